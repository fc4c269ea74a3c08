"""Measures how evenly an update is divided among the ranks, and how long the division takes.

    .venv/bin/python benchmarks/plan_of_a_batch.py                   the simulation: a minute
    .venv/bin/python benchmarks/plan_of_a_batch.py --processes 4     recipes/lm.py too: three minutes

The simulation splits a global batch of random lengths over all ranks (`split_global_batch`). It prints, and writes to
benchmarks/results/plan-of-a-batch.md, by how much the work of the slowest rank exceeds the lower bound.

In the run, each process measures the CPU time of its forward and backward passes between two reductions, without the
time that it waits for others, so that processes on a shared core measure as if each had its own. `idle` is the fraction
of an update that the ranks wait for the slowest, on average: 1 - mean / maximum.
"""

import argparse
import datetime
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from flags import output_dir
from machine import describe_machine

from common.report.tracking import versions
from common.training.micro_batch_partition import split_global_batch
from common.training.padding import longest_of, row_work

# Samples of an update, ranks, tokens of a micro-batch.
WORLDS = [
    (128, 1, 1024),
    (128, 4, 1024),
    (1024, 8, 8192),
    (4096, 64, 16384),
    (8192, 256, 16384),
    (16384, 1024, 16384),
    (65536, 1024, 32768),
]
ATTENTION_LENGTH = 6 * 1024  # of a model 1,024 wide


def draw_lengths(name: str, num_samples: int, budget: int) -> np.ndarray:
    """Lengths in tokens, at most half a budget: (n,), or (n, 2) for sources and targets. The same at each call."""
    generator = np.random.default_rng(0)
    scale = budget / 32
    lengths = {
        "lognormal": lambda: generator.lognormal(math.log(scale), 0.8, num_samples),
        "long tail": lambda: generator.lognormal(math.log(scale), 1.2, num_samples),
        "uniform": lambda: generator.uniform(1, 4 * scale, num_samples),
        "two kinds": lambda: np.where(
            generator.random(num_samples) < 0.1,
            generator.uniform(8 * scale, 12 * scale, num_samples),
            generator.uniform(1, scale, num_samples),
        ),
        "constant": lambda: np.full(num_samples, scale),
        "pairs": lambda: (
            generator.lognormal(math.log(scale / 2), 0.8, (num_samples, 1))
            * generator.lognormal(0, 0.3, (num_samples, 2))
        ),
    }[name]()
    return lengths.astype(np.int64).clip(1, budget // 2 // lengths.reshape(num_samples, -1).shape[1])


def measure_plan(name: str, num_samples: int, world_size: int, budget: int, attention_length: float) -> dict:
    """One row of the simulation."""
    lengths, seconds = draw_lengths(name, num_samples, budget), []
    for _ in range(7):
        started = time.process_time()
        plan = split_global_batch(lengths, world_size, micro_batch_tokens=budget, attention_length=attention_length)
        seconds.append(time.process_time() - started)
    lengths = lengths.reshape(num_samples, -1)
    runs = [positions for steps in plan for positions in steps]
    counts = np.array([len(positions) for positions in runs])
    longest = longest_of(lengths[np.concatenate(runs)], counts)
    work = (counts * row_work(longest, attention_length)).reshape(world_size, -1).sum(1)
    alone = row_work(lengths, attention_length)
    possible = max(alone.sum() / world_size, alone.max())
    return {
        "lengths": name,
        "samples": num_samples,
        "ranks": world_size,
        "budget": budget,
        "attention_length": attention_length if math.isfinite(attention_length) else None,
        "micro_steps": len(plan[0]),
        "milliseconds": 1e3 * statistics.median(seconds),
        "padding": float((counts * longest.sum(1)).sum() / lengths.sum() - 1),
        "busiest_over_possible": float(work.max() / possible - 1),
        "busiest_over_mean": float(work.max() / work.mean() - 1),
        "micro_batches_without_samples": int((counts == 0).sum()),
    }


def run_as_rank(folder: Path, flags: list[str]) -> None:
    """recipes/lm.py as one of several processes, which notes the processor's time of each update's micro-batches."""
    from common.run import Run

    plain = Run.micro_batches

    def timed(self, batch):
        if not self.model.training:
            yield from plain(self, batch)
            return
        started, parts = time.thread_time(), []
        for micro_batch, is_last in plain(self, batch):
            yield micro_batch, is_last
            shape = list(micro_batch["input_ids"].shape)
            parts.append({"shape": shape, "seconds": time.thread_time() - started - sum(p["seconds"] for p in parts)})
        rank = self.accelerator.process_index
        with open(folder / f"rank-{rank}.jsonl", "a") as file:
            note = {"update": batch.update, "work": batch.rank_work.tolist(), "micro_batches": parts}
            file.write(json.dumps(note) + "\n")

    Run.micro_batches = timed
    sys.argv = [str(ROOT / "recipes/lm.py"), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


def measure_run(processes: int, size: str, num_updates: int) -> dict:
    """How far the ranks of a real run are apart, in time and in the work that the plan counts."""
    with tempfile.TemporaryDirectory() as folder:
        config = ROOT / "accelerate_configs/multi_cpu.yaml"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
        command += ["--num_processes", processes, __file__, "--as_rank", folder]
        flags = ["--shape", "examples", "--model_config", size, "--num_updates", num_updates]
        flags += ["--global_batch_size", 128, "--micro_batch_tokens", 1024, "--eval_every", 0]
        flags += ["--output_dir", Path(folder) / "run"]
        subprocess.run(
            [str(part) for part in [*command, *flags]], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        ranks = [
            [json.loads(line) for line in (Path(folder) / f"rank-{rank}.jsonl").read_text().splitlines()]
            for rank in range(processes)
        ]
    seconds = np.array([[sum(p["seconds"] for p in note["micro_batches"]) for note in notes] for notes in ranks])[:, 1:]
    work = np.array([note["work"] for note in ranks[0]]).T[:, 1:]  # the first update is the warm-up
    return {
        "model": size,
        "processes": processes,
        "flags": " ".join(map(str, flags[:-2])),
        "updates": num_updates - 1,
        "idle": float(1 - seconds.mean() / seconds.max(0).mean()),
        "idle_by_counted_work": float(1 - work.mean() / work.max(0).mean()),
        "seconds": seconds.T.round(4).tolist(),
        "micro_batches": [
            [(p["shape"], round(p["seconds"], 4)) for p in note["micro_batches"]] for note in ranks[0][1:]
        ],
    }


def page(report: dict) -> str:
    """The results as Markdown."""
    packages = ", ".join(f"{name} {report['versions'][name]}" for name in ("python", "numpy", "torch", "accelerate"))
    lines = [
        "# The plan of a batch",
        "",
        f"{report['date']}. {report['machine']}. {packages}. Command: `{report['command']}`.",
        "",
        "An update is split into micro-batches for all ranks. Load imbalance: the work of the slowest rank above its "
        "lower bound, which is the mean work of the ranks without padding, or the work of the longest sample if that "
        "is more. Padding: padding tokens divided by real tokens. Time: CPU time to split one update, median of "
        "seven. Attention: the row length at which attention needs as much work as the rest; without a number, work "
        "is the number of tokens. Budget: maximum tokens per micro-batch.",
        "",
        "| lengths | samples | ranks | budget | attention | time | padding | load imbalance | micro-steps |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["simulated"]:
        attention = f"{row['attention_length']:,}" if row["attention_length"] else ""
        lines.append(
            f"| {row['lengths']} | {row['samples']:,} | {row['ranks']:,} | {row['budget']:,} | {attention} | "
            f"{row['milliseconds']:.1f} ms | {row['padding']:.1%} | {row['busiest_over_possible']:.1%} | "
            f"{row['micro_steps']} |"
        )
    lines += [
        "",
        "With few ranks, a micro-batch is a larger part of the update, so its lengths differ more. Some padding "
        "remains if more micro-steps would cost more than they save.",
    ]
    if run := report.get("run"):
        lines += [
            "",
            f"## `recipes/lm.py` on {run['processes']} processes",
            "",
            f"Functions of the standard library, model `{run['model']}`, `multi_cpu.yaml`, {run['updates']} updates "
            f"(`{run['flags']}`). Values are CPU times of each process in forward and backward.",
            "",
            "| | of an update |",
            "| --- | ---: |",
            f"| ranks wait for the slowest | {run['idle']:.1%} |",
            f"| predicted from the counted work | {run['idle_by_counted_work']:.1%} |",
        ]
    return "\n".join(lines) + "\n"


def main():
    if sys.argv[1:2] == ["--as_rank"]:
        return run_as_rank(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=0, help="measure recipes/lm.py too, on so many (default: 0)")
    parser.add_argument("--model_config", default="small", help="the recipe's (default: small)")
    parser.add_argument("--num_updates", type=int, default=9)
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    rows = [("lognormal", world, attention) for attention in (math.inf, ATTENTION_LENGTH) for world in WORLDS]
    rows += [
        (name, world, math.inf)
        for name in ("long tail", "uniform", "two kinds", "constant", "pairs")
        for world in (WORLDS[2], WORLDS[3], WORLDS[5])
    ]
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "command": " ".join([".venv/bin/python benchmarks/plan_of_a_batch.py", *sys.argv[1:]]),
        "versions": versions(),
        "simulated": [measure_plan(name, *world, attention) for name, world, attention in rows],
    }
    if options.processes:
        report["run"] = measure_run(options.processes, options.model_config, options.num_updates)
    (options.output_dir / "plan-of-a-batch.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.output_dir / "plan-of-a-batch.md").write_text(page(report))
    print(page(report))


if __name__ == "__main__":
    main()
