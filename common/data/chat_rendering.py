"""Renders conversations with chat templates and finds their targets, in a `limited_process`.

Chat templates are programs from files and from the hub. A template of one line can run without end or fill the memory.
"""

import math
import os.path
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from common.data.chat_forms import END_MARK, Part, forms_of, missing_parts, prints_python, with_end_mark, with_marks
from common.data.limited_process import serve
from common.data.messages import Chat, Message, arguments_of, with_json_arguments
from common.data.row_texts import utf8_length
from common.errors import UserError, one_line
from common.reading import as_user_error

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # begins the assistant's text in a chat template
TAG = re.compile(r"</?\w+>")  # around thoughts; templates write their own
Spans = list[tuple[int, int]]
Render = Callable[..., tuple[str, Spans]]


def answer(request: Any) -> Iterator[Any]:
    """Yields (text, spans of the targets, added counts) per conversation, or the rendered text of a probe.

    A request has either the template to `probe`, or `chats`, the fields of `Chat`, with `templates` (without and with
    tools), the `special_tokens` of the tokenizer and `markers`, tokens that can end a turn.
    A probe yields (text, line of a syntax error, any error).
    """
    if "probe" in request:
        yield _probe(request["probe"])
        return
    templates = dict(request["templates"])
    for fields in request["chats"]:
        chat, counts = Chat(*fields), Counter[Any]()
        try:
            template = templates[chat.tools is not None]
            text, spans = _write(chat, template, request["special_tokens"], request["markers"], counts)
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


def _write(
    chat: Chat, template: str, special_tokens: dict[str, Any], markers: list[str], counts: Counter
) -> tuple[str, Spans]:
    """Returns the conversation as text and the character spans of its targets."""
    cannot = f"{chat.where}: the chat template cannot be used"
    marks = bool(GENERATION_TAG.search(template))

    def render(messages: list[Message], tools: Any, prompt: bool = False) -> tuple[str, Spans]:
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

    chat, text, spans, missing = _render_best_form(chat, render)
    render_form = partial(render, tools=chat.tools)
    _count_unwritten(chat, text, missing, render_form, counts)
    if marks:
        return text, _marked_turns(chat, spans, render_form)
    return text, _added_turns(chat, text, render_form, markers, cannot)


def _render_best_form(chat: Chat, render: Render) -> tuple[Chat, str, Spans, list[Part] | None]:
    """Returns (chat, text, spans, missing parts) of the first form of which the template writes the most parts.

    The parts are None if the template rejects the marks. Raises the UserError of the given form if the template rejects
    it, and leaves something out of the others.
    """
    best: tuple[Chat, str, Spans, list[Part] | None] | None = None
    least, first_error, is_rejected = math.inf, None, False
    for form in forms_of(chat):
        for is_json in (False, True) if arguments_of(form.messages) else (False,):
            written = form._replace(messages=with_json_arguments(form.messages)) if is_json else form
            try:
                text, spans = render(written.messages, written.tools)
            except UserError as error:
                first_error, is_rejected = first_error or error, is_rejected or (form == chat and not is_json)
                continue
            missing = _missing(form, is_json, render)
            # Without a JSON filter, Jinja writes an object in Python syntax.
            rank = 1e6 * prints_python(text, form.messages) + (1e3 if missing is None else len(missing))
            if rank < least:
                best, least = (written, text, spans, missing), rank
            if not rank:
                break
        if not least:
            break
    # A form that the template accepts instead of the given one must lose nothing.
    if best is None or (is_rejected and best[3] != []):
        raise first_error or UserError(f"{chat.where}: the chat template cannot be used")
    return best


def _missing(form: Chat, is_json: bool, render: Render) -> list[Part] | None:
    """Returns the parts that the template leaves out, or None if it rejects the marks."""
    marked, parts = with_marks(form, is_json)
    try:
        return missing_parts(render(marked.messages, marked.tools)[0], parts)
    except UserError:
        return None


def _added_turns(chat: Chat, text: str, render: Render, markers: list[str], cannot: str) -> Spans:
    """Returns the character span of each target turn, from two renderings.

    The span begins where the earlier turns with the generation prompt end, and ends where the rendered turn ends.
    """
    spans = []
    for turn in (number for number, is_trained in enumerate(chat.is_trained) if is_trained):
        before = render(chat.messages[:turn], prompt=True)[0]
        after = render(chat.messages[: turn + 1])[0]
        span: tuple[int, int] | None = (len(before), len(after))
        if not (after.startswith(before) and text.startswith(after)):
            span = _turn_in_context(chat.messages, text, turn, before, render, markers)
        if span is None:
            raise UserError(
                f"{cannot}: an assistant turn changes the text before it; mark the turn with {{% generation %}}"
            )
        spans.append(span)
    return spans


def _turn_in_context(
    messages: list[Message], text: str, turn: int, prompt: str, render: Render, markers: list[str]
) -> tuple[int, int] | None:
    """Returns the span of a turn that is written differently at the end of a conversation, or None.

    Examples: thoughts only of the last turn, tools before the last question, a special token after the last turn. The
    span begins behind the text that the whole conversation and the prompt have in common after the previous message. It
    ends as at the end of a conversation, or else behind the first of `markers`, and the blanks after it.

    prompt: the text before the turn, with the generation prompt.
    """

    def behind(messages: list[Message], number: int, prompt: bool = False) -> str | None:
        """Returns the text behind the end of a message, or None if the template leaves the message out."""
        marked = [*messages[:number], with_end_mark(messages[number]), *messages[number + 1 :]]
        _, mark, rest = render(marked, prompt=prompt)[0].rpartition(END_MARK)
        return rest if mark else None

    rest, expected = text, prompt
    for number in reversed(range(turn)):
        if (found := behind(messages, number)) is not None:
            rest, expected = found, behind(messages[:turn], number, True) or ""
            break
    if not text.endswith(rest):
        return None
    common = os.path.commonprefix([rest, expected])
    while common and common != expected and not (common[-1].isspace() or common.endswith(tuple(markers))):
        common = common[:-1]  # part of a word that begins both the turn and the rest of the generation prompt
    start = len(text) - len(rest) + len(common)
    tail, last = behind(messages, turn), behind(messages[: turn + 1], turn)
    if tail is None and not messages[turn].get("content"):  # `_count_unwritten` counts the calls
        return start, start
    if tail is None:
        return None
    if not text.endswith(tail) or len(tail) > len(text) - start:
        return None
    end = len(text) - len(tail)
    if last and tail.startswith(last):
        return start, end + len(last)
    if turn == len(messages) - 1:
        return start, len(text)
    ends = [(position, mark) for mark in markers if (position := tail.find(mark)) >= 0]
    if not ends:
        return None
    end += min(ends)[0] + len(min(ends)[1])
    return start, end + len(text[end:]) - len(text[end:].lstrip())


def _marked_turns(chat: Chat, spans: Spans, render: Render) -> Spans:
    """Returns the spans that the template marks with {% generation %}, except in assistant turns that are not targets.

    The marks of a turn are found by rendering the conversation twice, without the turn and with it as the last turn.
    """
    left_out = set()
    for turn, (message, is_trained) in enumerate(zip(chat.messages, chat.is_trained, strict=True)):
        if message["role"] == "assistant" and not is_trained:
            before = len(render(chat.messages[:turn])[1]) if turn else 0
            left_out |= set(range(before, len(render(chat.messages[: turn + 1])[1])))
    return [span for number, span in enumerate(spans) if number not in left_out]


def _count_unwritten(chat: Chat, text: str, missing: list[Part] | None, render: Render, counts: Counter) -> None:
    """Counts message parts that the template omits: removing or changing them does not change the rendered text.

    missing: the parts whose marks are not in the text; None if the template rejects marks.
    """

    def written(messages: list[Message], **tools: None) -> str | None:
        try:
            return render(messages, **tools)[0]
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

    lost = set(missing or [])
    if chat.tools and written(chat.messages, tools=None) == text:
        counts["unwritten", "tools", "rows"] += 1
        lost = {part for part in lost if part.message is not None}
    places: dict[str, list[int]] = {}
    for number, message in enumerate(chat.messages):
        content = message.get("content")
        # A text that is found may belong to a different message.
        is_found = not content or (str(content).strip() in text and Part("content", number) not in lost)
        for key in message:
            if key != "role" and not (key == "content" and is_found and missing is not None):
                places.setdefault(key, []).append(number)
    for key, numbers in places.items():
        unwritten = numbers
        if not is_unwritten(numbers, key):
            unwritten = [number for number in numbers if is_unwritten([number], key)] if len(numbers) > 1 else []
        counts["unwritten", key, "messages"] += len(unwritten)
        if key == "tool_calls":
            lost = {part for part in lost if part.message not in unwritten}
        if key != "content":
            continue
        counts["lost"] += sum(chat.is_trained[n] and "tool_calls" not in chat.messages[n] for n in unwritten)
        # Counts content of which the template omits more than half, such as the text before </think>.
        for number in set(numbers) - set(unwritten):
            message = chat.messages[number]
            without = written([*chat.messages[:number], message | {key: ""}, *chat.messages[number + 1 :]]) or ""
            if len(text) - len(without) < len(TAG.sub("", str(message[key])).strip()) / 2:
                counts["partly" if chat.is_trained[number] else ("unwritten", "half of a content", "messages")] += 1
    for part in lost:
        if part.name != "content":
            counts["unwritten", part.name, "rows" if part.message is None else "messages"] += 1


if __name__ == "__main__":
    serve(answer)
