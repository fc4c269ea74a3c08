"""Which tokens of a conversation are learned? The chat template writes it; the assistant's turns are targets."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from common.data.columns import messages_of, utf8_length
from common.data.rows import Row
from common.data.tokenizer import encode_plain
from common.errors import UserError, one_line

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # by which a chat template marks what the assistant says
CHATML = Path(__file__).with_name("chatml.jinja")
Encoded = tuple[list[int], list[bool], str]  # a sample's tokens, which of them may be targets, its text


def read_chat_template(name: str) -> str:
    """The template of a file, or of ChatML by its name. Raises UserError, one line."""
    try:
        text = (CHATML if name == "chatml" else Path(name)).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not in UTF-8"
        raise UserError(f"--chat_template {name}: {reason}; name a file with a template in Jinja, or chatml") from error
    probe = [{"role": role, "content": "abc"} for role in ("user", "assistant")]
    try:
        written = render_jinja_template([probe], chat_template=text)[0][0]
    except TemplateSyntaxError as error:
        raise UserError(f"--chat_template {name}, line {error.lineno}: {one_line(error)}; mend it") from error
    except Exception:  # of a template that wants other messages: it is tried when they are read
        return text
    if "abc" not in written:
        raise UserError(f"--chat_template {name}: it writes nothing of a message; loop over `messages` in it")
    return text


def with_end_of_text(ids: list[int], eos: int) -> list[int]:
    """With the eos token at its end, which some tokenizers put there by themselves."""
    return ids if ids[-1:] == [eos] else [*ids, eos]


def encode_chats(
    batch: list[Row], tokenizer: PreTrainedTokenizerBase, counts: Counter, column: str = "messages"
) -> Iterator[Encoded]:
    """The tokenizer's chat template decides every token; the targets are those that lie in the assistant's turns.

    `counts` gets, by its number, the token with which each turn ends.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{batch[0].where}: messages need a chat template and the tokenizer has none; name one with "
            "--chat_template (chatml is at hand)"
        )
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} does not tell where a token lies in a text; use a fast tokenizer")
    chats = [_render(row, tokenizer, column) for row in batch]
    encoded = encode_plain(tokenizer, [text for text, _ in chats], return_offsets_mapping=True)
    for row, (text, spans), ids, offsets in zip(
        batch, chats, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        is_target = np.zeros(len(ids), bool)
        starts = np.array([start for start, _ in offsets])
        for start, end in spans:  # a token that begins before the turn belongs to what the model is given
            turn = (starts >= start) & (starts < end)
            is_target |= turn
            tokens = [ids[place] for place in np.flatnonzero(turn)]
            while tokens and not tokenizer.decode(tokens[-1:]).strip():  # many templates end a turn with a line's end
                tokens.pop()
            if tokens and tokens[-1] in tokenizer.added_tokens_decoder:  # else it is text, at which nothing stops
                counts[tokens[-1]] += 1
        counts["empty"] += any(
            message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls"))
            for message in messages_of(row, column)
        )
        yield ids, is_target.tolist(), text


def _render(row: Row, tokenizer: PreTrainedTokenizerBase, column: str) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text, and the spans of characters that the assistant says.

    A template says itself which these are with {% generation %}. Without that: a turn is what its rendering adds to the
    rendering of the turns before it together with the prompt for an answer.
    """
    messages = messages_of(row, column)
    template = tokenizer.get_chat_template()
    cannot = f"{row.where}: the chat template cannot be used"

    def render(messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, spans = render_jinja_template(
                [messages], chat_template=template, **options, **tokenizer.special_tokens_map
            )
        except Exception as error:  # templates raise jinja2's errors, and what Python raises for a missing key
            raise UserError(f"{cannot}: {one_line(error)}; mend the messages, or the --chat_template") from error
        utf8_length(texts[0], row.where)
        return texts[0], spans[0] if spans else []

    if GENERATION_TAG.search(template):
        return render(messages, return_assistant_tokens_mask=True)
    text, spans = render(messages)[0], []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:turn], add_generation_prompt=True)[0]
            after = render(messages[: turn + 1])[0]
            if not (after.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"{cannot}: what the assistant says is not a plain addition; mark it with {{% generation %}}"
                )
            spans.append((len(before), len(after)))
    return text, spans
