"""Finds an optimizer's state, including that of wrapped optimizers, and checks that a checkpoint contains all of it."""

from collections.abc import Iterator
from typing import Any

import torch

from common.training.optimizers import inner_optimizer, wrapped_optimizers


def counts_in_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer is one of torch's or a subclass, because these keep the step count in a tensor."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    return isinstance(optimizer, tuple(kinds))


class OptimizerState:
    """The state of each parameter in the optimizer that keeps it: the innermost optimizer with it in its groups."""

    def __init__(self, optimizer: Any):
        self.outer = inner_optimizer(optimizer)
        self.all = [self.outer, *wrapped_optimizers(self.outer)]
        # Group of ZeRO-3's flat partitions, which are in a group only during a step.
        self._no_group: dict[str, Any] = {}
        self._keepers = {id(p): (one, group) for one in self.all for group in one.param_groups for p in group["params"]}

    def keeper(self, holder: torch.Tensor) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """Returns the optimizer that keeps the state of a tensor, and the tensor's group there."""
        return self._keepers.get(id(holder), (self.outer, self._no_group))

    def of(self, holder: torch.Tensor | None) -> dict[str, Any]:
        """Returns the state of a tensor; {} if there is none."""
        return {} if holder is None else self.keeper(holder)[0].state.get(holder) or {}

    def problems(self, holders: dict[str, torch.Tensor | None], steps: "Steps") -> Iterator[str]:
        """Yields a line for each kind of state that would be missing in a checkpoint.

        An optimizer may keep no state for some or all parameters (SGD without momentum). State is missing if it is kept
        elsewhere, or if a parameter of the same group and number of dimensions has state.

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
            attributes = _tensor_attributes(one) if lacking or self.all[1:] else {}
            if attributes:
                yield (
                    f"{own} keeps tensors in its {', '.join(attributes)}, which a checkpoint does not hold; keep them "
                    "in its state, by parameter: self.state[parameter][NAME]"
                )
            elif missing := [name for name in lacking if self._kind(holders[name]) in kept]:
                more = f" and {len(missing) - 1} more" if missing[1:] else ""
                yield (
                    f"{own} has no state for the trained weight {missing[0]}{more}; keep it in self.state[parameter], "
                    "or put the weights that need none into a parameter group of their own"
                )
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


def _tensor_attributes(optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """Returns the tensors in each attribute that contains some, except groups and state."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = {
        name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state", "defaults")
    }
    return {name: found for name, value in others.items() if (found := list(_tensors_in(value, parameters)))}


def _tensors_in(value: Any, parameters: set[int], depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if id(value) not in parameters and value.numel() > 0:
            yield value
    elif depth and not isinstance(value, torch.optim.Optimizer):
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        for one in values:
            yield from _tensors_in(one, parameters, depth - 1)


class Steps:
    """Observes an optimizer's steps: the tensors they update, and changes to values that a checkpoint does not contain.

    moved: the tensors that had a gradient in a step.
    changed: the settings of groups (of Prodigy, of schedule-free optimizers) and the attributes that a step changed. A
    tensor that an attribute gets in the first step may be a constant table; it counts if a later step changes it.
    """

    def __init__(self, optimizer: Any = None):
        self.moved: set[torch.Tensor] = set()
        self.changed: dict[str, None] = {}
        self._before: dict[str, set[Any]] = {}
        self.optimizer = optimizer and inner_optimizer(optimizer)
        if self.optimizer:
            self.all = [self.optimizer, *wrapped_optimizers(self.optimizer)]
            self.optimizer.register_step_pre_hook(lambda *_: self._begin())
            self.optimizer.register_step_post_hook(lambda *_: self._end())

    def _begin(self) -> None:
        for group in self.optimizer.param_groups:
            self.moved.update(p for p in group["params"] if p.grad is not None and p not in self.moved)
        self._before = self._values()

    def _end(self) -> None:
        for name, values in self._values().items():
            if self._before.get(name, set()) - values:
                self.changed[name] = None

    def _values(self) -> dict[str, set[Any]]:
        """Returns numbers, and identity and write count of tensors. Omits the learning rate, set before each step."""
        found: dict[str, set[Any]] = {}
        for one in self.all:
            for number, group in enumerate(one.param_groups):
                for key, value in group.items():
                    if key not in ("params", "lr"):
                        found.setdefault(f"its groups' {key}", set()).update(
                            (number, each) for each in _facts_of(value)
                        )
            for key, value in vars(one).items():
                if not key.startswith("_") and isinstance(value, int | float):
                    found[f"its {key}"] = set(_facts_of(value))
            for key, tensors in _tensor_attributes(one).items():
                found[f"its {key}"] = {fact for tensor in tensors for fact in _facts_of(tensor)}
        return found

    def problems(self) -> Iterator[str]:
        """Yields a line if the steps change values that a checkpoint does not contain."""
        if self.changed:
            yield (
                f"optimizer {type(self.optimizer).__name__} changes {', '.join(self.changed)} in its steps, which a "
                "checkpoint does not hold; keep it in its state, by parameter: self.state[parameter][NAME]"
            )


def _facts_of(value: Any) -> list[Any]:
    """Returns the values to compare. Switches are omitted: whether an optimizer has built its tables is not state."""
    if isinstance(value, torch.Tensor):
        from common.internals.torch import write_count

        return [(id(value), write_count(value))]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []
