"""Optimizers, weight decay per parameter, and learning-rate schedules.

Make the optimizer before `accelerator.prepare`, from the plain model, and set the rate before each step:

    optimizer = make_optimizer("adamw", model, learning_rate=1e-3, weight_decay=0.1)
    rate = learning_rate(update, schedule="cosine", peak=1e-3, num_updates=1000, warmup_updates=50)
    set_learning_rate(optimizer, rate)
"""

import math
import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from common.errors import UserError

# Modules whose weight counts as a matrix for any sizes: a regression head has shape (1, width) and is decayed.
MATRIX_MODULES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MATRIX_MODULES += (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# Language models are trained with (0.9, 0.95): GPT-3, LLaMA, nanoGPT. torch's 0.999 averages the squared gradient over
# 1000 updates. This is longer than many of these runs, and a bad batch would have an effect for as long.
ADAM_BETAS = (0.9, 0.95)
SGD_MOMENTUM = 0.9
COSINE_FLOOR = 0.1  # fraction of the peak: the final rate of Chinchilla (arXiv:2203.15556), LLaMA and nanoGPT
WSD_DECAY = 5  # the decay is the last 1/5 of all updates, rounded up


# No percent signs: argparse would read them as format codes.
SCHEDULES = {
    "constant": "warm-up, then the peak to the end",
    "linear": "warm-up, then straight towards 0",
    "cosine": "warm-up, then half a cosine towards a tenth of the peak",
    "wsd": "warm-up, stable at the peak, straight towards 0 over the last fifth of the updates",
}


def parameter_groups(
    model: nn.Module, weight_decay: float, head: Collection[str] = (), head_ratio: float = 1.0
) -> list[dict[str, Any]]:
    """Splits the trainable parameters into groups with and without weight decay.

    Decayed: matrices, convolutions, stacked expert weights and embeddings. Not decayed: parameters of norm layers,
    biases, and parameters that are at most a vector (scales, gates, a class token). Embeddings are decayed as in
    nanoGPT and `transformers.Trainer`, because tied embeddings are also the head, which must not grow without bound. A
    tied weight appears once, a frozen weight never.

    Call it before `accelerator.prepare`, while parameters still have their shapes. If DeepSpeed has already partitioned
    a parameter (ZeRO-3 builds partitioned models), its shape is in `ds_shape`.

    Args:
        head: names of weights with a separate learning rate, `head_ratio` times that of the others. They are in
            separate groups if the ratio is not 1.

    Returns:
        One dict each for `decay`, `no_decay`, `head_decay` and `head_no_decay`, with keys `name`, `params` (in the
            model's order), `weight_decay` and `rate_ratio`. Groups without parameters are omitted, because DeepSpeed
            cannot flatten them.
    Raises UserError: the model has no trainable parameter.
    """
    decayed: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in decayed:
                decayed[parameter] = _is_decayed(module, name, parameter)
    if not decayed:
        raise UserError(
            "the model has no trainable parameter: unfreeze some (requires_grad) before the optimizer is made"
        )
    new = _head_parameters(model, head) if head_ratio != 1 else set()
    groups = [
        {
            "name": f"{prefix}{'decay' if is_decayed else 'no_decay'}",
            "params": [p for p in decayed if decayed[p] == is_decayed and (p in new) == is_new],
            "weight_decay": weight_decay if is_decayed else 0.0,
            "rate_ratio": ratio,
        }
        for prefix, is_new, ratio in (("", False, 1.0), ("head_", True, head_ratio))
        for is_decayed in (True, False)
    ]
    return [group for group in groups if group["params"]]


def _head_parameters(model: nn.Module, names: Collection[str]) -> set[nn.Parameter]:
    """Returns the parameters with these names; next to an adapter, peft trains a copy under a longer name."""
    found = set()
    for name, parameter in model.named_parameters():
        module, _, weight = name.partition(".modules_to_save.default.")
        if name in names or f"{module}.{weight}" in names:
            found.add(parameter)
    return found


def _is_decayed(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Returns whether weight decay applies to `parameter`, which `module` itself owns under `name`."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    if isinstance(module, MATRIX_MODULES):
        return len(shape) > 1
    # A norm over several dimensions has a weight with as many dimensions (Cohere's and Chameleon's norm per head). Each
    # model of transformers defines its own norm class, mostly unrelated to torch's, so only the class name identifies
    # it.
    if "norm" in type(module).__name__.lower():
        return False
    # Mamba's time constants, one per channel and state, are a matrix only by shape. Its authors exclude them from
    # decay.
    if name == "A_log":
        return False
    # Parameters that belong to a model's own class: a router or a stack of experts has several sizes above 1. A class
    # token (1, 1, width) and a scale per channel (1, channels, 1, 1) are vectors in effect.
    return sum(size > 1 for size in shape) > 1


def make_optimizer(
    name: str,
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    head: Collection[str] = (),
    head_learning_rate: float | None = None,
) -> torch.optim.Optimizer:
    """Returns an optimizer of `OPTIMIZERS` over the groups of `parameter_groups`. Call it before `accelerator.prepare`.

    The weights named in `head` are trained at `head_learning_rate`, all others at `learning_rate`.

    Weight decay is decoupled: an update subtracts learning_rate x weight_decay of each decayed parameter
    (arXiv:1711.05101). Only sgd adds it to the gradient, so it passes through the momentum.

    Raises UserError: no parameter is trainable, or bitsandbytes is not installed.
    """
    assert name in OPTIMIZERS, name
    ratio = head_learning_rate / learning_rate if head_learning_rate else 1.0
    groups = parameter_groups(model, weight_decay, head, ratio)
    if weight_decay > 0 and not any(group["weight_decay"] for group in groups):
        warnings.warn(
            f"--weight_decay {weight_decay} has no effect: only norms, biases and vectors train", stacklevel=2
        )
    return OPTIMIZERS[name].build(groups, model, learning_rate)


def _adamw_8bit(groups: list[dict[str, Any]], model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Returns bitsandbytes' AdamW (arXiv:2110.02861), with 32-bit embedding states as its authors recommend."""
    try:
        import bitsandbytes  # imported here: it takes seconds, and may not be installed
    except ImportError as error:
        raise UserError(f"--optimizer adamw8bit needs bitsandbytes ({error}): pip install bitsandbytes") from error
    from common.internals.bitsandbytes import use_own_manager

    optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=learning_rate, betas=ADAM_BETAS)
    use_own_manager(optimizer)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})
    return optimizer


def _adamw(groups: list[dict[str, Any]], model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=learning_rate, betas=ADAM_BETAS, fused=True)


def _adafactor(groups: list[dict[str, Any]], model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    # Not torch.optim.Adafactor: there the update is learning_rate x RMS(parameter), so AdamW's learning rates barely
    # move the model. It also limits the learning rate to 1/sqrt(update), which overrides the schedule. These settings
    # turn both off.
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=learning_rate, scale_parameter=False, relative_step=False, warmup_init=False)


def _sgd(groups: list[dict[str, Any]], model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=learning_rate, momentum=SGD_MOMENTUM, fused=True)


@dataclass(frozen=True)
class OptimizerInfo:
    """The properties of an optimizer that other code uses. A new optimizer needs only an entry in `OPTIMIZERS`.

    Attributes:
        build: creates the optimizer from parameter groups, the model and the learning rate.
        description: one line for `--help`.
        state_bytes: bytes of state per float32 parameter of a weight matrix.
        is_elementwise: whether each element is updated from its own gradient and state alone, and the state has the
            parameter's shape. Such an optimizer also works on shards and parts of layers (FSDP2, ZeRO, tensor
            parallelism), and its checkpoints resume in every mode. Others require full tensors on each process.
        uses_adamw_rate: whether AdamW's learning rate suits it, so that it can be recommended to save memory.
        aliases: its names in other training scripts.
        class_names: classes whose checkpoints have the same kinds of state for every weight.
        deepspeed_types: its types in an `optimizer` section of a DeepSpeed file, in lower case.
        deepspeed_params: parameters of such a section that have no flag, with their values.
        deepspeed_offloads: whether DeepSpeed's optimizer for offloaded state computes the same updates.
    """

    build: Callable[[list[dict[str, Any]], nn.Module, float], torch.optim.Optimizer]
    description: str
    state_bytes: float
    is_elementwise: bool = False
    uses_adamw_rate: bool = False
    aliases: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    deepspeed_types: tuple[str, ...] = ()
    deepspeed_params: dict[str, Any] = field(default_factory=dict)
    deepspeed_offloads: bool = False


OPTIMIZERS: dict[str, OptimizerInfo] = {
    "adamw": OptimizerInfo(
        _adamw,
        "AdamW in one fused kernel; the default",
        state_bytes=8,
        is_elementwise=True,
        uses_adamw_rate=True,
        aliases=("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
        class_names=("AdamW", "DeepSpeedCPUAdam"),
        deepspeed_types=("adam", "adamw"),  # DeepSpeed's Adam is AdamW too, unless adam_w_mode is false
        deepspeed_params={
            "betas": list(ADAM_BETAS),
            "eps": 1e-8,
            "adam_w_mode": True,
            "bias_correction": True,
            "amsgrad": False,
        },
        deepspeed_offloads=True,
    ),
    "adamw8bit": OptimizerInfo(
        _adamw_8bit,
        "AdamW with 8-bit states (bitsandbytes); embeddings keep 8 bytes; slow on CPU",
        state_bytes=2.03,  # two bytes, plus constants per block of elements
        uses_adamw_rate=True,
        aliases=("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
    ),
    "adafactor": OptimizerInfo(
        _adafactor,
        "row and column averages in place of the states; takes AdamW's learning rate",
        state_bytes=0.01,
        uses_adamw_rate=True,
    ),
    "sgd": OptimizerInfo(
        _sgd,
        "momentum 0.9; needs a learning rate some 30 times AdamW's",
        state_bytes=4,
        is_elementwise=True,
        class_names=("SGD",),
        deepspeed_types=("sgd",),
        deepspeed_params={"momentum": SGD_MOMENTUM, "dampening": 0, "nesterov": False},
    ),
}


def name_optimizers(*properties: str) -> str:
    """Returns the names of the optimizers that have all of these properties, for a message: "adamw or sgd"."""
    names = [name for name, info in OPTIMIZERS.items() if all(getattr(info, each) for each in properties)]
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def smaller_optimizers(name: str, is_split: bool) -> list[str]:
    """Returns the optimizers with less state that can replace `name` at AdamW's learning rate.

    Args:
        is_split: whether processes hold shards of the weights or parts of layers.
    """
    return [
        other
        for other, info in OPTIMIZERS.items()
        if info.state_bytes < OPTIMIZERS[name].state_bytes
        and info.uses_adamw_rate
        and (info.is_elementwise or not is_split)
    ]


def optimizers_help() -> str:
    """Returns the text of `--help`, one line per optimizer, with its state bytes per parameter; no percent signs."""
    lines = [f"{name} ({info.state_bytes:g} bytes): {info.description}" for name, info in OPTIMIZERS.items()]
    return "the optimizer, with its bytes of state per float32 parameter.\n" + ".\n".join(lines)


def learning_rate(update: int, schedule: str, peak: float, num_updates: int, warmup_updates: int) -> float:
    """Returns the learning rate of update `update` (0 to `num_updates` - 1): a pure function, so no state is saved.

    Warm-up: peak x (update + 1) / (warmup_updates + 1). It is above 0 in the first update, and the peak at
    `warmup_updates`.
    Then, with r = (num_updates - update) / (num_updates - warmup_updates), from 1 down to above 0 at the last update:
    - linear: peak x r
    - cosine: peak x (0.1 + 0.9 x (1 - cos(pi r)) / 2) (arXiv:1608.03983)
    - wsd: the peak, then linear decay to 0 over the last 20 % of the updates. From MiniCPM (arXiv:2404.06395), which
      decays over 10 %; arXiv:2405.18392 finds that 20 % is on par with cosine.
    """
    # Not transformers.get_scheduler: its warm-up starts with an update at rate 0 (shifted by one update, its decays
    # would end at 0). It also needs an optimizer and a saved state, for a function of a single number.
    assert schedule in SCHEDULES and max(update, warmup_updates) < num_updates, (schedule, update, warmup_updates)
    if update < warmup_updates:
        return peak * (update + 1) / (warmup_updates + 1)
    remaining = (num_updates - update) / (num_updates - warmup_updates)
    if schedule == "linear":
        return peak * remaining
    if schedule == "cosine":
        return peak * (COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 - math.cos(math.pi * remaining)) / 2)
    if schedule == "wsd":
        decay_updates = min(math.ceil(num_updates / WSD_DECAY), num_updates - warmup_updates)
        return peak * min(1.0, (num_updates - update) / decay_updates)
    return peak


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the recipe's optimizer (or DeepSpeed's, made from it) from inside the wrappers."""
    while is_wrapper(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def is_wrapper(optimizer: Any) -> bool:
    """Returns whether this is a wrapper of Accelerate or DeepSpeed.

    A recipe's own optimizer may also have an attribute `optimizer`.
    """
    if isinstance(optimizer, AcceleratedOptimizer):
        return True
    deepspeed = sys.modules.get("deepspeed.runtime.base_optimizer")
    return deepspeed is not None and isinstance(optimizer, deepspeed.DeepSpeedOptimizer)


def wrapped_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizers in an optimizer's attributes, also in lists and dicts; innermost last."""
    found = [optimizer]
    for outer in found:
        for value in vars(outer).values():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            found += [one for one in values if isinstance(one, torch.optim.Optimizer) and one not in found]
    return found[1:]


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Sets the learning rate; `optimizer` may be the object that `accelerator.prepare` returned.

    Each group keeps its ratio to this learning rate, its `rate_ratio`. In an optimizer from elsewhere, this is the
    group's learning rate divided by the optimizer's, at the first call.
    """
    for group in optimizer.param_groups:
        if "rate_ratio" not in group:
            own = getattr(inner_optimizer(optimizer), "defaults", {}).get("lr") or group["lr"]
            group["rate_ratio"] = group["lr"] / own if own else 1.0
        group["lr"] = value * group["rate_ratio"]


def check_rate(optimizer: torch.optim.Optimizer) -> None:
    """Checks that `set_learning_rate` reaches every trained group of the optimizer from `accelerator.prepare`.

    Raises UserError: an inner optimizer has separate groups.
    """
    inner = inner_optimizer(optimizer)
    groups = [(one, group) for one in (inner, *wrapped_optimizers(inner)) for group in one.param_groups]
    before = [group["lr"] for _, group in groups]
    set_learning_rate(optimizer, probe := 0.12345)
    missed = [
        one for one, group in groups if group["params"] and group["lr"] != probe * group.get("rate_ratio", math.nan)
    ]
    for (_, group), rate in zip(groups, before, strict=True):
        group["lr"] = rate
    if missed:
        raise UserError(
            f"optimizer {type(inner).__name__}: the learning rate does not reach the "
            f"{type(missed[0]).__name__} inside; share the groups: "
            "self.param_groups = [*first.param_groups, *second.param_groups]"
        )
