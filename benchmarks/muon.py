"""Compares Muon with AdamW: held-out loss at equal numbers of tokens, and the time of the optimizer step.

    .venv/bin/python benchmarks/muon.py      # finished runs are kept in runs/muon

Each run is recipes/lm.py through `accelerate launch` on the CPU, from scratch, with its default data, and with the
default learning rate of the size and `--rates` times this rate. Step times are CPU time in one process on one thread.
Writes results/muon-cpu.json.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.report import tracking
from common.training.optimizers import make_optimizer
from recipes.lm import MODEL_CONFIGS

OPTIMIZERS = ("adamw", "muon")


def run_dir(args, size, optimizer, ratio, seed):
    return args.work_dir.resolve() / f"{size}-{optimizer}-{ratio:g}-{seed}-{args.updates}"


def train(args, cases):
    """Makes the missing runs in one launch."""
    specs = []
    for size, optimizer, ratio, seed in cases:
        out = run_dir(args, size, optimizer, ratio, seed)
        flags = ["--model_config", size, "--optimizer", optimizer, "--learning_rate", ratio * MODEL_CONFIGS[size][-1]]
        flags += ["--seed", seed, "--num_updates", args.updates, "--save_every", 0, "--output_dir", out, "--overwrite"]
        if not is_finished(out):
            specs.append({"recipe": "recipes/lm.py", "flags": [str(flag) for flag in flags]})
    if not specs:
        return
    args.work_dir.mkdir(parents=True, exist_ok=True)
    (args.work_dir / "spec.json").write_text(json.dumps(specs))
    command = [Path(sys.executable).parent / "accelerate", "launch", "--config_file", "accelerate_configs/cpu.yaml"]
    command += ["tests/run_recipe.py", args.work_dir.resolve() / "spec.json"]
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def is_finished(directory):
    path = directory / "run.json"
    return path.exists() and json.loads(path.read_text())["status"] == "finished"


def time_steps(directory, rounds):
    """Median CPU seconds of a step of each optimizer, alternating, on a trained model with random gradients."""
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    optimizers = {name: make_optimizer(name, model, 1e-6, 0.1) for name in OPTIMIZERS}
    seconds = {name: [] for name in OPTIMIZERS}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for _, name in itertools.product(range(rounds), OPTIMIZERS):
        started = time.process_time()
        optimizers[name].step()
        seconds[name].append(time.process_time() - started)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first allocates the state


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"], choices=MODEL_CONFIGS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1, 2], help="factors on the default rate")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "runs/muon")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/muon-cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = list(itertools.product(args.sizes, OPTIMIZERS, args.rates, args.seeds))
    train(args, cases)
    rows, steps = [], {}
    for case in cases:
        results = json.loads((run_dir(args, *case) / "run.json").read_text())["results"]
        kept = {name: results[name] for name in ("validation_loss", "bits_per_byte")}
        rows.append(dict(zip(("size", "optimizer", "rate", "seed"), case, strict=True)) | kept)
        print(
            *(f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}" for key, value in rows[-1].items())
        )
    for size in args.sizes:
        steps[size] = time_steps(run_dir(args, size, "adamw", args.rates[0], args.seeds[0]), args.rounds)
        print(size, *(f"{name} {seconds:.4f} s per step" for name, seconds in steps[size].items()))
    facts = {"date": str(datetime.date.today()), "machine": platform.processor() or platform.machine()}
    facts |= {"versions": tracking.versions(), "updates": args.updates, "step_seconds": steps, "rows": rows}
    args.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
