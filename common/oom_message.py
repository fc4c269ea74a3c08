"""The message after an out-of-memory error: peak memory, the flags that save most, and the --plan command."""

import shlex
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from common.host_memory import available_per_process, format_bytes
from common.models import adapters
from common.models.model_setup import without_wrapper
from common.parallel.launch import runs_on_cpu
from common.planner import repeated_flags
from common.report.tracking import peak_memory_bytes
from common.training.optimizer_choice import kinds_of_split, smaller_optimizers
from common.training.optimizers import OPTIMIZERS
from common.training.out_of_memory import is_out_of_memory

MOST = 4  # maximum number of suggested flags
# Fractions of the activation memory that each mode of --activation_checkpointing keeps (docs/memory.md).
KEPT = {"none": 1.0, "selective": 0.6, "full": 0.1}


def explain(run: Any, error: BaseException) -> None:
    """Adds a note to an error if memory ran out. run: a `common.run.Run`."""
    if not is_out_of_memory(error):
        return
    traceback.clear_frames(error.__traceback__)  # frees the activations, which local variables of the frames reference
    savings = sorted(_savings(run), key=lambda saving: -saving[0])[:MOST]
    lines = [f"Memory ran out. {_describe_peak(run.device, run.memory_before)}."]
    if savings:
        lines += ["These flags need less memory, the largest saving first:", *(f"  {flag}" for _, flag in savings)]
    plan = shlex.join(["python", sys.argv[0], *repeated_flags(sys.argv[1:]), "--plan"])
    error.add_note("\n".join(["", *lines, f"What fits this machine: {plan}"]))


def _describe_peak(device: torch.device, before: int) -> str:
    peak = format_bytes(peak_memory_bytes(device))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = format_bytes(torch.cuda.memory_reserved(device))
        return f"Peak: {peak} allocated; {reserved} reserved of {format_bytes(total)}, {format_bytes(free)} free"
    left = format_bytes(available_per_process())
    return f"Peak resident memory: {peak} ({format_bytes(before)} before the model was built); available: {left}"


def _savings(run: Any) -> Iterator[tuple[float, str]]:
    """Yields flags that this run's mode supports, each with its estimated saving in bytes per process.

    The estimate: weights use 4 bytes per parameter, gradients 4 and the optimizer its state per trained parameter, all
    sharded with FSDP and DeepSpeed. The rest of the peak is activations, of which a mode keeps the fraction in `KEPT`.
    """
    args, launch, model = run.args, run.launch_config, getattr(run, "model", None)
    model = without_wrapper(model) if model is not None else run.meta_model()
    is_sharded = launch.mode in ("FSDP", "DeepSpeed")
    shards = launch.num_processes if is_sharded else 1
    total, trained = (number / shards for number in adapters.count_parameters(model))
    state = OPTIMIZERS[args.optimizer].state_bytes * trained
    static = 4.0 * total + 4.0 * trained + state
    activations = max(0.0, peak_memory_bytes(run.device) - run.memory_before - static)
    yield from _smaller_micro_batch(run, activations)
    if getattr(model, "supports_gradient_checkpointing", False) and args.activation_checkpointing in KEPT:
        kept = KEPT[args.activation_checkpointing]
        if kept > KEPT["full"]:
            yield activations * (1 - KEPT["full"] / kept), "--activation_checkpointing full"
        elif not runs_on_cpu(launch):
            yield activations / 2, "--activation_checkpointing offload"
    if launch.mixed_precision == "no" and launch.mode != "DeepSpeed" and not runs_on_cpu(launch):
        yield activations / 2, "--mixed_precision bf16 (before the recipe)"
    if launch.mode == "DDP" and launch.grid.group_size == launch.grid.pipeline == 1:
        yield static * (1 - 1 / launch.num_processes), "--config_file accelerate_configs/fsdp2.yaml"
    elif launch.mode == "plain" and not runs_on_cpu(launch):
        yield static, "--config_file accelerate_configs/fsdp2_offload.yaml --num_processes 1"
    if smaller := smaller_optimizers(args.optimizer, *kinds_of_split(launch.mode, launch.grid.tensor)):
        name = min(smaller, key=lambda name: OPTIMIZERS[name].state_bytes)
        yield state - OPTIMIZERS[name].state_bytes * trained, f"--optimizer {name}"
    if "lora_rank" in args.shared_flags and not adapters.is_asked(args) and args.model_name_or_path:
        yield 4.0 * trained + state, "--lora_rank 16"


def _smaller_micro_batch(run: Any, activations: float) -> Iterator[tuple[float, str]]:
    args = run.args
    if args.micro_batch_size:
        if args.micro_batch_size > 1:
            yield activations / 2, f"--micro_batch_size {args.micro_batch_size // 2}"
    elif (loader := getattr(run, "loader", None)) and loader.dataset.samples.max_length <= args.micro_batch_tokens // 2:
        yield activations / 2, f"--micro_batch_tokens {args.micro_batch_tokens // 2}"
