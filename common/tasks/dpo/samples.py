"""Selects the samples of a loss: preference pairs, or for KTO answers with a label."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from common.data.preferences import columns_of
from common.data.source_types import Source
from common.data.sources import open_source
from common.tasks.dpo import preferences
from common.tasks.dpo.losses import Objective


def find_columns(source: Source, loss: str) -> tuple[str, ...] | None:
    """Returns the columns with text to train a tokenizer on; None, the default column, for the embedded corpus."""
    if source.embedded:
        return None
    if loss != "kto":
        return columns_of(open_source(source))
    from common.tasks.dpo import unpaired

    return unpaired.columns_of(open_source(source))


def tokenize_samples(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    reference: str,
    objective: Objective,
    is_held_out: bool = False,
    cache_dir: str | Path | None = None,
) -> Any:
    """Returns `Preferences`, or `Unpaired` for KTO; see `tokenize_preferences` and `tokenize_unpaired`."""
    if objective.name != "kto":
        return preferences.tokenize_preferences(
            source, tokenizer, length, reference, cache_dir, objective, is_held_out=is_held_out
        )
    from common.tasks.dpo.unpaired import tokenize_unpaired

    return tokenize_unpaired(source, tokenizer, length, reference, cache_dir, is_held_out)


def collate_samples(
    samples: list[Any], pad_token_id: int, objective: Objective, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Returns a micro-batch; see `collate_preferences` and `collate_unpaired`."""
    if objective.name != "kto":
        return preferences.collate_preferences(samples, pad_token_id, objective, multiple_of)
    from common.tasks.dpo.unpaired import collate_unpaired

    return collate_unpaired(samples, pad_token_id, objective, multiple_of)
