"""Tokenises rows into one sample each: texts, prompts with completions, or conversations."""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.row_texts import batches, text_of
from common.data.source_types import Corpus, Row
from common.data.tokenizer import Encoded, encode_plain, encoded_batches, special_tokens_around, with_end_of_text
from common.data.too_long import is_left_out


def encode_examples(
    corpus: Corpus,
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    counts: Counter,
    on_too_long: str | None = None,
) -> Iterator[tuple[np.ndarray, str]]:
    """Yields (tokens in the stored form of `mark_targets`, text) of each example with a target; updates `counts`.

    on_too_long: what happens to a longer row, of `too_long.CHOICES`; None: it is truncated.
    """
    context: Any = nullcontext()
    if columns == ("messages",):
        from common.data.chats import encode_chats, start_rendering

        context = start_rendering()
        encoded = ((batch, encode_chats(batch, tokenizer, counts, context)) for batch in batches(corpus, columns))
    else:
        texts = encoded_batches(corpus, columns, tokenizer)
        encoded = ((batch[0], _join(batch, tokenizer, counts)) for batch in texts)
    with context:
        for batch, examples in encoded:
            for row, (ids, is_target, text) in zip(batch, examples, strict=True):
                length, stored = len(ids) - 1, mark_targets(ids, is_target, sequence_length)
                if (
                    length > sequence_length
                    and on_too_long
                    and is_left_out(on_too_long, row.where, "", length, "sequence_length", sequence_length)
                ):
                    counts["too_long"] += 1
                    continue
                num_targets = int(np.count_nonzero(stored >= 0))
                if not num_targets:
                    counts["dropped"] += 1
                    counts["without_targets"] += any(is_target[1:])
                    continue
                counts["documents"] += 1
                counts["targets"] += num_targets
                counts["bytes"] += len(text.encode())
                counts["truncated"] += length > sequence_length
                counts["max_length"] = max(counts["max_length"], len(stored) - 1)
                yield stored, text


def encode_texts(
    batch: list[Row], columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, counts: Counter
) -> Iterator[Encoded]:
    """Returns an iterator over a text and eos per row, or with two columns a prompt, a completion and eos.

    Targets are all tokens of the text and eos, or the completion and eos. The text or the prompt is encoded as
    `tokenizer(text)` does; special tokens before a text are not targets. Prompt and completion are tokenised
    separately. At inference, the prompt is tokenised without the completion, so the model would never see a token
    across the boundary. If the prompt is empty and the tokenizer adds no special tokens, eos is the prompt.
    """
    texts = [[text_of(row, column) for row in batch] for column in columns]
    encoded = [encode_plain(tokenizer, column)["input_ids"] for column in texts]
    return _join((batch, texts, encoded), tokenizer, counts)


def _join(batch: tuple[Any, ...], tokenizer: PreTrainedTokenizerBase, counts: Counter) -> Iterator[Encoded]:
    (before, behind), (rows, texts, ids) = special_tokens_around(tokenizer), batch
    eos = tokenizer.eos_token_id  # a slow property, once per batch
    for number in range(len(rows)):
        text = "".join(column[number] for column in texts)
        context, targets = before, ids[0][number] + behind
        if len(texts) == 2:
            # A completion must follow a token, because the first token of a sample cannot be a target.
            context, targets = before + ids[0][number] + behind or [eos], ids[1][number]
            counts["empty"] += bool(text) and not targets
        targets = with_end_of_text(targets, eos) if text else []
        yield context + targets, [False] * len(context) + [True] * len(targets), text


def mark_targets(ids: list[int], is_target: list[bool], sequence_length: int) -> np.ndarray:
    """Returns the stored form of a sequence, int32: targets as they are, other tokens as their bitwise complement.

    It is truncated to `sequence_length` inputs and their targets. The first token is never a target.
    """
    tokens, mask = np.array(ids[: sequence_length + 1], np.int32), np.array(is_target[: sequence_length + 1], bool)
    mask[:1] = False  # no token precedes it
    return np.where(mask, tokens, ~tokens)


def token_ids(stored: np.ndarray) -> np.ndarray:
    """Returns the token ids of a sequence in the form of `mark_targets`, also of those that are no targets."""
    return np.where(stored < 0, ~stored, stored)
