"""Measures memory and communication volume of sequence or tensor parallelism, and compares the volume with the formula.

    .venv/bin/python benchmarks/sequence.py                # some minutes on two cores; 1, 2 and 4 processes, float32
    .venv/bin/python benchmarks/sequence.py --of layers    # tensor parallelism instead
    .venv/bin/python benchmarks/sequence.py --quick        # a smoke test, whose values mean nothing

The model is a Llama of 4 layers and width 256, trained as in recipes/long_sequence.py. Memory is the peak of the first
process in one update on 32,768 bytes of text (tensor parallelism: 4,096), minus the memory before training. malloc
returns freed memory at once, so that only memory in use counts. Communication volume is the traffic of the machine's
loopback interface for an update on 4,096 bytes, over all processes, so no other program should use it. It is the
difference between two runs with different numbers of updates, so that the start does not count.
Writes results/sequence-cpu.json and .md, or results/tensor-cpu.json and .md.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import describe_machine

from common.report.tracking import versions  # noqa: E402

LAYERS, WIDTH = 4, 256  # as many key-value heads as query heads
UPDATES = (2, 4)
MODES = {"sequences": ("sequence", "sp"), "layers": ("tensor", "tp")}  # the config's name, and Accelerate's


def run(of, processes, length, updates, directory):
    """Bytes over the loopback interface, and the results."""
    command = [Path(sys.executable).parent / "accelerate", "launch", "--config_file"]
    if processes == 1:
        command += ["accelerate_configs/cpu.yaml"]
    else:
        name, short = MODES[of]
        command += [f"accelerate_configs/{name}_parallel.yaml", "--num_processes", processes]
        command += [f"--parallelism_config_{short}_size", processes, "--mixed_precision", "no"]
    command += ["recipes/long_sequence.py", "--architecture", "transformer", "--hidden_size", WIDTH]
    command += ["--num_layers", LAYERS, "--sequence_length", length, "--num_updates", updates, "--save_every", 0]
    command += ["--train_file", directory / "text.txt", "--eval_every", 0]
    command += ["--output_dir", directory / "run", "--overwrite"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MALLOC_MMAP_THRESHOLD_": "65536"}
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True, env=environment)
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
    return sent, json.loads((directory / "run/run.json").read_text())["results"]["memory_growth_bytes"]


def formula(of, processes, length, parameters):
    """Bytes that all processes send in an update.

    Of sequences: exchanges around attention, and DDP's sum of the gradients. Of layers: sums of activations, each of
    which every process sends twice but for its own part. Two a layer forward and two backward; one of the embedding,
    one of the gradient that the head passes on; and for each token the largest logit and two sums of its loss.
    """
    if of == "layers":
        return 4 * 2 * (processes - 1) * length * ((4 * LAYERS + 2) * WIDTH + 3)
    # Forward and backward; queries, keys and values before attention, its output after it.
    exchanged = 2 * LAYERS * (3 + 1) * WIDTH * length * (processes - 1) / processes
    return 4 * (exchanged + 2 * parameters * (processes - 1))


def page(results):
    about = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"# Memory and communication volume of processes that share {results['of']}",
        "",
        f"{results['date']}. {results['machine']}. {about}. Command: `{results['command']}`.",
        "",
        f"A Llama of {LAYERS} layers and width {WIDTH}, float32. MB are 10^6 bytes. Memory: growth of a process in an "
        f"update on a sequence of {results['length']:,} bytes, gradients and optimizer state included. Sent: by all "
        f"processes together, in an update on {results['short']:,} bytes.",
        "",
        "| processes | memory, MB | of one process's | sent, MB | by the formula, MB |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    alone = results["runs"][0]["memory_growth_bytes"]
    for one in results["runs"]:
        memory, sent = one["memory_growth_bytes"], one["sent_bytes"]
        lines.append(
            f"| {one['processes']} | {memory / 1e6:,.0f} | {memory / alone:.2f} | {sent / 1e6:,.1f} "
            f"| {one['formula_bytes'] / 1e6:,.1f} |"
        )
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=MODES, default="sequences", help="what processes share (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="short sequences; nothing is written to results/")
    args = parser.parse_args()
    (length, short), runs = (1024, 512) if args.quick else (32768 if args.of == "sequences" else 4096, 4096), []
    parameters = LAYERS * (4 * WIDTH**2 + 12 * WIDTH**2 + 2 * WIDTH) + 257 * WIDTH + WIDTH
    with tempfile.TemporaryDirectory() as directory:
        text = "".join(path.read_text() for path in sorted(ROOT.glob("common/*/*.py")))
        (Path(directory) / "text.txt").write_text(text)
        for processes in (1, 2, 4):
            few, many = (run(args.of, processes, short, updates, Path(directory))[0] for updates in UPDATES)
            _, memory = run(args.of, processes, length, 1, Path(directory))
            one = {"processes": processes, "memory_growth_bytes": memory}
            one |= {"sent_bytes": (many - few) / (UPDATES[1] - UPDATES[0])}
            runs.append(one | {"formula_bytes": formula(args.of, processes, short, parameters)})
    results = {"date": date.today().isoformat(), "machine": describe_machine()}
    results |= {
        "command": ".venv/bin/python benchmarks/sequence.py" + (" --of layers" if args.of == "layers" else ""),
        "of": args.of,
        "versions": versions(),
        "length": length,
        "short": short,
        "runs": runs,
    }
    if not args.quick:
        path = ROOT / f"benchmarks/results/{MODES[args.of][0]}-cpu"
        path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
