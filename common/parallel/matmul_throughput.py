"""Measures matmul throughput. Each measurement needs a tenth of a second."""

import time
from functools import cache

import torch

FEWEST_PARAMETERS = 5_000_000  # on a CPU, smaller models spend too little time in matmuls
SIZE = {"cpu": 768, "cuda": 4096}


@cache
def multiplication_rate(device: torch.device, precision: str) -> float:
    """Returns FLOP/s of a square matmul of `SIZE[device.type]` in one precision; measured once per process."""
    size = SIZE[device.type]
    a, b = torch.ones(2, size, size, dtype=dtypes(device)[precision], device=device)
    seconds: list[float] = []
    while sum(seconds) < 0.1:
        seconds.append(seconds_of(a, b))
    return 2 * size**3 / min(seconds)


def has_rate(device: torch.device, precision: str) -> bool:
    """Returns whether `multiplication_rate` supports the device, the default dtype and the precision."""
    return device.type in SIZE and torch.get_default_dtype() == torch.float32 and precision in dtypes(device)


def dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """Returns the dtype of each measured precision, by its name in `--mixed_precision`."""
    has_fp16 = device.type == "cuda"  # Accelerate does not support fp16 on a CPU
    return {"no": torch.float32, "bf16": torch.bfloat16} | ({"fp16": torch.float16} if has_fp16 else {})


def seconds_of(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the duration of a @ b in seconds."""
    start = time.perf_counter()
    product = a @ b
    if product.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
