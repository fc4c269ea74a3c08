"""Selects the columns that contain the text of a row, and checks that their values are texts."""

import math
from collections.abc import Iterator
from dataclasses import replace

from tqdm import tqdm

from common.data.source_types import Corpus, Row, Source
from common.errors import UserError, missing_column, shorten

PAIR = ("prompt", "completion")
# What other data sets call these two.
PAIRS_ELSEWHERE = (
    ("prompt", "instruction", "question", "query", "problem", "input", "user", "source"),
    ("completion", "output", "response", "answer", "solution", "chosen", "assistant", "target"),
)
# Columns to which other tools give a meaning, and what it is that a run without them does not learn from.
MEANINGS = {
    **dict.fromkeys(("system", "system_prompt"), "its text is not in the samples"),
    "history": "earlier turns are not in the samples",
    **dict.fromkeys(("instruction", "input", "question", "query", "context"), "its text is not in the samples"),
    **dict.fromkeys(("tools", "functions"), "which functions may be called is not in the samples"),
    "documents": "they are not in the samples",
    **dict.fromkeys(("weight", "weights", "sample_weight", "loss_weight"), "all rows count alike"),
    **dict.fromkeys(("train", "loss", "mask", "loss_mask", "completion_mask", "assistant_masks"), "it masks nothing"),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text is learned"),
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "the reasoning is not learned"),
    **dict.fromkeys(("score", "score_chosen", "score_rejected", "margin", "rating", "reward"), "all rows count alike"),
    "label": "good and bad rows are learned alike",
    "rejected": "nothing is learned of what was rejected",
    **dict.fromkeys(
        ("chat_template", "chat_template_kwargs"), "the template and its settings are the same for all rows"
    ),
    **dict.fromkeys(("messages", "conversations", "prompt", "completion"), "another form of the row is read"),
}
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


def watched(corpus: Corpus, used: tuple[str, ...], optional: tuple[str, ...] = ()) -> Corpus:
    """The corpus, which notes in `unused` the columns that hold something and are neither `used` nor `optional`."""
    known = (*used, *(name for name in optional if name not in used))

    def rows(_: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for row in corpus.rows(known, whole_files):
            for name in row.values.keys() - known:
                corpus.unused[name] += row.values[name] not in (None, "", [], {})
            yield row

    return replace(corpus, rows=rows)


def unused_columns(corpus: Corpus) -> str:
    """Names the columns of which nothing is used, those with a meaning elsewhere first; empty if all are used."""
    names = sorted(
        (name for name, number in corpus.unused.items() if number), key=lambda name: (name not in MEANINGS, name)
    )
    told = [f"{name} ({MEANINGS[name]})" if name in MEANINGS else name for name in names]
    return f"columns not used: {shorten(told)}" if told else ""


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


def by_number(name: str) -> tuple[bool, float, str]:
    """By what classes are sorted: numbers by size, "-1" and "2.0" too, and before all others."""
    try:
        number = int(name) if name.lstrip("-").isdecimal() else float(name)
    except ValueError:
        number = math.nan
    return (False, number, name) if math.isfinite(number) else (True, 0, name)


def batches(corpus: Corpus, columns: tuple[str, ...], whole_files: bool = False) -> Iterator[list[Row]]:
    """Rows in batches of bounded text, so that memory depends on neither their length nor their number."""
    batch, size = [], 0
    with tqdm(desc=f"tokenising {corpus.name}", unit="B", unit_scale=True, disable=None) as bar:  # None: on a terminal
        for row in corpus.rows(columns, whole_files):
            batch.append(row)
            size += sum(len(value) if isinstance(value, str) else len(str(value)) for value in row.values.values())
            if size >= BATCH_CHARACTERS or len(batch) == 4096:
                yield batch
                bar.update(size)
                batch, size = [], 0
        if batch:
            yield batch
