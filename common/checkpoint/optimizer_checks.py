"""Checks that a checkpoint contains the full state of a user's own optimizer."""

from collections.abc import Iterator
from typing import Any

import torch

from common.checkpoint.parts import OptimizerState
from common.internals.torch import write_count
from common.training.optimizers import inner_optimizer, wrapped_optimizers


def problems(state: OptimizerState, state_keys: dict[str, torch.Tensor | None], steps: "Steps | None") -> Iterator[str]:
    """Yields a line for each kind of state that would be missing in a checkpoint.

    An optimizer may have no state for some or all parameters (SGD without momentum). State counts as missing if the
    optimizer keeps tensors elsewhere, or has state for a parameter of the same group and number of dimensions.

    Args:
        state_keys: result of `Layout.state_keys`.
        steps: the observed steps.
    """
    if steps is not None:
        yield from steps.problems()
    trained = {name: state_key for name, state_key in state_keys.items() if state_key is not None}
    for optimizer in state.all:
        subject = f"optimizer {type(optimizer).__name__}"
        if optimizer is not state.outer:
            subject += f" in {type(state.outer).__name__}"
        own = {name: state_key for name, state_key in trained.items() if state.keeper(state_key)[0] is optimizer}
        moved = steps.moved if steps else set()
        without_state = [name for name, state_key in own.items() if state_key in moved and not state.of(state_key)]
        kinds = {name: (id(state.keeper(state_key)[1]), state_key.ndim) for name, state_key in own.items()}
        kept = {kinds[name] for name, state_key in own.items() if state.of(state_key)}
        attributes = _tensor_attributes(optimizer) if without_state or state.all[1:] else {}
        if attributes:
            yield (
                f"{subject} keeps tensors in its {', '.join(attributes)}, which a checkpoint does not hold; keep them "
                "in its state, by parameter: self.state[parameter][NAME]"
            )
        elif missing := [name for name in without_state if kinds[name] in kept]:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            yield (
                f"{subject} has no state for the trained weight {missing[0]}{more}; keep it in self.state[parameter], "
                "or put the weights that need none into a parameter group of their own"
            )
    yield from _value_problems(state, trained)


def _value_problems(state: OptimizerState, trained: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yields at most one line, about state that two optimizers keep, or that is neither a tensor nor a number."""
    for name, state_key in trained.items():
        keeper = state.keeper(state_key)[0]
        if any(other.state is not keeper.state and other.state.get(state_key) for other in state.all):
            yield f"two optimizers keep a state for {name}; let {type(state.outer).__name__} share one state dict"
            return
        for key, value in state.of(state_key).items():
            if not (value is None or isinstance(value, torch.Tensor | int | float)):
                yield (
                    f"optimizer state {key} of {name} is a {type(value).__name__}, which a checkpoint does not "
                    "hold; keep a tensor or a number"
                )
                return


def _tensor_attributes(optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """Returns the tensors in each attribute that contains some, except groups and state."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = {
        name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state", "defaults")
    }
    return {name: tensors for name, value in others.items() if (tensors := list(_tensors_in(value, parameters)))}


def _tensors_in(value: Any, parameters: set[int], depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if id(value) not in parameters and value.numel() > 0:
            yield value
    elif depth and not isinstance(value, torch.optim.Optimizer):
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        for item in values:
            yield from _tensors_in(item, parameters, depth - 1)


class Steps:
    """Observes an optimizer's steps: the tensors they update, and changes to values that a checkpoint does not contain.

    moved: the tensors that had a gradient in a step.
    changed: group settings and attributes that a step changed, as in Prodigy and schedule-free optimizers. A tensor
    that is created in the first step may be a constant table; it counts only if a later step changes it. A tensor that
    a step replaces by an equal one, such as a table that it moves to the parameters' device, is not changed.
    """

    def __init__(self, optimizer: Any):
        self.moved: set[torch.Tensor] = set()
        self.changed: dict[str, None] = {}
        self._before: dict[str, dict[Any, torch.Tensor | None]] = {}
        self.optimizer = inner_optimizer(optimizer)
        self.all = [self.optimizer, *wrapped_optimizers(self.optimizer)]
        self.optimizer.register_step_pre_hook(lambda *_: self._begin())
        self.optimizer.register_step_post_hook(lambda *_: self._end())

    def _begin(self) -> None:
        for group in self.optimizer.param_groups:
            self.moved.update(p for p in group["params"] if p.grad is not None and p not in self.moved)
        self._before = self._values()

    def _end(self) -> None:
        for name, values in self._values().items():
            before = self._before.get(name, {})
            if name not in self.changed and not all(
                key in values or any(_is_equal(tensor, new) for other, new in values.items() if other not in before)
                for key, tensor in before.items()
            ):
                self.changed[name] = None

    def _values(self) -> dict[str, dict[Any, torch.Tensor | None]]:
        """Returns numbers, and identity and write count of tensors. Omits the learning rate, set before each step."""
        all_values: dict[str, dict[Any, torch.Tensor | None]] = {}
        for optimizer in self.all:
            for number, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key not in ("params", "lr"):
                        values = all_values.setdefault(f"its groups' {key}", {})
                        values.update({(number, item): tensor for item, tensor in _comparable(value).items()})
            for key, value in vars(optimizer).items():
                if not key.startswith("_") and isinstance(value, int | float):
                    all_values[f"its {key}"] = _comparable(value)
            for key, tensors in _tensor_attributes(optimizer).items():
                all_values[f"its {key}"] = {key: t for t in tensors for key in _comparable(t)}
        return all_values

    def problems(self) -> Iterator[str]:
        """Yields a line if the steps change values that a checkpoint does not contain."""
        if self.changed:
            yield (
                f"optimizer {type(self.optimizer).__name__} changes {', '.join(self.changed)} in its steps, which a "
                "checkpoint does not hold; keep it in its state, by parameter: self.state[parameter][NAME]"
            )


def _comparable(value: Any) -> dict[Any, torch.Tensor | None]:
    """Returns the values to compare, without booleans, which often only record that something is initialised.

    Keys identify values. A tensor's is its identity and write count; the tensor itself is kept with it.
    """
    if isinstance(value, torch.Tensor):
        return {(id(value), write_count(value)): value}
    return {value: None} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def _is_equal(old: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    """Returns whether two different tensors have equal values; False if the old one was overwritten meanwhile."""
    if old is None or new is None or old is new:
        return False
    return old.shape == new.shape and torch.equal(old.to(new.device), new)
