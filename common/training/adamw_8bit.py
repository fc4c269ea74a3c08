"""AdamW with 8-bit states."""

from typing import Any

import torch
from torch import nn

from common.errors import UserError


def adamw_8bit(
    groups: list[dict[str, Any]], model: nn.Module, learning_rate: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Returns bitsandbytes' AdamW (arXiv:2110.02861), with 32-bit embedding states as its authors recommend."""
    try:
        import bitsandbytes  # imported here: it takes seconds, and may not be installed
    except ImportError as error:
        raise UserError(f"--optimizer adamw8bit needs bitsandbytes ({error}): pip install bitsandbytes") from error
    from common.internals.bitsandbytes import use_own_manager

    optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=learning_rate, betas=betas)
    use_own_manager(optimizer)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})
    return optimizer
