"""Trains the default model of recipes/lm.py in several ways, to choose the flags of `make train`.

    .venv/bin/python benchmarks/first_run_sweep.py                 # finished runs are kept in runs/first_run
    .venv/bin/python benchmarks/first_run_sweep.py --threads 1     # on a busy machine: only the results are compared

Each run has the default data and model. Writes bits per byte of held-out text, and the seconds of training, to
results/first-run-sweep-cpu.json. With other numbers of threads, the former differ by rounding only.
benchmarks/first_run.py measures the whole command with the chosen flags.
"""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from flags import output_file
from machine import describe_machine

from common.report import tracking

ARMS = {  # config and flags of each
    "adamw": ("cpu_bf16", ""),
    "muon": ("cpu_bf16", "--optimizer muon"),
    "muon, rate 12e-3, linear": ("cpu_bf16", "--optimizer muon --learning_rate 12e-3 --lr_schedule linear"),
    "muon, batches of 4": ("cpu_bf16", "--optimizer muon --global_batch_size 4 --num_updates 2000"),
    "muon, 800": ("cpu_bf16", "--optimizer muon --num_updates 800"),
    "muon, 800, linear": ("cpu_bf16", "--optimizer muon --num_updates 800 --lr_schedule linear"),
    "muon, 800, rate 4e-3": ("cpu_bf16", "--optimizer muon --num_updates 800 --learning_rate 4e-3"),
    "make train": ("cpu_bf16", "--optimizer muon --num_updates 950"),
    "make train, float32": ("cpu", "--optimizer muon --num_updates 950"),
    "float32, 500": ("cpu", "--optimizer muon --num_updates 500"),
    "float32, 500, micro-batches of 2,048": (
        "cpu",
        "--optimizer muon --num_updates 500 --micro_batch_tokens 2048",
    ),
    "float32, 500, rate 12e-3": ("cpu", "--optimizer muon --num_updates 500 --learning_rate 12e-3"),
    "float32, 1000, batches of 4": ("cpu", "--optimizer muon --num_updates 1000 --global_batch_size 4"),
    "float32, 600, rate 9e-3, linear": (
        "cpu",
        "--optimizer muon --num_updates 600 --learning_rate 9e-3 --lr_schedule linear",
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--threads", type=int, help="of each run (default: those of accelerate launch)")
    parser.add_argument("--work_dir", type=Path, default=ROOT / "runs/first_run")
    parser.add_argument("--output", type=output_file, default=ROOT / "benchmarks/results/first-run-sweep-cpu.json")
    args = parser.parse_args()
    launch = [Path(sys.executable).parent / "accelerate", "launch"]
    launch += ["--num_cpu_threads_per_process", args.threads] if args.threads else []
    rows = []
    for arm in args.arms:
        (config, flags), directory = ARMS[arm], args.work_dir.resolve() / arm.replace(", ", "-").replace(" ", "_")
        run = json.loads((directory / "run.json").read_text()) if (directory / "run.json").exists() else {}
        if "bits_per_byte" not in run.get("results", {}):
            command = [*launch, "--config_file", f"accelerate_configs/{config}.yaml", "recipes/lm.py", *flags.split()]
            command += ["--output_dir", directory, "--overwrite"]
            subprocess.run([str(part) for part in command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            run = json.loads((directory / "run.json").read_text())
        kept = {name: run["results"][name] for name in ("bits_per_byte", "validation_loss", "training_seconds")}
        rows.append({"arm": arm, "config": config, "flags": flags, **kept})
        print(f"{arm}: {kept['bits_per_byte']:.3f} bits per byte in {kept['training_seconds']:.0f} s", flush=True)
    facts = {"date": str(datetime.date.today()), "machine": describe_machine(), "threads": args.threads}
    args.output.write_text(json.dumps(facts | {"versions": tracking.versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
