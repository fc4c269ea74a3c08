"""Where an optimizer keeps its state, also one that wraps others, and whether a checkpoint would hold all of it."""

from collections.abc import Iterator
from typing import Any

import torch

from common.training.optimizers import inner_optimizer, wrapped_optimizers


def counts_in_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's optimizers or a subclass, which keep the count of steps in a tensor."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    return isinstance(optimizer, tuple(kinds))


class OptimizerState:
    """The state of each parameter, in the optimizer that keeps it: the innermost one that has it in its groups."""

    def __init__(self, optimizer: Any):
        self.outer = inner_optimizer(optimizer)
        self.all = [self.outer, *wrapped_optimizers(self.outer)]
        self._no_group: dict[str, Any] = {}  # of ZeRO-3's stretches, which are in a group only during a step
        self._keepers = {id(p): (one, group) for one in self.all for group in one.param_groups for p in group["params"]}

    def keeper(self, holder: torch.Tensor) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """The optimizer that keeps the state of a tensor, and the group of the tensor there."""
        return self._keepers.get(id(holder), (self.outer, self._no_group))

    def of(self, holder: torch.Tensor | None) -> dict[str, Any]:
        """The state of a tensor; empty if there is none."""
        return {} if holder is None else self.keeper(holder)[0].state.get(holder) or {}

    def problems(self, holders: dict[str, torch.Tensor | None], steps: "Steps") -> Iterator[str]:
        """A line for each kind of state that a checkpoint would lack.

        An optimizer may keep no state for some parameters, or for all (SGD without momentum). State is missing if it
        lies elsewhere, or if a parameter of the same group and number of dimensions has some.

        holders: the tensor that the optimizer knows, by the parameter's name; None if it is not trained.
        """
        yield from steps.problems()
        stepped = steps.moved
        for one in self.all:
            own = f"optimizer {type(one).__name__}"
            if one is not self.outer:
                own += f" in {type(self.outer).__name__}"
            lacking = [name for name, p in holders.items() if p in stepped and not self.of(p) and self._is_of(one, p)]
            kept = {self._kind(p) for p in holders.values() if self.of(p) and self._is_of(one, p)}
            attributes = list(_tensor_attributes(one)) if lacking or self.all[1:] else []
            if attributes:
                yield (
                    f"{own} keeps tensors in its {', '.join(attributes)}, which a checkpoint does not hold; keep them "
                    "in its state, by parameter: self.state[parameter][NAME]"
                )
            elif missing := [name for name in lacking if self._kind(holders[name]) in kept]:
                more = f" and {len(missing) - 1} more" if missing[1:] else ""
                yield f"{own} has no state for the trained weight {missing[0]}{more}; keep it in self.state[parameter]"
        for name, holder in holders.items():
            if holder is None:
                continue
            keeper = self.keeper(holder)[0]
            if any(one.state is not keeper.state and one.state.get(holder) for one in self.all):
                yield f"two optimizers keep a state for {name}; let {type(self.outer).__name__} share one state dict"
                return
            for key, value in self.of(holder).items():
                if not (value is None or isinstance(value, torch.Tensor | int | float)):
                    yield (
                        f"optimizer state {key} of {name} is a {type(value).__name__}, which a checkpoint does not "
                        "hold; keep a tensor or a number"
                    )
                    return

    def _is_of(self, optimizer: torch.optim.Optimizer, holder: torch.Tensor | None) -> bool:
        return holder is not None and self.keeper(holder)[0] is optimizer

    def _kind(self, holder: torch.Tensor | None) -> tuple[int, int]:
        assert holder is not None
        return id(self.keeper(holder)[1]), holder.ndim


def _tensor_attributes(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Names of the attributes that hold tensors, except groups and state."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state", "defaults") and _holds_tensor(value, parameters):
            yield name


def _holds_tensor(value: Any, parameters: set[int], depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return id(value) not in parameters and value.numel() > 0
    if isinstance(value, torch.optim.Optimizer) or not depth:
        return False
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return any(_holds_tensor(one, parameters, depth - 1) for one in values)


class Steps:
    """Watches the steps of an optimizer: `moved` has the tensors that had a gradient in one."""

    def __init__(self, optimizer: Any = None):
        self.moved: set[torch.Tensor] = set()
        self.changed: dict[str, None] = {}  # entries of the groups, in the order in which they were seen
        self._values: list[dict[str, Any]] = []
        self.optimizer = optimizer and inner_optimizer(optimizer)
        if self.optimizer:
            self.all = [self.optimizer, *wrapped_optimizers(self.optimizer)]
            self.optimizer.register_step_pre_hook(lambda *_: self._before())
            self.optimizer.register_step_post_hook(lambda *_: self._after())

    def _before(self) -> None:
        for group in self.optimizer.param_groups:
            self.moved.update(p for p in group["params"] if p.grad is not None and p not in self.moved)
        self._values = self._groups()

    def _after(self) -> None:
        for before, after in zip(self._values, self._groups(), strict=False):
            self.changed |= dict.fromkeys(key for key in after if after[key] != before.get(key))

    def _groups(self) -> list[dict[str, Any]]:
        """The settings of each group, of a tensor how often it was written; the rate is set before every step."""
        return [
            {
                key: value._version if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key not in ("params", "lr") and isinstance(value, torch.Tensor | int | float | tuple)
            }
            for one in self.all
            for group in one.param_groups
        ]

    def problems(self) -> Iterator[str]:
        """A line if the steps change what a checkpoint does not hold."""
        if self.changed:
            yield (
                f"optimizer {type(self.optimizer).__name__} changes {', '.join(self.changed)} of its parameter groups, "
                "which a checkpoint does not hold; keep them in its state, by parameter: self.state[parameter][NAME]"
            )
