"""Maps each rank's part of weights and optimizer state to the parameters' own names, in every mode.

The same checkpoint format serves all modes, because each layout splits a tensor into ranges of its flattened elements.
FSDP2 splits the first dimension, ZeRO-3 each parameter, ZeRO-1 and 2 the concatenated parameters; DDP does not split.
So a part is (name, start, elements), and any layout can be read from the parts of any other layout. Tensor parallelism
splits some matrices by columns. For these, a part also lists its columns, and its range refers to their elements.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from common.checkpoint.format import DTYPE_NAMES, DTYPES
from common.checkpoint.optimizer_state import OptimizerState, counts_in_tensors
from common.internals.torch import persistent_buffers, shard_offset
from common.models.adapters import has_adapter
from common.models.model_setup import without_wrapper
from common.parallel.process_groups import group_of
from common.training.optimizers import inner_optimizer, is_wrapper
from common.training.process_grid import running


class Piece(NamedTuple):
    """A range of a tensor's flattened elements that this rank holds."""

    name: str  # "weight/NAME", "buffer/NAME" or "optimizer.KEY/NAME", by the model's own names
    tensor: torch.Tensor  # the elements; a view of the trained tensor, in row-major order of its own shape
    start: int  # position of its first element in the flattened full tensor, or in its flattened columns
    shape: tuple[int, ...]  # shape of the full tensor
    is_owner: bool  # whether this rank writes it; only one of several replicas is written
    # Columns of a matrix (end exclusive) that `start` refers to; None: all columns.
    columns: tuple[int, int] | None = None


@dataclass
class _Part:
    """This rank's part of a parameter, and the location of its optimizer state."""

    name: str
    shape: tuple[int, ...]
    start: int
    weight: torch.Tensor
    # The tensor that the inner optimizer knows: the parameter, or the flat partition of many parameters; None if it is
    # not trained.
    holder: torch.Tensor | None
    cut: Callable[[torch.Tensor], torch.Tensor]  # selects this part's elements from a state tensor of the holder's size
    is_owner: bool
    columns: tuple[int, int] | None = None


def _zero_optimizer(optimizer: Any) -> Any | None:
    """Returns DeepSpeed's ZeRO optimizer among the wrappers, or None."""
    while is_wrapper(optimizer):
        optimizer = optimizer.optimizer
        if type(optimizer).__module__.startswith("deepspeed."):
            from common.internals.deepspeed import is_zero  # here because most runs do not need DeepSpeed

            if is_zero(optimizer):
                return optimizer
    return None


def _dtensor_part(name: str, p: DTensor, share: Any) -> _Part:
    placements, mesh = p.placements, p.device_mesh
    assert all(one in (Replicate(), Shard(0)) for one in placements), f"{name} is cut as {placements}"
    offset = shard_offset(p)
    # Only the first of HSDP's replicas is written.
    is_owner = all(mesh.get_local_rank(dim) == 0 for dim, one in enumerate(placements) if one == Replicate())
    start = offset[0] * (p.numel() // p.shape[0]) if p.ndim else 0
    holder = p if p.requires_grad else None
    is_owner = is_owner and (share is None or share.counts)
    whole = _whole_of(p, share)
    start += whole.pop("start")
    part = p.detach().to_local()
    return _Part(name, start=start, weight=part, holder=holder, cut=lambda s: s.to_local(), is_owner=is_owner, **whole)


def _whole_of(p: torch.Tensor, share: Any) -> dict[str, Any]:
    """Returns the full shape of a parameter that a group of ranks may share, and the position of this rank's part."""
    if share is None or share.dim is None:
        return {"shape": tuple(p.shape), "start": 0, "columns": None}
    if share.dim == 0:
        return {"shape": share.shape, "start": share.start * math.prod(share.shape[1:]), "columns": None}
    return {"shape": share.shape, "start": 0, "columns": (share.start, share.start + p.shape[1])}


def _parts(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Iterator[_Part]:
    for module in model.modules():
        # After a forward pass without backward, such as an evaluation, FSDP2 leaves the parameters of its root
        # all-gathered. These are plain tensors in the compute dtype, which no optimizer knows.
        if isinstance(module, FSDPModule):
            module.reshard()
    named = dict(without_wrapper(model).named_parameters())
    zero = _zero_optimizer(optimizer)
    if zero is not None:
        from common.internals.deepspeed import is_zero3, zero_groups

        names = {id(p): name for name, p in named.items()}
        parts = _zero3_parts if is_zero3(zero) else _zero12_parts
        yield from parts(zero, names)
        trained = {id(p) for group, _ in zero_groups(zero) for p in group}
        named = {name: p for name, p in named.items() if id(p) not in trained}  # the frozen parameters
    shares = without_wrapper(model).shares.of if hasattr(without_wrapper(model), "shares") else {}
    rank = accelerator.process_index
    peers = running().peers(rank)
    num_bytes = [0] * len(peers)  # bytes of replicated parameters that each rank writes, balanced over ranks
    known = {id(p) for group in inner_optimizer(optimizer).param_groups for p in group["params"]}
    for name, p in named.items():
        assert not p.requires_grad or id(p) in known, f"{name} requires a gradient, and the optimizer does not hold it"
        if hasattr(p, "ds_tensor"):
            yield _ds_part(name, p, p.ds_tensor.detach(), None, lambda state: state)
        elif isinstance(p, DTensor):
            yield _dtensor_part(name, p, shares.get(name))
        else:
            owner, share, holder = num_bytes.index(min(num_bytes)), shares.get(name), p if p.requires_grad else None
            num_bytes[owner] += p.nbytes
            is_owner = owner == peers.index(rank) and (share is None or share.counts)
            where = _whole_of(p, share)
            yield _Part(name, weight=p.detach(), holder=holder, cut=lambda s: s, is_owner=is_owner, **where)


def _zero12_parts(zero: Any, names: dict[int, str]) -> Iterator[_Part]:
    """Yields the parts under ZeRO-1 and 2, which concatenate the parameters of a group."""
    from common.internals.deepspeed import zero12_fragment, zero_groups

    for group, flat in zero_groups(zero):
        for p in group:
            fragment = zero12_fragment(p)
            if fragment is None:  # in the partition of a different rank
                continue

            def cut(state: torch.Tensor, at: Any = fragment) -> torch.Tensor:
                return state.narrow(0, at.offset, at.numel)

            yield _Part(names[id(p)], tuple(p.shape), fragment.start, cut(flat).detach(), flat, cut, is_owner=True)


def _ds_part(name: str, p: Any, weight: torch.Tensor, holder: torch.Tensor | None, cut: Callable) -> _Part:
    """Returns ZeRO-3's part of a parameter. All parts have equal size; zeros that pad the last parts are removed."""
    share = p.ds_tensor.ds_numel
    start = min(torch.distributed.get_rank(p.ds_process_group) * share, p.ds_numel)
    held = min(share, p.ds_numel - start)
    return _Part(
        name, tuple(p.ds_shape), start, weight.narrow(0, 0, held), holder, lambda s: cut(s).narrow(0, 0, held), True
    )


def _zero3_parts(zero: Any, names: dict[int, str]) -> Iterator[_Part]:
    """Yields this rank's ZeRO-3 part of each parameter, in float32; a group in files is read when its turn comes."""
    from common.internals.deepspeed import zero_groups

    for group, flat in zero_groups(zero):
        offset = 0
        for p in group:

            def cut(state: torch.Tensor, offset: int = offset, size: int = p.ds_tensor.ds_numel) -> torch.Tensor:
                return state.narrow(0, offset, size)

            yield _ds_part(names[id(p)], p, cut(flat).detach(), flat, cut)
            offset += p.ds_tensor.ds_numel


def _buffers(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[Piece]:
    stages = getattr(without_wrapper(model), "pipeline_stages", None)
    held_before = stages.held_before if stages else ()
    for prefix, module in without_wrapper(model).named_modules():
        for name, buffer in persistent_buffers(module):
            full = f"{prefix}.{name}" if prefix else name
            is_owner = accelerator.process_index % running().stage_size == 0 and full not in held_before
            yield Piece(f"buffer/{full}", buffer.detach(), 0, tuple(buffer.shape), is_owner)


def _state_pieces(part: _Part, state: dict[str, Any]) -> Iterator[Piece]:
    for key, value in state.items():
        if torch.is_tensor(value) and value.ndim:
            name = f"optimizer.{key}/{part.name}"
            if value.shape == part.holder.shape:
                yield Piece(name, part.cut(value).detach(), part.start, part.shape, part.is_owner, part.columns)
            else:  # factored or block-wise state: its parameter must be unsharded
                assert part.weight.shape == part.shape, f"{name} does not follow its parameter's cut"
                yield Piece(name, value.detach(), 0, tuple(value.shape), part.is_owner)


def pieces(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Iterator[Piece]:
    """Yields everything that this rank holds: float32 weights, persistent buffers, optimizer state. No communication.

    For an adapter, the frozen base is omitted, because no update changes it.
    """
    state, is_adapter = OptimizerState(optimizer), has_adapter(without_wrapper(model))
    for part in _parts(accelerator, model, optimizer):
        if is_adapter and part.holder is None:
            continue
        yield Piece(f"weight/{part.name}", part.weight, part.start, part.shape, part.is_owner, part.columns)
        yield from _state_pieces(part, state.of(part.holder))
    yield from _buffers(accelerator, model)


def scalar_state(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Returns the scalar optimizer state (a step count) that this rank writes, by "optimizer.KEY/NAME"."""
    state, found = OptimizerState(optimizer), {}
    for part in _parts(accelerator, model, optimizer):
        for key, value in state.of(part.holder).items():
            if part.is_owner and not (torch.is_tensor(value) and value.ndim):
                found[f"optimizer.{key}/{part.name}"] = value
    on_device = [name for name, value in found.items() if torch.is_tensor(value)]
    if on_device:  # a single transfer for all values
        values = torch.stack([found[name].detach().double() for name in on_device]).tolist()
        found |= dict(zip(on_device, values, strict=True))
    return found


def scalar_dtypes(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> dict[str, str]:
    """Returns the dtypes of those values of `scalar_state` that are tensors."""
    state, found = OptimizerState(optimizer), {}
    for part in _parts(accelerator, model, optimizer):
        for key, value in state.of(part.holder).items():
            if part.is_owner and torch.is_tensor(value) and not value.ndim:
                found[f"optimizer.{key}/{part.name}"] = DTYPE_NAMES[value.dtype]
    return found


def holders(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor | None]:
    """Returns the tensor that the optimizer knows, by the parameter's name; None if it is not trained."""
    found = {part.name: part.holder for part in _parts(accelerator, model, optimizer)}
    zero = _zero_optimizer(optimizer)
    if zero is not None:
        from common.internals.deepspeed import is_zero3, zero_groups

        names = {id(p): name for name, p in without_wrapper(model).named_parameters()}
        if not is_zero3(zero):  # also parameters in the partitions of other ranks
            found |= {names[id(p)]: flat for group, flat in zero_groups(zero) for p in group}
    return found


def untrained(found: dict[str, torch.Tensor | None], model: torch.nn.Module, optimizer: Any) -> list[str]:
    """Returns the names of the parameters without optimizer state.

    They are frozen, never had a gradient, or the optimizer keeps no state for them. found: result of `holders`. Call it
    on all ranks together, because the stages of a pipeline exchange their names.
    """
    state = OptimizerState(optimizer)
    names = [name for name, holder in found.items() if not state.of(holder)]
    if not hasattr(without_wrapper(model), "pipeline_stages"):
        return names
    told: list[Any] = [None] * running().pipeline
    torch.distributed.all_gather_object(told, names, group=group_of(running().stages))
    return list(dict.fromkeys(name for names in told for name in names))


def make_state(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    saved_scalars: dict[str, Any],
    saved_dtypes: dict[str, str] | None,
) -> None:
    """Creates the state of a new optimizer, so that the saved values can be read into the tensors of `pieces`.

    Args:
        tensors: dtype and full shape of each saved tensor, by the names of `pieces`.
        saved_scalars, saved_dtypes: results of `scalar_state` and `scalar_dtypes`; older checkpoints have no dtypes.
    """
    state_of, inner = OptimizerState(optimizer), inner_optimizer(optimizer)
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in (tensors | saved_scalars).items():
        kind, _, parameter = name.partition("/")
        if kind.startswith("optimizer."):
            by_parameter.setdefault(parameter, {})[kind.removeprefix("optimizer.")] = value
    for part in _parts(accelerator, model, optimizer):
        if part.holder is None or state_of.of(part.holder):
            continue
        keeper, group = state_of.keeper(part.holder)
        state: dict[str, Any] = {}
        for key, value in by_parameter.get(part.name, {}).items():
            if isinstance(value, tuple):
                dtype, shape = value
                if shape == part.shape:
                    state[key] = torch.zeros_like(part.holder, dtype=dtype, requires_grad=False)
                else:
                    state[key] = torch.zeros(shape, dtype=dtype, device=part.holder.device)
            elif dtype := _scalar_dtype(key, part.name, keeper, saved_dtypes):
                # The device on which torch loads a step. (ZeRO-3's groups are empty between steps; it keeps steps on
                # the device.)
                on_device = key != "step" or not group or group.get("fused") or group.get("capturable")
                device = part.holder.device if on_device else "cpu"
                state[key] = torch.tensor(value, dtype=dtype, device=device)
            else:
                state[key] = int(value) if key == "step" else value
        if state:
            keeper.state[part.holder] = state
    if hasattr(inner, "ds_opt_adam"):
        from common.internals.deepspeed import replay_steps

        replay_steps(inner)


def _scalar_dtype(
    key: str, name: str, keeper: torch.optim.Optimizer, saved: dict[str, str] | None
) -> torch.dtype | None:
    """Returns the dtype of a scalar state that the optimizer keeps in a tensor; None for a plain number.

    torch counts steps in a tensor, other optimizers (DeepSpeed's CPU Adam) in an int.
    """
    if key == "step" and counts_in_tensors(keeper):
        return torch.float32
    if hasattr(keeper, "ds_opt_adam"):  # the checkpoint's mode may differ
        return None
    dtype = (saved or {}).get(f"optimizer.{key}/{name}")
    return DTYPES[dtype] if dtype else None


@torch.no_grad()
def refresh(optimizer: Any) -> None:
    """Copies the float32 master weights to the compute weights after `pieces` were read into, if these are separate."""
    zero = _zero_optimizer(optimizer)
    if zero is not None:
        from common.internals.deepspeed import copy_master_weights

        copy_master_weights(zero)
