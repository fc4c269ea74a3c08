"""Measures the bytes of weights and optimizer state of one process in each mode.

    .venv/bin/python benchmarks/sharding.py                 # one process per GPU, or two on a CPU; float32
    .venv/bin/python benchmarks/sharding.py --model_config medium --num_processes 8

Each config runs the language-model recipe for two updates from the same weights, started by `accelerate launch`. The
bytes are those of the tensors that the process keeps between updates, on any device. Writes
results/sharding-DEVICE.json and .md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import torch
from machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.report.tracking import versions  # noqa: E402

CONFIGS = ("multi_gpu", "zero1", "zero2", "zero3", "fsdp2", "fsdp2_offload", "zero3_offload_cpu")


def measure(config, args, work):
    """Runs one config; the figures of each of its processes, and the losses."""
    output_dir, held = work / config, work / f"{config}-held"
    flags = ["--model_config", args.model_config, "--num_updates", "2", "--global_batch_size", "8"]
    spec = [{"flags": [*flags, "--output_dir", str(output_dir)], "changes": {"measure_state": str(held)}}]
    (work / f"{config}.json").write_text(json.dumps(spec))
    command = [str(Path(sys.executable).parent / "accelerate"), "launch"]
    command += ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", str(args.num_processes)]
    command += ["--mixed_precision", "no", "tests/run_recipe.py", str(work / f"{config}.json")]
    subprocess.run(command, cwd=ROOT, check=True)
    ranks = [json.loads(Path(f"{held}-{rank}.json").read_text()) for rank in range(args.num_processes)]
    losses = [json.loads(line)["loss"] for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return {"config": config, "ranks": ranks, "losses": losses}


def page(results):
    """The results as Markdown: the most that any process holds."""
    settings, first = results["settings"], results["runs"][0]
    lines = [
        "# What one process holds in each mode",
        "",
        f"{results['date']}. {results['machine']}. "
        + ", ".join(f"{k} {v}" for k, v in results["versions"].items())
        + ".",
        "",
        f"Command: `{results['command']}`. The model `{settings['model_config']}` in float32 with AdamW, two "
        f"updates, {settings['num_processes']} processes. MB are 10^6 bytes, of the process that stores the most.",
        "",
        "| config | weights, MB | optimizer, MB | both, of DDP's | first loss | second loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    whole = max(rank["weights"] + rank["optimizer"] for rank in first["ranks"])
    for run in results["runs"]:
        most = {key: max(rank[key] for rank in run["ranks"]) for key in ("weights", "optimizer")}
        figures = " | ".join(f"{most[key] / 1e6:,.1f}" for key in most)
        losses = " | ".join(f"{loss:.6f}" for loss in run["losses"])
        lines.append(f"| {run['config']} | {figures} | {sum(most.values()) / whole:.2f} | {losses} |")
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_config", default="small")
    parser.add_argument("--num_processes", type=int, default=torch.cuda.device_count() or 2)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    runs, failed = [], []
    with tempfile.TemporaryDirectory() as work:
        for config in CONFIGS:
            if config.startswith("zero") and find_spec("deepspeed") is None:
                print(f"skipped config: {config}; to run it, pip install deepspeed", flush=True)
                continue
            try:
                runs.append(measure(config, args, Path(work)))
            except subprocess.CalledProcessError:
                failed.append(config)
    if CONFIGS[0] in failed:  # the others are compared with it
        sys.exit(f"error: these configs failed: {', '.join(failed)}")
    results = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "versions": versions(),
        "command": " ".join([".venv/bin/python benchmarks/sharding.py", *sys.argv[1:]]),
        "settings": vars(args),
        "runs": runs,
    }
    path = ROOT / "benchmarks/results" / f"sharding-{'gpu' if on_gpu else 'cpu'}"
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(results))
    print(page(results))
    if failed:
        sys.exit(f"error: these configs failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
