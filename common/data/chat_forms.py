"""Forms of a conversation that chat templates expect, and marks that show which parts a template writes.

Templates differ in what they read: the roles of tool results and instructions, functions with or without
{"type": "function", "function": ...}, arguments as objects or as JSON. A part that a template does not read is missing
from the text without an error.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from common.data.messages import Chat, Message, arguments_of, with_json_arguments

MARK = re.compile(r"Zq(\d+)qZ", re.IGNORECASE)
THOUGHT = "<think>"  # begins a thought, which many templates leave out of earlier turns
END_MARK = "Zq0qZ"
ROLES = {"function": "tool", "ipython": "tool", "developer": "system"}  # names that few templates know


class Part(NamedTuple):
    """A part of a conversation: its name, and the number of its message, or None if it belongs to the tools."""

    name: str
    message: int | None


def forms_of(chat: Chat) -> Iterator[Chat]:
    """Yields the conversation as it is, with the usual roles and functions, and with bare functions, without repeats.

    Each form is followed by two in which a message without content has the content null, or an empty content.
    Arguments of calls are objects; `with_json_arguments` is a variant of each form.
    """
    yielded: list[Chat] = []
    for change, roles in ((None, {}), (_wrapped, ROLES), (_bare, ROLES)):
        form = chat if change is None else _changed(chat, change, roles)
        for more in ({}, {"content": None}, {"content": ""}):
            filled = form._replace(messages=[dict(more) | message for message in form.messages])
            if filled not in yielded:
                yielded.append(filled)
                yield filled


def _changed(chat: Chat, change: Any, roles: dict[str, str]) -> Chat:
    messages = []
    for message in chat.messages:
        calls = message.get("tool_calls")
        changed = {"tool_calls": [change(call) for call in calls]} if isinstance(calls, list) else {}
        messages.append(message | {"role": roles.get(message["role"], message["role"])} | changed)
    return chat._replace(messages=messages, tools=chat.tools and [change(tool) for tool in chat.tools])


def _wrapped(function: Any) -> Any:
    """Returns {"type": "function", "function": ...} of a bare function or call; the keys id and type stay outside."""
    if not isinstance(function, dict) or "function" in function or "name" not in function:
        return function
    outside = {key: function[key] for key in ("id", "type") if key in function}
    return {"type": "function"} | outside | {"function": {k: v for k, v in function.items() if k not in outside}}


def _bare(function: Any) -> Any:
    """Returns the function or call inside {"type": "function", "function": ...}, with its id."""
    if not isinstance(function, dict) or not isinstance(function.get("function"), dict):
        return function
    return {key: value for key, value in function.items() if key not in ("type", "function")} | function["function"]


def with_marks(chat: Chat, is_json: bool) -> tuple[Chat, list[Part]]:
    """Returns the conversation with "Zq0qZ", "Zq1qZ", ... in its parts, and these parts in the order of the numbers.

    Marked are the end of a content and the start of a thought in it, of a call the end of its name and a further
    argument, of a tool the ends of its name and description, and a further parameter.

    is_json: whether arguments become JSON strings.
    """
    parts: list[Part] = []

    def mark(name: str, message: int | None = None) -> str:
        parts.append(Part(name, message))
        return f"Zq{len(parts) - 1}qZ"

    def marked_call(call: Any, number: int) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return call | {"function": marked_call(call["function"], number)}
        changed: Message = {}
        if isinstance(call.get("name"), str):
            changed["name"] = call["name"] + mark("names of tool_calls", number)
        if isinstance(call.get("arguments"), dict) and call["arguments"]:
            changed["arguments"] = call["arguments"] | {mark("arguments of tool_calls", number): ""}
        return call | changed

    def marked_tool(tool: Any) -> Any:
        if isinstance(tool.get("function"), dict):
            return tool | {"function": marked_tool(tool["function"])}
        changed = {
            key: tool[key] + mark(f"{key}s of tools")
            for key in ("name", "description")
            if isinstance(tool.get(key), str)
        }
        schema = tool.get("parameters")
        if isinstance(schema, dict) and isinstance(schema.get("properties"), dict) and schema["properties"]:
            more = {mark("parameters of tools"): {"type": "string", "description": "x"}}
            changed["parameters"] = schema | {"properties": schema["properties"] | more}
        return tool | changed

    messages = []
    for number, message in enumerate(chat.messages):
        changed: Message = {}
        if isinstance(message.get("content"), str) and message["content"].strip():
            content = message["content"]
            if THOUGHT in content:
                content = content.replace(THOUGHT, THOUGHT + mark("thoughts in content", number), 1)
            changed["content"] = content + mark("content", number)
        if isinstance(message.get("tool_calls"), list):
            changed["tool_calls"] = [marked_call(call, number) for call in message["tool_calls"]]
        messages.append(message | changed)
    if is_json:
        messages = with_json_arguments(messages)
    return chat._replace(messages=messages, tools=chat.tools and [marked_tool(tool) for tool in chat.tools]), parts


def missing_parts(text: str, parts: list[Part]) -> list[Part]:
    """Returns the parts whose marks are not in the text."""
    written = {int(number) for number in MARK.findall(text)}
    return [part for number, part in enumerate(parts) if number not in written]


def with_end_mark(message: Message) -> Message:
    """Returns a message with END_MARK at the end of its content and of the names of its calls."""
    calls = message.get("tool_calls")
    changed = {"content": f"{message['content']}{END_MARK}"} if message.get("content") else {}

    def marked(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return call | {"function": marked(call["function"])}
        return call | ({"name": f"{call['name']}{END_MARK}"} if isinstance(call.get("name"), str) else {})

    return message | changed | ({"tool_calls": [marked(call) for call in calls]} if isinstance(calls, list) else {})


def prints_python(text: str, messages: list[Message]) -> bool:
    """Returns whether the text has arguments of a call in Python's syntax, which Jinja writes without a JSON filter."""
    arguments = arguments_of(messages)
    return any(str(value) in text and str(value) != json.dumps(value, ensure_ascii=False) for value in arguments)
