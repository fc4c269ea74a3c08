"""Compares mixtures of experts with a dense model of as many active parameters: quality and throughput.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/moe.py --num_updates 100 --output_dir runs/moe
    ... the same with --dense --output_dir runs/dense, and with other values of --balance
    python benchmarks/moe.py runs/moe runs/dense

The held-out metrics are those of the runs, which train on the same tokens. Throughput is measured here, alternating
between the trained models, in CPU time, so that other programs hardly affect it. It includes the forward and backward
pass of a global batch, without the optimizer step.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from flags import output_file, positive
from machine import describe_machine
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.data.source_types import Source
from common.data.text import tokenize
from common.report import tracking
from common.tasks.moe import routing
from common.training.batching import GlobalBatches, collate_tokens
from common.training.losses import sum_token_losses


def load(directory):
    """A run's settings and results, its model as the recipe trains it, and its first batch."""
    run = json.loads((directory / "run.json").read_text())
    args, tokenizer = run["arguments"], AutoTokenizer.from_pretrained(directory / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "model").train()
    sum_token_losses(model)
    router = routing.Routing(model, args["balance"], args["balance_strength"])
    samples = tokenize(Source(embedded="train"), tokenizer, args["sequence_length"], args["shape"])
    sizes = {name: args[name] for name in ("global_batch_size", "micro_batch_size", "micro_batch_tokens", "seed")}
    batches = GlobalBatches(samples, lambda s: collate_tokens(s, tokenizer.pad_token_id), rank=0, world_size=1, **sizes)
    return run, model, router, batches[0]


def time_global_batch(accelerator, model, router, batch):
    """CPU seconds of a global batch's forwards and backwards, with what balancing adds."""
    started = time.process_time()
    router.begin_update(accelerator, model, batch)
    for micro_batch in batch.micro_batches:
        (model(**micro_batch) / batch.num_targets).backward()
    model.zero_grad()
    return time.process_time() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output directories of recipes/moe.py, the dense one last")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--output", type=output_file, default=ROOT / "benchmarks/results/moe-cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    loaded = [load(directory) for directory in args.runs]
    seconds, balances = [[] for _ in loaded], {"none": [], "exact": [], "usual": []}
    for _ in range(args.rounds):
        for times, (_, *parts) in zip(seconds, loaded, strict=True):
            times.append(time_global_batch(accelerator, *parts))
        first = loaded[0][1:]
        for name in balances:  # what each way adds, on the first model
            first[1].balance = name
            balances[name].append(time_global_batch(accelerator, *first))
        first[1].balance = loaded[0][0]["arguments"]["balance"]
    rows = []
    for times, (run, model, router, _) in zip(seconds, loaded, strict=True):
        results, total = run["results"], sum(p.numel() for p in model.parameters())
        # Of each round by itself: what slows the machine slows the neighbours too.
        slower = [mine / dense for mine, dense in zip(times, seconds[-1], strict=True)]
        rows.append(
            {
                "model": "dense" if run["arguments"]["dense"] else run["arguments"]["balance"],
                "updates": run["arguments"]["num_updates"],
                "parameters": total,
                "active": routing.count_active(router.layers, total),
                "held_out_loss": results["validation_loss"],
                "bits_per_byte": results["bits_per_byte"],
                "busiest_expert": results.get("busiest_expert"),
                "dead_experts": results.get("dead_experts"),
                "tokens_per_second_of_dense": 1 / statistics.median(slower),
            }
        )
    costs = {
        name: statistics.median(mine / none for mine, none in zip(times, balances["none"], strict=True))
        for name, times in balances.items()
    }
    print("time of a global batch, beside --balance none:", costs)
    facts = {"balance_time": costs} | {
        "date": str(datetime.date.today()),
        "machine": describe_machine(),
    }
    args.output.write_text(json.dumps(facts | {"versions": tracking.versions(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(
            " ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )


if __name__ == "__main__":
    main()
