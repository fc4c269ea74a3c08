"""Compares Muon with AdamW: held-out loss at equal numbers of tokens, and the time of the optimizer step.

    .venv/bin/python benchmarks/muon.py      # finished runs are kept in runs/muon

Each run is recipes/lm.py through `accelerate launch` on the CPU, from scratch, with its default data. Its learning rate
is the size's default, times each of `--rates`. Step times, and the time of a forward and backward pass of `--timed` (a
size that need not be trained here), are CPU time in one process on one thread. Writes results/muon-cpu.json.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from flags import output_file, positive
from machine import describe_machine
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.data.source_types import Source
from common.data.tokenizer import special_token_ids, train_tokenizer
from common.report import tracking
from common.training.optimizers import make_optimizer
from recipes.lm import MODEL_CONFIGS, SHAPE

OPTIMIZERS = ("adamw", "muon")
SIZES = MODEL_CONFIGS | {"mini": (6, 256, 4, 4, 704, 8192, 2e-3)}  # 6.9 M parameters, between tiny and small
TOKENS = 2048  # of the timed forward and backward pass
BATCHES = [2**14, 2**16, 2**18]  # tokens per update for which the share of the step is given


def run_dir(args, size, optimizer, ratio, seed):
    return args.work_dir.resolve() / f"{size}-{optimizer}-{ratio:g}-{seed}-{args.updates}"


def build(size, seed):
    """Returns a model from scratch, and its tokenizer."""
    *shape, vocabulary, _ = SIZES[size]
    tokenizer = train_tokenizer(Source(embedded="train"), vocabulary)
    sizes = dict(zip(SHAPE, shape, strict=True), vocab_size=vocabulary, max_position_embeddings=2048)
    torch.manual_seed(seed)
    config = LlamaConfig(**sizes, **special_token_ids(tokenizer), tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config), tokenizer


def model_flags(args, size, seed):
    """Flags for a size of the recipe, or for a new model of this size in a directory."""
    if size in MODEL_CONFIGS:
        return ["--model_config", size]
    directory = args.work_dir.resolve() / f"{size}-{seed}"
    for part in build(size, seed):
        part.save_pretrained(directory)
    return ["--model_name_or_path", directory]


def train(args, cases):
    """Makes the missing runs in one launch."""
    specs = []
    for size, optimizer, ratio, seed in cases:
        out = run_dir(args, size, optimizer, ratio, seed)
        if is_finished(out):
            continue
        flags = [*model_flags(args, size, seed), "--optimizer", optimizer, "--learning_rate", ratio * SIZES[size][-1]]
        flags += ["--seed", seed, "--num_updates", args.updates, "--save_every", 0, "--output_dir", out, "--overwrite"]
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


def time_steps(size, rounds):
    """Median CPU seconds of a pass forward and backward of TOKENS tokens, and of a step of each optimizer."""
    model, _ = build(size, 0)
    ids = torch.randint(0, SIZES[size][-2], (TOKENS // 512, 512))
    passes = {"pass": lambda: model(input_ids=ids, labels=ids).loss.backward()}
    passes |= {name: make_optimizer(name, model, 1e-6, 0.1).step for name in OPTIMIZERS}
    seconds = {name: [] for name in passes}
    for _, name in itertools.product(range(rounds), passes):
        started = time.process_time()
        passes[name]()
        seconds[name].append(time.process_time() - started)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first allocates


def share_of_step(seconds, optimizer, tokens):
    """The optimizer step's share of the time of an update of this many tokens."""
    return seconds[optimizer] / (seconds[optimizer] + seconds["pass"] * tokens / TOKENS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "mini", "small"], choices=SIZES)
    parser.add_argument("--timed", nargs="+", default=["small", "medium"], choices=SIZES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, default=[1], help="factors on the default rate")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--rounds", type=positive, default=4, help="timed steps")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "runs/muon")
    parser.add_argument("--output", type=output_file, default=ROOT / "benchmarks/results/muon-cpu.json")
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
    for size in args.timed:
        steps[size] = {"seconds": time_steps(size, args.rounds)}
        for optimizer, tokens in itertools.product(OPTIMIZERS, BATCHES):
            share = steps[size][f"share of {optimizer} at {tokens} tokens"] = share_of_step(
                steps[size]["seconds"], optimizer, tokens
            )
            print(f"{size}: {optimizer} is {share:.1%} of an update of {tokens} tokens")
    facts = {"date": str(datetime.date.today()), "machine": describe_machine()}
    facts |= {"versions": tracking.versions(), "updates": args.updates, "steps": steps, "rows": rows}
    args.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
