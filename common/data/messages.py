"""Extracts the messages of a row and its tools, and determines the messages that are targets.

Datasets store the same conversation in several formats; this module converts it to a single format. Arrow (Parquet,
`datasets`) adds the keys of all other objects to each object, with null values; these keys are dropped. Arguments of
tool calls become objects, even if they were stored as JSON strings. System texts and earlier turns in separate columns
become messages.
"""

import json
from collections import Counter
from typing import Any, NamedTuple

from common.data.row_texts import text_of
from common.data.source_types import Row
from common.errors import UserError

Message = dict[str, Any]
# Keys with which other tools mark targets: OpenAI (weight), axolotl (train, training), ms-swift (loss).
TRAINING_KEYS = ("weight", "train", "training", "loss", "loss_mask")


class Chat(NamedTuple):
    """A conversation: its messages without TRAINING_KEYS, a target flag per message, and the functions it may call."""

    where: str
    messages: list[Message]
    is_trained: list[bool]
    tools: list[dict[str, Any]] | None


def read_chat(row: Row, column: str, counts: Counter) -> Chat:
    """Returns the conversation in a column, with the functions in the column `tools`.

    Null-valued keys that are dropped, and target marks without an effect, are added to `counts`.

    Raises UserError if the messages or tools are invalid.
    """
    messages, is_trained = messages_of(row, column, counts), []
    for message in messages:
        said = is_wanted(message, f"{row.where}: column {column}")
        is_trained.append(message["role"] == "assistant" and said is not False)
        counts["learned in vain"] += bool(said) and message["role"] != "assistant"
    plain = [{key: value for key, value in message.items() if key not in TRAINING_KEYS} for message in messages]
    return Chat(row.where, plain, is_trained, _tools_of(row, counts))


def is_wanted(message: Message, where: str) -> bool | None:
    """Returns whether the message is marked as a target, or None if it has no such mark.

    Raises UserError if a mark is neither 0 nor 1, or if marks contradict each other.
    """
    marks = {key: message[key] for key in TRAINING_KEYS if key in message}
    text = f"{where} has a message of {message['role']} with " + " and ".join(f"{k} {v!r}" for k, v in marks.items())
    if any(value not in (0, 1) for value in marks.values()):
        raise UserError(f"{text}; only 0 (context) and 1 (learned) are known: write one of them, or remove the key")
    if len(set(map(bool, marks.values()))) > 1:
        raise UserError(f"{text}, which contradict each other; keep one of them")
    return bool(next(iter(marks.values()))) if marks else None


def messages_of(row: Row, column: str = "messages", counts: Counter | None = None) -> list[Message]:
    """Returns the messages of a column in the single format of this module.

    Raises UserError if the column is not a list of messages, or a message has no content or a part that is not text.
    """
    messages = row.values.get(column)
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise UserError(f'{row.where}: column {column} is not a list of {{"role": ..., "content": ...}}; fix the row')
    # Parquet gives each message the keys of all messages, with nulls; templates test whether a key is present.
    try:
        present = [
            {key: _without_nulls(value, counts) for key, value in message.items() if value is not None}
            for message in messages
        ]
    except RecursionError as error:
        raise UserError(f"{row.where}: column {column} is nested too deeply; fix or remove the row") from error
    if empty := next((message for message in present if message.keys() - TRAINING_KEYS == {"role"}), None):
        raise UserError(f"{row.where}: column {column} has a message of {empty['role']} without content; fix the row")
    joined = [message | _joined(message, f"{row.where}: column {column}") | _called(message) for message in present]
    return [
        {key: value for key, value in message.items() if key != "function_call" or "tool_calls" not in message}
        for message in joined
    ]


def _without_nulls(value: Any, counts: Counter | None) -> Any:
    """Returns a value without null-valued keys of objects, at any depth; `counts` counts the removed keys."""
    if isinstance(value, list):
        return [_without_nulls(item, counts) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_nulls(item, counts) for key, item in value.items() if item is not None}
    if counts is not None:
        counts["nulls"] += len(value) - len(kept)
    return kept


def _joined(message: Message, where: str) -> dict[str, str]:
    """Returns {"content": text} with all parts concatenated if the content is a list of parts; otherwise {}.

    Without this, many templates would render the list in Python syntax.
    """
    parts = message.get("content")
    if not isinstance(parts, list):
        return {}
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) < len(parts):
        raise UserError(f"{where} has a message with parts that are no text; leave the row out, or write them as text")
    return {"content": "".join(strings)}


def _from_json(value: Any, kind: type) -> Any:
    """Returns the decoded value if it is a JSON string of this type; otherwise the value itself."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return read if isinstance(read, kind) else value


def _called(message: Message) -> Message:
    """Returns {"tool_calls": ...} with calls and arguments decoded if they are JSON strings; {} without tool calls."""
    calls = _from_json(message.get("tool_calls"), list)
    if calls is None and isinstance(call := _from_json(message.get("function_call"), dict), dict):
        calls = [{"type": "function", "function": call}]  # OpenAI's earlier form, which no template reads
    if not isinstance(calls, list):
        return {}

    def read(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        inner = {"function": read(call["function"])} if isinstance(call.get("function"), dict) else {}
        own = {"arguments": _from_json(call["arguments"], dict)} if "arguments" in call else {}
        return call | inner | own

    return {"tool_calls": [read(call) for call in calls]}


def arguments_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns the arguments of all tool calls; arguments that are not objects are omitted."""
    lists = (calls for message in messages if isinstance(calls := message.get("tool_calls"), list))
    calls = (call for calls in lists for call in calls if isinstance(call, dict))
    functions = (call["function"] if isinstance(call.get("function"), dict) else call for call in calls)
    return [call["arguments"] for call in functions if isinstance(call.get("arguments"), dict)]


def with_json_arguments(messages: list[Message]) -> list[Message]:
    """Returns the messages with tool call arguments as JSON strings, for templates that concatenate them with text."""

    def write(value: Any) -> Any:
        if isinstance(value, list):
            return [write(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {
            key: json.dumps(item, ensure_ascii=False) if key == "arguments" and isinstance(item, dict) else write(item)
            for key, item in value.items()
        }

    return [
        message | ({"tool_calls": write(message["tool_calls"])} if "tool_calls" in message else {})
        for message in messages
    ]


def function_names(message: Message) -> list[str]:
    """Returns the names of the functions that a message calls."""
    calls = message.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    functions = (call["function"] if isinstance(call.get("function"), dict) else call for call in calls)
    return [call["name"] for call in functions if isinstance(call.get("name"), str)]


def _tools_of(row: Row, counts: Counter) -> list[dict[str, Any]] | None:
    """Returns the functions of the column `tools`, or None."""
    tools = _from_json(row.values.get("tools"), list)
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{row.where}: column tools is neither a list of functions nor JSON of one; fix the row")
    return _without_nulls(tools, counts)


def with_system(row: Row, messages: list[Message]) -> list[Message]:
    """Returns the messages, preceded by a system message with the text of the column `system`, if it is not empty.

    Raises UserError if the messages begin with a different system text.
    """
    if row.values.get("system") in (None, ""):
        return messages
    system = text_of(row, "system")
    if messages and isinstance(messages[0], dict) and messages[0].get("role") in ("system", "developer"):
        if messages[0].get("content") == system:
            return messages
        raise UserError(f"{row.where}: has a system text in column system and another in its messages; keep one")
    return [{"role": "system", "content": system}, *messages]


def history_of(row: Row) -> list[Message]:
    """Returns the earlier turns as messages, from the column `history`: a list of [question, answer] pairs.

    Raises UserError if the column is not a list of such pairs.
    """
    rounds = _from_json(row.values.get("history"), list) or []  # a CSV file contains JSON
    if not isinstance(rounds, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in rounds
    ):
        raise UserError(f"{row.where}: column history is not a list of pairs, [question, answer]; fix the row")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in rounds for role, text in zip(roles, pair, strict=True)]


def texts_of(row: Row, columns: tuple[str, ...]) -> list[str]:
    """Returns the texts in the columns of a row; for messages, their contents, without those that are not strings."""
    texts: list[str] = []
    for column in columns:
        if column == "messages" or isinstance(row.values.get(column), list):
            contents = [message.get("content") for message in messages_of(row, column)]
            texts += [content for content in contents if isinstance(content, str)]
        else:
            texts.append(text_of(row, column))
    return texts
