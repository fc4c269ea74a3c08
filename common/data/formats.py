"""ShareGPT's conversations and Alpaca's instructions, read as the messages, or the prompt and completion, they are."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common.data.columns import PAIR, names_decide, text_of
from common.data.rows import Corpus, Row, Source
from common.errors import UserError

CONVERSATIONS = ("conversations", "conversation")  # names of ShareGPT's column
ALPACA = ("instruction", "output")  # and an input, in some rows
# Who speaks, by the names that data sets of this kind have.
ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
ROLES |= {"model": "assistant", "chatgpt": "assistant", "tool": "tool", "observation": "tool"}


def with_known_format(corpus: Corpus, source: Source, shape: str | None, has_template: bool) -> Corpus:
    """The corpus with the column `messages`, or `prompt` and `completion`, where its columns are those of a format.

    Left as it is where it has these columns already, or where blocks or columns were asked for by name.

    has_template: whether a chat template will write the messages; without one, an instruction becomes a prompt.
    """
    names = set(corpus.columns)
    if not names_decide(source, shape) or "messages" in names or set(PAIR) <= names:
        return corpus
    column = next((name for name in CONVERSATIONS if name in names), None)
    if column is not None:
        wanted = (column, *names & {"system"})

        def conversations(_: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
            for row in corpus.rows(wanted, whole_files):
                yield row._replace(values={"messages": _messages(row, column)})

        return replace(corpus, columns=("messages",), rows=conversations)
    if not set(ALPACA) <= names:
        return corpus
    wanted = (*ALPACA, *names & {"input"})

    def instructions(_: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for row in corpus.rows(wanted, whole_files):
            instruction, output = (text_of(row, name) for name in ALPACA)
            more = text_of(row, "input") if row.values.get("input") else ""
            yield row._replace(values=_instructed(instruction, more, output, has_template))

    columns = ("messages",) if has_template else PAIR
    return replace(corpus, columns=columns, rows=instructions, identity=[*corpus.identity, "instructions"])


def _messages(row: Row, column: str) -> list[dict[str, Any]]:
    turns = row.values.get(column)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f'{row.where}: column {column} is not a list of {{"from": ..., "value": ...}}; mend the row')
    messages = []
    if system := row.values.get("system"):
        messages.append({"role": "system", "content": system})
    for turn in turns:
        if turn.get("role") is not None:
            messages.append(turn)
            continue
        who, content = turn.get("from"), turn.get("value")
        if who not in ROLES or not isinstance(content, str):
            found = f"a turn from {who!r}" if who not in ROLES else f"a turn of {who} whose value is no text"
            raise UserError(f"{row.where}: column {column} has {found}; known are {', '.join(ROLES)}; mend the row")
        messages.append({"role": ROLES[who], "content": content})
    return messages


def _instructed(instruction: str, more: str, output: str, has_template: bool) -> dict[str, Any]:
    """Messages for a chat template; else a prompt with the headings of the Alpaca data set, and a completion."""
    if has_template:
        asked = f"{instruction}\n\n{more}" if more else instruction
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]}
    parts = [("Instruction", instruction), ("Input", more)] if more else [("Instruction", instruction)]
    prompt = "".join(f"### {name}:\n{text}\n\n" for name, text in parts)
    return {PAIR[0]: f"{prompt}### Response:\n", PAIR[1]: output}
