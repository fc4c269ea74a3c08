"""Which columns of a row hold the text, and is what they hold text?"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from common.data.rows import Corpus, Row, Source
from common.errors import UserError, missing_column

PAIR = ("prompt", "completion")
# What other data sets call these two.
PAIRS_ELSEWHERE = (
    ("prompt", "instruction", "question", "query", "problem", "input", "user", "source"),
    ("completion", "output", "response", "answer", "solution", "chosen", "assistant", "target"),
)
BATCH_CHARACTERS = 1 << 20  # text handed to the tokenizer at once: it needs some 100 bytes a token for the time being


def names_decide(source: Source, shape: str | None) -> bool:
    """Whether the names of the columns say what a sample is: neither blocks nor a column were asked for."""
    return shape != "blocks" and source.text_column == "text" and not (source.prompt_column or source.completion_column)


def choose_columns(corpus: Corpus, source: Source, shape: str | None) -> tuple[str, tuple[str, ...]]:
    """(shape, columns): messages before prompt and completion before text, unless blocks or a column was asked for."""
    pair = (source.prompt_column or PAIR[0], source.completion_column or PAIR[1])
    if source.prompt_column or source.completion_column:
        check_columns(corpus, pair, "--prompt_column, --completion_column")
        return "examples", pair
    if names_decide(source, shape):
        for columns in (("messages",), pair):
            if set(columns) <= set(corpus.columns):
                return "examples", columns
    check_columns(corpus, (source.text_column,), f"--text_column{_hint(corpus.columns)}")
    return shape or "blocks", (source.text_column,)


def check_columns(corpus: Corpus, wanted: tuple[str, ...], flags: str = "") -> None:
    """Raises UserError, one line that names the `flags` to give, if the corpus has not all wanted columns."""
    if missing := [column for column in wanted if column not in corpus.columns]:
        raise UserError(missing_column(corpus.name, missing, corpus.columns) + (f" ({flags})" if flags else ""))


def _hint(columns: tuple[str, ...]) -> str:
    """How to name columns that other data sets use for what `prompt` and `completion` are here."""
    names = {column.lower(): column for column in columns}
    prompt, completion = (next((names[name] for name in known if name in names), None) for known in PAIRS_ELSEWHERE)
    if not (prompt or completion):
        return ""
    return f"; for examples --prompt_column {prompt or 'NAME'} --completion_column {completion or 'NAME'}"


def text_of(row: Row, column: str) -> str:
    """A row's text. Raises UserError, one line, where it is missing, no string, or not to be written in UTF-8."""
    if column not in row.values:
        raise UserError(missing_column(row.where, [column], tuple(row.values)))
    text = row.values[column]
    if not isinstance(text, str):
        found = "null" if text is None else f"of type {type(text).__name__}"
        raise UserError(f"{row.where}: column {column} is {found}, not a string; mend or remove the row")
    utf8_length(text, row.where)
    return text


def filled_text(row: Row, column: str) -> str:
    """As `text_of`, and not empty."""
    text = text_of(row, column)
    if not text.strip():
        raise UserError(f"{row.where}: column {column} is an empty text; fill it or remove the row")
    return text


def utf8_length(text: str, where: str) -> int:
    """Length in UTF-8. JSON's escapes can spell half a surrogate pair, which no tokenizer takes."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UserError(f"{where}: half a surrogate pair ({half}) is not text; mend or remove the row") from error


def texts_of(row: Row, columns: tuple[str, ...]) -> list[str]:
    texts = []
    for column in columns:
        if column != "messages" and not isinstance(row.values.get(column), list):
            texts.append(text_of(row, column))
        else:
            contents = [message.get("content") for message in messages_of(row, column)]
            texts += [content for content in contents if isinstance(content, str)]
    return texts


def by_number(name: str) -> tuple[bool, float, str]:
    """By what classes are sorted: numbers by size, "-1" and "2.0" too, and before all others."""
    try:
        number = int(name) if name.lstrip("-").isdecimal() else float(name)
    except ValueError:
        number = math.nan
    return (False, number, name) if math.isfinite(number) else (True, 0, name)


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in batches of bounded text, so that memory depends on neither the rows' length nor their number."""
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += sum(len(value) if isinstance(value, str) else len(str(value)) for value in row.values.values())
        if size >= BATCH_CHARACTERS or len(batch) == 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def messages_of(row: Row, column: str = "messages") -> list[dict[str, Any]]:
    messages = row.values.get(column)
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UserError(f'{row.where}: column {column} is not a list of {{"role": ..., "content": ...}}; mend the row')
    # Parquet gives every message the keys of all; templates ask whether a key is there.
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    if empty := next((message for message in present if message.keys() == {"role"}), None):
        raise UserError(f"{row.where}: column {column} has a message of {empty['role']} without content; mend the row")
    return [message | _joined(message, f"{row.where}: column {column}") for message in present]


def _joined(message: dict[str, Any], where: str) -> dict[str, str]:
    """The content of a message that has it in parts, as one text: many templates would write a list as Python does."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return {}
    texts = [one.get("text") for one in parts if isinstance(one, dict) and one.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where} has a message with parts that are no text; leave the row out, or write them as text")
    return {"content": "".join(texts)}
