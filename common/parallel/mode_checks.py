"""Checks of launches with several processes or sharding: their settings, and the recipe flags that they support."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common.internals.transformers import unsplit_layers
from common.parallel import parallelism_config
from common.parallel.launch import Launch
from common.training.optimizer_choice import name_optimizers
from common.training.optimizers import OPTIMIZERS
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Arguments, Traits


def check_requested(launch: Launch, args: Arguments, traits: Traits) -> list[str]:
    """Returns the lines of `launch_checks.check_requested` that depend on the mode or on the process grid."""
    problems: list[str] = []
    if launch.mode not in ("plain", "DDP", "FSDP", "DeepSpeed"):
        problems.append(
            f"{launch.source} asks for {launch.mode}, which no recipe runs; use a file of accelerate_configs/"
        )
    if launch.mode == "FSDP":
        problems += check_fsdp(launch.source, launch.settings, args.optimizer)
    if launch.mode == "DeepSpeed":
        problems += check_deepspeed_flags(launch)
    sizes, named = launch.sizes, {*launch.given, *launch.file_settings}
    problems += parallelism_config.check_others(launch.source, launch.settings, named)
    problems += parallelism_config.check_sizes(launch.source, sizes, launch.mode, launch.num_processes)
    problems += _check_parts(launch, traits)
    problems += parallelism_config.check_parts(launch.source, sizes, launch.mixed_precision, args.optimizer)
    problems += _check_accumulation(launch, args)
    if args.shared("quantize") and launch.mode == "DeepSpeed":
        problems.append(
            f"--quantize {args.quantize}: DeepSpeed does not support weights in 4 bits, and {launch.source} sets it; "
            "use fsdp2.yaml, multi_gpu.yaml or single_gpu.yaml, or remove --quantize"
        )
    if args.shared("teacher"):
        problems += _check_teacher(launch)
    return problems


def _check_teacher(launch: Launch) -> Iterator[str]:
    """Yields a line if a launch does not support a second model, which gets whole sequences and is whole or sharded."""
    kinds = {"tensor parallelism": launch.grid.tensor > 1, "sequence parallelism": launch.grid.sequence > 1}
    if launch.mode == "DeepSpeed":
        from common.parallel.deepspeed_files import read_deepspeed_config

        zero = read_deepspeed_config(launch.deepspeed_config).get("zero_optimization")
        kinds["ZeRO-3"] = isinstance(zero, dict) and zero.get("stage") == 3
    for kind in (kind for kind, is_used in kinds.items() if is_used):
        yield f"--teacher is not supported with {kind}, which {launch.source} sets; use fsdp2.yaml or multi_gpu.yaml"


def check_flags(launch: Launch, args: Arguments, traits: Traits) -> list[str]:
    """Returns one line per flag that the mode does not support, or that conflicts with the DeepSpeed file."""
    problems = list(_check_budget(launch, args, traits))
    if launch.mode == "DeepSpeed":
        from common.parallel.deepspeed_flags import check_deepspeed

        problems += check_deepspeed(launch.deepspeed_config, args, launch.mixed_precision, launch.grid)
    return problems


def check_fsdp(source: str, settings: dict[str, Any], optimizer: str) -> Iterator[str]:
    """Yields a line for each FSDP setting of the launcher that would change the recipe's run."""
    if "shards" not in OPTIMIZERS[optimizer].works_on:
        # The steps of other optimizers mix shards (DTensor) with plain tensors, which raises an error.
        others = name_optimizers("shards")
        yield f"--optimizer {optimizer} does not work on the shards of FSDP2; use {others}, or multi_gpu.yaml"
    version = settings.get("fsdp_version")
    if str(version) != "2":
        yield f"{source} asks for FSDP {version}; set fsdp_version: 2, which the recipes are tested with"
    if str(settings.get("fsdp_activation_checkpointing")).lower() == "true":
        yield (
            f"{source} sets fsdp_activation_checkpointing; remove it and use --activation_checkpointing full, which "
            "works in every mode"
        )


def check_model(launch: Launch, config: Any, model_class: Any, meta_model: Callable[[], torch.nn.Module]) -> list[str]:
    """Returns one line per reason why the launch does not support the model; called before the model is built.

    model_class: an Auto class. meta_model: builds the model on the meta device. Raises UserError: NVMe is too small.
    """
    shared = check_shared_model(config, model_class, meta_model, launch.grid)
    problems = [*shared, *check_layer_classes(launch, meta_model)]
    if launch.mode == "DeepSpeed" and not problems:
        from common.parallel import deepspeed_space

        deepspeed_space.check_space(launch, lambda: [p.numel() for p in meta_model().parameters()])
    return problems


def check_shared_model(config: Any, model_class: Any, meta_model: Callable[[], Any], grid: ProcessGrid) -> list[str]:
    """Returns one line per reason why a group of ranks cannot share the model's sequences or layers."""
    if grid.sequence > 1:
        from common.parallel import sequence

        return list(sequence.check_model(config, model_class, grid))
    if grid.tensor == 1:
        return []
    from common.parallel import tensor

    return list(tensor.check_model(config, meta_model, grid))


LAYER_SETTINGS = ("fsdp_transformer_layer_cls_to_wrap", "deepspeed_moe_layer_cls_names")


def check_layer_classes(launch: Launch, meta_model: Callable[[], torch.nn.Module]) -> Iterator[str]:
    """Yields a line for each layer class in the launcher settings that the model does not contain."""
    for setting in LAYER_SETTINGS:
        wanted = [name.strip() for name in str(launch.settings.get(setting) or "").split(",") if name.strip()]
        if not wanted or not setting.startswith(f"{launch.mode.lower()}_"):
            continue
        model = meta_model()
        found = {type(module).__name__ for module in model.modules()}
        if missing := [name for name in wanted if name not in found]:
            blocks = [part for module in model.modules() if isinstance(module, torch.nn.ModuleList) for part in module]
            layers = found & unsplit_layers(model)
            layers = layers or {type(block).__name__ for block in blocks}
            yield (
                f"{launch.source}: {setting}: {type(model).__name__} has no layer {', '.join(missing)}; use "
                f"{' or '.join(sorted(layers))}, or remove the setting"
            )


# Launcher settings that a DeepSpeed file overrides.
DEEPSPEED_FLAGS = {f"offload_{part}_{what}" for part in ("optimizer", "param") for what in ("device", "nvme_path")}
DEEPSPEED_FLAGS |= {"zero_stage", "gradient_clipping", "zero3_save_16bit_model"}


def check_deepspeed_flags(launch: Launch) -> Iterator[str]:
    """Yields one line per launcher setting that the DeepSpeed file overrides, or that would replace an `auto` in it."""
    file = launch.deepspeed_config
    if not isinstance(file, str):
        return
    for name in sorted(DEEPSPEED_FLAGS):
        if name in launch.given:
            yield (
                f"--{name} {launch.settings[name]} next to {file}: the file overrides it; remove the flag, or set "
                "a different file with --deepspeed_config_file"
            )
        elif name in launch.file_settings:
            yield f"{launch.config_file}: {name} next to {file}: the latter overrides it; remove one of them"
    if "ACCELERATE_GRADIENT_CLIPPING" in launch.environment:
        yield "ACCELERATE_GRADIENT_CLIPPING in the environment has no effect; unset it, use --max_grad_norm"


def _check_parts(launch: Launch, traits: Traits) -> list[str]:
    """Returns a line if the recipe does not support the launch's pipeline or sequence parallelism."""
    stages, asked = launch.grid.pipeline, f"{launch.source} sets parallelism_config_pp_size to"
    if stages > 1 and traits.pipeline_schedule is None:
        return [f"{asked} {stages}, and this recipe has no stages; run recipes/pipeline.py, or take another config"]
    if launch.grid.sequence > 1 and not traits.splits_sequences:
        asked = f"{launch.source} sets parallelism_config_sp_size to {launch.grid.sequence}"
        return [f"{asked}, and this recipe's loss needs all tokens of a text; set it to 1, or take another config"]
    return []


def _check_budget(launch: Launch, args: Arguments, traits: Traits) -> Iterator[str]:
    """Yields a line if --micro_batch_tokens auto is set, but the ranks communicate in forward or backward."""
    is_alone = launch.mode in ("plain", "DDP") and launch.grid.data_parallel == launch.num_processes
    if traits.lengths_vary and args.micro_batch_tokens == "auto" and not is_alone:
        yield (
            f"--micro_batch_tokens auto: in {launch.source} the processes communicate in each forward pass, so the "
            "others would hang if one ran out of memory; pass a number (--plan prints the largest that fits)"
        )


def _check_accumulation(launch: Launch, args: Arguments) -> list[str]:
    """Returns a line if the launch sets gradient accumulation steps, because they follow from the recipe's flags.

    Under DeepSpeed, the launch may set the number that follows from the flags.
    """
    in_environment = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    allowed = ["1", "auto"]
    if {launch.gradient_accumulation_steps, in_environment} <= {*allowed}:
        return []
    from common.parallel import deepspeed_flags

    known_steps, arithmetic = deepspeed_flags.accumulation_steps(args, launch.grid)
    if launch.mode == "DeepSpeed" and known_steps is not None:
        allowed.append(f"{known_steps:g}")
    for source, steps in ((launch.source, launch.gradient_accumulation_steps), ("the environment", in_environment)):
        if steps not in allowed:
            setting = f"{source} sets gradient_accumulation_steps to {steps}"
            return [f"{setting}; remove it: accumulation follows from {arithmetic}"]
    return []
