"""Activation checkpointing modes: keep activations for backward, recompute them, or move them to host memory.

The gradients do not depend on the mode, only memory and time do.
"""

import torch
from transformers import PreTrainedModel

from common.internals.transformers import is_checkpointed

# Help texts; without percent signs, because argparse would read them as format codes. The ratios are measured, see
# `activation_recomputation`.
ACTIVATION_CHECKPOINTING: dict[str, str] = {
    "none": "keep all activations: most memory, least time",
    "selective": "keep the results of matmuls and fused attention, recompute the rest in backward: about 0.6 (float32) "
    "or 0.45 (bf16) of the bytes of none, about 1.1 of its time",
    "full": "keep the input of each layer, recompute the layer in backward: about 0.1 of the bytes of none, 1.3 of its "
    "time",
    "offload": "full, with the layer inputs in host memory until backward: least device memory; inputs are copied to "
    "the host and back during computation; on a CPU the same as full",
}


def apply_activation_checkpointing(model: PreTrainedModel, mode: str, device: torch.device) -> None:
    """Makes the layers of a bare transformers model keep, recompute or offload their activations in training mode.

    It covers the layers that transformers can checkpoint, but not the loss and the output head. The recomputation uses
    the RNG state of the forward, so dropout is the same. `full` is arXiv:1604.06174 with one segment
    per layer. Raises UserError: the layers of the model cannot be checkpointed.

    Args:
        mode: a key of `ACTIVATION_CHECKPOINTING`.
        device: device of the model. If device memory is host memory, `offload` warns and is the same as `full`.
    """
    assert mode in ACTIVATION_CHECKPOINTING, mode
    if mode == "none" and not any(is_checkpointed(module) for module in model.modules()):
        return
    from common.training import activation_recomputation

    if mode == "none":  # enabled by the model's config
        activation_recomputation.disable_recomputation(model)
    else:
        activation_recomputation.enable_recomputation(model, mode, device)
