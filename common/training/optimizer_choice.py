"""Optimizer suggestions for messages, and support for optimizers that wrap others."""

import math
from typing import Any

import torch

from common.errors import UserError
from common.training.optimizers import OPTIMIZERS, inner_optimizer, set_learning_rate, wrapped_optimizers


def name_optimizers(split: str, is_offloaded: bool = False) -> str:
    """Returns the names of the optimizers that work on a kind of `SPLITS`, for a message: "adamw or sgd".

    is_offloaded: whether DeepSpeed offloads the optimizer state.
    """
    names = [
        name
        for name, info in OPTIMIZERS.items()
        if split in info.works_on and (info.deepspeed_offloads or not is_offloaded)
    ]
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def kinds_of_split(mode: str, tensor: int) -> tuple[str, ...]:
    """Returns the kinds of `SPLITS` by which a mode splits weights. tensor: size of a tensor group."""
    sharded = {"FSDP": ("shards",), "DeepSpeed": ("zero",)}
    return sharded.get(mode, ()) + (("parts",) if tensor > 1 else ())


def smaller_optimizers(name: str, *splits: str) -> list[str]:
    """Returns the optimizers with less state that can replace `name` at AdamW's learning rate.

    splits: kinds of `SPLITS` by which the mode splits the weights.
    """
    return [
        other
        for other, info in OPTIMIZERS.items()
        if info.state_bytes < OPTIMIZERS[name].state_bytes
        and info.uses_adamw_rate
        and set(splits) <= set(info.works_on)
    ]


def keep_objects(optimizer: Any, groups: list[dict[str, Any]], state: Any) -> None:
    """Restores the identity of `param_groups` and `state` after `accelerator.prepare`, keeping their new content.

    Accelerate loads a copy of the state, but an optimizer that wraps others shares these objects with them.
    """
    if vars(optimizer).get("param_groups", groups) is not groups:
        for group, new in zip(groups, optimizer.param_groups, strict=True):
            group.update(new)
        optimizer.param_groups = groups
    if (new_state := vars(optimizer).get("state", state)) is not state:
        state.clear()
        state.update(new_state)
        optimizer.state = state


def check_prepared(optimizer: torch.optim.Optimizer) -> None:
    """Checks the optimizer from `accelerator.prepare`. Raises UserError: see `check_rate`; or it rejects its shards."""
    check_rate(optimizer)
    if check_shards := getattr(inner_optimizer(optimizer), "check_shards", None):
        check_shards()


def check_rate(optimizer: torch.optim.Optimizer) -> None:
    """Checks that `set_learning_rate` reaches every trained group of the optimizer from `accelerator.prepare`.

    Raises UserError: an inner optimizer has separate groups.
    """
    inner = inner_optimizer(optimizer)
    groups = [(owner, group) for owner in (inner, *wrapped_optimizers(inner)) for group in owner.param_groups]
    before = [group["lr"] for _, group in groups]
    set_learning_rate(optimizer, probe := 0.12345)
    missed = [
        owner for owner, group in groups if group["params"] and group["lr"] != probe * group.get("rate_ratio", math.nan)
    ]
    for (_, group), rate in zip(groups, before, strict=True):
        group["lr"] = rate
    if missed:
        raise UserError(
            f"optimizer {type(inner).__name__}: the learning rate does not reach the "
            f"{type(missed[0]).__name__} inside; share the groups: "
            "self.param_groups = [*first.param_groups, *second.param_groups]"
        )
