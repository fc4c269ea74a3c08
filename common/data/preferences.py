"""Reads preference pairs: a chosen and a rejected answer, both of which follow the same prompt.

corpus = open_preferences(Source(files=("train.jsonl",)), tokenizer)
columns = columns_of(corpus)
with start_rendering() as process:
    for row, chosen, rejected in encode_pairs(corpus, columns, tokenizer, counts, process):
        ids, is_target, text = chosen
"""

from collections import Counter
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from common.data.chats import encode_chats
from common.data.examples import encode_texts
from common.data.limited_process import LimitedProcess
from common.data.messages import TRAINING_KEYS, Message, history_of, messages_of, with_system
from common.data.preference_rows import ANSWERS, CONTEXT, PROMPTS, check_row, find_missing_prompts
from common.data.python_functions import derived_corpus, find_docstring
from common.data.row_texts import batches
from common.data.source_types import Corpus, Row, Source
from common.data.sources import check_columns, open_source
from common.data.tokenizer import Encoded
from common.errors import UserError
from common.reading import reading


def columns_of(corpus: Corpus) -> tuple[str, ...]:
    """Returns the columns of prompt and answers."""
    check_columns(corpus, ANSWERS)
    return tuple(name for name in ("prompt", *ANSWERS) if name in corpus.columns)


def open_preferences(source: Source, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Opens the rows of a source, and sets the tokenizer's chat template. Raises UserError: the source is mixed."""
    if source.parts:
        raise UserError("files of preferences cannot be mixed by weights; remove the weights from --train_file")
    tokenizer.chat_template = source.chat_template or tokenizer.chat_template
    corpus = open_source(source)
    if {"messages", "conversations", "conversation"} & set(corpus.columns):
        from common.data.preference_formats import with_known_preferences

        corpus = with_known_preferences(corpus)
    return embedded_preferences(corpus, source.text_column) if source.embedded else corpus


def embedded_preferences(corpus: Corpus, text_column: str) -> Corpus:
    """Returns the embedded corpus as pairs: function bodies are chosen, their lines in reverse order are rejected."""

    def values_of(function: str) -> tuple[str, str, str] | None:
        prompt, body = split_body(function) or ("", "")
        return (prompt, body, "\n".join(body.strip("\n").split("\n")[::-1]) + "\n") if prompt else None

    return derived_corpus(corpus, text_column, ("prompt", *ANSWERS), values_of)


def split_body(function: str) -> tuple[str, str] | None:
    """Returns (a function's lines up to the end of its docstring, its body), or None if it has no docstring."""
    if not (docstring := find_docstring(function)):
        return None
    lines, end = function.split("\n"), docstring[-1]
    return "\n".join(lines[:end]) + "\n", "\n".join(lines[end:])


def encode_answers(
    batch: list[Row],
    columns: tuple[str, ...],
    answer: str,
    tokenizer: PreTrainedTokenizerBase,
    counts: Counter,
    process: LimitedProcess,
    is_whole: bool,
) -> Iterator[Encoded]:
    """Yields the encoded prompt and answer of each row; `answer` is a column name.

    is_whole: the targets are the messages from the first that differs; otherwise all of the assistant's.
    """
    if not isinstance(batch[0].values.get(answer), list):
        return encode_texts(batch, ("prompt", answer) if "prompt" in columns else (answer,), tokenizer, counts)
    rows = []
    for row in batch:
        with reading(row.where):
            chat = _chat_of(row, answer)
            if is_whole:
                both = zip(*(_chat_of(row, name) for name in ANSWERS), strict=False)
                num_common = next((n for n, (a, b) in enumerate(both) if a != b), len(chat))
                chat = [*map(as_context, chat[:num_common]), *chat[num_common:]]
            rows.append(row._replace(values={answer: chat, "tools": row.values.get("tools")}))
    return encode_chats(rows, tokenizer, counts, process, answer)


def _chat_of(row: Row, answer: str) -> list[Message]:
    """Returns the messages of prompt and answer, with those of the columns `CONTEXT`."""
    messages = messages_of(row, answer)
    # A text prompt is in the messages too (see `check_row`). Only some datasets repeat prompt messages there.
    prompt = messages_of(row, "prompt") if isinstance(row.values.get("prompt"), list) else []
    messages = messages if messages[: len(prompt)] == prompt else prompt + messages
    first = messages[:1] if messages[0]["role"] in ("system", "developer") else []
    return with_system(row, [*first, *history_of(row), *messages[len(first) :]])


def as_context(message: Message) -> Message:
    """Returns the message, marked as no target."""
    marks = {"weight": 0} if message["role"] == "assistant" else {}
    return {key: value for key, value in message.items() if key not in TRAINING_KEYS} | marks


def encode_pairs(
    corpus: Corpus,
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    counts: Counter,
    process: LimitedProcess,
    is_whole: bool = False,
    others: tuple[str, ...] = (),
) -> Iterator[tuple[Row, Encoded, Encoded]]:
    """Yields each row of a corpus with its prompt and chosen answer, and its prompt and rejected answer, encoded.

    Args:
        columns: the columns that `columns_of` returns.
        counts: receives the counts of `examples.encode_texts` and `chats.encode_chats`.
        process: that of `chats.start_rendering`.
        is_whole: as in `encode_answers`.
        others: further columns of the rows, if they have them.

    Raises UserError: a row is not a pair (`preference_rows.check_row`).
    """
    for batch in batches(corpus, columns + others + (CONTEXT if "prompt" in columns else CONTEXT + PROMPTS)):
        for row in batch:
            with reading(row.where):
                check_row(row, columns)
                corpus.unused.update(find_missing_prompts(row, columns))
        both = [encode_answers(batch, columns, answer, tokenizer, counts, process, is_whole) for answer in ANSWERS]
        yield from zip(batch, *both, strict=True)
