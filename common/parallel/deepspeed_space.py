"""Checks that the files and buffers of DeepSpeed's NVMe offload are large enough for the model."""

import math
import shutil
from collections.abc import Callable
from typing import Any

from accelerate.state import AcceleratorState

from common.errors import UserError, raise_errors
from common.parallel.deepspeed_files import offload_devices, read_deepspeed_config
from common.parallel.launch import Launch


def check_space(launch: Launch, parameter_sizes: Callable[[], list[int]]) -> None:
    """Checks, before the model is built, that the files and buffers of the NVMe offload are large enough.

    Sets the size of the buffers. parameter_sizes: returns the number of elements of each parameter.

    Raises UserError: one line per path with too little space, or one line if the configured buffers are too small.
    """
    check_nvme_space(launch.deepspeed_config, parameter_sizes, launch.num_machines)
    plugin = AcceleratorState().deepspeed_plugin
    if size_nvme_buffers(plugin.deepspeed_config, parameter_sizes, launch.num_processes):
        plugin.set_deepspeed_weakref()  # transformers reads this copy when it builds a model


def check_nvme_space(
    config: str | dict[str, Any], parameter_sizes: Callable[[], list[int]], num_machines: int = 1
) -> None:
    """Checks that the files of DeepSpeed's NVMe offload, if any, fit on this host, before a file is written.

    Files need 16 bytes per parameter for the optimizer (float32 master weight, AdamW's two moments, gradient), and 4
    for the parameter itself. Each host stores an equal part of them.

    Raises UserError: one line per path with too little space.
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
    raise_errors(
        f"nvme_path {path}: {num_parameters:,} parameters take {size / 1e9:.3f} GB of files there, and "
        f"{free / 1e9:.3f} GB are free; make room, or name another"
        for path, size in needed.items()
        if (free := shutil.disk_usage(path).free) < size
    )


def size_nvme_buffers(config: dict[str, Any], parameter_sizes: Callable[[], list[int]], num_processes: int) -> bool:
    """Sets the size of DeepSpeed's buffers for weights on NVMe, if not configured, in `config`.

    The size is a process's part of the largest parameter. DeepSpeed's default of 100 million elements is too small for
    the embedding of an 8 B model, which has 525 million. Returns whether the weights are on NVMe.
    Raises UserError: the configured size is too small, so DeepSpeed would fail with an assertion.
    """
    zero = config.get("zero_optimization", {})
    if offload_devices(zero)["offload_param"] != "nvme":
        return False
    needed = math.ceil(max(parameter_sizes()) / num_processes)
    given = zero["offload_param"].setdefault("buffer_size", needed)
    if given < needed:
        raise UserError(
            f"offload_param.buffer_size is {given:.0f}, but a process's share of the largest parameter has {needed} "
            "elements; remove it: it follows from the model"
        )
    return True
