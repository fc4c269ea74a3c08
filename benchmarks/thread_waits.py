"""Compares recipes on a CPU by how long a thread of OpenMP spins before it sleeps, alone and next to other programs.

    .venv/bin/python benchmarks/thread_waits.py       half an hour on two cores; writes results/thread-waits-cpu.json
    .venv/bin/python benchmarks/thread_waits.py --sizes tiny --neighbours alone --rounds 1 --output_dir runs/benchmarks

Each run is a new process, which trains a new model on blocks of 512 tokens of Python's standard library; every second
round runs the settings in reverse order. Ratios are computed within a round.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from flags import output_dir, positive
from machine import describe_machine, num_cores
from malloc import UPDATES, measure
from throughput_data import rows_of

from common.report import tracking

LIBRARY = {"GOMP_SPINCOUNT": "300000"}  # the library's own default; a setting of the environment is never changed
NEIGHBOURS = {"alone": 0, "one busy core": 1, "all cores busy": num_cores()}


@contextmanager
def busy(number):
    """Keeps `number` cores busy with programs of one thread each."""
    with ExitStack() as stack:
        for _ in range(number):
            program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(program.wait)
            stack.callback(program.kill)
        yield


def tokens_per_second(spins, size, precision, num_updates, folder):
    os.environ.pop("GOMP_SPINCOUNT", None)
    os.environ.update({"GOMP_SPINCOUNT": spins} if spins else {})
    return measure(size, precision, "", num_updates, folder)[0]


def measure_rows(args, folder):
    """Returns for each size, precision and neighbour the throughput of each setting over the library's, by round."""
    rows = []
    for size, precision, name in itertools.product(args.sizes, args.precisions, args.neighbours):
        ratios = {spins: [] for spins in args.spins}
        for number in range(args.rounds):
            arms = [LIBRARY["GOMP_SPINCOUNT"], *args.spins][:: 1 if number % 2 == 0 else -1]
            with busy(NEIGHBOURS[name]):
                found = {
                    spins: tokens_per_second(spins, size, precision, args.num_updates or UPDATES[size], folder)
                    for spins in arms
                }
            for spins in args.spins:
                ratios[spins].append(round(found[spins] / found[LIBRARY["GOMP_SPINCOUNT"]], 3))
        rows.append({"size": size, "precision": precision, "neighbours": name, "ratios": ratios})
        shown = ", ".join(f"{spins or 'recipe'}: {median(values):.2f}" for spins, values in ratios.items())
        print(f"{size}, {precision}, {name}: {shown}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=UPDATES, default=["tiny", "small"])
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bf16"), default=["float32"])
    parser.add_argument("--neighbours", nargs="+", choices=NEIGHBOURS, default=list(NEIGHBOURS))
    parser.add_argument("--spins", nargs="+", default=["0", "1000", "10000"], help="values of GOMP_SPINCOUNT")
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
    path = args.output_dir / "thread-waits-cpu.json"
    path.write_text(json.dumps(facts | {"throughput / with 300,000 spins": rows}, indent=1) + "\n")
    print(path.name)


if __name__ == "__main__":
    main()
