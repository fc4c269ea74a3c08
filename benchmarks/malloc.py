"""Compares updates of recipes/lm.py on a CPU with two settings of glibc's malloc: its defaults, and `KEPT`.

    .venv/bin/python benchmarks/malloc.py            a quarter of an hour on two cores; writes results/malloc-cpu.json
    .venv/bin/python benchmarks/malloc.py --sizes tiny --rounds 1 --num_updates 3 --output_dir runs/benchmarks

Each run is a new process, which trains a new model on blocks of 512 tokens of Python's standard library; every second
round runs the settings in reverse order. Ratios are computed within a round.
"""

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from flags import output_dir, positive
from machine import describe_machine
from throughput import launch
from throughput_data import rows_of

from common.report import tracking

# The first two make malloc keep all memory that is freed. The others make it use a freed block again: by default, the
# bytes before and after an aligned block go to caches for small blocks, and without them it is too small for the next
# tensor of its size.
KEPT = "mmap_max=0 trim_threshold=2000000000 tcache_count=0 mxfast=0"
SETTINGS = {"default": "", "kept": ":".join(f"glibc.malloc.{word}" for word in KEPT.split())}
UPDATES = {"tiny": 40, "small": 8, "medium": 3}


def measure(size, precision, tunables, num_updates, folder):
    """Tokens per second (median of the updates after the first) and memory growth in bytes of a run.

    folder: has rows.jsonl, and receives the run.
    """
    output_dir = folder / f"{size}-{precision}-{tunables[:1]}-{time.time_ns()}"
    os.environ["GLIBC_TUNABLES"] = tunables  # of the processes that it starts
    script = ["recipes/lm.py", "--no-compile", "--model_config", size, "--sequence_length", 512]
    script += ["--global_batch_size", 8, "--output_dir", output_dir]
    script += ["--train_file", folder / "rows.jsonl", "--shape", "blocks"]  # without held-out files
    launch(precision, [*script, "--optimizer", "adamw", "--num_updates", num_updates], "cpu")
    updates = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((output_dir / "run.json").read_text())["results"]
    return median(update["tokens_per_second"] for update in updates[1:]), results["memory_growth_bytes"]


def measure_rows(args, folder):
    """Returns for each size and precision the ratios of speed and memory, `KEPT` over default, by round."""
    rows = []
    for size, precision in itertools.product(args.sizes, args.precisions):
        ratios = []
        for number in range(args.rounds):
            found = {}
            for name in list(SETTINGS)[:: 1 if number % 2 == 0 else -1]:
                num_updates = args.num_updates or UPDATES[size]
                found[name] = measure(size, precision, SETTINGS[name], num_updates, folder)
            ratios.append([kept / default for kept, default in zip(found["kept"], found["default"], strict=True)])
        speed, memory = ([round(ratio, 3) for ratio in column] for column in zip(*ratios, strict=True))
        rows.append({"size": size, "precision": precision, "speed": speed, "memory": memory})
        print(f"{size}, {precision}: {median(speed):.2f} times the speed, {median(memory):.2f} of the memory growth")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=UPDATES, default=list(UPDATES))
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bf16"), default=["float32", "bf16"])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--num_updates", type=int, help="of a run (default: 3 to 40, by size)")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory  # for the tokens
        with open(Path(directory) / "rows.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows_of("blocks"))
        rows = measure_rows(args, Path(directory))
    facts = {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "versions": tracking.versions()}
    facts |= {"libc": "-".join(platform.libc_ver()), "tunables": SETTINGS["kept"]}
    path = args.output_dir / "malloc-cpu.json"
    path.write_text(json.dumps(facts | {"kept / default": rows}, indent=1) + "\n")
    print(path.name)


if __name__ == "__main__":
    main()
