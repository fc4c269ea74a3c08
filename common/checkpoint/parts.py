"""This rank's parts of the parameters, and the state that an optimizer keeps for them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from common.checkpoint.format import DTYPE_NAMES
from common.training.optimizers import inner_optimizer, wrapped_optimizers


@dataclass
class Part:
    """This rank's part of a parameter, and the location of its optimizer state."""

    name: str
    shape: tuple[int, ...]  # of the full parameter
    start: int  # position of its first element, as in `Piece`
    weight: torch.Tensor
    # The key of its state in `optimizer.state`: the parameter, or ZeRO's flat partition of many parameters; None if it
    # is not trained.
    state_key: torch.Tensor | None
    is_owner: bool
    # Selects this part's elements from a state tensor of the size of `state_key`.
    select: Callable[[torch.Tensor], torch.Tensor] = lambda state: state
    columns: tuple[int, int] | None = None


def check_known(named: Mapping[str, torch.Tensor], optimizer: Any) -> None:
    known = {id(p) for group in inner_optimizer(optimizer).param_groups for p in group["params"]}
    for name, p in named.items():
        assert not p.requires_grad or id(p) in known, f"{name} requires a gradient, but is not in the optimizer"


def replicated_parts(named: Mapping[str, torch.Tensor], rank: int, replicas: list[int]) -> Iterator[Part]:
    """Yields parameters that are replicated on the ranks `replicas`; each rank writes an equal share of the bytes."""
    num_bytes = [0] * len(replicas)
    for name, p in named.items():
        owner = num_bytes.index(min(num_bytes))
        num_bytes[owner] += p.nbytes
        yield Part(name, tuple(p.shape), 0, p.detach(), p if p.requires_grad else None, replicas[owner] == rank)


class OptimizerState:
    """Access to the optimizer state of each parameter, also in optimizers that wrap others (the innermost counts)."""

    def __init__(self, optimizer: Any):
        self.outer = inner_optimizer(optimizer)
        self.all = [self.outer, *wrapped_optimizers(self.outer)]
        # For ZeRO-3's flat partitions, which are in a parameter group only during a step.
        self._no_group: dict[str, Any] = {}
        self._keepers = {id(p): (own, group) for own in self.all for group in own.param_groups for p in group["params"]}

    def keeper(self, state_key: torch.Tensor) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """Returns the optimizer that keeps the state of a tensor, and the tensor's group there."""
        return self._keepers.get(id(state_key), (self.outer, self._no_group))

    def of(self, state_key: torch.Tensor | None) -> dict[str, Any]:
        """Returns the state of a tensor; {} if there is none."""
        return {} if state_key is None else self.keeper(state_key)[0].state.get(state_key) or {}


class Piece(NamedTuple):
    """A range of a tensor's flattened elements that this rank holds."""

    name: str  # "weight/NAME", "buffer/NAME" or "optimizer.KEY/NAME", by the model's own names
    tensor: torch.Tensor  # the elements, in row-major order; a view of the training's tensor
    start: int  # position of its first element in the flattened full tensor, or in its flattened columns
    shape: tuple[int, ...]  # shape of the full tensor
    is_owner: bool  # whether this rank writes it; only one of several replicas is written
    columns: tuple[int, int] | None = None  # columns of a matrix (end exclusive) that `start` refers to; None: all

    def to_record(self) -> dict[str, Any]:
        """Returns the entry in the JSON file of the rank that writes it."""
        record = {"dtype": DTYPE_NAMES[self.tensor.dtype], "shape": self.shape, "start": self.start}
        record["elements"] = self.tensor.numel()
        return record | ({"columns": self.columns} if self.columns else {})
