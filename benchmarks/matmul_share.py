"""Measures how much of an update's time its matmuls need alone: the share of the throughput at these very shapes.

    .venv/bin/python benchmarks/matmul_share.py                          # medium, float32 and bf16, on the CPU

An update of recipes/lm.py's model is forward and backward of blocks of 512 tokens in micro-batches of 1,024, with the
recipe's loss, with and without compiled layers. Each matmul and attention operator of one micro-batch is recorded with
its shapes and dtypes. Then each is run alone, many times, on random numbers of these shapes. The share is the sum of
these times divided by the time of the micro-batch; rounds alternate between the three. Optimizer steps are left out.
Writes results/matmul-share-cpu.json.
"""

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common import arguments  # isort: skip  # noqa: F401  # before torch
import torch
from flags import output_file, positive
from machine import describe_machine

from benchmarks.compile import build
from common.internals.torch import dispatch_mode
from common.report import tracking
from common.training.compilation import compile_layers
from common.training.precision import weights_cast_once
from recipes.lm import MODEL_CONFIGS

ATEN = torch.ops.aten
MATMULS = {ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.addmm_.default}
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
ROWS, LENGTH = 2, 512  # of a micro-batch


class Recorder(dispatch_mode()):
    """Counts the matmuls: {(operator, shapes and dtypes and layouts of its tensors, other arguments): number}."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in (*MATMULS, ATTENTION, ATTENTION_BACKWARD):
            self.found[operator, tuple(map(describe, args)), tuple(sorted((kwargs or {}).items()))] += 1
        return operator(*args, **(kwargs or {}))


def describe(value):
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.stride(), value.dtype
    return "other", value


def make(described):
    kind, *what = described
    if kind == "other":
        return what[0]
    shape, stride, dtype = what
    return torch.empty_strided(shape, stride, dtype=dtype).normal_()


def seconds_alone(found, repeats=3):
    """Seconds of all recorded operators, each run alone on random numbers."""
    total = 0.0
    for (operator, described, more), number in found.items():
        args, times = [make(one) for one in described], []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            operator(*args, **dict(more))
            times.append(time.perf_counter() - started)
        total += number * median(times[1:])
    return total


def step(model, ids, precision):
    """Seconds of forward and backward of a micro-batch; the weights are cast before."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), weights_cast_once(True):
        started = 0.0
        for _ in range(2):  # the first also casts the weights, which an update does once
            started = time.perf_counter()
            model(input_ids=ids, targets=ids.flatten(), target_rows=torch.arange(ids.numel())).backward()
        return time.perf_counter() - started


def measure(size, precision, rounds):
    (plain, ids), (compiled, _), recorder = build(size, ROWS, LENGTH), build(size, ROWS, LENGTH), Recorder()
    compile_layers(compiled.base_model, varies=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), recorder:
        plain(input_ids=ids, targets=ids.flatten(), target_rows=torch.arange(ids.numel())).backward()
    step(compiled, ids, precision)
    times = {"alone": [], "plain": [], "compiled": []}
    for _ in range(rounds):
        times["alone"].append(seconds_alone(recorder.found))
        times["plain"].append(step(plain, ids, precision))
        times["compiled"].append(step(compiled, ids, precision))
    seconds = {name: median(values) for name, values in times.items()}
    shares = {
        name: median(alone / own for alone, own in zip(times["alone"], times[name], strict=True))
        for name in ("plain", "compiled")
    }
    return {"size": size, "precision": precision, "seconds": seconds, "share": shares, "operators": len(recorder.found)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["medium"], choices=MODEL_CONFIGS)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--output", type=output_file, default=ROOT / "benchmarks/results/matmul-share-cpu.json")
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        for precision in ("float32", "bf16"):
            rows.append(measure(size, precision, args.rounds))
            print(rows[-1], flush=True)
    facts = {"command": "python benchmarks/matmul_share.py", "date": str(datetime.date.today())}
    facts |= {"machine": describe_machine(), "threads": torch.get_num_threads(), "versions": tracking.versions()}
    args.output.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
