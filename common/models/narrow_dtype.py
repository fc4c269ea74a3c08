"""The dtype of frozen weights."""

import torch
from accelerate.state import AcceleratorState, is_initialized

from common.training.precision import is_deepspeed


def narrow_dtype() -> torch.dtype | None:
    """Returns the 16-bit dtype of autocast or FSDP2; None in float32, and under DeepSpeed, which casts the model."""
    if not is_initialized() or is_deepspeed():
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)
