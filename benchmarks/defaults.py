"""Compares learning rates on short runs of every recipe, to choose the default rates.

    .venv/bin/python benchmarks/defaults.py                # keeps finished runs, in runs/defaults

Each run is the shipped recipe, started by `accelerate launch` on the CPU in float32 with one thread; the runs are
shorter than by default. Compares the held-out loss. Writes results/defaults-cpu.json and .md.
"""

import argparse
import ast
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flags import output_dir
from machine import describe_machine

from common.report.tracking import versions  # noqa: E402


class Case(NamedTuple):
    """Runs that differ in nothing but their rate and seed. `base`: the run that made what is fine-tuned."""

    recipe: str
    size: str
    task: str
    updates: int
    batch: int
    rates: tuple[float, ...]
    flags: tuple[str, ...] = ()
    base: tuple[str, str, int, int, float] | None = None
    seeds: tuple[int, ...] = (0,)


BYTES = ("--tokenizer", "bytes")
CASES = (
    Case("seq2seq", "tiny", "reversal", 600, 64, (5e-4, 1e-3, 2e-3, 5e-3)),
    Case("seq2seq", "tiny", "addition", 300, 32, (5e-4, 1e-3, 2e-3, 5e-3), BYTES),
    Case("seq2seq", "tiny", "docstrings", 150, 16, (5e-4, 1e-3, 2e-3, 5e-3)),
    Case("seq2seq", "tiny", "docstrings", 300, 16, (1e-3, 2e-3, 5e-3)),
    Case(
        "seq2seq",
        "pretrained tiny",
        "sorting",
        100,
        32,
        (1e-4, 3e-4, 1e-3, 3e-3),
        base=("tiny", "reversal", 600, 64, 1e-3),
    ),
    Case("vision", "convnet", "digits", 200, 64, (1e-3, 2e-3, 4e-3, 8e-3)),
    Case("vision", "resnet", "digits", 75, 64, (1e-3, 2e-3, 4e-3)),
    Case("vision", "vit", "digits", 75, 64, (5e-4, 1e-3, 2e-3)),
    Case("classify", "tiny", "packages", 60, 32, (1e-3, 2e-3, 4e-3)),
    Case("lm", "tiny", "source code", 60, 8, (3e-3, 6e-3, 1.2e-2)),
    Case("long_sequence", "lstm", "source code, 8,192 bytes", 30, 1, (1e-2, 2e-2, 4e-2, 8e-2)),
    Case("seq2seq", "tiny", "reversal", 600, 64, (1e-3, 2e-3), seeds=(1,)),
)
# What is made here; the other tasks are the recipes' own data.
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FIGURES = {"exact": "exact", "accuracy": "right", "bits_per_byte": "bits per byte"}


def make_pairs(task, number):
    """(source, target) of `number` examples with different sources."""
    rng, pairs = random.Random(task), {}
    while len(pairs) < number:
        if task == "addition":
            a, b = rng.randrange(1000), rng.randrange(1000)
            pairs[f"{a}+{b}"] = str(a + b)
        else:
            letters = rng.choices(LETTERS, k=rng.randint(3, 8))
            made = reversed(letters) if task == "reversal" else sorted(letters)
            pairs[" ".join(letters)] = " ".join(made)
    return list(pairs.items())


def write_data(work):
    for task in ("reversal", "addition", "sorting"):
        pairs = make_pairs(task, 8500)
        for part, some in (("train", pairs[:8000]), ("held_out", pairs[8000:])):
            rows = [json.dumps({"source": source, "target": target}) + "\n" for source, target in some]
            (work / f"{task}-{part}.jsonl").write_text("".join(rows))


def run_dir(work, recipe, size, task, updates, batch, rate, seed=0):
    return work / f"{recipe}-{size}-{task}-{updates}x{batch}-{rate:g}-{seed}".replace(" ", "_").replace(",", "")


def recipe_flags(case, rate, seed, work):
    flags = ["--num_updates", case.updates, "--global_batch_size", case.batch, "--learning_rate", rate]
    flags += ["--seed", seed, "--save_every", 0, *case.flags]
    if case.task in ("reversal", "addition", "sorting"):
        flags += ["--train_file", work / f"{case.task}-train.jsonl"]
        flags += ["--validation_file", work / f"{case.task}-held_out.jsonl"]
    if case.base:
        flags += ["--model_name_or_path", run_dir(work, case.recipe, *case.base) / "model"]
    elif case.recipe == "long_sequence":
        length = case.task.split()[-2].replace(",", "")
        flags += ["--architecture", case.size, "--sequence_length", length]
    else:
        flags += ["--model_config", case.size]
    return [str(flag) for flag in flags]


def finished(folder):
    """The figures of a run that is done, else None."""
    path = folder / "run.json"
    run = json.loads(path.read_text()) if path.exists() else {}
    return run["results"] if run.get("status") == "finished" else None


def measure(case, work):
    """Makes the runs of a case that are not there yet, in one launch; the figures of each of its runs."""
    folders = {(rate, seed): run_dir(work, *case[:5], rate, seed) for rate in case.rates for seed in case.seeds}
    spec = [
        {
            "recipe": f"recipes/{case.recipe}.py",
            "flags": [*recipe_flags(case, *which, work), "--output_dir", str(folder), "--overwrite"],
        }
        for which, folder in folders.items()
        if not finished(folder)
    ]
    if spec:
        (work / "spec.json").write_text(json.dumps(spec))
        command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file"]
        command += ["accelerate_configs/cpu.yaml", "tests/run_recipe.py", str(work / "spec.json")]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    bases = [run_dir(work, one.recipe, *one.base) for one in CASES if one.base]
    runs = []
    for (rate, seed), folder in folders.items():
        if folder not in bases:
            shutil.rmtree(folder / "model", ignore_errors=True)
        figures = finished(folder)
        kept = {name: figures[name] for name in ("validation_loss", *FIGURES) if name in figures}
        runs.append({"rate": rate, "seed": seed, **kept})
    return runs


def default_rate(recipe, size):
    """What the recipe takes where no --learning_rate is given: read from its source, without running it."""
    sizes = {"long_sequence": "common/tasks/long_sequence/architectures.py"}.get(recipe, f"recipes/{recipe}.py")
    for node in ast.walk(ast.parse((ROOT / sizes).read_text())):
        if size.startswith("pretrained"):
            if isinstance(node, ast.keyword) and node.arg == "fine_tuning_rate":
                return ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and node.targets[0].id in ("MODEL_CONFIGS", "ARCHITECTURES"):
            return ast.literal_eval(node.value)[size][-1]
    raise KeyError(f"{recipe} names no rate for {size}")


def mean(runs, name):
    return statistics.mean(run[name] for run in runs)


def cell(runs):
    """The mean of a rate's seeds: the loss, and the figure that people look at."""
    text = f"{mean(runs, 'validation_loss'):.3f}"
    for name, unit in FIGURES.items():
        if name in runs[0]:
            value = mean(runs, name)
            return f"{text} ({value:.3f} {unit})" if name == "bits_per_byte" else f"{text} ({value:.0%} {unit})"
    return text


def table(cases):
    """Markdown: a row a rate, the lowest loss of a case bold."""
    lines = ["| model | task | updates x samples | rate | seed | held-out loss | |"]
    lines.append("| --- | --- | ---: | ---: | ---: | --- | --- |")
    for case in cases:
        rates = {}
        for run in case["runs"]:
            rates.setdefault(run["rate"], []).append(run)
        best = min(rates, key=lambda rate: mean(rates[rate], "validation_loss"))
        for rate, runs in rates.items():
            figures = f"**{cell(runs)}**" if rate == best else cell(runs)
            seeds = ", ".join(str(run["seed"]) for run in runs)
            row = [case["size"], " ".join([case["task"], *case["flags"]]), f"{case['updates']} x {case['batch']}"]
            row += [f"{rate:g}", seeds, figures, "default" if rate == case["default"] else ""]
            lines.append("| " + " | ".join(row) + " |")
    return lines


def page(results):
    """The results as Markdown."""
    lines = [
        "# The default learning rates",
        "",
        f"{results['date']}. {results['machine']}. "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + ".",
        "",
        f"Command: `{results['command']}`. Each run is the shipped recipe, started by `accelerate launch`, on one "
        "thread in float32; flags that are not in the table have their defaults. No run is longer than the recipe's "
        "default, and most are far shorter. The lowest held-out loss of a model and task is bold. The best rate "
        "decreases with the length of the run (arXiv:2409.19913). Therefore a default was lowered if lower rates were "
        "clearly better, but not raised if a higher rate was better after a short run. With one or two seeds, "
        "differences of a few per cent are not significant.",
        "",
        "Reversal: 3 to 8 letters with spaces, in reverse order. Sorting: such letters, sorted. Addition: two numbers "
        "below 1,000. Each task has 8,000 pairs, and 500 held-out pairs, of which 200 are generated. Everything else "
        "is the recipe's default data. The pretrained model is the tiny model of reversal, trained at 0.001. Its best "
        "fine-tuning rate is higher than that of large models: the default is the higher of the two rates for AdamW "
        "in T5's documentation in transformers, 1e-4 and 3e-4.",
        "",
        "On docstrings, whose runs here have a half and a quarter of the default length, a high rate is still better. "
        "The disadvantage of 0.001 decreases with the length of the run, and is smaller than that of 0.005 in "
        "reversal.",
        "",
        "Not measured, and unchanged: the sizes and architectures that are not in the tables (with 100 M parameters "
        "or more, a run takes hours on this machine); pipeline.py, whose models are lm.py's; moe.py, whose tokens use "
        "as many parameters as lm.py's; dpo.py, whose rate for a pretrained model is from its paper "
        "(arXiv:2305.18290); reward.py, whose rate for a pretrained model is Llama 2's (arXiv:2307.09288); embed.py, "
        "whose rates are classify.py's or below; the fine-tuning rates except that of seq2seq.py; weight decay, "
        "warm-up and schedule. The ViT's runs are too short to compare rates.",
    ]
    for recipe in dict.fromkeys(case["recipe"] for case in results["cases"]):
        lines += ["", f"## recipes/{recipe}.py", ""]
        lines += table([case for case in results["cases"] if case["recipe"] == recipe])
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "runs/defaults", help="the runs, done ones are kept")
    parser.add_argument("--quick", action="store_true", help="two runs of two updates, to see that all works")
    args = parser.parse_args()
    work = args.work_dir.resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_data(work)
    cases = [CASES[0]._replace(updates=2, rates=CASES[0].rates[:2], flags=("--generate", "4"))] if args.quick else CASES
    results = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "versions": versions(),
        "command": ".venv/bin/python benchmarks/defaults.py" + " --quick" * args.quick,
        "cases": [],
    }
    for case in cases:
        facts = {"recipe": case.recipe, "size": case.size, "task": case.task}
        facts |= {"updates": case.updates, "batch": case.batch, "flags": case.flags, "base": case.base}
        default = default_rate(case.recipe, case.size)
        results["cases"].append(facts | {"default": default, "runs": measure(case, work)})
        path = args.output_dir / "defaults-cpu"
        path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
