"""In which precision does this machine multiply fastest? `python -m common.parallel.rates` prints launch flags for it.

Measured in about a tenth of a second. A CPU with AMX or AVX512-BF16 multiplies bf16 several times as fast as float32,
any other no faster; a GPU since Ampere has bf16, one since Volta fp16.
"""

import time

import torch

# Casts, norms, softmax and the optimizer stay in float32: products must be this much faster for an update to be.
PAYS = 1.5
SIZE = {"cpu": 768, "cuda": 4096}


def multiplication_rates(device: torch.device) -> dict[str, float]:
    """FLOP/s of a matrix product of the device's SIZE, by precision as `--mixed_precision` names it."""
    size = SIZE[device.type]
    dtypes = {"no": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":  # Accelerate has no fp16 on a CPU
        dtypes["fp16"] = torch.float16
    rates = {}
    for name, dtype in dtypes.items():
        a, b = torch.ones(2, size, size, dtype=dtype, device=device)
        seconds = min(_seconds(a, b) for _ in range(4))
        rates[name] = 2 * size**3 / seconds
    return rates


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    start = time.perf_counter()
    product = a @ b
    if product.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def fastest(rates: dict[str, float], running: str) -> str:
    """The precision to run in, out of those in `rates`: `running`, unless another one is PAYS times as fast."""
    best = max(rates, key=rates.__getitem__)
    return best if rates[best] > PAYS * rates[running] else running


def advise(device: torch.device, running: str) -> str:
    """What another precision than `running` would give, to end the first printed block's line; empty for nothing."""
    if device.type not in SIZE or torch.get_default_dtype() != torch.float32:
        return ""
    rates = multiplication_rates(device)
    if running not in rates or (best := fastest(rates, running)) == running:
        return ""
    name = "float32" if best == "no" else best
    return (
        f"; this machine multiplies {name} {rates[best] / rates[running]:.1f} times as fast: --mixed_precision {best}"
    )


def main() -> None:
    """Prints flags of `accelerate launch`, for `make train`."""
    if torch.cuda.is_available():
        best = fastest(multiplication_rates(torch.device("cuda")), "bf16")
        config, flags = "single_gpu", "" if best == "bf16" else f" --mixed_precision {best}"
    else:
        best, flags = fastest(multiplication_rates(torch.device("cpu")), "no"), ""
        config = "cpu_bf16" if best == "bf16" else "cpu"
    print(f"--config_file accelerate_configs/{config}.yaml{flags}")


if __name__ == "__main__":
    main()
