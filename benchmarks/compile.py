"""Compares compiled layers with others on a CPU: forward and backward of 2,048 tokens in blocks, loss included.

    .venv/bin/python benchmarks/compile.py

For each size of recipes/lm.py and each precision, it times updates of two models with equal weights in turn, and the
first update of the compiled one: with an empty cache of code, then in a new process with the code of the first one.
Writes results/compile-cpu.json.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

import torch
from flags import output_file, positive
from machine import describe_machine
from transformers import LlamaForCausalLM

from common.report import tracking
from common.training.compilation import compile_layers
from common.training.losses import sum_token_losses
from common.training.precision import weights_cast_once
from recipes.lm import MODEL_CONFIGS, SHAPE, LlamaConfig

LENGTH, ROWS, MICRO_STEPS = 256, 4, 2  # of the micro-batches of an update


def build(size, rows, length):
    """Returns a model from scratch that returns the recipe's loss, and token ids (rows, length)."""
    *shape, vocabulary, _ = MODEL_CONFIGS[size]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**dict(zip(SHAPE, shape, strict=True)), vocab_size=vocabulary))
    sum_token_losses(model)
    return model.train(), torch.randint(vocabulary, (rows, length))


def update(model, ids, precision):
    """Seconds of an update's forward and backward passes, and the loss."""
    model.zero_grad()
    started, loss = time.perf_counter(), None
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), weights_cast_once(True):
        for _ in range(MICRO_STEPS):
            loss = model(input_ids=ids, targets=ids.flatten(), target_rows=torch.arange(ids.numel()))
            loss.backward()
    return time.perf_counter() - started, loss.item() / ids.numel()


def measure(size, precision, rounds):
    """Of this process: seconds of the first compiled update, and of later ones of both kinds."""
    (plain, ids), (compiled, _) = build(size, ROWS, LENGTH), build(size, ROWS, LENGTH)
    compile_layers(compiled.base_model, varies=False)
    update(plain, ids, precision)
    first, loss = update(compiled, ids, precision)
    pairs = [[update(model, ids, precision)[0] for model in (plain, compiled)] for _ in range(rounds)]
    difference = abs(loss / update(plain, ids, precision)[1] - 1)
    return {"first": first, "pairs": pairs, "relative difference of the loss": difference}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small", "medium"], choices=MODEL_CONFIGS)
    parser.add_argument("--rounds", type=positive, default=11)
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "PRECISION"), help="prints this case, measured here")
    parser.add_argument("--output", type=output_file, default=ROOT / "benchmarks/results/compile-cpu.json")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.rounds)))
        return
    rows = []
    for size in args.sizes:
        for precision in ("float32", "bf16"):
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, __file__, "--rounds", str(args.rounds), "--one", size, precision]
                env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
                cold, warm = (
                    json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
                    for _ in range(2)
                )
            pairs = cold["pairs"] + warm["pairs"]
            row = {
                "size": size,
                "precision": precision,
                "speed of compiled layers": median(plain / compiled for plain, compiled in pairs),
                "seconds of an update": [median(times) for times in zip(*pairs, strict=True)],
                "seconds of the first update": [cold["first"], warm["first"]],
                "relative difference of the loss": cold["relative difference of the loss"],
            }
            rows.append(row)
            print(row, flush=True)
    facts = {
        "command": "python benchmarks/compile.py",
        "date": str(datetime.date.today()),
        "machine": describe_machine(),
    }
    args.output.write_text(json.dumps(facts | {"versions": tracking.versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
