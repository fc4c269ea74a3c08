"""Renders conversations with chat templates and finds their targets, in a `limited_process`.

Chat templates are programs from files and from the hub. A template of one line can run without end or fill the memory.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from common.data.limited_process import serve
from common.data.messages import Chat, Message, arguments_of, with_json_arguments
from common.data.row_texts import utf8_length
from common.errors import UserError, as_user_error, one_line

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # begins the assistant's text in a chat template
Spans = list[tuple[int, int]]
Render = Callable[..., tuple[str, Spans]]


def answer(request: Any) -> Iterator[Any]:
    """Yields (text, spans of the targets, added counts) per conversation, or the rendered text of a probe.

    A request has either the template to `probe`, or `chats`, the fields of `Chat`, with `templates` (without and with
    tools) and the `special_tokens` of the tokenizer. A probe yields (text, line of a syntax error, any error).
    """
    if "probe" in request:
        yield _probe(request["probe"])
        return
    templates = dict(request["templates"])
    for fields in request["chats"]:
        chat, counts = Chat(*fields), Counter[Any]()
        try:
            text, spans = _write(chat, templates[chat.tools is not None], request["special_tokens"], counts)
        except MemoryError:
            raise
        except Exception as error:  # the type depends on the value
            raise as_user_error(error, chat.where, "fix or remove the row") from error
        yield text, spans, list(counts.items())


def _probe(template: str) -> tuple[str, int, str]:
    probe = [{"role": role, "content": "abc"} for role in ("user", "assistant")]
    try:
        return render_jinja_template([probe], chat_template=template)[0][0], 0, ""
    except TemplateSyntaxError as error:
        return "", error.lineno, one_line(error)
    except MemoryError:
        raise
    except Exception as error:  # the template may require different messages
        return "", 0, one_line(error) or type(error).__name__


def _write(chat: Chat, template: str, special_tokens: dict[str, Any], counts: Counter) -> tuple[str, Spans]:
    """Returns the conversation as text and the character spans of its targets."""
    cannot = f"{chat.where}: the chat template cannot be used"
    marks = bool(GENERATION_TAG.search(template))

    def render(messages: list[Message], tools: Any = chat.tools, prompt: bool = False) -> tuple[str, Spans]:
        options: dict[str, Any] = {"tools": tools, "chat_template": template, **special_tokens}
        options |= {"return_assistant_tokens_mask": True} if marks else {"add_generation_prompt": prompt}
        try:
            rendered: Any = render_jinja_template([messages], **options)  # its hint is str, but it returns a pair
        except MemoryError:
            raise
        except Exception as error:  # templates raise jinja2's errors and Python's own, such as for a missing key
            raise UserError(f"{cannot}: {one_line(error)}; fix the messages, or the --chat_template") from error
        (text,), spans = rendered
        utf8_length(text, chat.where)
        return text, spans[0] if spans else []

    chat, text, spans = _render_with_arguments(chat, render)
    _count_unwritten(chat, text, render, counts)
    return text, (_marked_turns if marks else _added_turns)(chat, text, spans, render, cannot)


def _render_with_arguments(chat: Chat, render: Render) -> tuple[Chat, str, Spans]:
    """Returns (chat, text, spans); tool call arguments are objects, or JSON strings if the template needs text."""
    arguments = arguments_of(chat.messages)
    if not arguments:
        return chat, *render(chat.messages)
    as_json = chat._replace(messages=with_json_arguments(chat.messages))
    try:
        text, spans = render(chat.messages)
    except UserError as error:
        try:
            return as_json, *render(as_json.messages)
        except UserError:
            raise error from None
    # Without a JSON filter, Jinja writes an object in Python syntax.
    if any(str(value) in text and str(value) != json.dumps(value, ensure_ascii=False) for value in arguments):
        return as_json, *render(as_json.messages)
    return chat, text, spans


def _added_turns(chat: Chat, text: str, _: Spans, render: Render, cannot: str) -> Spans:
    """Returns the character span of each target turn, from two renderings.

    The span begins where the earlier turns with the generation prompt end, and ends where the rendered turn ends.
    """
    spans = []
    for turn in (number for number, is_trained in enumerate(chat.is_trained) if is_trained):
        before = render(chat.messages[:turn], prompt=True)[0]
        after = render(chat.messages[: turn + 1])[0]
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"{cannot}: an assistant turn changes the text before it; mark the turn with {{% generation %}}"
            )
        spans.append((len(before), len(after)))
    return spans


def _marked_turns(chat: Chat, _: str, spans: Spans, render: Render, __: str) -> Spans:
    """Returns the spans that the template marks with {% generation %}, except in assistant turns that are not targets.

    The marks of a turn are found by rendering the conversation twice, without the turn and with it as the last turn.
    """
    left_out = set()
    for turn, (message, is_trained) in enumerate(zip(chat.messages, chat.is_trained, strict=True)):
        if message["role"] == "assistant" and not is_trained:
            before = len(render(chat.messages[:turn])[1]) if turn else 0
            left_out |= set(range(before, len(render(chat.messages[: turn + 1])[1])))
    return [span for number, span in enumerate(spans) if number not in left_out]


def _count_unwritten(chat: Chat, text: str, render: Render, counts: Counter) -> None:
    """Counts message parts that the template omits: removing or changing them does not change the rendered text."""

    def written(messages: list[Message], *tools: None) -> str | None:
        try:
            return render(messages, *tools)[0]
        except UserError:
            return None

    def is_unwritten(numbers: list[int], key: str) -> bool:
        """Returns whether the text stays the same if the key is removed; "content" is changed or emptied instead."""

        def changed(content: Callable[[Message], str]) -> list[Message]:
            return [
                message if number not in numbers
                else message | {key: content(message)} if key == "content"
                else {name: value for name, value in message.items() if name != key}
                for number, message in enumerate(chat.messages)
            ]  # fmt: skip

        longer = written(changed(lambda message: f"{message[key]} x"))
        return longer == text or (key == "content" and written(changed(lambda _: "")) == text)

    if chat.tools and written(chat.messages, None) == text:
        counts["unwritten", "tools", "rows"] += 1
    places: dict[str, list[int]] = {}
    for number, message in enumerate(chat.messages):
        content = message.get("content")
        for key in message:
            if key != "role" and not (key == "content" and (not content or str(content).strip() in text)):
                places.setdefault(key, []).append(number)
    for key, numbers in places.items():
        unwritten = numbers
        if not is_unwritten(numbers, key):
            unwritten = [number for number in numbers if is_unwritten([number], key)] if len(numbers) > 1 else []
        counts["unwritten", key, "messages"] += len(unwritten)
        if key != "content":
            continue
        counts["lost"] += sum(chat.is_trained[number] for number in unwritten)
        # Counts content of which the template omits more than half, such as the text before </think>.
        for number in set(numbers) - set(unwritten):
            message = chat.messages[number]
            without = written([*chat.messages[:number], message | {key: ""}, *chat.messages[number + 1 :]]) or ""
            if len(text) - len(without) < len(str(message[key]).strip()) / 2:
                counts["partly" if chat.is_trained[number] else ("unwritten", "half of a content", "messages")] += 1


if __name__ == "__main__":
    serve(answer)
