"""Checks the advice of --plan under enforced memory limits: does the advised run survive, and does a larger one die?

    .venv/bin/python benchmarks/plan_limits.py                       # all pairs; measured pairs are kept
    .venv/bin/python benchmarks/plan_limits.py --only medium         # pairs with one of these words in their names

A pair is a model and a limit. Under the limit run: `python recipes/X.py ... --plan`; exactly the advised command, for a
few updates, including checkpoint and model; and the same with twice the micro-batch. If the plan says that nothing
fits, the smallest possible run is tried instead. All samples have the same length, so that every micro-batch is the
longest.

`memory_limit.py` describes the limits: a cgroup of all processes, including the launcher; pairs with `rlimit` limit
each process. "Predicted to die" means that the plan tried twice the micro-batch, and found that it does not fit. "Used"
is the peak of the advised run as a fraction of the limit. "Error" is the predicted memory divided by this peak, for
runs with one process. Writes results/plan-limits-cpu.json and .md.
"""

import argparse
import json
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from flags import output_dir
from memory_limit import cgroups_can_be_made, run_limited
from tqdm import tqdm

GIB = 2**30
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # malloc keeps nothing of what is freed
# Name, recipe, flags, limit in GiB, how it is enforced, and the environment.
PAIRS = [
    ("lm small", "lm", "--model_config small --sequence_length 2048 --global_batch_size 2", 1.5, "cgroup", {}),
    ("lm small, longer", "lm", "--model_config small --sequence_length 4096 --global_batch_size 2", 2.0, "cgroup", {}),
    ("lm small, mapped", "lm", "--model_config small --sequence_length 2048 --global_batch_size 2", 1.25, "cgroup",
        MAPPED),
    ("moe small, less", "moe", "--model_config small --sequence_length 256 --global_batch_size 8", 1.25, "cgroup", {}),
    ("vision resnet", "vision", "--model_config resnet --image_size 32 --global_batch_size 1024", 2.0, "cgroup", {}),
    ("classify small", "classify", "--model_config small --sequence_length 256 --global_batch_size 8", 1.0, "cgroup",
        {}),
    ("seq2seq small", "seq2seq", "--model_config small --sequence_length 256 --target_length 256 --global_batch_size 8",
        1.5, "cgroup", {}),
    ("lm medium, less", "lm", "--model_config medium --sequence_length 128 --global_batch_size 8", 2.0, "cgroup", {}),
    ("lm small, ulimit", "lm", "--model_config small --sequence_length 2048 --global_batch_size 2", 1.25, "rlimit", {}),
    ("moe small", "moe", "--model_config small --sequence_length 256 --global_batch_size 8", 2.0, "cgroup", {}),
    ("lm medium", "lm", "--model_config medium --sequence_length 128 --global_batch_size 8", 2.75, "cgroup", {}),
    ("vision resnet, larger", "vision", "--model_config resnet --image_size 48 --global_batch_size 1024", 6.0, "cgroup",
        {}),
]  # fmt: skip
DATA = {"lm": "text.txt", "moe": "text.txt", "classify": "labels.jsonl", "seq2seq": "pairs.jsonl"}
RUN = ["--num_updates", "2", "--warmup_updates", "1", "--save_every", "1"]


def make_inputs(directory: Path) -> None:
    """Rows that are all longer than their samples may be."""
    words = (ROOT / "README.md").read_text().split()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=2000)) for _ in range(100)]
    (directory / "text.txt").write_text("\n".join(texts))
    rows = [{"text": text, "label": f"kind {n % 4}"} for n, text in enumerate(texts)]
    (directory / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"source": text, "target": text[::-1]} for text in texts]
    (directory / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))


def record_rows(path: str, recipe: str) -> None:
    """Plans the recipe inside the limit, and writes each row that the plan considered to `path`."""
    from tools.plan import plan

    class RecordedRow(plan.Row):
        def __init__(self, *values):
            super().__init__(*values)
            need = plan.need_on_cpu(self.mode, self.parts, self.host)
            row = [self.mode.name, self.checkpointing, self.rows, self.tokens, sum(self.parts.values()), need]
            with open(path, "a") as file:
                file.write(json.dumps([*row, self.shortfall]) + "\n")

    plan.Row = RecordedRow
    runpy.run_path(recipe, run_name="__main__")


def enlarged(line):
    """Returns the launch command with twice the micro-batch."""
    return re.sub(r"(--micro_batch_(?:size|tokens)) (\d+)", lambda found: f"{found[1]} {2 * int(found[2])}", line)


def run_pair(pair, directory):
    """Returns the plan's prediction and the outcome of the runs."""
    name, recipe, flags, limit, kind, more = pair
    limit, rows_path = int(limit * GIB), directory / "rows"
    rows_path.unlink(missing_ok=True)
    flags = [*flags.split(), *RUN, "--output_dir", str(directory / "run")]
    flags += ["--train_file", str(directory / DATA[recipe])] if recipe in DATA else []
    settings = {"cwd": ROOT, "env": os.environ | {"TQDM_DISABLE": "1"} | more}
    settings["env"]["PATH"] = f"{Path(sys.executable).parent}:{settings['env']['PATH']}"

    def limited(command):
        shutil.rmtree(directory / "run", ignore_errors=True)
        return run_limited(command, limit, kind, **settings)

    planned = limited([sys.executable, __file__, "--record", rows_path, f"recipes/{recipe}.py", *flags, "--plan"])
    found = {"name": name, "recipe": recipe, "limit": limit, "kind": kind, "plan_peak": planned.peak}
    found["allowance"] = allowance()
    if planned.status:
        return found | {"failed": planned.died or planned.output[-1500:]}
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
    advised = re.search(r"^ +(accelerate launch .*)$", planned.output, re.MULTILINE)
    if advised is None:
        found["advice"] = None
        smallest = "accelerate launch --config_file accelerate_configs/cpu.yaml "
        smallest += f"recipes/{recipe}.py {shlex.join(flags)} --micro_batch_size 1 --activation_checkpointing full"
        ended = limited(shlex.split(smallest))
        found |= {"smallest": ended.died or ("failed" if ended.failed else "trained"), "peak": ended.peak}
        return found | ({"failed": ended.output[-1500:]} if ended.failed else {})
    line = advised[1]
    config, way = Path(re.search(r"--config_file (\S+)", line)[1]).stem, line.split()[-1]
    what, size = re.search(r"--micro_batch_(size|tokens) (\d+)", line).groups()
    own = {row[3] if what == "tokens" else row[2]: row for row in rows if row[:2] == [config, way]}
    found |= {"advice": f"{config}, {way}, {what} {size}", "line": line.replace(str(directory), "DIR")}
    found |= {"tensors": own[int(size)][4], "need": own[int(size)][5]}
    ended = limited(shlex.split(line))
    found |= {"advised": ended.died or ("failed" if ended.failed else "trained"), "peak": ended.peak}
    found["seconds"] = round(ended.seconds, 1)
    if ended.failed or ended.died:
        found["output"] = ended.output[-1500:]
    double = own.get(2 * int(size))
    found["double_predicted"] = "dies" if double and double[6] else "gains nothing"
    ended = limited(shlex.split(enlarged(line)))
    found["double"] = ended.died or ("failed" if ended.failed else "trained")
    return found | {"double_peak": ended.peak} | ({"failed": ended.output[-1500:]} if ended.failed else {})


def allowance():
    """Returns the memory of a plan in addition to tensors. If it has changed, pairs are measured again."""
    from tools.plan import process_memory

    return [process_memory.LAUNCHER, process_memory.GROWTH, process_memory.KEPT]


def holds(pair):
    """Returns whether the advised run survived, and twice the micro-batch died or was predicted to die."""
    if pair["advice"] is None:
        return pair["smallest"] not in ("trained", "failed")
    died = pair["double"] not in ("trained", "failed")
    return pair["advised"] == "trained" and (died or pair["double_predicted"] == "dies")


def page(results):
    """Returns the page as Markdown."""
    pairs = [pair for pair in results["pairs"] if "failed" not in pair]
    advised = [pair for pair in pairs if pair["advice"]]
    errors = [pair["need"] / pair["peak"] - 1 for pair in advised if pair["kind"] == "cgroup"]
    lines = [
        "# The advice of --plan under enforced memory limits",
        "",
        f"`python benchmarks/plan_limits.py` on {results['machine']}, {results['date']}: {results['versions']}.",
        "",
        f"{len(pairs)} pairs; in {sum(map(holds, pairs))} the plan was right: the advised run survived, and twice the "
        f"micro-batch died or was predicted to die; or nothing fitted, and the smallest run died. "
        f"{sum(pair['advised'] != 'trained' for pair in advised)} of {len(advised)} "
        f"advised runs died. Predicted memory minus peak, as a fraction of the peak: {min(errors):+.0%} to "
        f"{max(errors):+.0%}. The docstring of benchmarks/plan_limits.py describes the columns.",
        "",
        "| model | limit | advice | it | predicted | peak | used | the double | was predicted to |",
        "| --- | --: | --- | --- | --: | --: | --: | --- | --- |",
    ]
    for pair in pairs:
        limit = f"{pair['limit'] / GIB:.2f} GiB" + (" a process" if pair["kind"] == "rlimit" else "")
        if pair["advice"] is None:
            lines.append(f"| {pair['name']} | {limit} | nothing fits | the smallest: {pair['smallest']} | | | | | |")
            continue
        sizes = f"{pair['need'] / GIB:.2f} | {pair['peak'] / GIB:.2f} | {pair['peak'] / pair['limit']:.0%}"
        after = f"{pair['double']} | {pair['double_predicted']}"
        lines.append(f"| {pair['name']} | {limit} | {pair['advice']} | {pair['advised']} | {sizes} | {after} |")
    return "\n".join([*lines, ""])


def main():
    if sys.argv[1:2] == ["--record"]:
        _, _, rows_path, recipe, *rest = sys.argv
        sys.argv = [recipe, *rest]
        record_rows(rows_path, recipe)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="pairs of these names, or with such a word; run again")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    parser.add_argument("--work_dir", type=Path, default=Path(tempfile.gettempdir()) / "plan-limits-benchmark")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended"))  # what it limits ends with it
    if reason := cgroups_can_be_made():
        sys.exit(f"error: {reason}; run this as root, or in a cgroup that is yours")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    make_inputs(args.work_dir)
    path = args.output_dir / "plan-limits-cpu.json"
    results = json.loads(path.read_text()) if path.is_file() else {"pairs": []}
    results["pairs"] = [pair for pair in results["pairs"] if pair.get("allowance") == allowance()]
    done = {pair["name"] for pair in results["pairs"] if "failed" not in pair}

    from machine import describe_machine  # imports torch, which the children must not do before the recipe

    from common.report.tracking import versions

    names = versions()
    results |= {"machine": describe_machine(), "date": time.strftime("%Y-%m-%d")}
    results["versions"] = ", ".join(f"{name} {names[name]}" for name in ("torch", "accelerate", "transformers"))
    order = [name for name, *_ in PAIRS]
    for pair in tqdm(PAIRS, unit="pair"):
        words = {pair[0], *pair[0].replace(",", "").split()}
        if words.isdisjoint(args.only) if args.only else pair[0] in done:
            continue
        found = run_pair(pair, args.work_dir)
        others = [one for one in results["pairs"] if one["name"] != pair[0] and one["name"] in order]
        results["pairs"] = sorted([*others, found], key=lambda one: order.index(one["name"]))
        keys = ("advice", "advised", "smallest", "need", "peak", "double", "double_predicted", "failed")
        tqdm.write(f"{pair[0]:28}{[found[key] for key in keys if key in found]}")
        path.write_text(json.dumps(results, indent=1) + "\n")
        if any("failed" not in one for one in results["pairs"]):
            (args.output_dir / "plan-limits-cpu.md").write_text(page(results))


if __name__ == "__main__":
    main()
