"""Optimizers, weight decay per parameter, and learning-rate schedules.

optimizer = make_optimizer("adamw", model, learning_rate=1e-3, weight_decay=0.1)  # before accelerator.prepare
rate = learning_rate(update, schedule="cosine", peak=1e-3, num_updates=1000, warmup_updates=50)
set_learning_rate(optimizer, rate)  # before each step
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

# Modules whose weight is decayed for any sizes, for example a regression head of shape (1, width).
MATRIX_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MATRIX_MODULES += (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# As GPT-3, LLaMA and nanoGPT. torch's default 0.999 averages over 1000 updates, longer than many of these runs.
ADAM_BETAS = (0.9, 0.95)
SGD_MOMENTUM = 0.9
COSINE_FLOOR = 0.1  # fraction of the peak: the final rate of Chinchilla (arXiv:2203.15556), LLaMA and nanoGPT
WSD_DECAY = 5  # the decay is the last 1/5 of all updates, rounded up
SPLITS = ("shards", "parts", "zero")  # of weights: by FSDP2, by tensor parallelism, and DeepSpeed's flat partitions
Groups = list[dict[str, Any]]

# No percent signs: argparse would read them as format codes.
SCHEDULES = {
    "constant": "warm-up, then the peak to the end",
    "linear": "warm-up, then linear decay to 0",
    "cosine": "warm-up, then cosine decay to a tenth of the peak",
    "wsd": "warm-up, constant peak, then linear decay to 0 over the last fifth of the updates",
}


def parameter_groups(
    model: nn.Module, weight_decay: float, head: Collection[str] = (), head_ratio: float = 1.0
) -> Groups:
    """Splits the trainable parameters into the groups `decay`, `no_decay`, `head_decay` and `head_no_decay`.

    Matrices, convolutions, stacked expert weights and embeddings are decayed; norms, biases and vectors are not.
    Embeddings are decayed as in nanoGPT and `transformers.Trainer`, because tied embeddings are also the head, which
    must not grow without bound. Groups without parameters are omitted, because DeepSpeed cannot flatten them.

    head: names of weights whose learning rate is `head_ratio` times that of the others.
    Raises UserError: the model has no trainable parameter.
    """
    decayed: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in decayed:
                decayed[parameter] = _is_decayed(module, name, parameter)
    if not decayed:
        raise UserError("the model has no trainable parameter: set requires_grad before the optimizer is created")
    head = head if head_ratio != 1 else ()
    copy = ".modules_to_save.default."  # with an adapter, peft trains a copy of the head under a longer name
    in_head = {p for name, p in model.named_parameters() if name in head or name.replace(copy, ".") in head}
    groups = [
        {
            "name": f"{prefix}{'decay' if is_decayed else 'no_decay'}",
            "params": [p for p in decayed if decayed[p] == is_decayed and (p in in_head) == is_head],
            "weight_decay": weight_decay if is_decayed else 0.0,
            "rate_ratio": ratio,
        }
        for prefix, is_head, ratio in (("", False, 1.0), ("head_", True, head_ratio))
        for is_decayed in (True, False)
    ]
    return [group for group in groups if group["params"]]


def _is_decayed(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Returns whether weight decay applies to `parameter`, a direct parameter of `module` with this `name`."""
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 has already partitioned the parameter
    if isinstance(module, MATRIX_MODULES):
        return len(shape) > 1
    # The weight of a norm may have several dimensions. Norms of transformers have no common base class, so the class
    # name identifies them. Mamba excludes its time constants (A_log), which are a matrix only by shape.
    if "norm" in type(module).__name__.lower() or name == "A_log":
        return False
    # A router or a stack of experts has several sizes above 1. A class token (1, 1, width) and a scale per channel
    # (1, channels, 1, 1) are vectors in effect.
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

    The weights named in `head` use `head_learning_rate`, all others `learning_rate`. Weight decay is
    decoupled: an update subtracts learning_rate x weight_decay of each decayed parameter (arXiv:1711.05101). Only sgd
    adds it to the gradient, so it passes through the momentum. Raises UserError: no parameter is trainable.
    """
    ratio = head_learning_rate / learning_rate if head_learning_rate else 1.0
    groups = parameter_groups(model, weight_decay, head, ratio)
    if weight_decay > 0 and not any(group["weight_decay"] for group in groups):
        warnings.warn(f"--weight_decay {weight_decay} has no effect: only vectors are trained", stacklevel=2)
    if (build := OPTIMIZERS[name].build) is not None:
        return build(groups, model, learning_rate)
    from common.training.rare_optimizers import BUILDERS

    return BUILDERS[name](groups, model, learning_rate, ADAM_BETAS)


@dataclass(frozen=True)
class OptimizerInfo:
    """The properties of an optimizer that other code uses. A new optimizer needs only an entry in `OPTIMIZERS`.

    An elementwise optimizer updates each element from its own gradient and state alone, and its state has the
    parameter's shape. So it works on all `SPLITS`. Without `works_on`, an optimizer requires full tensors.
    """

    build: Callable[[Groups, nn.Module, float], torch.optim.Optimizer] | None  # None: see `rare_optimizers.BUILDERS`
    description: str  # one line for --help
    state_bytes: float  # per float32 parameter of a weight matrix
    works_on: tuple[str, ...] = ()  # of SPLITS
    outside_bytes: float | None = None  # of state per parameter of embeddings and head, if different
    uses_adamw_rate: bool = False  # so that it can be recommended to save memory
    aliases: tuple[str, ...] = ()  # names in other training scripts
    class_names: tuple[str, ...] = ()  # classes whose checkpoints have the same kinds of state for every weight
    deepspeed_types: tuple[str, ...] = ()  # lower-case types in an `optimizer` section of a DeepSpeed file
    deepspeed_params: dict[str, Any] = field(default_factory=dict)  # parameters of that section that have no flag
    deepspeed_offloads: bool = False  # whether DeepSpeed's optimizer for offloaded state computes the same updates


OPTIMIZERS: dict[str, OptimizerInfo] = {
    "adamw": OptimizerInfo(
        lambda groups, _, rate: torch.optim.AdamW(groups, lr=rate, betas=ADAM_BETAS, fused=True),
        "AdamW in one fused kernel; the default",
        state_bytes=8,
        works_on=SPLITS,
        uses_adamw_rate=True,
        aliases=("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
        class_names=("AdamW", "DeepSpeedCPUAdam"),
        deepspeed_types=("adam", "adamw"),  # DeepSpeed's Adam is AdamW too, unless adam_w_mode is false
        deepspeed_params={"betas": list(ADAM_BETAS), "eps": 1e-8}
        | {"adam_w_mode": True, "bias_correction": True, "amsgrad": False},
        deepspeed_offloads=True,
    ),
    "adamw8bit": OptimizerInfo(
        None,
        "AdamW with 8-bit states (bitsandbytes); embeddings keep 8 bytes; slow on CPU",
        state_bytes=2.03,  # two bytes, plus constants per block of elements
        works_on=("shards",),
        uses_adamw_rate=True,
        aliases=("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
    ),
    "adafactor": OptimizerInfo(None, "row and column averages; uses AdamW's learning rate", 0.01, uses_adamw_rate=True),
    "muon": OptimizerInfo(None, "Muon for hidden matrices, AdamW (8 bytes) elsewhere", 4, ("shards", "parts"), 8, True),
    "sgd": OptimizerInfo(
        lambda groups, _, rate: torch.optim.SGD(groups, lr=rate, momentum=SGD_MOMENTUM),  # fused=True fails under FSDP2
        "momentum 0.9; needs about 30 times AdamW's learning rate",
        state_bytes=4,
        works_on=SPLITS,
        class_names=("SGD",),
        deepspeed_types=("sgd",),
        deepspeed_params={"momentum": SGD_MOMENTUM, "dampening": 0, "nesterov": False},
    ),
}


def optimizers_help() -> str:
    """Returns the text of `--help`, one line per optimizer, with its state bytes per parameter; no percent signs."""
    lines = [f"{name} ({info.state_bytes:g} bytes): {info.description}" for name, info in OPTIMIZERS.items()]
    return "the optimizer, with its bytes of state per float32 parameter.\n" + ".\n".join(lines)


def learning_rate(update: int, schedule: str, peak: float, num_updates: int, warmup_updates: int) -> float:
    """Returns the learning rate of update `update` (0 to `num_updates` - 1): a pure function, so no state is saved.

    Warm-up: peak x (update + 1) / (warmup_updates + 1), the peak at `warmup_updates`. Then, with
    r = (num_updates - update) / (num_updates - warmup_updates):
    - linear: peak x r
    - cosine: peak x (0.1 + 0.9 x (1 - cos(pi r)) / 2) (arXiv:1608.03983)
    - wsd: the peak, then linear decay to 0 over the last 20 % of the updates. From MiniCPM (arXiv:2404.06395), which
      decays over 10 %; arXiv:2405.18392 finds that 20 % is on par with cosine.
    """
    # Not transformers.get_scheduler: its warm-up starts with an update at rate 0, and it needs a saved state.
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


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Sets the learning rate; each group keeps its ratio to it, its `rate_ratio`.

    For an optimizer that `make_optimizer` did not create, the ratio is the group's initial learning rate divided by
    the optimizer's default.
    """
    for group in optimizer.param_groups:
        if "rate_ratio" not in group:
            default = getattr(inner_optimizer(optimizer), "defaults", {}).get("lr") or group["lr"]
            group["rate_ratio"] = group["lr"] / default if default else 1.0
        group["lr"] = value * group["rate_ratio"]


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the recipe's optimizer, or the optimizer that DeepSpeed created from it, without wrappers."""
    while is_wrapper(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def is_wrapper(optimizer: Any) -> bool:
    """Returns whether this is a wrapper of Accelerate or DeepSpeed; others may also have an attribute `optimizer`."""
    deepspeed = sys.modules.get("deepspeed.runtime.base_optimizer")
    is_deepspeed = deepspeed is not None and isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
    return is_deepspeed or isinstance(optimizer, AcceleratedOptimizer)


def wrapped_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizers in an optimizer's attributes, also in lists and dicts; innermost last."""
    optimizers = [optimizer]
    for outer in optimizers:
        for value in vars(outer).values():
            values = list(value.values()) if isinstance(value, dict) else value
            values = values if isinstance(values, list | tuple) else [values]
            values = [value for value in values if isinstance(value, torch.optim.Optimizer)]
            optimizers += [inner for inner in values if inner not in optimizers]
    return optimizers[1:]
