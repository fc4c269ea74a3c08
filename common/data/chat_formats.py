"""Converts ShareGPT conversations and Alpaca instructions to messages, or to prompt and completion."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common.data.column_selection import PAIR, names_decide, text_of, watched
from common.data.messages import history_of, with_system
from common.data.source_types import Corpus, Row, Source
from common.errors import UserError

CONVERSATIONS = ("conversations", "conversation")  # names of ShareGPT's column
ALPACA = ("instruction", "output")  # and an input, in some rows
# Who speaks, by the names that data sets of this kind have.
ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
ROLES |= {"model": "assistant", "chatgpt": "assistant", "tool": "tool", "observation": "tool"}


def with_known_format(corpus: Corpus, source: Source, shape: str | None, has_template: bool) -> Corpus:
    """The corpus with the column `messages`, or `prompt` and `completion`, if its columns are those of a format.

    Unchanged if it has a prompt and a completion already, or if blocks or columns were asked for by name. The column
    `system`, and of instructions `history`, become messages; `tools` stays what it is.

    has_template: whether a chat template will write the messages; without one, an instruction becomes a prompt.
    """
    names = set(corpus.columns)
    if not names_decide(source, shape):
        return corpus
    column = next((name for name in ("messages", *CONVERSATIONS) if name in names), None)
    if column is None and set(ALPACA) <= names and not set(PAIR) <= names:
        used, optional = ALPACA, ("input", "system", "history", *(("tools",) if has_template else ()))
        columns, identity = ("messages",) if has_template else PAIR, [*corpus.identity, "instructions"]
    elif column == "messages" or (column and not set(PAIR) <= names):
        used, optional, columns, identity = (column,), ("system", "tools"), ("messages",), corpus.identity
    else:
        return corpus
    opened = watched(corpus, used, optional)

    def rows(_: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for row in opened.rows(used, whole_files):
            if used is ALPACA:
                values = _instructed(row, has_template)
            else:
                messages = row.values.get(column) if column == "messages" else _messages(row, column)
                values = {"messages": with_system(row, messages) if isinstance(messages, list) else messages}
            yield row._replace(values=values | {name: row.values[name] for name in ("tools",) if name in row.values})

    return replace(corpus, columns=columns, rows=rows, identity=identity)


def _messages(row: Row, column: str) -> list[dict[str, Any]]:
    turns = row.values.get(column)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f'{row.where}: column {column} is not a list of {{"from": ..., "value": ...}}; mend the row')
    messages = []
    for turn in turns:
        if turn.get("role") is not None:
            messages.append(turn)
            continue
        who, content = turn.get("from"), turn.get("value")
        if who not in ROLES or not isinstance(content, str):
            found = f"a turn from {who!r}" if who not in ROLES else f"a turn of {who} whose value is no text"
            raise UserError(f"{row.where}: column {column} has {found}; known are {', '.join(ROLES)}; mend the row")
        others = {key: one for key, one in turn.items() if key not in ("from", "value", "role")}
        messages.append({"role": ROLES[who]} | others | {"content": content})
    return messages


def _instructed(row: Row, has_template: bool) -> dict[str, Any]:
    """Messages for a chat template; else a prompt with the headings of the Alpaca data set, and a completion."""
    instruction, output = (text_of(row, name) for name in ALPACA)
    more = text_of(row, "input") if row.values.get("input") else ""
    history = history_of(row)
    if has_template:
        asked = f"{instruction}\n\n{more}" if more else instruction
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
        return {"messages": with_system(row, [*history, *turns])}
    if history:
        raise UserError(
            f"{row.where}: column history has earlier turns, which need a --chat_template; name one (chatml)"
        )
    parts = [("Instruction", instruction), ("Input", more)] if more else [("Instruction", instruction)]
    prompt = "".join(f"### {name}:\n{text}\n\n" for name, text in parts)
    system = "".join(f"{one['content']}\n\n" for one in with_system(row, []))
    return {PAIR[0]: f"{system}{prompt}### Response:\n", PAIR[1]: output}
