"""FSDP2 and DeepSpeed: what they can take, and how they run without a GPU."""

import difflib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from pydantic import ValidationError
from torch.distributed.fsdp import CPUOffloadPolicy

from common.extensions import build_extensions

# Keys that follow from the recipe's own flags: a DeepSpeed file says "auto", or nothing.
FOLLOWING_KEYS = {
    "train_batch_size": "--global_batch_size",
    "train_micro_batch_size_per_gpu": "--micro_batch_size or --micro_batch_tokens",
    "gradient_accumulation_steps": "--global_batch_size",
}


# What Accelerate and the recipe fill in for "auto".
RESOLVED_KEYS = {
    *FOLLOWING_KEYS,
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    # From the width of the model:
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
}
# What DeepSpeed reads at the top of its file, and ignores without a word where it is misspelt.
TOP_KEYS = (*FOLLOWING_KEYS, "gradient_clipping", "bf16", "fp16", "zero_optimization", "aio", "communication_data_type")
TOP_KEYS += ("prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown", "zero_allow_untested_optimizer")


def inline_deepspeed_config(settings: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration as the launcher's own settings make it, in the form of a file."""
    zero = {"stage": int(settings.get("zero_stage") or 2)}
    for part in ("offload_optimizer", "offload_param"):
        device = settings.get(f"{part}_device") or "none"
        zero[part] = {"device": device} | ({"nvme_path": settings.get(f"{part}_nvme_path")} if device == "nvme" else {})
    clipping = settings.get("gradient_clipping")
    return {"zero_optimization": zero} | ({"gradient_clipping": float(clipping)} if clipping else {})


def read_deepspeed_config(config: str | dict[str, Any]) -> dict[str, Any]:
    """The settings of a DeepSpeed file, or those that were given.

    Raises:
        ValueError: the file is not there, or is no JSON object; one line.
    """
    if not isinstance(config, str):
        return config
    try:
        settings = json.loads(Path(config).read_text())
    except OSError as error:
        raise ValueError(
            f"{config}: {error.strerror}; name a DeepSpeed file, from the directory that you launch in"
        ) from error
    except ValueError as error:
        raise ValueError(f"{config}: not JSON ({error}); mend the file") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{config}: not a JSON object; mend the file")
    return settings


def flatten(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting of a nested configuration, under its dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def check_deepspeed(
    config: str | dict[str, Any], optimizer: str, max_grad_norm: float, mixed_precision: str
) -> list[str]:
    """One line for each value of a DeepSpeed file, or of the launch, that contradicts a flag or cannot run.

    Args:
        config: DeepSpeed's configuration or the name of its file.
    """
    where = config if isinstance(config, str) else "the launch's DeepSpeed settings"
    try:
        config = read_deepspeed_config(config)
    except ValueError as error:
        return [str(error)]
    return [f"{where}: {problem}" for problem in _check_deepspeed_file(config, max_grad_norm, mixed_precision)] + (
        _check_zero(where, config.get("zero_optimization", {}), optimizer)
    )


def _check_deepspeed_file(config: dict[str, Any], max_grad_norm: float, mixed_precision: str) -> Iterator[str]:
    for key in config:
        nearest = difflib.get_close_matches(key, TOP_KEYS, n=1, cutoff=0.8)
        if nearest and key not in TOP_KEYS:
            yield f"DeepSpeed knows no key {key}; did you mean {nearest[0]}?"
    for section, flag in {"optimizer": "--optimizer", "scheduler": "--lr_schedule"}.items():
        if section in config:
            yield f"take out its section {section}: {flag} is what runs"
    for section in ("tensorboard", "wandb", "csv_monitor", "comet"):
        if (config.get(section) or {}).get("enabled"):
            yield f"take out its section {section}: --report_to is what runs"
    for section in ("torch_autocast", "data_types", "communication_data_type"):
        if config.get(section) and not (section == "torch_autocast" and not config[section].get("enabled")):
            yield f"{section} would compute or send in another precision than the launch's; take it out"
    for section in ("progressive_layer_drop", "curriculum_learning", "data_efficiency", "compression_training"):
        if section in config:
            yield f"take out its section {section}: it would train on something else than the recipe gives"
    if config.get("prescale_gradients") or config.get("gradient_predivide_factor", 1) != 1:
        yield "take out prescale_gradients and gradient_predivide_factor: the recipe divides by the window's targets"
    if "activation_checkpointing" in config:
        yield "its section activation_checkpointing has no effect on these models; use --activation_checkpointing"
    for key, flag in FOLLOWING_KEYS.items():
        if config.get(key, "auto") != "auto":
            yield f'{key} is {config[key]}; it follows from {flag}: take it out, or set "auto"'
    clipping = config.get("gradient_clipping", "auto")
    if clipping not in ("auto", max_grad_norm):
        yield f'gradient_clipping is {clipping}, but --max_grad_norm is {max_grad_norm}; set "auto" there'
    for precision in ("bf16", "fp16"):
        enabled = (config.get(precision) or {}).get("enabled", False)
        if enabled != "auto" and bool(enabled) != (mixed_precision == precision):
            yield (
                f"{precision}.enabled is {json.dumps(enabled)}, but --mixed_precision is {mixed_precision}; set "
                '"auto" there, and the precision with accelerate launch --mixed_precision'
            )
    for section, size in (("tensor_parallel", "autotp_size"), ("sequence_parallel_size", None)):
        degree = (config.get(section) or {}).get(size, 1) if size else config.get(section, 1)
        if degree not in (0, 1):
            yield f"{section} is {degree}; take it out: each process of a recipe takes samples of its own"
    for name, value in flatten(config):
        if value == "auto" and name not in RESOLVED_KEYS and name.split(".")[0] not in ("optimizer", "scheduler"):
            yield f'{name} is "auto", which nothing here resolves; write its value'


def _check_zero(where: str, zero: Any, optimizer: str) -> list[str]:
    """Whether DeepSpeed takes the section zero_optimization, and its offload the optimizer."""
    if not isinstance(zero, dict) or not zero:
        return [f"{where}: it has no section zero_optimization; write one, as in ds_configs/"]
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # here because it takes seconds

    problems = []
    for old, new in {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}.items():
        if old in zero:
            problems.append(f'{where}: zero_optimization.{old} is of the past; write "{new}": {{"device": "cpu"}}')
    if problems:
        return problems
    try:
        DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if value != "auto"})
    except ValidationError as error:
        for mistake in error.errors():
            name = ".".join(str(part) for part in mistake["loc"])
            nearest = difflib.get_close_matches(name, DeepSpeedZeroConfig.model_fields, n=1)
            unknown = mistake["type"] == "extra_forbidden"
            hint = f"; did you mean {nearest[0]}?" if unknown and nearest else f": {mistake['msg']}; mend it"
            problems.append(f"{where}: zero_optimization.{name} is not a setting that DeepSpeed takes{hint}")
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


def check_nvme_space(config: str | dict[str, Any], count_parameters: Callable[[], int], num_machines: int = 1) -> None:
    """Whether the files of DeepSpeed's NVMe offload, if there is any, have room on this host, before one is written.

    A parameter takes 16 bytes of files for the optimizer (its float32 copy, AdamW's two moments, its gradient) and 4
    for itself; hosts share them.

    Raises:
        ValueError: a line for each path with too little space.
    """
    zero = read_deepspeed_config(config).get("zero_optimization", {})
    in_files = [part for part, device in offload_devices(zero).items() if device == "nvme"]
    if not in_files:
        return
    num_parameters = count_parameters()
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
        raise ValueError("\n".join(problems))


def check_fsdp(source: str, settings: dict[str, Any], num_processes: int, optimizer: str) -> list[str]:
    """One line for each FSDP setting of the launcher that would be another run than the recipe's."""
    problems = []
    if optimizer not in ("adamw", "sgd"):
        # Their steps mix the shards (DTensor) with plain tensors, and raise.
        problems.append(
            f"--optimizer {optimizer} does not work on the shards of FSDP2; use adamw or sgd, or multi_gpu.yaml"
        )
    version = settings.get("fsdp_version")
    if str(version) != "2":
        problems.append(f"{source} asks for FSDP {version}; set fsdp_version: 2, which the recipes are tested with")
    if str(settings.get("fsdp_activation_checkpointing")).lower() == "true":
        problems.append(
            f"{source} sets fsdp_activation_checkpointing; take it out and use --activation_checkpointing full, which "
            "works in every mode"
        )
    if settings.get("use_parallelism_config"):
        sizes = {
            name: settings.get(f"parallelism_config_{name}_size") or 1
            for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
        }
        for name in ("tp", "cp", "sp"):
            if sizes[name] > 1:
                problems.append(
                    f"{source} sets parallelism_config_{name}_size to {sizes[name]}; set it to 1: each process of a "
                    "recipe takes samples of its own"
                )
        product = sizes["dp_replicate"] * sizes["dp_shard"]
        if product != num_processes and max(sizes["tp"], sizes["cp"], sizes["sp"]) == 1:
            problems.append(
                f"{source} asks for {num_processes} processes, but for {sizes['dp_replicate']} copies "
                f"(parallelism_config_dp_replicate_size) in {sizes['dp_shard']} shards "
                f"(parallelism_config_dp_shard_size) = {product}; make the product the number of processes"
            )
    return problems


def prepare_rehearsal(mode: str) -> None:
    """What sharding on a CPU needs before the processes connect."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # also where there is a GPU and the config says use_cpu
    # With ACCELERATE_USE_CPU, Accelerate would drop FSDP and DeepSpeed. Without, it finds no backend on a machine that
    # has no GPU, unless told.
    os.environ["ACCELERATE_USE_CPU"] = "false"
    if mode == "DeepSpeed":
        build_extensions([])  # DeepSpeed's collectives want theirs when the processes connect


def connect_rehearsal(mode: str) -> None:
    """Lets Accelerate shard on a CPU, over gloo: the state that it would make by itself has no sharding there."""
    state = PartialState(backend="gloo")
    if mode == "FSDP":
        state.distributed_type = DistributedType.MULTI_GPU  # the only types for which Accelerate looks at FSDP


def adapt(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Tells FSDP2 and DeepSpeed what the recipe knows, before `accelerator.prepare`."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.device.type == "cpu" and fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy):
        fsdp.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinned memory is for copies to a GPU
    if accelerator.deepspeed_plugin is not None:
        # DeepSpeed calls collectives under names that torch 2.13 deprecates: a warning for each call.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        config = accelerator.deepspeed_plugin.deepspeed_config
        build_extensions(offload_devices(config.get("zero_optimization", {})).values())
        config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed wants a number; nothing is divided by it
        if config.get("gradient_clipping", "auto") == "auto":
            # Never 0: DeepSpeed would compute no norm then, and so would not see that a gradient is not finite.
            config["gradient_clipping"] = max_grad_norm or 1e30
