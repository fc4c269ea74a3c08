"""DeepSpeed's settings, of a file or of the launcher: compared with the recipe's flags, and filled in from them.

What is "auto" or absent contradicts nothing. What a flag decides may also be written down, as long as it says the same;
DeepSpeed is not given it then, because the recipe does it: the optimizer, the schedule, the batch.
"""

import argparse
import copy
import difflib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import UserError
from common.training.optimizers import ADAM_BETAS, COSINE_FLOOR, SGD_MOMENTUM

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


# Accelerate fills these in from the width of the model.
WIDTH_KEYS = tuple(
    f"zero_optimization.{key}"
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)


GATHER_KEY = "stage3_gather_16bit_weights_on_model_save"


# What DeepSpeed reads at the top of its file, and ignores without a word where it is misspelt.
TOP_KEYS = (*BATCH_KEYS, "gradient_clipping", "bf16", "fp16", "zero_optimization", "aio", "communication_data_type")


TOP_KEYS += ("prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown", "zero_allow_untested_optimizer")


TOP_KEYS += ("optimizer", "scheduler", "activation_checkpointing", "steps_per_print", "data_types", "torch_autocast")


# Nothing comes of them here: Accelerate silences DeepSpeed's own lines, and the recipes bring models and loaders.
IDLE_KEYS = ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last")


TRAINS_OTHERWISE = ("progressive_layer_drop", "curriculum_learning", "data_efficiency", "compression_training")


TRAINS_OTHERWISE += ("amp", "elasticity", "eigenvalue", "quantize_training", "sparse_attention", "sparse_gradients")


# The types of an `optimizer` section, whose case DeepSpeed ignores, and the --optimizer that each is. Its Adam is AdamW
# too, unless adam_w_mode is false.
OPTIMIZER_TYPES = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}


KERNELS = ("torch_adam", "fused", "foreach")  # they change how a step is computed, not what


SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


@dataclass
class Settled:
    """DeepSpeed's settings as they are to run, and what is to be said of those that were given."""

    config: dict[str, Any]
    problems: list[str] = field(default_factory=list)  # what contradicts a flag or the launch, or cannot run
    filled: list[str] = field(default_factory=list)  # what was "auto" or absent, each with where it comes from
    left: list[str] = field(default_factory=list)  # what was "auto", and is left to DeepSpeed's defaults
    idle: list[str] = field(default_factory=list)  # what has no effect


def inline_deepspeed_config(settings: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration as the launcher's own settings make it, in the form of a file."""
    zero = {"stage": int(settings.get("zero_stage") or 2)}
    for part in ("offload_optimizer", "offload_param"):
        device = settings.get(f"{part}_device") or "none"
        zero[part] = {"device": device} | ({"nvme_path": settings.get(f"{part}_nvme_path")} if device == "nvme" else {})
    clipping = settings.get("gradient_clipping", "auto")
    return {"zero_optimization": zero} | ({} if clipping in ("auto", None) else {"gradient_clipping": float(clipping)})


def read_deepspeed_config(config: str | dict[str, Any]) -> dict[str, Any]:
    """The settings of a DeepSpeed file, or those that were given.

    Raises:
        UserError: the file is not there, or is no JSON object; one line.
    """
    if not isinstance(config, str):
        return config
    try:
        settings = json.loads(Path(config).read_text())
    except OSError as error:
        raise UserError(
            f"{config}: {error.strerror}; name a DeepSpeed file, from the directory that you launch in"
        ) from error
    except ValueError as error:
        raise UserError(f"{config}: not JSON ({error}); mend the file") from error
    if not isinstance(settings, dict):
        raise UserError(f"{config}: not a JSON object; mend the file")
    return settings


def flatten(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting of a nested configuration, under its dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def file_precision(config: str | dict[str, Any]) -> str | None:
    """The precision that a DeepSpeed file turns on by itself, whatever the launch says; None where it turns on none."""
    try:
        config = read_deepspeed_config(config)
    except UserError:
        return None  # `check_deepspeed` says so
    return next((name for name in ("bf16", "fp16") if _section(config, name).get("enabled") is True), None)


def check_deepspeed(
    config: str | dict[str, Any], args: argparse.Namespace, mixed_precision: str, num_processes: int
) -> list[str]:
    """One line for each value of a DeepSpeed file, or of the launch, that contradicts a flag or cannot run.

    Args:
        config: DeepSpeed's configuration or the name of its file.
        args: the recipe's flags, their defaults filled in.
    """
    where = config if isinstance(config, str) else "the launch's DeepSpeed settings"
    try:
        settled = settle_deepspeed(config, args, mixed_precision, num_processes)
    except UserError as error:
        return [str(error)]
    return [f"{where}: {problem}" for problem in settled.problems] + _check_zero(where, settled, args.optimizer)


def settle_deepspeed(
    config: str | dict[str, Any], args: argparse.Namespace, mixed_precision: str, num_processes: int
) -> Settled:
    """What DeepSpeed is to be given, and what is to be said of it. For the arguments see `check_deepspeed`.

    Raises:
        UserError: the file cannot be read.
    """
    settled = Settled(copy.deepcopy(read_deepspeed_config(config)))
    for key in settled.config:
        nearest = difflib.get_close_matches(key, TOP_KEYS, n=1, cutoff=0.8)
        if nearest and key not in TOP_KEYS:
            settled.problems.append(f"DeepSpeed knows no key {key}; did you mean {nearest[0]}?")
    _settle_batch(settled, args, num_processes)
    _settle_optimizer(settled, args)
    _settle_scheduler(settled, args)
    _settle_precision(settled, mixed_precision)
    _settle_zero(settled)
    _settle_others(settled)
    settled.left = list(_take_auto(settled.config))
    return settled


def describe_settled(where: str, settled: Settled) -> str:
    """The line that says what was filled in."""
    defaults = [f"{name} (DeepSpeed's default)" for name in settled.left]
    return f"DeepSpeed's settings ({where}), filled in: {', '.join(settled.filled + defaults)}"


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _is_given(value: Any) -> bool:
    return value is not None and value != "auto"


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if {type(value), type(other)} <= {int, float}:
        return math.isclose(value, other, rel_tol=1e-9)
    return value == other


def _contradictions(given: dict[str, Any], prefix: str, runs: dict[str, tuple[str, Any]]) -> Iterator[str]:
    """A line for each value that is not what runs: of each name, the flag that decides, and its value."""
    for name, value in given.items():
        if not _is_given(value):
            continue
        if name not in runs:
            yield f"{prefix}{name} is {json.dumps(value)}, which has no flag here; take it out"
        elif not _is_same(value, runs[name][1]):
            flag, ours = runs[name]
            remedy = f"give {flag} {json.dumps(value)}, or take it out" if flag.startswith("--") else "take it out"
            yield f"{prefix}{name} is {json.dumps(value)}, but {flag} is {json.dumps(ours)}; {remedy}"


def _settle_batch(settled: Settled, args: argparse.Namespace, num_processes: int) -> None:
    """DeepSpeed is not told of the batch, which the recipe cuts.

    `sharding.configure_plugins` sets the norm that clips.
    """
    cut = "micro_batch_size" if args.micro_batch_size else "micro_batch_tokens"
    flags = {"gradient_clipping": "max_grad_norm", "train_batch_size": "global_batch_size"}
    for key, flag in (flags | {"train_micro_batch_size_per_gpu": cut}).items():
        value, ours = settled.config.pop(key, None), getattr(args, flag)
        if not _is_given(value):
            settled.filled.append(f"{key} (--{flag} {ours})")
        elif flag == "micro_batch_tokens":
            remedy = f"give --micro_batch_size {value}, or take it out"
            settled.problems.append(f"{key} is {value}, but --{flag} {ours} cuts the batch; {remedy}")
        else:
            settled.problems += _contradictions({key: value}, "", {key: (f"--{flag}", ours)})
    key = "gradient_accumulation_steps"
    value = settled.config.pop(key, None)
    steps, arithmetic = accumulation_steps(args, num_processes)
    if not _is_given(value) or value == 1:  # 1 is the default, which `accelerate config` writes unasked
        settled.filled.append(f"{key} ({arithmetic})")
    elif value != steps:
        settled.problems.append(f"{key} is {value}; it follows from {arithmetic}; take it out")


def accumulation_steps(args: argparse.Namespace, num_processes: int) -> tuple[float | None, str]:
    """The micro-batches of an update on a process, None where they vary, and the flags that they follow from."""
    batch = f"--global_batch_size {args.global_batch_size}"
    if not args.micro_batch_size:
        return None, f"{batch} in --micro_batch_tokens {args.micro_batch_tokens}"
    steps = args.global_batch_size / (args.micro_batch_size * num_processes)
    return steps, f"{batch} / (--micro_batch_size {args.micro_batch_size} x {num_processes} processes) = {steps:g}"


def _settle_optimizer(settled: Settled, args: argparse.Namespace) -> None:
    section = _section(settled.config, "optimizer")
    if settled.config.pop("optimizer", None) is None:
        return
    kind = section.get("type")
    ours = OPTIMIZER_TYPES.get(str(kind).lower())
    if _is_given(kind) and ours != args.optimizer:
        remedy = f"give --optimizer {ours}, or take the section out" if ours else "take the section out"
        settled.problems.append(f"optimizer.type is {kind}, but --optimizer is {args.optimizer}; {remedy}")
        return
    runs = {"lr": ("--learning_rate", args.learning_rate), "weight_decay": ("--weight_decay", args.weight_decay)}
    fixed = {"betas": list(ADAM_BETAS), "eps": 1e-8, "adam_w_mode": True, "bias_correction": True, "amsgrad": False}
    if args.optimizer == "sgd":
        fixed = {"momentum": SGD_MOMENTUM, "dampening": 0, "nesterov": False}
    runs |= {name: (f"that of --optimizer {args.optimizer}", value) for name, value in fixed.items()}
    given = {name: value for name, value in _section(section, "params").items() if name not in KERNELS}
    settled.problems += _contradictions(given, "optimizer.params.", runs)
    flags = f"--optimizer {args.optimizer}, --learning_rate {args.learning_rate}, --weight_decay {args.weight_decay}"
    settled.filled.append(f"optimizer ({flags})")


def _settle_scheduler(settled: Settled, args: argparse.Namespace) -> None:
    section = _section(settled.config, "scheduler")
    if settled.config.pop("scheduler", None) is None:
        return
    kind = section.get("type")
    if _is_given(kind) and kind not in SCHEDULER_TYPES:
        settled.problems.append(f"scheduler.type is {kind}, which --lr_schedule has not; take the section out")
        return
    runs = {
        "warmup_max_lr": ("--learning_rate", args.learning_rate),
        "warmup_num_steps": ("--warmup_updates", args.warmup_updates),
        "total_num_steps": ("--num_updates", args.num_updates),
        # The recipes' warm-up is a straight line from 0.
        "warmup_min_lr": ("that of --lr_schedule", 0),
        "warmup_min_ratio": ("that of --lr_schedule", 0),
        "warmup_type": ("that of --lr_schedule", "linear"),
        "cos_min_ratio": ("that of --lr_schedule", COSINE_FLOOR),
    }
    given, warmup = _section(section, "params"), f"--warmup_updates {args.warmup_updates}"
    if args.warmup_updates is None:  # with --resume it is the checkpoint's, which is not known yet
        given, warmup = {**given, "warmup_num_steps": "auto"}, "the checkpoint's --warmup_updates"
    settled.problems += _contradictions(given, "scheduler.params.", runs)
    settled.filled.append(f"scheduler (--lr_schedule {args.lr_schedule}, {warmup})")


def _settle_precision(settled: Settled, mixed_precision: str) -> None:
    config = settled.config
    if "bfloat16" in config:  # its old name, which Accelerate does not know
        config.setdefault("bf16", config.pop("bfloat16"))
    for name in ("bf16", "fp16"):
        section, is_on = _section(config, name), mixed_precision == name
        enabled = section.get("enabled")
        if _is_given(enabled) and bool(enabled) != is_on:
            remedy = f"take its section {name} out, or launch with --mixed_precision {name if enabled else 'no'}"
            settled.problems.append(
                f"{name}.enabled is {json.dumps(enabled)}, but --mixed_precision is {mixed_precision}; {remedy}"
            )
        elif not _is_given(enabled) and is_on:
            settled.filled.append(f"{name} (--mixed_precision {mixed_precision})")
        for key, value in section.items():
            if key.endswith(("master_weights_and_grads", "optimizer_states")) and value is True:
                settled.problems.append(f"take out {name}.{key}: master weights and moments are float32")
        if section:
            section["enabled"] = is_on
        else:
            config.pop(name, None)  # Accelerate writes one


def _settle_zero(settled: Settled) -> None:
    zero = _section(settled.config, "zero_optimization")
    width = [key for key in WIDTH_KEYS if zero.get(key.split(".")[1]) == "auto"]
    settled.filled += [f"{key.split('.')[1]} (the model's width)" for key in width]
    parameters = _section(zero, "offload_param")
    if parameters.get("device") == "nvme" and parameters.get("buffer_size", "auto") == "auto":
        parameters.pop("buffer_size", None)
        settled.filled.append("offload_param.buffer_size (the model's largest parameter)")
    gathers = [zero.pop(key, "auto") for key in (GATHER_KEY, "stage3_gather_fp16_weights_on_model_save")]
    if zero.get("stage") == 3:
        zero[GATHER_KEY] = True
        if True not in gathers:
            settled.filled.append(f"{GATHER_KEY} (true: the run ends with a whole model)")


def _settle_others(settled: Settled) -> None:
    config, problems = settled.config, settled.problems
    for key in IDLE_KEYS:
        if config.pop(key, None) not in (None, False, "auto"):
            settled.idle.append(key)
    if config.pop("activation_checkpointing", None) is not None:
        settled.idle.append("activation_checkpointing (use --activation_checkpointing)")
    if _section(config, "aio").pop("thread_count", None) is not None:
        settled.idle.append("aio.thread_count (DeepSpeed reads intra_op_parallelism)")
    for section in ("tensorboard", "wandb", "csv_monitor", "comet"):
        if _section(config, section).get("enabled"):
            problems.append(f"take out its section {section}: --report_to is what runs")
    for name in TRAINS_OTHERWISE:
        value = config.pop(name, None)
        is_on = value.get("enabled", True) if isinstance(value, dict) else value
        if is_on not in (None, False, "auto"):
            problems.append(f"take out its section {name}: it would train on something else than the recipe gives")
        elif value is not None:
            settled.idle.append(name)
    for section in ("data_types", "communication_data_type"):
        for name, value in flatten({section: config.get(section)}):
            is_sum = name in ("data_types.grad_accum_dtype", "communication_data_type")
            does = (
                "sum in another precision than float32" if is_sum else "compute in another precision than the launch's"
            )
            if value and value != "auto" and not (is_sum and value in ("fp32", "float32")):
                problems.append(f"{name} {json.dumps(value)} would {does}; take it out")
    if _section(config, "torch_autocast").get("enabled"):
        problems.append("torch_autocast would compute in another precision than the launch's; take it out")
    if config.get("prescale_gradients") or config.get("gradient_predivide_factor", 1) != 1:
        problems.append("take out prescale_gradients and gradient_predivide_factor: the recipe divides by the targets")
    for section, size in (("tensor_parallel", "autotp_size"), ("sequence_parallel_size", None)):
        degree = _section(config, section).get(size, 1) if size else config.get(section, 1)
        if degree not in (0, 1):
            problems.append(f"{section} is {degree}; take it out: each process of a recipe takes samples of its own")


def _take_auto(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Takes out what is still "auto", which DeepSpeed reads as absent and Accelerate would refuse; yields the names."""
    for name, value in list(settings.items()):
        if isinstance(value, dict):
            yield from _take_auto(value, f"{prefix}{name}.")
        elif value == "auto" and f"{prefix}{name}" not in WIDTH_KEYS:
            del settings[name]
            yield f"{prefix}{name}"


def _check_zero(where: str, settled: Settled, optimizer: str) -> list[str]:
    """Whether DeepSpeed takes the section zero_optimization, and its offload the optimizer."""
    zero = settled.config.get("zero_optimization")
    if not isinstance(zero, dict) or not zero:
        return [f"{where}: it has no section zero_optimization; write one, as in ds_configs/"]
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # here because it takes seconds

    problems = []
    for old, new in {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}.items():
        if old in zero:
            problems.append(f'{where}: zero_optimization.{old} is of the past; write "{new}": {{"device": "cpu"}}')
    if problems:
        return problems
    fields = {name for key, facts in DeepSpeedZeroConfig.model_fields.items() for name in (key, facts.alias) if name}
    left = [name.split(".")[1] for name in settled.left if name.startswith("zero_optimization.")]
    mistakes = {name: None for name in left if name not in fields}
    try:
        DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if value != "auto"})
    except ValidationError as error:
        for mistake in error.errors():
            is_unknown = mistake["type"] == "extra_forbidden"
            mistakes[".".join(str(part) for part in mistake["loc"])] = None if is_unknown else mistake["msg"]
    for name, reason in mistakes.items():
        nearest = difflib.get_close_matches(name, fields, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "; take it out"
        hint = f"; {name} belongs at the top of the file" if name in TOP_KEYS else hint
        hint = f": {reason}; mend it" if reason else hint
        problems.append(f"{where}: zero_optimization.{name} is not a setting that DeepSpeed takes{hint}")
    if problems:
        return problems
    stage = zero.get("stage", 0)
    if stage == 0:
        problems.append(f"{where}: zero_optimization.stage is 0, which shards nothing; set 1, 2 or 3, or use multi_gpu")
    devices = offload_devices(zero)
    if devices["offload_optimizer"] != "none" and optimizer != "adamw":
        # Accelerate would put DeepSpeed's CPU Adam in its place, without a word.
        problems.append(f"--optimizer {optimizer}: with its state offloaded, DeepSpeed runs only adamw; use adamw")
    elif optimizer not in ("adamw", "sgd"):
        # ZeRO updates flat pieces of the parameters: factored or block-wise states would be others than the tensors'.
        problems.append(f"--optimizer {optimizer} works on whole tensors, and ZeRO cuts them; use adamw or sgd")
    if devices["offload_param"] != "none" and stage in (1, 2):
        problems.append(f"{where}: offload_param has no effect at stage {stage}; take it out, or set stage 3")
    for part, device in devices.items():
        path = zero[part].get("nvme_path") if device == "nvme" else None
        if device == "nvme" and (reason := _cannot_write(path)):
            problems.append(f"{where}: {part}.nvme_path {path}: {reason}; make it, or name another")
    return problems


def _cannot_write(path: str | None) -> str | None:
    """Why no file can be made in a directory, or None."""
    if not path or not os.path.isdir(path):
        return "is no directory"
    try:
        tempfile.TemporaryFile(dir=path).close()  # os.access says yes to root even where nothing can be made
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return None


def offload_devices(zero_optimization: dict[str, Any]) -> dict[str, str]:
    """Where weights (`offload_param`) and optimizer state (`offload_optimizer`) lie: none, cpu or nvme."""
    parts = ("offload_param", "offload_optimizer")
    return {part: (zero_optimization.get(part) or {}).get("device") or "none" for part in parts}


def check_nvme_space(
    config: str | dict[str, Any], parameter_sizes: Callable[[], list[int]], num_machines: int = 1
) -> None:
    """Whether the files of DeepSpeed's NVMe offload, if there is any, have room on this host, before one is written.

    A parameter takes 16 bytes of files for the optimizer (its float32 copy, AdamW's two moments, its gradient) and 4
    for itself; hosts share them.

    Raises:
        UserError: a line for each path with too little space.
    """
    zero = read_deepspeed_config(config).get("zero_optimization", {})
    in_files = [part for part, device in offload_devices(zero).items() if device == "nvme"]
    if not in_files:
        return
    num_parameters = sum(parameter_sizes())
    needed: dict[str, int] = {}
    for part in in_files:
        path, size = zero[part]["nvme_path"], 16 if part == "offload_optimizer" else 4
        needed[path] = needed.get(path, 0) + size * num_parameters // num_machines
    problems = [
        f"nvme_path {path}: {num_parameters:,} parameters take {size / 1e9:.3f} GB of files there, and "
        f"{free / 1e9:.3f} GB are free; make room, or name another"
        for path, size in needed.items()
        if (free := shutil.disk_usage(path).free) < size
    ]
    if problems:
        raise UserError("\n".join(problems))


def size_nvme_buffers(config: dict[str, Any], parameter_sizes: Callable[[], list[int]], num_processes: int) -> bool:
    """Gives DeepSpeed's buffers for weights in files room for a process's share of the largest parameter, in place.

    DeepSpeed's default is 100 million elements, where the embedding of an 8 B model has 525 million. Returns whether
    there are such buffers.

    Raises:
        UserError: the file gives a size that is too small, where DeepSpeed would fail with an assertion.
    """
    zero = config.get("zero_optimization", {})
    if offload_devices(zero)["offload_param"] != "nvme":
        return False
    needed = math.ceil(max(parameter_sizes()) / num_processes)
    given = zero["offload_param"].setdefault("buffer_size", needed)
    if given < needed:
        raise UserError(
            f"offload_param.buffer_size is {given:.0f}, but a process's share of the largest parameter has {needed} "
            "elements; take it out: it follows from the model"
        )
    return True
