"""Tokenises conversations with the chat template; the assistant's turns are the targets."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from common.data.messages import Chat, Message, arguments_of, function_names, read_chat, with_json_arguments
from common.data.row_texts import utf8_length
from common.data.source_types import Row
from common.data.tokenizer import Encoded, encode_plain
from common.errors import UserError, one_line, reading

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # begins the assistant's text in a chat template
CHATML = Path(__file__).with_name("chatml.jinja")


def read_chat_template(name: str) -> str:
    """Returns the chat template in a file, or the ChatML template for the name "chatml".

    Raises UserError, one line, if the file cannot be read or the template is invalid or ignores the messages.
    """
    try:
        text = (CHATML if name == "chatml" else Path(name)).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not in UTF-8"
        raise UserError(f"--chat_template {name}: {reason}; name a file with a template in Jinja, or chatml") from error
    probe = [{"role": role, "content": "abc"} for role in ("user", "assistant")]
    try:
        written = render_jinja_template([probe], chat_template=text)[0][0]
    except TemplateSyntaxError as error:
        raise UserError(f"--chat_template {name}, line {error.lineno}: {one_line(error)}; fix it") from error
    except Exception:  # The template may require different messages; `encode_chats` reports errors for real rows.
        return text
    if "abc" not in written:
        raise UserError(f"--chat_template {name}: it writes nothing of a message; loop over `messages` in it")
    return text


Spans = list[tuple[int, int]]
Render = Callable[..., tuple[str, Spans]]


def encode_chats(
    batch: list[Row], tokenizer: PreTrainedTokenizerBase, counts: Counter, column: str = "messages"
) -> Iterator[Encoded]:
    """Yields the encoded conversations of a batch; the tokenizer adds no special tokens to the chat template's text.

    The tokens of the assistant's turns are the targets. `counts` receives the values that `chat_notes` reports and, by
    token id, the number of target turns that end with each special token.

    Raises UserError if the template or the tokenizer cannot be used, or a row has no valid messages.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{batch[0].where}: messages need a chat template and the tokenizer has none; pass "
            "--chat_template (for example chatml)"
        )
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} has no character offsets of tokens; use a fast tokenizer")
    chats, written = [], []
    for row in batch:
        with reading(row.where):
            chats.append(read_chat(row, column, counts))
            written.append(_write(chats[-1], tokenizer, counts))
    counts["chats"] += len(chats)
    encoded = encode_plain(tokenizer, [text for text, _ in written], return_offsets_mapping=True)
    for chat, (text, spans), ids, offsets in zip(
        chats, written, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        ids, starts, ends = _without_crossing(tokenizer, text, spans, ids, offsets)
        is_target = np.zeros(len(ids), bool)
        for start, end in spans:
            turn = (starts >= start) & (starts < end)
            is_target |= turn
            tokens = [ids[index] for index in np.flatnonzero(turn)]
            # Skips trailing whitespace tokens, because many templates end a turn with a line break.
            while tokens and not str(tokenizer.decode(tokens[-1:])).strip():
                tokens.pop()
            # Only special tokens are counted: ordinary text does not end generation.
            if tokens and tokens[-1] in tokenizer.added_tokens_decoder:
                counts[tokens[-1]] += 1
        counts["empty"] += any(
            message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls"))
            for message in chat.messages
        )
        _count_answers(chat, text, starts[1:][is_target[1:]], ends[1:][is_target[1:]], counts)
        yield ids, is_target.tolist(), text


def _without_crossing(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Spans, ids: list[int], offsets: Spans
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Returns (ids, starts, ends) in which no token begins before a turn and ends inside it.

    At inference, the prompt is tokenised without its answer, so the model would never see such a token. Therefore the
    parts are tokenised separately. If their tokens decode to a different text than `ids`, then `ids` are kept, and a
    token across the start of a turn is treated as part of the turn.
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    crossing = {start: (starts < start) & (ends > start) for start, _ in spans}
    if not any(tokens.any() for tokens in crossing.values()):
        return ids, starts, ends
    cuts = [0, *sorted(start for start in crossing if 0 < start < len(text)), len(text)]
    parts = encode_plain(tokenizer, [text[a:b] for a, b in pairwise(cuts)], return_offsets_mapping=True)
    apart = [token for part in parts["input_ids"] for token in part]
    if tokenizer.decode(apart) == tokenizer.decode(ids):
        moved = [
            np.array(o, np.int64).reshape(-1, 2) + cut for o, cut in zip(parts["offset_mapping"], cuts, strict=False)
        ]
        return apart, *np.concatenate(moved).T
    for start, tokens in crossing.items():
        starts[tokens] = start
    return ids, starts, ends


def _count_answers(chat: Chat, text: str, starts: np.ndarray, ends: np.ndarray, counts: Counter) -> None:
    """Counts all answers, those without a target, and those whose content or function name is less than half targets.

    Parts that the template rewrites or omits are skipped; `_count_unwritten` counts the omitted parts.
    """
    position = 0
    for message, is_trained in zip(chat.messages, chat.is_trained, strict=True):
        pieces = [piece for piece in (str(message.get("content") or "").strip(), *function_names(message)) if piece]
        if not (is_trained and pieces):
            continue
        counts["answers"] += 1
        covered_parts = [_target_part(text, piece, position, starts, ends) for piece in pieces]
        position = max(position, *(end for end, _ in covered_parts))
        shares = [share for piece, (_, share) in zip(pieces, covered_parts, strict=True) if piece in text]
        counts["lost" if not any(shares) else "partly"] += any(share < 1 / 2 for share in shares)


def _target_part(text: str, piece: str, position: int, starts: np.ndarray, ends: np.ndarray) -> tuple[int, float]:
    """Returns (end, share of target characters) of the first occurrence after `position` with a target, or (0, 0)."""
    while (following := int(np.searchsorted(ends, position, side="right"))) < len(ends):
        at = text.find(piece, max(position, int(starts[following]) - len(piece) + 1))
        if at < 0:
            break
        lengths = np.minimum(ends, at + len(piece)) - np.maximum(starts, at)
        if covered := int(lengths[lengths > 0].sum()):
            return at + len(piece), covered / len("".join(piece.split()))
        position = at + 1
    return 0, 0.0


def _write(chat: Chat, tokenizer: PreTrainedTokenizerBase, counts: Counter) -> tuple[str, Spans]:
    """Returns the conversation as text and the character spans of its targets."""
    cannot = f"{chat.where}: the chat template cannot be used"
    try:
        template = tokenizer.get_chat_template(tools=chat.tools)
    except ValueError as error:
        raise UserError(f"{cannot}: {one_line(error)}") from error
    marks = bool(GENERATION_TAG.search(template))

    def render(messages: list[Message], tools: Any = chat.tools, prompt: bool = False) -> tuple[str, Spans]:
        options: dict[str, Any] = {"tools": tools, "chat_template": template, **tokenizer.special_tokens_map}
        options |= {"return_assistant_tokens_mask": True} if marks else {"add_generation_prompt": prompt}
        try:
            rendered: Any = render_jinja_template([messages], **options)  # its hint is str, but it returns a pair
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
