"""Compares the matmul throughput of the precisions.

`python -m common.parallel.precision_choice RECIPE` prints the launch flags of the fastest precision.

On a CPU with AMX or AVX512-BF16, bf16 is several times as fast as float32, on any other CPU it is not faster. GPUs
since Ampere support bf16, since Volta fp16.
"""

import statistics
import sys

import torch

from common.parallel.matmul_throughput import (
    FEWEST_PARAMETERS,
    SIZE,
    can_measure_throughput,
    dtypes,
    matmul_durations,
    measure_throughput,
)

# Minimum ratio of matmul throughputs. Below it, the full update is not faster, because only its matmuls speed up.
MIN_SPEEDUP = 1.5
# Recipes whose smallest model is faster in bf16 on two cores with AMX, although it is below FEWEST_PARAMETERS. In the
# other recipes it gains less, is slower, or ends with a higher held-out loss (benchmarks/precision.py).
GAIN = ("lm",)


def measure_throughputs(device: torch.device) -> dict[str, float]:
    """Returns FLOP/s of a matmul of the device's SIZE, by precision as `--mixed_precision` names it."""
    return {name: measure_throughput(device, name) for name in dtypes(device)}


def sustained_rates(device: torch.device, seconds: float) -> dict[str, float]:
    """Returns FLOP/s by precision, each the mean over `seconds` seconds.

    This includes effects that short measurements miss: a hot or power-limited GPU, and other programs on the device.
    """
    measured = {name: matmul_durations(device, name, seconds) for name in dtypes(device)}
    flops = 2 * SIZE[device.type] ** 3
    return {name: flops / statistics.fmean(durations[1:] or durations) for name, durations in measured.items()}


def fastest(rates: dict[str, float], running: str) -> str:
    """Returns the fastest precision of `rates` if it is MIN_SPEEDUP times as fast as `running`, else `running`."""
    best = max(rates, key=rates.__getitem__)
    return best if rates[best] > MIN_SPEEDUP * rates[running] else running


def advise(device: torch.device, running: str, num_parameters: int) -> str:
    """Returns text for the run summary if a different precision than `running` is faster, otherwise ""."""
    is_small = device.type == "cpu" and num_parameters < FEWEST_PARAMETERS
    if is_small or not can_measure_throughput(device, running):
        return ""
    rates = measure_throughputs(device)
    if (best := fastest(rates, running)) == running:
        return ""
    name = "float32" if best == "no" else best
    faster = f"{rates[best] / rates[running]:.1f} times as fast"
    return f"; this machine multiplies {name} {faster}: before the recipe, --mixed_precision {best}"


def main(recipe: str = "lm") -> None:
    """Prints flags of `accelerate launch` for `make train`, which trains the recipe's smallest model."""
    if torch.cuda.is_available():
        best = fastest(measure_throughputs(torch.device("cuda")), "bf16")
        config, flags = "single_gpu", "" if best == "bf16" else f" --mixed_precision {best}"
    else:
        best, flags = "no", ""
        if recipe in GAIN:
            best = fastest(measure_throughputs(torch.device("cpu")), "no")
        config = "cpu_bf16" if best == "bf16" else "cpu"
    print(f"--config_file accelerate_configs/{config}.yaml{flags}")


if __name__ == "__main__":
    main(*sys.argv[1:])
