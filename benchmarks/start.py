"""Measures the time of a start: imports, a dry run and a run of one update of each recipe; and evaluation.

    .venv/bin/python benchmarks/start.py --parts imports dry_run update evaluation
    .venv/bin/python benchmarks/start.py --parts dry_run --before ../older     # compared with an older checkout

Values are seconds of full processes with a warm cache: first run it once with --fresh. The arms alternate. Each call
adds its runs to start-cpu.json, or with --fresh starts the file anew; medians are over all runs in the file.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

from flags import output_dir, positive
from machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
IMPORTS = {
    "import torch, transformers, accelerate": "import torch, transformers, accelerate",
    "the same and a model's class": "import torch, transformers, accelerate; transformers.LlamaForCausalLM",
}


def seconds(command, cwd=ROOT):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.perf_counter()
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def processes(part, before):
    """Name and command of each arm of a part, and the directory that it runs in."""
    if part == "imports":
        yield from ((name, [sys.executable, "-c", code], ROOT) for name, code in IMPORTS.items())
        with tempfile.NamedTemporaryFile(suffix=".py") as empty:
            launcher = [Path(sys.executable).parent / "accelerate", "launch"]
            launcher += ["--config_file", "accelerate_configs/cpu.yaml", empty.name]
            yield "accelerate launch of an empty script", launcher, ROOT
        return
    for recipe in RECIPES:
        for label, root in [("", ROOT), *([(" before", before)] if before else [])]:
            with tempfile.TemporaryDirectory() as directory:
                flags = ["--dry_run"] if part == "dry_run" else ["--num_updates", 1, "--output_dir", directory]
                yield f"{recipe}.py{label}", [sys.executable, f"recipes/{recipe}.py", *flags], root


def evaluation():
    """Held-out tokens a second of the tiny model, and those of its forward alone on the same samples without padding.

    For functions, of all lengths, and for full blocks; cut as `make_loader` does now, and as an update is cut.
    """
    from functools import partial
    from types import SimpleNamespace

    import torch

    from common.data.source_types import Source
    from common.data.text import tokenize
    from common.data.tokenizer import special_token_ids, train_tokenizer
    from common.models.load import build_model
    from common.training.batching import collate_tokens, make_loader
    from common.training.losses import sum_token_losses
    from common.training.process_grid import ProcessGrid
    from common.training.recipe_traits import Traits
    from recipes import lm

    *shape, vocabulary, _ = lm.MODEL_CONFIGS["tiny"]
    tokenizer = train_tokenizer(Source(embedded="train"), vocabulary)
    shape = dict(zip(lm.SHAPE, shape, strict=True), vocab_size=vocabulary)
    model = build_model(lm.LlamaConfig(**shape, **special_token_ids(tokenizer), tie_word_embeddings=True)).eval()
    sum_token_losses(model)
    args = SimpleNamespace(global_batch_size=8, micro_batch_size=None, micro_batch_tokens=1024, num_workers=0, seed=0)
    args.drop_last_window, args.activation_checkpointing = False, "none"
    accelerator = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"), mixed_precision="no")
    collate = partial(collate_tokens, pad_token_id=tokenizer.pad_token_id)
    full = collate([(torch.zeros(256).long().numpy(), torch.ones(256).long().numpy(), torch.arange(256).numpy())] * 4)
    rates = {}

    def run(name, num_tokens, micro_batches):
        started = time.perf_counter()
        with torch.no_grad():
            for micro_batch in micro_batches:
                model(**micro_batch)
        rates[name] = num_tokens / (time.perf_counter() - started)

    run("", 1, [full] * 20)  # warms up
    del rates[""]
    run("forward alone", 1024 * 80, [full] * 80)
    for kind in ("examples", "blocks"):
        samples = tokenize(Source(embedded="validation"), tokenizer, 256, kind)
        cuts = {"evaluation": None, "cut as an update": range(-(-len(samples) // 8))}
        for name, updates in cuts.items():
            loader = make_loader(args, accelerator, Traits(), ProcessGrid(1), collate, math.inf, samples, updates)
            run(f"{kind}, {name}", samples.num_tokens, (one for batch in loader for one in batch.micro_batches))
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("imports", "dry_run", "update", "evaluation")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=positive, default=1)
    parser.add_argument("--before", metavar="DIR", help="an older checkout to measure beside this one")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that the file holds")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    path = args.output_dir / "start-cpu.json"
    before = {} if args.fresh or not path.exists() else json.loads(path.read_text())
    runs, commands = before.get("runs", []), before.get("commands", [])
    commands.append(shlex.join(["python", "benchmarks/start.py", *sys.argv[1:]]))
    for _ in range(args.rounds):
        for part in args.parts:
            if part == "evaluation":
                found = evaluation()
            else:
                found = {}
                for name, command, cwd in processes(part, args.before):
                    found[name] = seconds(command, cwd)
            runs += [{"part": part, "arm": name, "figure": figure} for name, figure in found.items()]
    write(path, runs, commands)


def write(path, runs, commands):
    from common.report.tracking import versions

    arms = dict.fromkeys((run["part"], run["arm"]) for run in runs)
    medians = {}
    for part, arm in arms:
        figures = [run["figure"] for run in runs if (run["part"], run["arm"]) == (part, arm)]
        medians.setdefault(part, {})[arm] = {"median": median(figures), "rounds": len(figures)}
    facts = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "versions": versions(),
        "commands": commands,
        "units": "seconds; tokens per second of evaluation",
        "medians": medians,
        "runs": runs,
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
