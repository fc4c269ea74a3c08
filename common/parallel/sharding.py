"""Checks FSDP2's requirements, and configures FSDP2 and DeepSpeed, also without a GPU. Files: `deepspeed_files`."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from common.internals.accelerate_state import shard_over, shard_without_gpu
from common.internals.transformers import unsplit_layers
from common.parallel.deepspeed_files import offload_devices
from common.parallel.extensions import build_extensions
from common.training.optimizer_choice import name_optimizers
from common.training.optimizers import OPTIMIZERS
from common.training.process_grid import Degrees


def check_fsdp(source: str, settings: dict[str, Any], optimizer: str) -> Iterator[str]:
    """Yields a line for each FSDP setting of the launcher that would change the recipe's run."""
    if not OPTIMIZERS[optimizer].is_elementwise:
        # Their steps mix the shards (DTensor) with plain tensors, which raises an error.
        others = name_optimizers("is_elementwise")
        yield f"--optimizer {optimizer} does not work on the shards of FSDP2; use {others}, or multi_gpu.yaml"
    version = settings.get("fsdp_version")
    if str(version) != "2":
        yield f"{source} asks for FSDP {version}; set fsdp_version: 2, which the recipes are tested with"
    if str(settings.get("fsdp_activation_checkpointing")).lower() == "true":
        yield (
            f"{source} sets fsdp_activation_checkpointing; take it out and use --activation_checkpointing full, which "
            "works in every mode"
        )


LAYER_SETTINGS = ("fsdp_transformer_layer_cls_to_wrap", "deepspeed_moe_layer_cls_names")


def check_layer_classes(
    source: str, settings: dict[str, Any], mode: str, make_empty: Callable[[], torch.nn.Module]
) -> Iterator[str]:
    """Yields a line for each launcher setting with a layer class that the model does not contain.

    Args:
        mode: FSDP or DeepSpeed, whose settings count.
        make_empty: builds the model on the meta device.
    """
    for setting in LAYER_SETTINGS:
        wanted = [name.strip() for name in str(settings.get(setting) or "").split(",") if name.strip()]
        if not wanted or not setting.startswith(f"{mode.lower()}_"):
            continue
        model = make_empty()
        found = {type(module).__name__ for module in model.modules()}
        if missing := [name for name in wanted if name not in found]:
            blocks = [part for module in model.modules() if isinstance(module, torch.nn.ModuleList) for part in module]
            layers = found & unsplit_layers(model)
            layers = layers or {type(block).__name__ for block in blocks}
            yield (
                f"{source}: {setting}: {type(model).__name__} has no layer {', '.join(missing)}; use "
                f"{' or '.join(sorted(layers))}, or remove the setting"
            )


def prepare_rehearsal(mode: str) -> None:
    """Prepares sharding on a CPU, before the processes connect."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # also if there is a GPU, and the config sets use_cpu
    # With ACCELERATE_USE_CPU, Accelerate would drop FSDP and DeepSpeed. Without it, on a machine without a GPU,
    # Accelerate finds no backend unless it is set.
    os.environ["ACCELERATE_USE_CPU"] = "false"
    if mode == "DeepSpeed":
        build_extensions([])  # DeepSpeed's collectives need their extension when the processes connect


def connect_rehearsal(mode: str) -> None:
    """Lets Accelerate shard on a CPU over gloo; the state that it creates by default does not support this."""
    PartialState(backend="gloo")
    if mode == "FSDP":
        shard_without_gpu()


def updates_on_host(accelerator: Accelerator) -> bool:
    """Returns whether the optimizer state is offloaded, so that the CPU computes the updates."""
    if accelerator.deepspeed_plugin is not None:
        zero = accelerator.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        return offload_devices(zero)["offload_optimizer"] != "none"
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    return fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy)


def shard_over_peers(accelerator: Accelerator, degrees: Degrees) -> None:
    """Lets FSDP2 shard over the ranks with the same part of each layer; by default, it shards over all ranks."""
    if degrees.tensor == 1 or getattr(accelerator.state, "fsdp_plugin", None) is None:
        return
    # The same sizes as Accelerate's own mesh. That mesh is not used, because its tensor parallelism would partition the
    # model again.
    sizes, names = (degrees.data, degrees.tensor), ("dp_shard_cp", "tp")
    mesh = init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=names)
    shard_over(accelerator, mesh["dp_shard_cp"], degrees.data)


def configure_plugins(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Sets the recipe's values in the plugins of FSDP2 and DeepSpeed, before `accelerator.prepare`."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.device.type == "cpu" and fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy):
        fsdp.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinned memory is for copies to a GPU
    if fsdp is not None and fsdp.mixed_precision_policy is not None:
        # Accelerate would sum gradients over the ranks, and round the loss, in the compute dtype. Outputs are not cast:
        # the policy applies to every layer, whose hidden states stay in the compute dtype, and a loss is float32
        # anyway.
        sums = {"reduce_dtype": torch.float32, "output_dtype": None}
        fsdp.mixed_precision_policy = dataclasses.replace(fsdp.mixed_precision_policy, **sums)
    if accelerator.deepspeed_plugin is not None:
        from common.internals.deepspeed import silence_memory_report  # here, as most runs do not use DeepSpeed

        # DeepSpeed calls collectives by names that torch 2.13 deprecates, with a warning per call.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        config = accelerator.deepspeed_plugin.deepspeed_config
        build_extensions(offload_devices(config.get("zero_optimization", {})).values())
        config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed requires a number; nothing is divided by it
        if config.get("gradient_clipping", "auto") == "auto":
            # Never 0: DeepSpeed would then not compute the norm, and would not detect a non-finite gradient.
            config["gradient_clipping"] = max_grad_norm or 1e30
        # In every precision gradients are summed in float32, over micro-batches and over ranks.
        config["data_types"], config["communication_data_type"] = {"grad_accum_dtype": "fp32"}, "fp32"
        # With these settings, ZeRO-1 in bf16 uses a different optimizer of DeepSpeed. By default it keeps each gradient
        # a second time, in bf16, and prints eighteen lines about memory.
        config.setdefault("bf16", {})["immediate_grad_update"] = True
        silence_memory_report()
