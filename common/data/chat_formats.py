"""Converts ShareGPT conversations and Alpaca instructions to messages, or to prompt and completion."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common.data.messages import history_of, with_system
from common.data.row_texts import text_of
from common.data.source_types import Corpus, Row, Source
from common.data.sources import PAIR, names_decide
from common.errors import UserError
from common.reading import reading

CONVERSATIONS = ("conversations", "conversation")  # column names of ShareGPT
ALPACA = ("instruction", "output")  # some rows also have an `input`
# Maps the speaker names in datasets of these formats to message roles.
ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
ROLES |= {"model": "assistant", "chatgpt": "assistant", "tool": "tool", "observation": "tool"}
ROLES |= {"function_call": "assistant", "function_response": "tool", "ipython": "tool", "developer": "system"}


def with_known_format(corpus: Corpus, source: Source, shape: str | None, has_template: bool) -> Corpus:
    """Returns a corpus with the column `messages`, or `prompt` and `completion`, if its columns match a known format.

    The corpus is returned unchanged if it has a prompt and a completion but no `messages`, or if blocks or columns were
    requested. The column `system` and, for instructions, `history` become messages. The column `tools` is kept.

    Args:
        shape: the requested kind of samples, as in `tokenize`.
        has_template: whether the tokenizer has a chat template; without a template, instructions become prompts with
            completions.
    """
    names = set(corpus.columns)
    if not names_decide(source, shape):
        return corpus
    column = next((name for name in ("messages", *CONVERSATIONS) if name in names), None)
    used: tuple[str, ...]
    optional: tuple[str, ...]
    columns: tuple[str, ...]
    if column is None and set(ALPACA) <= names and not set(PAIR) <= names:
        used, optional = ALPACA, ("input", "system", "history", *(("tools",) if has_template else ()))
        columns, identity = ("messages",) if has_template else PAIR, [*corpus.identity, "instructions"]
    elif column == "messages" or (column and not set(PAIR) <= names):
        used, optional, columns, identity = (column,), ("system", "tools"), ("messages",), corpus.identity
    else:
        return corpus

    def rows(_: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for row in corpus.rows(used + optional, whole_files):
            with reading(row.where):
                if column is None:
                    values = _instructed(row, has_template)
                else:
                    messages = row.values.get(column) if column == "messages" else read_turns(row, column)
                    values = {"messages": with_system(row, messages) if isinstance(messages, list) else messages}
            yield row._replace(values=values | {name: row.values[name] for name in ("tools",) if name in row.values})

    return replace(corpus, columns=columns, rows=rows, identity=identity)


def read_turns(row: Row, column: str) -> list[dict[str, Any]]:
    """Returns the turns of a ShareGPT column as messages; turns that already have a role are kept."""
    turns = row.values.get(column)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f'{row.where}: column {column} is not a list of {{"from": ..., "value": ...}}; fix the row')
    messages = []
    for turn in turns:
        if turn.get("role") is not None:
            messages.append(turn)
            continue
        who, content = turn.get("from"), turn.get("value")
        is_known = isinstance(who, str) and who in ROLES
        if not is_known or not isinstance(content, str):
            problem = f"a turn from {who!r}" if not is_known else f"a turn of {who} whose value is no text"
            raise UserError(f"{row.where}: column {column} has {problem}; known are {', '.join(ROLES)}; fix the row")
        others = {key: value for key, value in turn.items() if key not in ("from", "value", "role")}
        if who == "function_call":
            others |= {"tool_calls": _calls(content, f"{row.where}: column {column}")}
        messages.append({"role": ROLES[who]} | others | ({"content": content} if who != "function_call" else {}))
    return messages


def _calls(text: str, where: str) -> list[dict[str, Any]]:
    """Returns the calls in the text of a turn from `function_call`: JSON of one call, or of a list of calls."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        read = None
    calls = read if isinstance(read, list) else [read]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(
            f'{where} has a turn of function_call whose value is not JSON such as {{"name": "f", "arguments": {{}}}}; '
            "fix the row"
        )
    return [{"type": "function", "function": call} for call in calls]


def _instructed(row: Row, has_template: bool) -> dict[str, Any]:
    """Returns {"messages": ...} for a chat template; without a template, a prompt and a completion.

    The prompt has the headings of the Alpaca dataset.
    """
    instruction, output = (text_of(row, name) for name in ALPACA)
    more = text_of(row, "input") if row.values.get("input") else ""
    history = history_of(row)
    if has_template:
        question = f"{instruction}\n\n{more}" if more else instruction
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        return {"messages": with_system(row, [*history, *turns])}
    if history:
        raise UserError(
            f"{row.where}: column history has earlier turns, which need a --chat_template; name one (chatml)"
        )
    parts = [("Instruction", instruction), ("Input", more)] if more else [("Instruction", instruction)]
    prompt = "".join(f"### {name}:\n{text}\n\n" for name, text in parts)
    system = "".join(f"{message['content']}\n\n" for message in with_system(row, []))
    return {PAIR[0]: f"{system}{prompt}### Response:\n", PAIR[1]: output}
