"""Finds the class of a checkpoint's model by its name in the manifest."""

from typing import Any

from torch import nn


def class_name(model: nn.Module) -> str:
    """Returns the name of the model's class in a single process; FSDP2 uses its own class, FSDPLlamaForCausalLM."""
    return type(model).__name__.removeprefix("FSDP")


def class_of(manifest: dict[str, Any]) -> Any:
    """Returns the model's class in transformers; None for a recipe's own class."""
    import transformers  # here because listing checkpoints does not need it

    # Older checkpoints contain the name of FSDP2's class.
    return getattr(transformers, manifest["architecture"].removeprefix("FSDP"), None)
