"""Tokenises conversations with the chat template; the assistant's turns are the targets."""

import stat
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.chat_notes import count_at
from common.data.limited_process import LimitedProcess, LimitExceeded
from common.data.messages import Chat, function_names, read_chat
from common.data.source_types import Row
from common.data.tokenizer import Encoded, encode_plain
from common.errors import UserError, one_line
from common.reading import reading

CHATML = Path(__file__).with_name("chatml.jinja")
MAX_TEMPLATE_BYTES = 1 << 20
Spans = list[tuple[int, int]]


def start_rendering(**limits: int) -> LimitedProcess:
    """Returns a process that renders chat templates, because a template can run without end or fill the memory."""
    return LimitedProcess("common.data.chat_rendering", **limits)


def read_chat_template(name: str) -> str:
    """Returns the chat template in a file, or the ChatML template for the name "chatml".

    Raises UserError, one line, if the file cannot be read or the template is invalid or ignores the messages.
    """
    subject = f"--chat_template {name}"
    path = CHATML if name == "chatml" else Path(name)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_TEMPLATE_BYTES:
            raise UserError(f"{subject}: not a regular file of at most 1 MiB; name a file with a template, or chatml")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not in UTF-8"
        raise UserError(f"{subject}: {reason}; name a file with a template in Jinja, or chatml") from error
    try:
        with start_rendering() as process:
            ((written, line, problem),) = process.ask({"probe": text})
    except LimitExceeded as error:
        raise UserError(f"{subject}: the template {error}; fix it") from error
    if line:
        raise UserError(f"{subject}, line {line}: {problem}; fix it")
    # The template may require different messages; `encode_chats` reports errors for real rows.
    if not problem and "abc" not in written:
        raise UserError(f"{subject}: it writes nothing of a message; loop over `messages` in it")
    return text


def encode_chats(
    batch: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    counts: Counter,
    process: LimitedProcess,
    column: str = "messages",
) -> Iterator[Encoded]:
    """Yields the encoded conversations of a batch; the tokenizer adds no special tokens to the chat template's text.

    The tokens of the assistant's turns are the targets. `counts` receives the values that `chat_notes` reports and, by
    token id, the number of target turns that end with each special token. `process` is that of `start_rendering`.

    Raises UserError if the template or the tokenizer cannot be used, or a row has no valid messages.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{batch[0].where}: messages need a chat template and the tokenizer has none; pass "
            "--chat_template (for example chatml)"
        )
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} has no character offsets of tokens; use a fast tokenizer")
    chats = []
    for row in batch:
        with reading(row.where):
            chats.append(read_chat(row, column, counts))
    written = _render(chats, tokenizer, counts, process)
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


def _render(
    chats: list[Chat], tokenizer: PreTrainedTokenizerBase, counts: Counter, process: LimitedProcess
) -> list[tuple[str, Spans]]:
    """Returns each conversation as text and the character spans of its targets."""
    templates: dict[bool, str] = {}
    for chat in chats:
        if (has_tools := chat.tools is not None) not in templates:
            try:
                templates[has_tools] = tokenizer.get_chat_template(tools=chat.tools)
            except ValueError as error:
                raise UserError(f"{chat.where}: the chat template cannot be used: {one_line(error)}") from error
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    special = tokenizer.special_tokens_map
    markers = [token for token in sorted(tokens) if token in special.values() or token in str(templates)]
    request = {"chats": chats, "special_tokens": special, "templates": list(templates.items()), "markers": markers}
    written: list[tuple[str, Spans]] = []
    try:
        for text, spans, added in process.ask(request):
            written.append((text, spans))
            for key, count in added:
                count_at(counts, tuple(key) if isinstance(key, list) else key, count, chats[len(written) - 1].where)
    except LimitExceeded as error:
        raise UserError(
            f"{chats[len(written)].where}: the chat template {error}; use a different --chat_template"
        ) from error
    return written


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
        count_at(counts, "lost" if not any(shares) else "partly", any(share < 1 / 2 for share in shares), chat.where)


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
