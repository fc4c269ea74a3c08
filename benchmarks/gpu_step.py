"""Measures a training step of a 1.24 B Llama on one GPU, and its parts: head and loss, attention, layers.

    .venv/bin/python benchmarks/gpu_step.py                                   two minutes on an H100
    .venv/bin/python benchmarks/gpu_step.py --quick --output_dir runs/bench   a smoke test with toy sizes, on any device

Each value is in milliseconds, the mean of five repetitions after two to warm up:
    matmul       an 8192 x 8192 product in bf16, of random numbers; the reference of every utilisation
    head         forward and backward of the output head and its loss: in chunks of 512 rows as without a compiler, with
                 the compiled softmax, and by Liger Kernel, if it is installed
    attention    forward and backward of a layer's attention, by cuDNN and by flash attention, and the seconds of the
                 first call at eight new shapes
    step         forward and backward of the model: plain layers, compiled layers, and Liger's layers
FLOPs of a step: 6 x parameters x tokens, and 6 x layers x width x length x tokens for causal attention
(arXiv:2001.08361, with the backward).
"""

import argparse
import importlib.util
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from flags import output_dir
from machine import describe_machine, device_name
from throughput import this_command
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.models.attention_masks import decide_on_the_host  # noqa: E402
from common.report.tracking import versions  # noqa: E402
from common.training import compilation, fused_softmax  # noqa: E402
from common.training.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from common.training.losses import sum_token_losses  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TOY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 8192}
HAS_LIGER = DEVICE == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(action, times=5):
    for _ in range(2):
        action()
    wait()
    started = time.perf_counter()
    for _ in range(times):
        action()
    wait()
    return (time.perf_counter() - started) / times * 1e3


def head(shape, rows, with_compiler=True):
    """Milliseconds of the head and the loss for `rows` tokens."""
    hidden = torch.randn(rows, shape["hidden_size"], device=DEVICE, requires_grad=True)
    weight = torch.randn(shape["vocab_size"], shape["hidden_size"], device=DEVICE).mul_(0.02).requires_grad_()
    targets = torch.randint(shape["vocab_size"], (rows,), device=DEVICE)

    def step():
        hidden.grad = weight.grad = None
        with torch.autocast(DEVICE, torch.bfloat16):
            linear_cross_entropy(hidden, weight, None, targets).backward()

    def liger_step():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        hidden.grad = weight.grad = None
        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        loss(weight.to(torch.bfloat16), hidden.to(torch.bfloat16), targets).backward()

    if with_compiler == "liger":
        return milliseconds(liger_step)
    with mock.patch.object(fused_softmax, "can_compile", lambda _: with_compiler):
        return milliseconds(step)


def attention(shape, rows, length, backend):
    """A function that computes one layer's attention and its gradients."""
    size = shape["head_dim"]
    query, key, value = (
        torch.randn(rows, shape[heads], length, size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for heads in ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")
    )

    def step():
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()

    return step


def step_of_model(shape, layers, rows, length, rate):
    """Milliseconds, TFLOP/s, share of the matmul's, and peak memory of a step. layers: plain, compiled or liger."""
    decide_on_the_host()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).train()
    sum_token_losses(model)
    if layers == "compiled":
        compilation.compile_layers(model.base_model, False)
    elif layers == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    ids = torch.randint(shape["vocab_size"], (rows, length), device=DEVICE)
    inputs = {"targets": ids.flatten()[1:], "target_rows": torch.arange(rows * length - 1, device=DEVICE)}

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, **inputs)
        (loss / rows / length).backward()

    started = time.perf_counter()
    step()
    wait()
    found = {"first step, s": time.perf_counter() - started}
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found["ms"] = milliseconds(step)
    tokens = rows * length
    per_token = 6 * model.num_parameters() + 6 * shape["num_hidden_layers"] * shape["hidden_size"] * length
    found["TFLOP/s"] = per_token * tokens / found["ms"] / 1e9
    found["share of the matmul"] = found["TFLOP/s"] / rate
    if DEVICE == "cuda":
        found["peak, GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def measure(shape, quick):
    """All figures, by name."""
    rows, length, size = (2, 64, 256) if quick else (2, 4096, 8192)
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / milliseconds(lambda: a @ b, 20) / 1e9
    yield "matmul, TFLOP/s", rate
    yield "head, ms, without a compiler", head(shape, rows * length, False)
    yield "head, ms, compiled softmax", head(shape, rows * length)
    if HAS_LIGER:
        yield "head, ms, Liger", head(shape, rows * length, "liger")
    backends = {"flash": SDPBackend.FLASH_ATTENTION}
    if DEVICE == "cuda":
        backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION} | backends
    for name, backend in backends.items():
        yield f"attention, ms, {name}", milliseconds(attention(shape, rows, length, backend))
        seconds = []
        for number in range(8):  # shapes that no other backend has had
            step = attention(shape, 9 + number, 200 + 37 * number, backend)
            seconds.append(first_call(step))
        yield f"first call at a new shape, s, {name}", seconds
    kinds = ["plain", "compiled"] + ["liger"] * HAS_LIGER
    fresh = multiprocessing.get_context("spawn")  # compiled graphs keep the weights of their models
    for layers, rows_at_once in [(kind, rows) for kind in kinds] + [("compiled", 2 * rows)]:
        with ProcessPoolExecutor(1, fresh) as process:
            found = process.submit(step_of_model, shape, layers, rows_at_once, length, rate).result()
        yield f"step, {layers}, {rows_at_once} x {length}", found


def first_call(step):
    wait()
    started = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that it runs, no more")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    if DEVICE == "cpu" and not args.quick:
        parser.error("torch sees no GPU; --quick runs toy sizes on a CPU")
    results = {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "versions": versions()}
    results |= {"command": this_command(), "figures": {}}
    for name, value in measure(TOY if args.quick else LLAMA, args.quick):
        results["figures"][name] = value
        print(name, json.dumps(value), flush=True)
    path = args.output_dir / f"gpu-step-{device_name()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
