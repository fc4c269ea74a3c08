"""Layouts of FSDP2, DeepSpeed's ZeRO, tensor parallelism and pipeline parallelism, in which a rank holds only parts."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from common.checkpoint.parts import Part, check_known, replicated_parts
from common.internals.torch import shard_offset
from common.parallel.process_groups import gradient_peers, group_of, pipeline_ranks
from common.training.optimizers import is_wrapper
from common.training.process_grid import current_grid
from common.training.shares import Share


def sharded_parts(model: torch.nn.Module, optimizer: Any, rank: int) -> Iterator[Part]:
    """Yields this rank's part of each parameter."""
    for module in model.modules():
        # After a forward pass without backward, such as an evaluation, FSDP2 leaves the parameters of its root
        # all-gathered. These are plain tensors in the compute dtype, which are not in the optimizer.
        if isinstance(module, FSDPModule):
            module.reshard()
    named: dict[str, Any] = dict(model.named_parameters())
    zero = zero_optimizer(optimizer)
    if zero is not None:
        from common.internals.deepspeed import is_zero3, zero_groups

        names = {id(p): name for name, p in named.items()}
        parts = _zero3_parts if is_zero3(zero) else _zero12_parts
        yield from parts(zero, names)
        trained = {id(p) for group, _ in zero_groups(zero) for p in group}
        named = {name: p for name, p in named.items() if id(p) not in trained}  # the frozen parameters
    check_known(named, optimizer)
    shares: dict[str, Share] = getattr(getattr(model, "shares", None), "of", {})
    replicated = {}
    for name, p in named.items():
        if hasattr(p, "ds_tensor"):
            yield _zero3_part(name, p, p.ds_tensor.detach(), None, lambda state: state)
        elif isinstance(p, DTensor):
            yield _within_group(_dtensor_part(name, p), p, shares.get(name))
        else:
            replicated[name] = p
    for part in replicated_parts(replicated, rank, gradient_peers(current_grid(), rank)):
        yield _within_group(part, replicated[part.name], shares.get(part.name))


def _within_group(part: Part, p: torch.Tensor, share: Share | None) -> Part:
    """Returns the part with its position in the full parameter, if a group of ranks partitions it (`share`)."""
    if share is None:
        return part
    part = replace(part, is_owner=part.is_owner and share.counts)
    if share.dim is None:
        return part
    if share.dim == 0:
        return replace(part, shape=share.shape, start=part.start + share.start * math.prod(share.shape[1:]))
    return replace(part, shape=share.shape, columns=(share.start, share.start + p.shape[1]))


def _dtensor_part(name: str, p: DTensor) -> Part:
    placements, mesh = p.placements, p.device_mesh
    assert all(placement in (Replicate(), Shard(0)) for placement in placements), f"{name} is sharded as {placements}"
    # Only the first of HSDP's replicas is written.
    is_owner = all(mesh.get_local_rank(dim) == 0 for dim, p in enumerate(placements) if p == Replicate())
    start = shard_offset(p)[0] * (p.numel() // p.shape[0]) if p.ndim else 0
    state_key = p if p.requires_grad else None
    return Part(name, tuple(p.shape), start, _local(p.detach()), state_key, is_owner, select=_local)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def zero_optimizer(optimizer: Any) -> Any | None:
    """Returns DeepSpeed's ZeRO optimizer among the wrappers, or None."""
    while is_wrapper(optimizer):
        optimizer = optimizer.optimizer
        if type(optimizer).__module__.startswith("deepspeed."):
            from common.internals.deepspeed import is_zero  # here because FSDP does not need DeepSpeed

            if is_zero(optimizer):
                return optimizer
    return None


def _zero12_parts(zero: Any, names: dict[int, str]) -> Iterator[Part]:
    """Yields the parts under ZeRO-1 and 2, which concatenate the parameters of a group."""
    from common.internals.deepspeed import zero12_fragment, zero_groups

    for group, flat in zero_groups(zero):
        for p in group:
            fragment = zero12_fragment(p)
            if fragment is None:  # in the partition of a different rank
                continue

            def select(state: torch.Tensor, at: Any = fragment) -> torch.Tensor:
                return state.narrow(0, at.offset, at.numel)

            yield Part(names[id(p)], tuple(p.shape), fragment.start, select(flat).detach(), flat, True, select)


def _zero3_parts(zero: Any, names: dict[int, str]) -> Iterator[Part]:
    """Yields this rank's ZeRO-3 part of each parameter, in float32."""
    from common.internals.deepspeed import zero_groups

    for group, flat in zero_groups(zero):
        offset = 0
        p: Any
        for p in group:

            def select(state: torch.Tensor, offset: int = offset, size: int = p.ds_tensor.ds_numel) -> torch.Tensor:
                return state.narrow(0, offset, size)

            yield _zero3_part(names[id(p)], p, select(flat).detach(), flat, select)
            offset += p.ds_tensor.ds_numel


def _zero3_part(name: str, p: Any, weight: torch.Tensor, state_key: torch.Tensor | None, select: Callable) -> Part:
    """Returns ZeRO-3's part of a parameter. All parts have equal size; zeros that pad the last parts are removed."""
    size = p.ds_tensor.ds_numel
    start = min(torch.distributed.get_rank(p.ds_process_group) * size, p.ds_numel)
    num_elements = min(size, p.ds_numel - start)

    def unpadded(state: torch.Tensor) -> torch.Tensor:
        return select(state).narrow(0, 0, num_elements)

    return Part(name, tuple(p.ds_shape), start, weight.narrow(0, 0, num_elements), state_key, True, unpadded)


def state_keys_elsewhere(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor | None]:
    """Returns `Layout.state_keys` of the parameters under ZeRO-1 and 2, also if they are in other ranks' partitions."""
    zero = zero_optimizer(optimizer)
    if zero is None:
        return {}
    from common.internals.deepspeed import is_zero3, zero_groups

    if is_zero3(zero):
        return {}
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: flat for group, flat in zero_groups(zero) for p in group}


def gather_names(names: list[str]) -> list[str]:
    """Returns the names of all stages of this rank's pipeline, each once."""
    gathered: list[Any] = [None] * current_grid().pipeline
    torch.distributed.all_gather_object(gathered, names, group=group_of(pipeline_ranks))
    return list(dict.fromkeys(name for names in gathered for name in names))


def why_not_saved(accelerator: Accelerator) -> str | None:
    """Returns the reason why the state of a run with DeepSpeed cannot be saved, or None."""
    from common.parallel.deepspeed_files import offload_devices

    zero = accelerator.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
    if offload_devices(zero)["offload_optimizer"] == "nvme":
        return (
            "--save_every, --resume: checkpoints do not contain an optimizer state on NVMe (nvme_path); pass "
            "--save_every 0, or use zero3_offload_cpu.yaml"
        )
    return None


def copy_master_weights(optimizer: Any) -> None:
    """Copies ZeRO's float32 master weights to the compute weights, after values were read into the master weights."""
    zero = zero_optimizer(optimizer)
    if zero is not None:
        from common.internals import deepspeed

        deepspeed.copy_master_weights(zero)
