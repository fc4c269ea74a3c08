"""Measures the memory of each pipeline stage and the communication volume, and compares the volume with the formula.

    .venv/bin/python benchmarks/pipeline.py                # some minutes on two cores; 1, 2 and 4 stages, float32
    .venv/bin/python benchmarks/pipeline.py --quick        # a smoke test, whose values mean nothing

The model is `small` of recipes/pipeline.py, with 16 blocks of 256 tokens per update, one per micro-batch. Memory is the
peak of the first process, which has the embedding and keeps the most micro-batches, minus the memory before training.
malloc returns freed memory at once, so that only memory in use counts. Communication volume is the traffic of the
machine's loopback interface per update, over all processes, so no other program should use it. It is the difference
between two runs with different numbers of updates, so that the start does not count. Writes
results/pipeline-cpu.json and .md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import describe_machine

from common.report.tracking import versions  # noqa: E402

WIDTH, VOCABULARY, LENGTH = 384, 8192, 256  # of recipes/pipeline.py's model `small`, whose embedding is its head too
UPDATES = (2, 4)


def run(stages, schedule, samples, updates, directory):
    """Bytes over the loopback interface, and the results."""
    config = ROOT / "accelerate_configs/cpu.yaml"
    if stages > 1:
        settings = yaml.safe_load((ROOT / "accelerate_configs/pipeline.yaml").read_text())
        settings["parallelism_config"]["parallelism_config_pp_size"] = stages
        config = directory / "config.yaml"
        config.write_text(yaml.safe_dump(settings | {"num_processes": stages, "mixed_precision": "no"}))
    command = [Path(sys.executable).parent / "accelerate", "launch", "--config_file", config, "recipes/pipeline.py"]
    command += ["--model_config", "small", "--train_file", directory / "text.txt", "--sequence_length", LENGTH]
    command += ["--global_batch_size", samples, "--micro_batch_size", 1, "--schedule", schedule]
    command += ["--num_updates", updates, "--save_every", 0, "--output_dir", directory / "run", "--overwrite"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True, env=environment)
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
    return sent, json.loads((directory / "run/run.json").read_text())["results"]["memory_growth_bytes"]


def formula(stages, samples):
    """Bytes that all processes send in an update: at each boundary hidden states and back their gradients.

    And the two ends of a tied weight sum their gradients.
    """
    if stages == 1:
        return 0
    return 4 * ((stages - 1) * 2 * samples * LENGTH * WIDTH + 2 * VOCABULARY * WIDTH)


def page(results):
    about = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# Memory and communication volume of pipeline stages",
        "",
        f"{results['date']}. {results['machine']}. {about}. Command: `{results['command']}`.",
        "",
        f"A Llama of 6 layers and width {WIDTH} with a tied embedding (13.8 M parameters), float32, "
        f"{results['samples']} micro-batches of {LENGTH} tokens an update. MB are 10^6 bytes. Memory: growth of the "
        "first process, gradients and optimizer state included. Sent: by all processes together, in an update.",
        "",
        "| stages | schedule | memory, MB | of one process's | sent, MB | by the formula, MB |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    alone = results["runs"][0]["memory_growth_bytes"]
    for one in results["runs"]:
        memory, sent = one["memory_growth_bytes"], one["sent_bytes"]
        lines.append(
            f"| {one['stages']} | {one['schedule']} | {memory / 1e6:,.0f} | {memory / alone:.2f} | {sent / 1e6:,.1f} "
            f"| {one['formula_bytes'] / 1e6:,.1f} |"
        )
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few samples; nothing is written to results/")
    args = parser.parse_args()
    samples, runs = 4 if args.quick else 16, []
    with tempfile.TemporaryDirectory() as directory:
        text = "".join(path.read_text() for path in sorted(ROOT.glob("common/*/*.py")))
        (Path(directory) / "text.txt").write_text(text)
        for stages, schedule in ((1, "1f1b"), (2, "1f1b"), (2, "gpipe"), (4, "1f1b")):
            (few, _), (many, memory) = (run(stages, schedule, samples, updates, Path(directory)) for updates in UPDATES)
            one = {"stages": stages, "schedule": schedule, "memory_growth_bytes": memory}
            one |= {"sent_bytes": (many - few) / (UPDATES[1] - UPDATES[0])}
            runs.append(one | {"formula_bytes": formula(stages, samples)})
    results = {"date": date.today().isoformat(), "machine": describe_machine()}
    results |= {
        "command": ".venv/bin/python benchmarks/pipeline.py",
        "versions": versions(),
        "samples": samples,
        "runs": runs,
    }
    if not args.quick:
        (ROOT / "benchmarks/results/pipeline-cpu.json").write_text(json.dumps(results, indent=1) + "\n")
        (ROOT / "benchmarks/results/pipeline-cpu.md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
