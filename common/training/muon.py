"""Muon (https://kellerjordan.github.io/posts/muon): orthogonalised momentum for hidden matrices, AdamW for the rest.

The momentum of a matrix is a full matrix here, never a shard, because the orthogonal matrix of a shard is not a shard
of the orthogonal matrix. Each matrix has an owner, the rank that orthogonalises it. The ranks send the owner their
parts of the momentum, and receive their parts of the result, so all ranks apply the same numbers.

torch.optim.Muon is not used, because it computes in bf16, and every process would orthogonalise every matrix.
"""

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.errors import UserError
from common.internals.torch import shard_offset
from common.training.shares import Share

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: singular values end between 0.7 and 1.2
SMALLEST_NORM = 1e-7  # smaller matrices are not scaled up to norm 1
UPDATE_RMS = 0.2  # of AdamW's updates in units of the learning rate, as Moonlight (arXiv:2502.16982) measured
FLAT_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Returns the matrices that are neither embeddings nor in an output layer.

    These are weights of linear layers, LoRA's A and B, routers, stacked experts (experts, a, b), and convolutions
    (channels, ...) in two or three dimensions, flattened to (channels, all others). Convolutions over groups of
    channels, such as depthwise ones, have no full matrix and are left out.
    """
    base, head = getattr(model, "base_model", model), getattr(model, "get_output_embeddings", lambda: None)()
    inside = set(base.parameters())
    outer = {p for p in model.parameters() if p not in inside} | set(head.parameters() if head is not None else ())
    hidden: set[nn.Parameter] = set()
    for module in model.modules():
        is_embedding = isinstance(module, nn.Embedding) or "embed" in type(module).__name__.lower()
        for name, p in module.named_parameters(recurse=False):
            if is_embedding or "embed" in name or name.startswith("head"):
                outer.add(p)  # also if the same parameter is in a linear layer
            elif isinstance(module, FLAT_CONVOLUTIONS):
                hidden.update({p} if p.ndim >= 4 and module.groups == 1 else ())
            elif p.ndim in (2, 3) and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
                hidden.add(p)
    return hidden - outer


def orthogonalize(matrices: Tensor) -> Tensor:
    """Returns matrices (..., a, b) with the same singular vectors and singular values near 1."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    first, third, fifth = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = first * x + (third * gram + fifth * gram @ gram) @ x
    return x.mT if is_tall else x


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape as one matrix (a, b) or a stack (experts, a, b)."""
    return shape if len(shape) < 4 else (shape[0], math.prod(shape[1:]))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Muon(torch.optim.Optimizer):
    """Muon for the hidden matrices of `model`, torch's AdamW for all other parameters, with the same learning rate.

    An update of a matrix (a, b) is scaled by 0.2 sqrt(max(a, b)), so its root mean square is that of AdamW's updates.
    Weight decay is decoupled. State per parameter: `momentum_buffer`, or AdamW's.

    groups: those of `parameter_groups`. All ranks call each `step` together. Raises UserError: no hidden matrix.
    """

    def __init__(
        self, groups: list[dict[str, Any]], model: nn.Module, learning_rate: float, betas: tuple[float, float]
    ):
        hidden = hidden_matrices(model)
        split = [
            group | {"is_hidden": is_hidden, "params": params}
            for group in groups
            for is_hidden in (True, False)
            if (
                params := [p for p in group["params"] if (p in hidden and "no_decay" not in group["name"]) == is_hidden]
            )
        ]
        matrices = [group for group in split if group["is_hidden"]]
        if not matrices:
            raise UserError("--optimizer muon: the model trains no hidden matrix; use --optimizer adamw")
        super().__init__(matrices, {"lr": learning_rate})
        others = [group for group in split if not group["is_hidden"]]
        self.adamw = torch.optim.AdamW(others, lr=learning_rate, betas=betas, fused=True) if others else None
        if self.adamw is not None:
            self.param_groups += self.adamw.param_groups
            self.adamw.state = self.state
        self.model = model
        self.exchange: _Exchange | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient; the same on all ranks."""
        groups = [group for group in self.param_groups if group["is_hidden"]]
        matrices = [p for group in groups for p in group["params"]]
        if self.exchange is None:  # the first step comes after `accelerator.prepare`, which replaces parameters
            self.exchange = _Exchange(matrices, self.model)
        settings = [group for group in groups for _ in group["params"]]
        moved = [number for number, p in enumerate(matrices) if p.grad is not None]
        for numbers, owners in self.exchange.rounds(moved):
            directions = [self._direction(matrices[number]) for number in numbers]
            for number, update in zip(numbers, self.exchange.orthogonalize(numbers, owners, directions), strict=True):
                group, weight = settings[number], _local(matrices[number])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update.to(weight), alpha=-group["lr"] * self.exchange.scale(number))
        if self.adamw is not None:
            self.adamw.step(closure)

    def _direction(self, p: Any) -> Tensor:
        """Returns Nesterov's momentum of this rank's part of a matrix, after updating the momentum."""
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradient, momentum = _local(p.grad), _local(self.state[p]["momentum_buffer"])
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


class _Block(NamedTuple):
    """A rank's part of a tensor: ranges (end exclusive) of its first two dimensions."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[slice(*self.rows), slice(*self.columns)]

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        return (self.rows[1] - self.rows[0], self.columns[1] - self.columns[0], *full[2:])


def _find_block(p: Any, share: Share | None) -> tuple[tuple[int, ...], _Block]:
    """Returns the full shape of a parameter, and this rank's part: FSDP2's shard of a tensor group's part."""
    shape, start, local = tuple(p.shape), 0, _local(p)
    if isinstance(p, DTensor):
        start = shard_offset(p)[0]
    rows, columns = (start, start + local.shape[0]), (0, shape[1])
    if share is not None and share.dim == 0:
        rows = (rows[0] + share.start, rows[1] + share.start)
    if share is not None and share.dim == 1:
        columns = (share.start, share.start + shape[1])
    return (shape if share is None else share.shape), _Block(rows, columns)


class _Exchange:
    """Gathers matrices on their owners, and returns each rank's part of the orthogonalised matrices.

    In a round, each rank owns at most one matrix. So a rank holds a few matrices at once, not a full model. Two
    collectives per round; none if this is the only process, or each rank holds full matrices of a stack.
    """

    def __init__(self, parameters: list[nn.Parameter], model: nn.Module):
        shares: Any = getattr(model, "shares", None)
        names = {id(p): name for name, p in model.named_parameters()}
        own = [_find_block(p, shares.of.get(names[id(p)]) if shares else None) for p in parameters]
        self.shapes, blocks = [shape for shape, _ in own], [block for _, block in own]
        self.device = PartialState().device  # of the collectives; offloaded parameters are on the CPU
        self.dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
        self.group = shares.layer_group if shares else None
        self.rank, self.blocks = 0, [blocks]  # by rank and matrix
        if dist.is_initialized() and dist.get_world_size(self.group) > 1:
            self.rank = dist.get_rank(self.group)
            gathered: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(gathered, blocks, group=self.group)
            self.blocks = gathered

    def scale(self, number: int) -> float:
        """Returns the factor from orthogonal matrices to updates of AdamW's size."""
        return UPDATE_RMS * math.sqrt(max(_matrix_shape(self.shapes[number])[-2:]))

    def _cost(self, number: int) -> float:
        """Returns the matmul work of a matrix or stack, up to a factor."""
        *_, height, width = shape = _matrix_shape(self.shapes[number])
        return math.prod(shape) * min(height, width)

    def _holds_matrices(self, number: int) -> bool:
        """Returns whether every rank has different full matrices of a stack, so that it can orthogonalise its own."""
        held = [block[number] for block in self.blocks if block[number].rows[0] < block[number].rows[1]]
        is_stack = len(self.shapes[number]) == 3 and all(block.columns == (0, self.shapes[number][1]) for block in held)
        return is_stack and len(set(held)) == len(held)

    def rounds(self, numbers: list[int]) -> Iterator[tuple[list[int], list[int | None]]]:
        """Yields the matrices of each round and their owners; None if each rank orthogonalises its own part.

        The largest matrices come first, each to the rank with the least work so far.
        """
        local = [number for number in numbers if len(self.blocks) == 1 or self._holds_matrices(number)]
        for number in local:
            yield [number], [None]
        rest = sorted(set(numbers) - set(local), key=lambda number: (-self._cost(number), number))
        work, owned = [0.0] * len(self.blocks), [[] for _ in self.blocks]  # type: tuple[list[float], list[list[int]]]
        for number in rest:
            owner = work.index(min(work))
            work[owner] += self._cost(number)
            owned[owner].append(number)
        for place in range(max(map(len, owned))):
            owners = [owner for owner, numbers in enumerate(owned) if place < len(numbers)]
            yield [owned[owner][place] for owner in owners], list(owners)

    def orthogonalize(self, numbers: list[int], owners: list[int | None], parts: list[Tensor]) -> list[Tensor]:
        """Returns this rank's parts of the orthogonalised matrices of a round, from its `parts` of the matrices."""
        parts = [part.to(self.device, self.dtype) for part in parts]
        if owners[0] is None:
            shape = _matrix_shape(tuple(parts[0].shape))
            return [orthogonalize(part.reshape(shape)).view_as(part) for part in parts]
        by_owner = dict(zip(owners, zip(numbers, parts, strict=True), strict=True))
        world, nothing = range(len(self.blocks)), parts[0].new_empty(0)
        own = by_owner[self.rank][0] if self.rank in by_owner else None
        sends = [
            by_owner[owner][1].flatten()
            if owner in by_owner and self.rank in self._senders(by_owner[owner][0], owner)
            else nothing
            for owner in world
        ]
        senders = self._senders(own, self.rank) if own is not None else []
        received = self._all_to_all(sends, [self._size(rank, own) if rank in senders else 0 for rank in world])
        results = [nothing for _ in world]
        if own is not None:
            full = parts[0].new_empty(self.shapes[own])
            for rank in senders:
                block = self.blocks[rank][own]
                block.of(full).copy_(received[rank].view(block.shape(self.shapes[own])))
            full = orthogonalize(full.view(_matrix_shape(self.shapes[own]))).reshape(self.shapes[own])
            results = [self.blocks[rank][own].of(full).flatten() for rank in world]
        sizes = [by_owner[owner][1].numel() if owner in by_owner else 0 for owner in world]
        returned = self._all_to_all(results, sizes)
        return [returned[owner].view_as(part) for owner, part in zip(owners, parts, strict=True)]  # type: ignore[index]

    def _size(self, rank: int, number: int | None) -> int:
        """Returns the number of elements of a rank's part of a matrix."""
        assert number is not None
        return math.prod(self.blocks[rank][number].shape(self.shapes[number]))

    def _senders(self, number: int, owner: int) -> list[int]:
        """Returns the ranks that send their part to the owner: of several with the same part, the nearest."""
        nearest = sorted(range(len(self.blocks)), key=lambda rank: -abs(rank - owner))
        return sorted({self.blocks[rank][number]: rank for rank in nearest}.values())

    def _all_to_all(self, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Sends flat tensors to the ranks, in order, and returns those of `sizes` elements that they send."""
        received = tensors[0].new_empty(sum(sizes))
        splits = [tensor.numel() for tensor in tensors]
        dist.all_to_all_single(received, torch.cat(tensors), sizes, splits, group=self.group)
        return list(received.split(sizes))
