"""Lists every effective setting with its value and its source: a file, flag, variable or default."""

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from common.parallel.distributed_mode import describe_mode, describe_precision
from common.parallel.launch import Launch
from common.redaction import redact
from common.training.epochs import EPOCHS
from common.training.recipe_traits import given_flags

# Prefixes of environment variables that affect a run, or the locations of its files.
PREFIXES = "ACCELERATE_ CUDA_ DS_ FSDP_ GLOO_ HF_ MKL_ NCCL_ NVIDIA_ OMP_ PYTORCH_ TOKENIZERS_ TORCH TRANSFORMERS_"
PREFIXES += " XDG_CACHE_HOME"
LAUNCH_SETTINGS = "num_machines machine_rank main_process_ip main_process_port num_processes mixed_precision use_cpu"
LAUNCH_SETTINGS += " gpu_ids num_cpu_threads_per_process"


def list_settings(args: argparse.Namespace, launch: Launch, accelerator: Accelerator) -> Iterator[tuple[str, Any, str]]:
    """Yields name, value and source of every setting of this run.

    Call it after `accelerator.prepare`, which resolves DeepSpeed's `auto`.
    """
    yield ("mode", describe_mode(accelerator), "what runs")
    yield ("device", accelerator.device, "what runs")
    yield ("precision", describe_precision(accelerator), "what runs")
    yield ("processes", accelerator.num_processes, "what runs")
    yield ("CPU threads of a process", torch.get_num_threads(), "what runs")

    for name in sorted(launch.settings):
        is_fsdp = name.startswith("fsdp_") and launch.mode == "FSDP"
        is_parallel = name.startswith("parallelism_config_") and launch.settings.get("use_parallelism_config")
        if name in LAUNCH_SETTINGS.split() or is_fsdp or is_parallel:
            yield (name, launch.settings[name], _source(launch, name))

    if accelerator.deepspeed_plugin is not None:
        from common.parallel.deepspeed_files import BATCH_KEYS, flatten, read_deepspeed_config

        source = launch.deepspeed_config if isinstance(launch.deepspeed_config, str) else launch.source
        requested = dict(flatten(read_deepspeed_config(launch.deepspeed_config)))
        for name, value in flatten(accelerator.deepspeed_plugin.deepspeed_config):
            if name in requested and requested[name] == value:
                yield (name, value, source)
            elif name in requested and requested[name] == "auto" and name not in BATCH_KEYS:
                yield (name, value, f"{source}: auto, resolved")
            else:
                yield (name, value, "set by Accelerate or the recipe")

    for name, value in vars(args).items():
        yield (f"--{name}", bool(value) if name == "compile" else value, _source_of_flag(name))

    for name, value in sorted(launch.environment.items()):
        if name.startswith(tuple(PREFIXES.split())):
            yield (name, value, "environment")


def _source(launch: Launch, name: str) -> str:
    if name in launch.given:
        return f"flag --{name} of accelerate launch"
    if launch.file_settings.get(name) is not None:
        return str(launch.config_file)
    return "default of accelerate launch"


def _source_of_flag(name: str) -> str:
    flags = given_flags()
    if f"--{name}" in flags:
        words = " ".join(sys.argv[1:]).replace("=", " ").split()
        text = dict(itertools.pairwise([*words, ""]))[f"--{name}"]
        return f"flag: {text}, resolved" if EPOCHS.fullmatch(text) else "flag"
    if f"--no-{name}" in flags:
        return f"flag --no-{name}"
    if name == "num_updates" and "--num_epochs" in flags:
        return "--num_epochs"
    return "default: auto, resolved" if name == "compile" else "default"


def print_dry_run(
    args: argparse.Namespace, launch: Launch, accelerator: Accelerator, num_left: int, memory: str
) -> None:
    """Prints the settings as three columns (name, value, source), without secrets, and the outcome of a dry run.

    num_left: number of updates that remain to be trained. memory: predicted peak memory, as text.
    """
    settings = list_settings(args, launch, accelerator)
    rows = [[name, str(redact({name: value})[name]), source] for name, value, source in settings]
    widths = [min(limit, max(len(row[column]) for row in rows)) for column, limit in ((0, 60), (1, 40))]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows]
    done = "one forward and one backward done" if num_left else "no update is left"
    lines = ["every setting, its value, and where it comes from:", *lines, f"memory: {memory}"]
    accelerator.print("\n".join([*lines, f"dry run: {done}, nothing written"]), flush=True)
