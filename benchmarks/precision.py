"""Compares the held-out results of each recipe's default run in float32 and in bf16, on a CPU, with several seeds.

    .venv/bin/python benchmarks/precision.py                      # all, about an hour on two cores
    .venv/bin/python benchmarks/precision.py --recipes vision     # one recipe; earlier measurements are kept

Each run is a shipped recipe with its default flags and data, started by `accelerate launch` with cpu.yaml or
cpu_bf16.yaml; several runs with one thread each run at the same time. For each seed, both precisions begin with the
same weights and see the same samples in the same order. Writes results/precision-cpu.json and .md.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import describe_machine

from common.report.tracking import versions  # noqa: E402

RECIPES = ("lm", "classify", "vision", "seq2seq", "long_sequence", "moe")
CONFIGS = {"float32": "cpu", "bf16": "cpu_bf16"}
FIGURES = {"accuracy": "accuracy", "exact": "exact"}  # beside the loss, where a recipe has one of them
RESULTS = ROOT / "benchmarks/results/precision-cpu.json"


def run(recipe, precision, seed, updates):
    """The results of one run."""
    with tempfile.TemporaryDirectory() as directory:
        command = [Path(sys.executable).parent / "accelerate", "launch", "--config_file"]
        command += [f"accelerate_configs/{CONFIGS[precision]}.yaml", f"recipes/{recipe}.py", "--seed", seed]
        command += ["--save_every", 0, "--output_dir", Path(directory, "run")]
        command += ["--num_updates", updates] if updates else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([str(part) for part in command], cwd=ROOT, check=True, capture_output=True, env=environment)
        record = json.loads(Path(directory, "run", "run.json").read_text())
        num_updates = len(Path(directory, "run", "metrics.jsonl").read_text().splitlines())
    results = record["results"]
    kept = {name: results[name] for name in ("validation_loss", *FIGURES, "training_seconds") if name in results}
    print(recipe, precision, seed, kept, flush=True)
    return {"recipe": recipe, "precision": precision, "seed": seed, "updates": num_updates} | kept


def table(runs):
    """Markdown: a row a recipe; of each precision the mean over seeds, and of their differences mean and range."""
    titles = ("recipe", "updates", "seeds", "loss, float32", "loss, bf16", "bf16 - float32", "float32 between seeds")
    titles += ("float32's time / bf16's", "")
    lines = [f"| {' | '.join(titles)} |", "| --- " + "| ---: " * 7 + "| --- |"]
    for recipe in RECIPES:
        losses = {(one["precision"], one["seed"]): one for one in runs if one["recipe"] == recipe}
        seeds = sorted(seed for precision, seed in losses if precision == "bf16" and ("float32", seed) in losses)
        if not seeds:
            continue
        wide, narrow = ([losses[precision, seed] for seed in seeds] for precision in CONFIGS)
        wide_losses, narrow_losses = ([one["validation_loss"] for one in some] for some in (wide, narrow))
        more = [b - a for a, b in zip(wide_losses, narrow_losses, strict=True)]
        faster = statistics.median(
            a["training_seconds"] / b["training_seconds"] for a, b in zip(wide, narrow, strict=True)
        )
        figure = ""
        for name, label in FIGURES.items():
            if name in wide[0]:
                means = [statistics.mean(one[name] for one in some) for some in (wide, narrow)]
                figure = f"{label} {means[0]:.1%} and {means[1]:.1%}"
        lines.append(
            f"| {recipe} | {wide[0]['updates']} | {len(seeds)} | {statistics.mean(wide_losses):.4f} "
            f"| {statistics.mean(narrow_losses):.4f} | {statistics.mean(more):+.4f} ({min(more):+.4f} to "
            f"{max(more):+.4f}) | {max(wide_losses) - min(wide_losses):.4f} | {faster:.2f} | {figure} |"
        )
    return lines


def page(results):
    about = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = ["# Held-out results in float32 and in bf16", ""]
    lines += [f"{results['date']}. {results['machine']}. {about}. Command: `{results['command']}`.", ""]
    about = (
        "Held-out loss with the recipe's own data and default flags, mean over seeds; the difference of the two "
        "precisions, mean and range, below zero if bf16 is better; and for comparison the range of float32 between "
        "seeds. Time: median training time without the last evaluation. It is rough, because runs with one thread "
        "each ran at the same time, some of them next to other programs. Last column: the recipe's metric, in float32 "
        "and in bf16."
    )
    lines.append(about)
    return "\n".join([*lines, "", *table(results["runs"]), ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--num_updates", type=int, help="instead of the recipe's own, for a quick look")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
    results |= {"date": date.today().isoformat(), "versions": versions()}
    results |= {"machine": describe_machine()}
    results |= {"command": ".venv/bin/python benchmarks/precision.py"}
    cases = list(itertools.product(args.recipes, args.seeds, CONFIGS))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [pool.submit(run, recipe, precision, seed, args.num_updates) for recipe, seed, precision in cases]
        for one in made:
            new = one.result()
            same = [new[name] for name in ("recipe", "precision", "seed")]
            old = [x for x in results["runs"] if [x[name] for name in ("recipe", "precision", "seed")] != same]
            results["runs"] = [*old, new]
            if not args.num_updates:
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                RESULTS.with_suffix(".md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
