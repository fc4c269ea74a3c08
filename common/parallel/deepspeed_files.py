"""Reads DeepSpeed's settings from a file or the launcher, and checks that DeepSpeed and this host support them."""

import argparse
import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import why_not_writable
from common.training.optimizer_choice import name_optimizers
from common.training.optimizers import OPTIMIZERS

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys at the top level of DeepSpeed's file. DeepSpeed silently ignores misspelt keys.
TOP_KEYS: tuple[str, ...] = (
    *BATCH_KEYS,
    "gradient_clipping",
    "bf16",
    "fp16",
    "zero_optimization",
    "aio",
    "communication_data_type",
)
TOP_KEYS += ("prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown", "zero_allow_untested_optimizer")
TOP_KEYS += ("optimizer", "scheduler", "activation_checkpointing", "steps_per_print", "data_types", "torch_autocast")


def inline_deepspeed_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the launcher's DeepSpeed settings, converted to the structure of a DeepSpeed file."""
    zero: dict[str, Any] = {"stage": int(settings.get("zero_stage") or 2)}
    for part in ("offload_optimizer", "offload_param"):
        device = settings.get(f"{part}_device") or "none"
        zero[part] = {"device": device} | ({"nvme_path": settings.get(f"{part}_nvme_path")} if device == "nvme" else {})
    clipping = settings.get("gradient_clipping", "auto")
    return {"zero_optimization": zero} | ({} if clipping in ("auto", None) else {"gradient_clipping": float(clipping)})


def read_launched(launch: Any, args: argparse.Namespace) -> None:
    """Sets the DeepSpeed config of a launch (name of a file, or settings), and its precision; notes problems.

    launch: a `launch.Launch`. args: settings of the launcher. Its precision takes precedence over that of the file.
    """
    config, problems = args.deepspeed_config_file or inline_deepspeed_config(vars(args)), list[str]()
    if args.deepspeed_config_file and launch.config_file and "deepspeed_config_file" not in launch.given:
        config, problems = find_deepspeed_file(args.deepspeed_config_file, launch.config_file)
    launch.deepspeed_config = config
    launch.file_problems += problems
    precision = file_precision(config)
    is_set = "mixed_precision" in launch.given or launch.file_settings.get("mixed_precision")
    if precision is not None and launch.mode == "DeepSpeed" and not is_set:
        launch.mixed_precision = precision


def find_deepspeed_file(name: str, config_file: str) -> tuple[str, list[str]]:
    """Returns the path of a DeepSpeed file that the config file refers to, and a line if two different files match.

    Accelerate resolves `name` relative to the current directory. Here, the directory of the config file and its parents
    are searched too. So a shipped config, or a copy with its ds_configs/, works from any directory.
    """
    folders = [*Path(os.path.abspath(config_file)).parents, *Path(config_file).resolve().parents]
    nearest = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if nearest is None or not Path(name).is_file():
        return name if nearest is None else str(nearest), []
    if nearest.read_bytes() == Path(name).read_bytes():
        return name, []
    return name, [
        f"{config_file}: {name} is in the current directory and, with other contents, at {nearest}; choose one with "
        "--deepspeed_config_file PATH before the recipe, or start from another directory"
    ]


def read_deepspeed_config(config: str | dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a DeepSpeed file; returns a dict of settings unchanged.

    Raises UserError: the file does not exist, or is not a JSON object; one line.
    """
    if not isinstance(config, str):
        return config
    try:
        settings = json.loads(Path(config).read_text())
    except OSError as error:
        raise UserError(
            f"{config}: {error.strerror}; name a DeepSpeed file, relative to the current directory "
            "or to the folder of the config file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{config}: not JSON ({error}); fix the file") from error
    if not isinstance(settings, dict):
        raise UserError(f"{config}: not a JSON object; fix the file")
    return settings


def flatten(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each setting of a nested configuration, with its dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def section_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def file_precision(config: str | dict[str, Any]) -> str | None:
    """Returns the precision that a DeepSpeed file enables (bf16 or fp16); None if it enables none or is unreadable."""
    try:
        config = read_deepspeed_config(config)
    except UserError:
        return None  # `check_deepspeed` reports it
    return next((name for name in ("bf16", "fp16") if section_of(config, name).get("enabled") is True), None)


def check_zero(where: str, zero: Any, left: list[str], optimizer: str) -> Iterator[str]:
    """Yields one line per problem with the section zero_optimization, or with the optimizer under ZeRO.

    Args:
        left: names of the settings that were "auto" and now have DeepSpeed's defaults.
    """
    if not isinstance(zero, dict) or not zero:
        yield f"{where}: it has no section zero_optimization; write one, as in ds_configs/"
        return
    if problems := _check_names(zero, left):
        yield from (f"{where}: zero_optimization.{problem}" for problem in problems)
        return
    stage = zero.get("stage", 0)
    if stage == 0:
        yield f"{where}: zero_optimization.stage is 0, which shards nothing; set 1, 2 or 3, or use multi_gpu"
    devices = offload_devices(zero)
    yield from check_optimizer(zero, optimizer)
    if devices["offload_param"] != "none" and stage in (1, 2):
        yield f"{where}: offload_param has no effect at stage {stage}; remove it, or set stage 3"
    for part, device in devices.items():
        if device != "nvme":
            continue
        path = zero[part].get("nvme_path")
        reason = why_not_writable(path) if path and os.path.isdir(path) else "is not a directory"
        if reason:
            yield f"{where}: {part}.nvme_path {path}: {reason}; create it, or set a different path"


def check_optimizer(zero: dict[str, Any], optimizer: str) -> Iterator[str]:
    """Yields a line if ZeRO, or its offload, does not support the optimizer. zero: section zero_optimization."""
    if offload_devices(zero)["offload_optimizer"] != "none" and not OPTIMIZERS[optimizer].deepspeed_offloads:
        # Accelerate would silently replace it by DeepSpeed's CPU Adam.
        others = name_optimizers("zero", is_offloaded=True)
        yield f"--optimizer {optimizer}: with its state offloaded, DeepSpeed runs only {others}; use {others}"
    elif "zero" not in OPTIMIZERS[optimizer].works_on:
        # ZeRO updates flattened partitions of the parameters; factored or block-wise optimizer state would differ from
        # that of unsharded parameters.
        others = name_optimizers("zero")
        yield f"--optimizer {optimizer} works on whole tensors, and ZeRO cuts them; use {others}"


def _check_names(zero: dict[str, Any], left: list[str]) -> list[str]:
    """Returns one line per setting of the section zero_optimization whose name or value DeepSpeed rejects."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # imported here because it takes seconds
    from pydantic import ValidationError

    old = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
    problems = [f'{name} is outdated; write "{new}": {{"device": "cpu"}}' for name, new in old.items() if name in zero]
    if problems:
        return problems
    fields = {name for key, facts in DeepSpeedZeroConfig.model_fields.items() for name in (key, facts.alias) if name}
    names = [name.split(".")[1] for name in left if name.startswith("zero_optimization.")]
    mistakes: dict[str, str | None] = {name: None for name in names if name not in fields}
    try:
        DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if value != "auto"})
    except ValidationError as error:
        for mistake in error.errors():
            is_unknown = mistake["type"] == "extra_forbidden"
            mistakes[".".join(map(str, mistake["loc"]))] = None if is_unknown else mistake["msg"]
    for name, reason in mistakes.items():
        nearest = difflib.get_close_matches(name, fields, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "; remove it"
        hint = f"; {name} belongs at the top of the file" if name in TOP_KEYS else hint
        problems.append(f"{name} is invalid: {reason}" if reason else f"{name} is not a setting of DeepSpeed{hint}")
    return problems


def offload_devices(zero_optimization: dict[str, Any]) -> dict[str, str]:
    """Returns the device of weights (`offload_param`) and optimizer state (`offload_optimizer`): none, cpu or nvme."""
    parts = ("offload_param", "offload_optimizer")
    return {part: (zero_optimization.get(part) or {}).get("device") or "none" for part in parts}
