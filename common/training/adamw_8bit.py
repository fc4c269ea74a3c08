"""AdamW with 8-bit states, also on the shards of FSDP2."""

import math
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.errors import UserError

SMALLEST = 4096  # elements of a parameter with 8-bit states; bitsandbytes' default
BLOCK = 256  # consecutive elements of a parameter with the same scale of their 8-bit states, in bitsandbytes


def adamw_8bit(
    groups: list[dict[str, Any]], model: nn.Module, learning_rate: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Returns bitsandbytes' AdamW (arXiv:2110.02861), with 32-bit embedding states as its authors recommend."""
    try:
        import bitsandbytes  # noqa: F401  # imported here: it takes seconds, and may not be installed
    except ImportError as error:
        raise UserError(f"--optimizer adamw8bit needs bitsandbytes ({error}): pip install bitsandbytes") from error
    from common.internals.bitsandbytes import use_own_manager

    optimizer = _sharded_class()(groups, lr=learning_rate, betas=betas, min_8bit_size=SMALLEST)
    optimizer.model = model
    use_own_manager(optimizer)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})
    return optimizer


@cache
def _sharded_class() -> Any:
    """Returns the class; in a function, because bitsandbytes is imported only if it is used."""
    from bitsandbytes.optim import AdamW8bit

    class ShardedAdamW8bit(AdamW8bit):
        """bitsandbytes' AdamW that updates each rank's shard of a parameter with the kernel for full parameters.

        The update is that of the full parameters, because shards consist of full blocks (`check_shards`). States are
        DTensors like their parameter; `absmax1` and `absmax2` have the blocks of this rank.
        """

        model: nn.Module

        def check_shards(self) -> None:
            """Raises UserError, on all ranks, if a block of a parameter is in several shards."""
            in_32_bits = {id(getattr(module, name)) for module, name, _ in self.mng.module_weight_config_triple}
            for name, p in self.model.named_parameters():
                is_8_bit = p.requires_grad and id(p) not in in_32_bits and p.numel() >= SMALLEST
                if not is_8_bit or not isinstance(p, DTensor):
                    continue
                shards = p.device_mesh.size(-1)
                rows = -(-p.shape[0] // shards)
                if rows < p.shape[0] and rows * math.prod(p.shape[1:]) % BLOCK:
                    raise UserError(
                        f"--optimizer adamw8bit: a shard of {name} {tuple(p.shape)} has {rows} rows on {shards} "
                        f"processes, which is no multiple of bitsandbytes' blocks of {BLOCK} elements; use a different "
                        "number of processes, or --optimizer adamw"
                    )

        def init_state(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
            super().init_state(group, p, gindex, pindex)
            if isinstance(p, DTensor):
                for key in {"absmax1", "absmax2"} & self.state[p].keys():
                    blocks = -(-p.to_local().numel() // BLOCK)
                    self.state[p][key] = self.state[p][key].new_zeros(blocks)

        def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
            if not isinstance(p, DTensor):
                super().update_step(group, p, gindex, pindex)
                return
            state, shard = self.state[p], p.to_local().detach()
            gradient: Any = p.grad
            shard.grad = gradient.to_local()
            self.state[shard] = {
                key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()
            }
            if shard.numel():
                super().update_step(group, shard, gindex, pindex)
            self.state.pop(shard)
            state["step"] += 1

    return ShardedAdamW8bit
