"""Compares two runs of recipes/lm.py at the same time on one CPU, with different settings of OpenMP, and a single run.

    .venv/bin/python benchmarks/two_runs.py        a quarter of an hour on two cores; writes results/two-runs-cpu.json
    .venv/bin/python benchmarks/two_runs.py --sizes tiny --rounds 1 --num_updates 2 --output_dir runs/benchmarks

Each run is a new process, which trains a new model on blocks of 512 tokens of Python's standard library. Throughput is
the sum of both runs; every second round runs the settings in reverse order. Ratios are computed within a round.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from flags import output_dir, positive
from machine import describe_machine, num_cores
from malloc import UPDATES, measure
from throughput_data import rows_of

from common.report import tracking

# Number of runs, and settings of the environment.
ARMS = {
    "one run": (1, {}),
    "two runs": (2, {}),
    "two runs, half of the threads each": (2, {"OMP_NUM_THREADS": str(max(1, num_cores() // 2))}),
    "two runs, OMP_WAIT_POLICY=passive": (2, {"OMP_WAIT_POLICY": "passive"}),
    "one run, OMP_WAIT_POLICY=passive": (1, {"OMP_WAIT_POLICY": "passive"}),
}


def tokens_per_second(arm, size, num_updates, folder):
    """Returns the throughput of all runs of an arm together."""
    number, environment = ARMS[arm]
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    os.environ.update(environment)  # of the processes that it starts
    with ThreadPoolExecutor(number) as pool:
        runs = [pool.submit(measure, size, "float32", "", num_updates, folder) for _ in range(number)]
    return round(sum(run.result()[0] for run in runs))


def measure_row(args, size, folder):
    """Returns tokens/s of each arm, a list with a number per round, and the median ratio to a single run."""
    speeds = {arm: [] for arm in ARMS}
    for number in range(args.rounds):
        for arm in list(ARMS)[:: 1 if number % 2 == 0 else -1]:
            speeds[arm].append(tokens_per_second(arm, size, args.num_updates, folder))
    single = speeds["one run"]
    ratios = {arm: round(median(a / b for a, b in zip(speeds[arm], single, strict=True)), 2) for arm in ARMS}
    return {"size": size, "tokens/s": speeds, "ratios": ratios}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=UPDATES, default=["tiny", "small"])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--num_updates", type=positive, default=6, help="of a run (default: 6)")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    facts = {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "versions": tracking.versions()}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory  # for the tokens
        with open(Path(directory) / "rows.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows_of("blocks"))
        for size in args.sizes:
            rows.append(measure_row(args, size, Path(directory)))
            print(json.dumps(rows[-1]["ratios"]), flush=True)
    path = args.output_dir / "two-runs-cpu.json"
    path.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    print(path.name)


if __name__ == "__main__":
    main()
