"""Description of the machine that a benchmark runs on, for its results."""

import os
import platform
from pathlib import Path

import psutil
import torch


def describe_machine() -> str:
    """Returns processor, bf16 instructions, cores, memory, system and GPUs of this machine, without its name."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line for line in cpuinfo.splitlines() if "model name" in line]
    cpu = names[0].split(":")[1].strip() if names else platform.processor() or platform.machine()
    bf16 = [label for flag, label in (("avx512_bf16", "AVX512-BF16"), ("amx_bf16", "AMX-BF16")) if flag in cpuinfo]
    cpu += f" with {' and '.join(bf16)}" if bf16 else ""
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB of memory"
    machine = f"{cpu}, {num_cores()} cores, {memory}, {platform.system()}"
    if not torch.cuda.is_available():
        return machine
    number = torch.cuda.device_count()
    return f"{f'{number} ' if number > 1 else ''}{torch.cuda.get_device_name()}; {machine}"


def num_cores() -> int:
    """Returns the number of physical cores that this process may use."""
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count()
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def device_name() -> str:
    """Returns the GPU's name, or cpu, as in the names of result files."""
    return torch.cuda.get_device_name().lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"
