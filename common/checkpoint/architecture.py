"""Finds the class of a checkpoint's model by its name in the manifest."""

from typing import Any

from torch import nn


def class_name(model: nn.Module) -> str:
    """Of the model as it is on one process: FSDP2 gives it a class of its own, FSDPLlamaForCausalLM."""
    return type(model).__name__.removeprefix("FSDP")


def class_of(manifest: dict[str, Any]) -> Any:
    """The class in transformers; None for a recipe's own."""
    import transformers  # here because the command lists checkpoints without it

    # Older checkpoints have the name that FSDP2 gave.
    return getattr(transformers, manifest["architecture"].removeprefix("FSDP"), None)
