"""Private names of transformers that every run needs, and a function to overwrite. Tested with 5.17 and 5.23."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from common.internals.library import private


def unsplit_layers(model: nn.Module) -> set[str]:
    """Returns the names of the layer classes that are sharded as a unit: `_no_split_modules`; empty without it."""
    return set(getattr(model, "_no_split_modules", None) or ())


def set_unsplit_layers(model: Any, names: set[str]) -> None:
    """Sets `_no_split_modules`, the layer classes that Accelerate's FSDP2 plugin shards as a unit."""
    model._no_split_modules = names


def is_checkpointed(module: nn.Module) -> bool:
    """Returns whether the layer recomputes its activations. Needs `_gradient_checkpointing_func`; False without it."""
    return bool(getattr(module, "gradient_checkpointing", False)) and hasattr(module, "_gradient_checkpointing_func")


def find_documents_with(function: Callable[[Tensor], Tensor | None]) -> None:
    """Makes attention masks use `function` to find the documents of a row, for the rest of the process.

    function: maps the position ids (B, L) to the index of each token's document, (B, L); None: one document per row.
    Overwrites `masking_utils.find_packed_sequence_indices`, which waits for the device; raises UserError without it.
    """
    from transformers import masking_utils

    private(masking_utils, "find_packed_sequence_indices")
    masking_utils.find_packed_sequence_indices = function  # type: ignore[assignment]  # on purpose
