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

# Measured on one CPU core with a Llama shape (4 layers of width 384, MLP of 1024, 6 heads, SDPA, no output head) and
# 2 x 512 tokens. Bytes alive between forward and backward, without the parameters, in float32 and under bf16 autocast:
# none 128.9 and 101.4 MiB, selective 78.9 and 44.9, full 10.8 and 10.8. FLOPs of a forward and a backward, attention
# included: selective 1.00 and full 1.26 of none. Time: selective 1.0 to 1.1, full 1.15 to 1.35. The bytes of `none` are
# larger, and both shares smaller, where attention with dropout has no fused kernel (BERT on CPU: 0.33 and 0.11).
# (No per cent signs in these lines: argparse would read them as its own.)
ACTIVATION_CHECKPOINTING: dict[str, str] = {
    "none": "keep all activations: most memory, least time",
    "selective": "keep the results of matmuls and fused attention, recompute the rest in backward: about 0.6 (float32) "
    "or 0.45 (bf16) of the bytes of none, about 1.1 of its time",
    "full": "keep the input of each layer, recompute the layer in backward: about 0.1 of the bytes of none, 1.3 of its "
    "time",
    "offload": "full, with the layer inputs in host memory until backward: least device memory; inputs are copied to "
    "the host and back during computation; on a CPU the same as full",
}

# The results worth their bytes. Only overloads (`.default`) match what is dispatched: a bare `aten.mm` never would,
# silently. `bmm` is left out on purpose: attention without a fused kernel builds its length x length scores with it,
# and these are what checkpointing must not keep.
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
    """The policy of `selective`, asked once for each operator that a layer's forward runs."""
    if operator not in _KEPT_OPERATORS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    given = dict(zip(argument_names(operator), args, strict=False)) | kwargs
    # Attention that drops out draws random numbers inside its kernel. Were its result kept, the second run would not
    # draw them, and every later dropout of the layer would get another mask than in forward: a wrong gradient.
    if given.get("dropout_p"):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def apply_activation_checkpointing(model: nn.Module, mode: str, device: torch.device) -> None:
    """Make the layers of a transformers model keep, recompute or offload their activations; in place.

    Call it on the bare model, before it is compiled or handed to `accelerator.prepare`. It acts in training mode only.
    The layers are those that the library itself can checkpoint; the loss and the output head are outside. Random
    state is restored for the second run, so dropout gives the same gradients as without. `full` is Chen et al. 2016,
    "Training Deep Nets with Sublinear Memory Cost", with one segment a layer.

    Args:
        model: a transformers model (`PreTrainedModel`).
        mode: a key of `ACTIVATION_CHECKPOINTING`.
        device: where the model computes. `offload` warns, and is `full`, where device memory is host memory.

    Raises UserError: a model whose layers cannot be checkpointed.
    """
    assert mode in ACTIVATION_CHECKPOINTING, mode
    if mode == "none":
        if any(is_checkpointed(module) for module in model.modules()):  # the model's own config can have asked for it
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
    # A few models bring their own switch, which takes no settings: it would run another mode than the one asked for.
    checkpointed = [module for module in model.modules() if is_checkpointed(module)]
    if not checkpointed:
        raise UserError(cannot)
    if mode == "offload":
        from common.training.activation_offload import HostOffload

        offload = HostOffload(device)
        for module in checkpointed:
            wrap_checkpointing(module, offload.around)
    # The library also makes the embedding's output require a gradient, which only the re-entrant kind needs; with
    # frozen embeddings it would cost a gradient that nobody reads, and it breaks the graph of torch.compile.
    model.disable_input_require_grads()


def _first_method(model: nn.Module, *names: str) -> Any:
    # transformers renamed these methods; the old names warn in new versions and the new ones are not in old versions.
    return next(getattr(model, name) for name in names if hasattr(model, name))
