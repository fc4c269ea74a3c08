"""Lets the layers of a model recompute their activations in backward, or move them to host memory."""

import functools
import warnings
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from common.errors import UserError
from common.internals.torch import argument_names
from common.internals.transformers import is_checkpointed
from common.internals.transformers_uncommon import wrap_checkpointing

# Measured with 2 x 512 tokens on one CPU core, for a Llama shape (4 layers of width 384, MLP of 1024, 6 heads, SDPA, no
# output head). Memory between forward and backward, without parameters, in float32 and under bf16 autocast: none 128.9
# and 101.4 MiB, selective 78.9 and 44.9, full 10.8 and 10.8. FLOPs of a forward and a backward relative to none,
# attention included: selective 1.00, full 1.26. Time relative to none: selective 1.0 to 1.1, full 1.15 to 1.35. If
# attention with dropout has no fused kernel, none needs more memory, and both memory ratios are smaller (BERT on CPU:
# 0.33 and 0.11).
# Operators whose results `selective` keeps. Only overloads (`.default`) match the dispatched operators; `aten.mm`
# would silently never match. `bmm` is excluded on purpose: attention without a fused kernel computes its length x
# length scores with it, and checkpointing must not keep these.
_KEPT_OPERATORS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)


def keep_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Returns the policy of `selective` for one operator; called for each operator that a layer's forward runs."""
    if operator not in _KEPT_OPERATORS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    arguments = dict(zip(argument_names(operator), args, strict=False)) | kwargs
    # Attention with dropout draws random numbers inside its kernel. If its result were kept, the second run would not
    # draw them. Every later dropout of the layer would get a different mask than in forward, which gives a wrong
    # gradient.
    if arguments.get("dropout_p"):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def enable_recomputation(model: PreTrainedModel, mode: str, device: torch.device) -> None:
    """Implements the modes of `apply_activation_checkpointing` other than "none"."""
    unsupported = f"--activation_checkpointing {mode}: {type(model).__name__} cannot checkpoint its layers; use none"
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(unsupported)
    if mode == "offload" and device.type in ("cpu", "mps"):
        warnings.warn(
            f"--activation_checkpointing offload does nothing on {device.type}, whose memory is host memory: as full",
            stacklevel=3,
        )
        mode = "full"
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if mode == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_matmuls)
    _first_method(model, "activation_checkpointing_enable", "gradient_checkpointing_enable")(settings)
    # A few models implement this method themselves and ignore the settings, so the mode would differ from the request.
    checkpointed = [module for module in model.modules() if is_checkpointed(module)]
    if not checkpointed:
        raise UserError(unsupported)
    if mode == "offload":
        from common.training.activation_offload import HostOffload

        offload = HostOffload(device)
        for module in checkpointed:
            wrap_checkpointing(module, offload.wrap)
    # transformers also makes the embedding's output require a gradient, which only re-entrant checkpointing needs. With
    # frozen embeddings this computes an unused gradient, and it breaks the graph of torch.compile.
    model.disable_input_require_grads()


def disable_recomputation(model: PreTrainedModel) -> None:
    """Disables activation checkpointing that the model's config has enabled."""
    _first_method(model, "activation_checkpointing_disable", "gradient_checkpointing_disable")()


def _first_method(model: PreTrainedModel, *names: str) -> Any:
    # transformers renamed these methods: the old names warn in new versions, and old versions lack the new names.
    return next(getattr(model, name) for name in names if hasattr(model, name))
