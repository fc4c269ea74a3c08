"""Activation checkpointing modes: keep activations for backward, recompute them, or move them to host memory.

Law: the gradients do not depend on the mode. Only memory and time do.
"""

import functools
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from common.errors import UserError
from common.internals.torch import argument_names
from common.internals.transformers import is_checkpointed, wrap_checkpointing

# Measured with 2 x 512 tokens on one CPU core, for a Llama shape (4 layers of width 384, MLP of 1024, 6 heads, SDPA, no
# output head). Memory between forward and backward, without parameters, in float32 and under bf16 autocast: none 128.9
# and 101.4 MiB, selective 78.9 and 44.9, full 10.8 and 10.8. FLOPs of a forward and a backward relative to none,
# attention included: selective 1.00, full 1.26. Time relative to none: selective 1.0 to 1.1, full 1.15 to 1.35. If
# attention with dropout has no fused kernel, none needs more memory, and both memory ratios are smaller (BERT on CPU:
# 0.33 and 0.11).
# (The texts below contain no percent signs, because argparse would read them as format codes.)
ACTIVATION_CHECKPOINTING: dict[str, str] = {
    "none": "keep all activations: most memory, least time",
    "selective": "keep the results of matmuls and fused attention, recompute the rest in backward: about 0.6 (float32) "
    "or 0.45 (bf16) of the bytes of none, about 1.1 of its time",
    "full": "keep the input of each layer, recompute the layer in backward: about 0.1 of the bytes of none, 1.3 of its "
    "time",
    "offload": "full, with the layer inputs in host memory until backward: least device memory; inputs are copied to "
    "the host and back during computation; on a CPU the same as full",
}

# Operators whose results are worth their memory. Only overloads (`.default`) match the dispatched operators; `aten.mm`
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


def _keep_matrix_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Returns the policy of `selective` for one operator; called for each operator that a layer's forward runs."""
    if operator not in _KEPT_OPERATORS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    given = dict(zip(argument_names(operator), args, strict=False)) | kwargs
    # Attention with dropout draws random numbers inside its kernel. If its result were kept, the second run would not
    # draw them. Every later dropout of the layer would get a different mask than in forward, which gives a wrong
    # gradient.
    if given.get("dropout_p"):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def apply_activation_checkpointing(model: nn.Module, mode: str, device: torch.device) -> None:
    """Makes the layers of a transformers model keep, recompute or offload their activations; in place.

    Call it on the bare model, before it is compiled or passed to `accelerator.prepare`. It takes effect only in
    training mode. It covers the layers that the library itself can checkpoint, but not the loss and the output head.
    The RNG state is restored for the recomputation, so dropout gives the same gradients as without checkpointing.
    `full` is Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", with one segment per layer.

    Args:
        model: a transformers model (`PreTrainedModel`).
        mode: a key of `ACTIVATION_CHECKPOINTING`.
        device: device of the model. If device memory is host memory, `offload` warns and is the same as `full`.

    Raises UserError: the layers of the model cannot be checkpointed.
    """
    assert mode in ACTIVATION_CHECKPOINTING, mode
    if mode == "none":
        if any(is_checkpointed(module) for module in model.modules()):  # the model's config can turn it on
            _first_method(model, "activation_checkpointing_disable", "gradient_checkpointing_disable")()
        return
    cannot = f"--activation_checkpointing {mode}: {type(model).__name__} cannot checkpoint its layers; use none"
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(cannot)
    if mode == "offload" and device.type in ("cpu", "mps"):
        warnings.warn(
            f"--activation_checkpointing offload does nothing on {device.type}, whose memory is host memory: as full",
            stacklevel=2,
        )
        mode = "full"
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if mode == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_matrix_products)
    enable = _first_method(model, "activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable(settings)
    # A few models have their own switch, which ignores these settings: the mode would differ from the requested mode.
    checkpointed = [module for module in model.modules() if is_checkpointed(module)]
    if not checkpointed:
        raise UserError(cannot)
    if mode == "offload":
        from common.training.activation_offload import HostOffload

        offload = HostOffload(device)
        for module in checkpointed:
            wrap_checkpointing(module, offload.around)
    # The library also makes the embedding's output require a gradient, which only re-entrant checkpointing needs. With
    # frozen embeddings this computes an unused gradient, and it breaks the graph of torch.compile.
    model.disable_input_require_grads()


def _first_method(model: nn.Module, *names: str) -> Any:
    # transformers renamed these methods: the old names warn in new versions, and old versions lack the new names.
    return next(getattr(model, name) for name in names if hasattr(model, name))
