"""Attention on a CPU in rows of several documents: segment by segment, instead of one masked square per row.

A segment is one document, or several consecutive ones with at least `LEAST` tokens together: a kernel call for each
short document would cost more than it saves. In a row of 2,048 tokens, this takes about a third of the time of the
whole mask (`benchmarks/packing.py`).
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from common.process import this_process

LEAST = 256  # tokens of a segment of several documents

Attention = Callable[..., tuple[Tensor, Any]]  # of transformers' interface


def split_rows() -> None:
    """Makes "sdpa" attention compute by segments, for all models of this process. Calling it again has no effect."""
    before = AttentionInterface()["sdpa"]
    if not isinstance(before, SegmentedAttention):
        AttentionInterface.register("sdpa", SegmentedAttention(before))


class SegmentedAttention:
    """Calls another attention function once per segment of each row, in training on a CPU; otherwise unchanged.

    The mask decides where a document begins: at a token that does not attend to the one before it.
    """

    def __init__(self, attention: Attention):
        self.attention = attention

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, Any]:
        """Shapes: query (B, H, L, D), key and value (B, H / n, L, D), attention_mask bool (B, 1, L, L)."""
        length = query.shape[2]
        is_special = given.get("position_bias") is not None or this_process().has_fake_weights
        if (
            attention_mask is None
            or attention_mask.shape[1:] != (1, length, length)
            or attention_mask.dtype != torch.bool
            or not query.device.type == attention_mask.device.type == "cpu"
            or (is_special or torch.compiler.is_compiling() or length <= LEAST)
        ):
            return self.attention(module, query, key, value, attention_mask, **given)
        rows = []
        for row in range(len(query)):
            mask, segments = attention_mask[row % len(attention_mask)], []
            for start, end in pairwise(find_segments(mask[0])):
                part = (slice(row, row + 1), slice(None), slice(start, end))
                # A causal mask without a window needs no mask: the last token attends to the first.
                own_mask = None if mask[0, end - 1, start] else mask[None, :, start:end, start:end]
                output, _ = self.attention(module, query[part], key[part], value[part], own_mask, **given)
                segments.append(output)
            rows.append(torch.cat(segments, 1))
        return torch.cat(rows), None


def find_segments(mask: Tensor) -> list[int]:
    """Returns the first token of each segment, and the length of the row. mask: bool (L, L), causal, by documents."""
    starts = (~mask.diagonal(-1)).nonzero()[:, 0].add(1).tolist()
    bounds = [0]
    for start in [*starts, len(mask)]:
        if start == len(mask) or start - bounds[-1] >= LEAST:
            bounds.append(start)
    return bounds
