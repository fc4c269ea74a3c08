"""Converts preferences in the formats of other tools to rows with `prompt`, and answers or a label.

| tool | columns | becomes |
| --- | --- | --- |
| axolotl | messages, chosen, rejected (a message each) | prompt, chosen, rejected |
| LLaMA-Factory | conversations, chosen, rejected (a turn each) | prompt, chosen, rejected |
| LLaMA-Factory | messages or conversations, kto_tag | prompt, completion (the last turn), label |
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from common.data.chat_formats import CONVERSATIONS, read_turns
from common.data.preference_rows import ANSWERS
from common.data.source_types import Corpus, Row
from common.errors import UserError
from common.reading import reading

TAG = "kto_tag"  # LLaMA-Factory's column of labels


def with_known_preferences(corpus: Corpus) -> Corpus:
    """Returns a corpus with a column `prompt` of messages if its columns match a known format; otherwise unchanged."""
    names = set(corpus.columns)
    column = next((name for name in ("messages", *CONVERSATIONS) if name in names), "")
    if not column or "prompt" in names:
        return corpus
    if set(ANSWERS) <= names:
        return _converted(corpus, column, ANSWERS, ("prompt", *ANSWERS), _pair)
    if TAG in names and "label" not in names:
        return _converted(corpus, column, (TAG,), ("prompt", "completion", "label"), _labelled)
    return corpus


def _converted(
    corpus: Corpus,
    column: str,
    used: tuple[str, ...],
    made: tuple[str, ...],
    values_of: Callable[[Row, str], dict[str, Any]],
) -> Corpus:
    """Returns the corpus with the columns `made` instead of `column` and `used`; other columns are kept."""
    others = tuple(name for name in corpus.columns if name not in (column, *used))

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for row in corpus.rows((column, *used, *(name for name in wanted if name not in made)), whole_files):
            with reading(row.where):
                values = values_of(row, column)
            kept = {name: value for name, value in row.values.items() if name not in (column, *used)}
            yield row._replace(values=kept | values)

    return replace(corpus, columns=made + others, rows=rows, identity=[*corpus.identity, "preferences"])


def _pair(row: Row, column: str) -> dict[str, Any]:
    """Returns the prompt, which does not end with an answer, and both answers, each as a list of messages."""
    prompt = read_turns(row, column)
    if not prompt or prompt[-1]["role"] == "assistant":
        raise UserError(f"{row.where}: column {column} ends with an answer of the assistant; leave it to {ANSWERS[0]}")
    return {"prompt": prompt} | {name: _answer(row, name) for name in ANSWERS}


def _answer(row: Row, name: str) -> list[dict[str, Any]]:
    """Returns an answer as messages. It is a text, a message or turn, or a list of these."""
    answer = row.values.get(name)
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    turns = answer if isinstance(answer, list) else [answer]
    return read_turns(row._replace(values={name: turns}), name)


def _labelled(row: Row, column: str) -> dict[str, Any]:
    """Returns the turns before the last one, the last one, and its label."""
    messages = read_turns(row, column)
    return {"prompt": messages[:-1], "completion": messages[-1:], "label": row.values.get(TAG)}
