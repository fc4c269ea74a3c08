"""Pads rows of tokens, and splits the columns of a micro-batch among the ranks of a sequence group."""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from common.training.padding import round_up


def pad_rows(rows: list[torch.Tensor], multiple_of: int, padding_value: int = 0) -> torch.Tensor:
    """Returns B rows as (B, L), padded on the right; L is a multiple of `multiple_of`."""
    padded = pad_sequence(rows, batch_first=True, padding_value=padding_value)
    length = padded.shape[1]
    return F.pad(padded, (0, round_up(length, multiple_of) - length), value=padding_value)


def shard_tokens(micro_batch: dict[str, torch.Tensor], part: int, num_parts: int) -> dict[str, torch.Tensor]:
    """Returns one of `num_parts` equal parts of a micro-batch's columns, with the targets that they predict.

    `input_ids` (B, L) becomes (B, ceil(L / num_parts)). `position_ids` of the same shape are positions in the
    full sequence. The last part is padded; padding is not a target, and no real token attends to it.
    """
    input_ids, rows = micro_batch["input_ids"], micro_batch["target_rows"]
    num_rows, length = input_ids.shape
    size = -(-length // num_parts)
    columns = torch.arange(part * size, (part + 1) * size)
    position_ids = columns.clamp(max=length - 1)  # the model has no positions beyond the longest row
    is_own = rows % length // size == part
    rows = rows[is_own]
    return {
        "input_ids": input_ids[:, position_ids].contiguous(),
        "position_ids": position_ids.repeat(num_rows, 1),
        "targets": micro_batch["targets"][is_own],
        "target_rows": rows // length * size + rows % length - part * size,
    }
