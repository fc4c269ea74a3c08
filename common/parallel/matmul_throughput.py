"""Measures matmul throughput. A measurement needs a tenth of a second on a CPU, half a second on a GPU."""

import time
from functools import cache

import torch

FEWEST_PARAMETERS = 5_000_000  # on a CPU, smaller models spend too little time in matmuls
SIZE, SECONDS = {"cpu": 768, "cuda": 8192}, {"cpu": 0.1, "cuda": 0.5}


@cache
def measure_throughput(device: torch.device, precision: str) -> float:
    """Returns FLOP/s of a square matmul of `SIZE[device.type]` in one precision; measured once per process."""
    return 2 * SIZE[device.type] ** 3 / min(matmul_durations(device, precision, SECONDS[device.type]))


def matmul_durations(device: torch.device, precision: str, seconds: float) -> list[float]:
    """Returns durations of a matmul, for `seconds` seconds. Random numbers, because a GPU clocks constants higher."""
    size, own = SIZE[device.type], torch.Generator(device)  # so that the run's RNG states stay the same
    a, b = torch.randn(2, size, size, generator=own, device=device, dtype=dtypes(device)[precision])
    durations: list[float] = []
    while sum(durations) < seconds:
        durations.append(seconds_of(a, b))
    return durations


def can_measure_throughput(device: torch.device, precision: str) -> bool:
    """Returns whether `measure_throughput` supports the device, the default dtype and the precision."""
    return device.type in SIZE and torch.get_default_dtype() == torch.float32 and precision in dtypes(device)


def dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """Returns the dtype of each measured precision, by its name in `--mixed_precision`."""
    has_fp16 = device.type == "cuda"  # Accelerate does not support fp16 on a CPU
    return {"no": torch.float32, "bf16": torch.bfloat16} | ({"fp16": torch.float16} if has_fp16 else {})


def seconds_of(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the duration of a @ b in seconds."""
    if a.is_cuda:
        from common.parallel.gpu_timing import mean_seconds

        return mean_seconds(a, b)
    start = time.perf_counter()
    a @ b
    return time.perf_counter() - start
