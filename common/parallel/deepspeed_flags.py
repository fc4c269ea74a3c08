"""Compares DeepSpeed's settings with the recipe's flags, and fills them in from the flags.

A setting that is "auto" or absent never conflicts. A setting that a flag controls may also be in the file, if the
values are equal. Such settings (optimizer, schedule, batch) are not passed to DeepSpeed, because the recipe applies
them.
"""

import argparse
import copy
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from common.errors import UserError
from common.parallel.deepspeed_files import TOP_KEYS, check_zero, flatten, read_deepspeed_config, section_of
from common.training.optimizers import COSINE_FLOOR, OPTIMIZERS
from common.training.process_grid import ProcessGrid

# Accelerate fills these in from the hidden size of the model.
WIDTH_KEYS = tuple(
    f"zero_optimization.{key}"
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)
GATHER_KEY = "stage3_gather_16bit_weights_on_model_save"
# Keys without effect, because Accelerate silences DeepSpeed's own output, and recipes create the loaders.
IDLE_KEYS = ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last")
TRAINS_OTHERWISE: tuple[str, ...] = (
    "progressive_layer_drop",
    "curriculum_learning",
    "data_efficiency",
    "compression_training",
)
TRAINS_OTHERWISE += ("amp", "elasticity", "eigenvalue", "quantize_training", "sparse_attention", "sparse_gradients")
# Types of an `optimizer` section (DeepSpeed ignores their case), and the --optimizer of each type.
OPTIMIZER_TYPES = {kind: name for name, info in OPTIMIZERS.items() for kind in info.deepspeed_types}
KERNELS = ("torch_adam", "fused", "foreach")  # they change the kernel of a step, not its result
SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


@dataclass
class Settled:
    """DeepSpeed's resolved settings, and messages about the requested settings."""

    config: dict[str, Any]
    problems: list[str] = field(default_factory=list)  # conflicts with a flag or the launch; unsupported values
    filled: list[str] = field(default_factory=list)  # settings that were "auto" or absent, each with its source
    left: list[str] = field(default_factory=list)  # settings that were "auto" and now have DeepSpeed's defaults
    idle: list[str] = field(default_factory=list)  # settings without effect
    risky: list[str] = field(default_factory=list)  # settings that may give wrong gradients, each with its fix


def check_deepspeed(
    config: str | dict[str, Any], args: argparse.Namespace, mixed_precision: str, grid: ProcessGrid
) -> list[str]:
    """Returns one line per value of a DeepSpeed file or the launch that conflicts with a flag or is unsupported."""
    where = config if isinstance(config, str) else "the launch's DeepSpeed settings"
    try:
        settled = settle_deepspeed(config, args, mixed_precision, grid)
    except UserError as error:
        return [str(error)]
    except RecursionError:
        return [f"{where}: nested too deeply; remove the section that DeepSpeed does not read"]
    zero = check_zero(where, settled.config.get("zero_optimization"), settled.left, args.optimizer)
    return [*(f"{where}: {problem}" for problem in settled.problems), *zero]


def settle_deepspeed(
    config: str | dict[str, Any], args: argparse.Namespace, mixed_precision: str, grid: ProcessGrid
) -> Settled:
    """Returns DeepSpeed's resolved settings, with messages. Raises UserError: the file cannot be read."""
    settled = Settled(copy.deepcopy(read_deepspeed_config(config)))
    for key in settled.config:
        nearest = difflib.get_close_matches(key, TOP_KEYS, n=1, cutoff=0.8)
        if nearest and key not in TOP_KEYS:
            settled.problems.append(f"DeepSpeed knows no key {key}; did you mean {nearest[0]}?")
    _settle_batch(settled, args, grid)
    _settle_optimizer(settled, args)
    _settle_scheduler(settled, args)
    _settle_precision(settled, mixed_precision, args.export_dtype)
    _settle_zero(settled, args.compile is True)
    _settle_others(settled)
    settled.left = list(_take_auto(settled.config))
    return settled


def describe_settled(where: str, settled: Settled) -> str:
    """Returns the line that lists the filled-in settings."""
    defaults = [f"{name} (DeepSpeed's default)" for name in settled.left]
    return f"DeepSpeed's settings ({where}), filled in: {', '.join(settled.filled + defaults)}"


def _is_given(value: Any) -> bool:
    return value is not None and value != "auto"


def _contradictions(given: dict[str, Any], prefix: str, runs: dict[str, tuple[str, Any]]) -> Iterator[str]:
    """Yields one line per setting of the file that differs from the effective value, or has no flag."""
    for name, value in given.items():
        if not _is_given(value):
            continue
        if name not in runs:
            yield f"{prefix}{name} is {json.dumps(value)}, which has no flag here; remove it"
        elif value != runs[name][1]:
            flag, ours = runs[name]
            remedy = f"pass {flag} {json.dumps(value)}, or remove it" if flag.startswith("--") else "remove it"
            yield f"{prefix}{name} is {json.dumps(value)}, but {flag} is {json.dumps(ours)}; {remedy}"


def _settle_batch(settled: Settled, args: argparse.Namespace, grid: ProcessGrid) -> None:
    """Removes the settings of batch and clipping, because the recipe splits the batch.

    `sharding.configure_plugins` sets the clipping norm again, from --max_grad_norm.
    """
    cut = "micro_batch_size" if args.micro_batch_size else "micro_batch_tokens"
    flags = {"gradient_clipping": "max_grad_norm", "train_batch_size": "global_batch_size"}
    for key, flag in (flags | {"train_micro_batch_size_per_gpu": cut}).items():
        value, ours = settled.config.pop(key, None), getattr(args, flag)
        if not _is_given(value):
            settled.filled.append(f"{key} (--{flag} {ours})")
        elif flag == "micro_batch_tokens":
            remedy = f"pass --micro_batch_size {value}, or remove it"
            settled.problems.append(f"{key} is {value}, but --{flag} {ours} splits the batch; {remedy}")
        else:
            settled.problems += _contradictions({key: value}, "", {key: (f"--{flag}", ours)})
    key = "gradient_accumulation_steps"
    value = settled.config.pop(key, None)
    steps, arithmetic = accumulation_steps(args, grid)
    if not _is_given(value) or value == 1:  # 1 is the default, which `accelerate config` writes by itself
        settled.filled.append(f"{key} ({arithmetic})")
    elif value != steps:
        settled.problems.append(f"{key} is {value}; it follows from {arithmetic}; remove it")


def accumulation_steps(args: argparse.Namespace, grid: ProcessGrid) -> tuple[float | None, str]:
    """Returns micro-batches per update and process (None if they vary), and the flags that determine them."""
    batch = f"--global_batch_size {args.global_batch_size}"
    if not args.micro_batch_size:
        return None, f"{batch} in --micro_batch_tokens {args.micro_batch_tokens}"
    steps = args.global_batch_size / (args.micro_batch_size * grid.data_parallel)
    return steps, f"{batch} / (--micro_batch_size {args.micro_batch_size} x {grid.describe()}) = {steps:g}"


def _settle_optimizer(settled: Settled, args: argparse.Namespace) -> None:
    given = section_of(settled.config, "optimizer")
    if settled.config.pop("optimizer", None) is None:
        return
    kind = given.get("type")
    ours = OPTIMIZER_TYPES.get(str(kind).lower())
    if _is_given(kind) and ours != args.optimizer:
        remedy = f"pass --optimizer {ours}, or remove the section" if ours else "remove the section"
        settled.problems.append(f"optimizer.type is {kind}, but --optimizer is {args.optimizer}; {remedy}")
        return
    fixed = OPTIMIZERS[args.optimizer].deepspeed_params
    runs = {name: (f"that of --optimizer {args.optimizer}", value) for name, value in fixed.items()}
    runs |= {"lr": ("--learning_rate", args.learning_rate), "weight_decay": ("--weight_decay", args.weight_decay)}
    params = {name: value for name, value in section_of(given, "params").items() if name not in KERNELS}
    settled.problems += _contradictions(params, "optimizer.params.", runs)
    flags = f"--optimizer {args.optimizer}, --learning_rate {args.learning_rate}, --weight_decay {args.weight_decay}"
    settled.filled.append(f"optimizer ({flags})")


def _settle_scheduler(settled: Settled, args: argparse.Namespace) -> None:
    given = section_of(settled.config, "scheduler")
    if settled.config.pop("scheduler", None) is None:
        return
    kind = given.get("type")
    if _is_given(kind) and kind not in SCHEDULER_TYPES:
        settled.problems.append(f"scheduler.type is {kind}, which --lr_schedule does not support; remove the section")
        return
    # The recipes' warm-up is linear from 0.
    fixed = {"warmup_min_lr": 0, "warmup_min_ratio": 0, "warmup_type": "linear", "cos_min_ratio": COSINE_FLOOR}
    runs = {name: ("that of --lr_schedule", value) for name, value in fixed.items()} | {
        "warmup_max_lr": ("--learning_rate", args.learning_rate),
        "warmup_num_steps": ("--warmup_updates", args.warmup_updates),
        "total_num_steps": ("--num_updates", args.num_updates),
    }
    params, warmup = {**section_of(given, "params")}, f"--warmup_updates {args.warmup_updates}"
    if args.num_updates is None:
        for name in ("total_num_steps", "warmup_num_steps"):
            if _is_given(params.get(name)) and (name == "total_num_steps" or args.warmup_updates is None):
                said = f"scheduler.params.{name} is {json.dumps(params.pop(name))}"
                settled.problems.append(f"{said}, but --num_epochs sets the length of the run; remove it")
    if args.warmup_updates is None:  # known only after the data, or the checkpoint, is read
        params["warmup_num_steps"] = "auto"
        warmup = (
            "the checkpoint's --warmup_updates" if args.num_updates or args.resume else "a twentieth of the updates"
        )
    settled.problems += _contradictions(params, "scheduler.params.", runs)
    settled.filled.append(f"scheduler (--lr_schedule {args.lr_schedule}, {warmup})")


def _settle_precision(settled: Settled, mixed_precision: str, export_dtype: str | None) -> None:
    config = settled.config
    if mixed_precision != "no" and export_dtype == "float32":
        settled.problems.append(
            f"DeepSpeed keeps the weights of model/ in {mixed_precision}, not in --export_dtype float32; remove it: "
            "python -m tools.checkpoint export makes a model of the float32 weights of a checkpoint"
        )
    if "bfloat16" in config:  # DeepSpeed's old name of bf16, unknown to Accelerate
        config.setdefault("bf16", config.pop("bfloat16"))
    for name in ("bf16", "fp16"):
        section, is_on = section_of(config, name), mixed_precision == name
        enabled = section.get("enabled")
        if _is_given(enabled) and bool(enabled) != is_on:
            remedy = f"remove its section {name}, or launch with --mixed_precision {name if enabled else 'no'}"
            settled.problems.append(
                f"{name}.enabled is {json.dumps(enabled)}, but --mixed_precision is {mixed_precision}; {remedy}"
            )
        elif not _is_given(enabled) and is_on:
            settled.filled.append(f"{name} (--mixed_precision {mixed_precision})")
        for key, value in section.items():
            if key.endswith(("master_weights_and_grads", "optimizer_states")) and value is True:
                settled.problems.append(f"remove {name}.{key}: master weights and moments are float32")
        if section:
            section["enabled"] = is_on
        else:
            config.pop(name, None)  # Accelerate adds a section


def _settle_zero(settled: Settled, compiles: bool) -> None:
    zero = section_of(settled.config, "zero_optimization")
    if compiles and zero.get("overlap_comm") is True and zero.get("stage") in (1, 2):
        # A compiled backward writes gradients in several streams. DeepSpeed 0.19.8 waits for all of them only if the
        # gradient is smaller than a bucket; earlier versions wait for one.
        settled.risky.append(
            "overlap_comm with --compile: DeepSpeed may sum a gradient before it is computed; set overlap_comm to false"
        )
    width = [key for key in WIDTH_KEYS if zero.get(key.split(".")[1]) == "auto"]
    settled.filled += [f"{key.split('.')[1]} (the model's width)" for key in width]
    parameters = section_of(zero, "offload_param")
    if parameters.get("device") == "nvme" and parameters.get("buffer_size", "auto") == "auto":
        parameters.pop("buffer_size", None)
        settled.filled.append("offload_param.buffer_size (the model's largest parameter)")
    gathers = [zero.pop(key, "auto") for key in (GATHER_KEY, "stage3_gather_fp16_weights_on_model_save")]
    if zero.get("stage") == 3:
        zero[GATHER_KEY] = True
        if True not in gathers:
            settled.filled.append(f"{GATHER_KEY} (true: the run ends with a whole model)")


def _settle_others(settled: Settled) -> None:
    config, problems, idle = settled.config, settled.problems, settled.idle
    idle += [key for key in IDLE_KEYS if config.pop(key, None) not in (None, False, "auto")]
    if config.pop("activation_checkpointing", None) is not None:
        idle.append("activation_checkpointing (use --activation_checkpointing)")
    if section_of(config, "aio").pop("thread_count", None) is not None:
        idle.append("aio.thread_count (DeepSpeed reads intra_op_parallelism)")
    for name in TRAINS_OTHERWISE:
        value = config.pop(name, None)
        is_on = value.get("enabled", True) if isinstance(value, dict) else value
        if is_on not in (None, False, "auto"):
            problems.append(f"remove its section {name}: it would change what the recipe trains")
        elif value is not None:
            idle.append(name)
    for name in ("tensorboard", "wandb", "csv_monitor", "comet"):
        if section_of(config, name).get("enabled"):
            problems.append(f"remove its section {name}: --report_to selects the tracker")
    precision = {name: config[name] for name in ("data_types", "communication_data_type") if config.get(name)}
    for name, value in flatten(precision):
        is_sum = name in ("data_types.grad_accum_dtype", "communication_data_type")
        does = "sum in a precision other than float32" if is_sum else "compute in a precision other than the launch's"
        if value and value != "auto" and not (is_sum and value in ("fp32", "float32")):
            problems.append(f"{name} {json.dumps(value)} would {does}; remove it")
    if section_of(config, "torch_autocast").get("enabled"):
        problems.append("torch_autocast would compute in a precision other than the launch's; remove it")
    if config.get("prescale_gradients") or config.get("gradient_predivide_factor", 1) != 1:
        problems.append("remove prescale_gradients and gradient_predivide_factor: the recipe divides by the targets")
    degrees = {"tensor_parallel": section_of(config, "tensor_parallel").get("autotp_size", 1)}
    degrees["sequence_parallel_size"] = config.get("sequence_parallel_size", 1)
    for name, degree in degrees.items():
        if degree not in (0, 1):
            problems.append(f"{name} is {degree}; remove it: each process of a recipe has its own samples")


def _take_auto(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Removes settings that are still "auto", except WIDTH_KEYS, and yields their names.

    DeepSpeed treats "auto" as absent, but Accelerate would reject it.
    """
    for name, value in list(settings.items()):
        if isinstance(value, dict):
            yield from _take_auto(value, f"{prefix}{name}.")
        elif value == "auto" and f"{prefix}{name}" not in WIDTH_KEYS:
            del settings[name]
            yield f"{prefix}{name}"
