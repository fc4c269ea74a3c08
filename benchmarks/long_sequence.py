"""Measures peak memory and time of a forward and backward pass at several lengths, as in recipes/long_sequence.py.

    .venv/bin/python benchmarks/long_sequence.py             # about ten minutes on one core
    .venv/bin/python benchmarks/long_sequence.py --quick     # a smoke test, in seconds

The input is one sequence of random tokens, in float32, on one thread. Each value comes from its own process, forked
after the imports, which builds the model, warms up on 256 tokens, and then measures peak resident memory minus the
memory before (of model and data), and CPU time, which other programs hardly affect. A case that would exceed the limits
of time or memory, extrapolated from the previous length, is recorded as skipped.
Writes results/long-sequence-cpu.json and .png.
"""

import argparse
import json
import math
import multiprocessing
import shlex
import sys
import time
from datetime import date
from pathlib import Path

import psutil
import torch
from flags import output_dir
from machine import describe_machine
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.report.tracking import versions
from common.tasks.long_sequence.recurrent import RecurrentConfig, RecurrentLM, tile_mlps
from common.training.activation_checkpointing import apply_activation_checkpointing
from common.training.losses import sum_token_losses

SIZES = {"vocab_size": 257, "hidden_size": 128}
RECURRENT_LENGTHS = [1024 * 4**power for power in range(6)]  # to a million
GRU_LENGTHS = RECURRENT_LENGTHS[:4]  # on a CPU its steps are several times slower than the LSTM's
TRANSFORMER_LENGTHS = [1024 * 2**power for power in range(5)]
LAST_PIECE = 256  # steps, where the number of levels grows with the length
TRUNCATE = 1024

ARMS = {
    "lstm": {
        "plain": "plain: everything kept",
        "segmented": "--segments sqrt",
        "twice": "--segments sqrt --levels 2",
        "logarithm": "--segments 4, levels as log(length)",
        "truncated": f"--truncate {TRUNCATE}: NOT the same gradient",
    },
    "gru": {"plain": "GRU, plain", "segmented": "GRU, --segments sqrt"},
    "transformer": {
        "plain": "plain: whole logits, everything kept",
        "loss": "loss in tiles",
        "mlp": "loss and MLP in tiles",
        "layers": "the same, layers recomputed\n(on a GPU: their inputs offloaded)",
    },
}
LENGTHS = {"lstm": RECURRENT_LENGTHS, "gru": GRU_LENGTHS, "transformer": TRANSFORMER_LENGTHS}


def make_recurrent(cell, arm, length):
    model = RecurrentLM(RecurrentConfig(cell=cell, **SIZES))
    if arm == "truncated":
        model.truncate = TRUNCATE
    elif arm == "logarithm":
        model.segments, model.levels = 4, max(1, math.ceil(math.log(length / LAST_PIECE, 4)))
    else:
        model.levels = {"plain": 0, "segmented": 1, "twice": 2}[arm]
    return model


def make_transformer(arm, length):
    config = LlamaConfig(
        **SIZES,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    if arm != "plain":
        sum_token_losses(model)
    if arm in ("mlp", "layers"):
        tile_mlps(model, 1024)
    apply_activation_checkpointing(model, "full" if arm == "layers" else "none", torch.device("cpu"))
    return model.train()


def step(model, arm, ids, rows):
    if arm == "plain" and not isinstance(model, RecurrentLM):
        return model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return model(input_ids=ids, targets=ids[0], target_rows=rows).backward()


def measure(kind, arm, length, pipe):
    """In a process of its own: sends peak memory in bytes and seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_transformer(arm, length) if kind == "transformer" else make_recurrent(kind, arm, length)
    ids, rows = torch.randint(0, SIZES["vocab_size"], (1, length)), torch.arange(length)
    step(model, arm, ids[:, :256], rows[:256])
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before, start = psutil.Process().memory_info().rss, time.process_time()
    step(model, arm, ids, rows)
    seconds = time.process_time() - start
    status = Path("/proc/self/status").read_text().split()
    pipe.send((int(status[status.index("VmHWM:") + 1]) * 1024 - before, seconds))


def measure_all(kind, arm, lengths, most_bytes, most_seconds):
    """A record for each length, measured or skipped."""
    context = multiprocessing.get_context("fork")
    power, memory, seconds, last = (2 if kind == "transformer" else 1), 0, 0, None
    for length in lengths:
        record = {"model": kind, "arm": arm, "length": length}
        growth = length / last if last else 1
        reasons = []
        if memory * growth > most_bytes:
            reasons.append(f"would take about {memory * growth / 2**30:.0f} GiB")
        if seconds * growth**power > most_seconds:
            reasons.append(f"would take about {seconds * growth**power:.0f} s")
        if reasons:
            yield record | {"skipped": ", ".join(reasons)}
            continue
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(kind, arm, length, theirs))
        process.start()
        theirs.close()
        memory, seconds = ours.recv()
        process.join()
        last = length
        yield record | {"peak_memory_bytes": memory, "seconds": seconds}


def draw(results, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 9), layout="constrained")
    for kind, arms in ARMS.items():
        column = int(kind == "transformer")
        for arm, label in arms.items():
            runs = [r for r in results["runs"] if (r["model"], r["arm"]) == (kind, arm) and "skipped" not in r]
            lengths = [run["length"] for run in runs]
            style = ":" if kind == "gru" else "--" if arm == "truncated" else "-"
            axes[0, column].loglog(
                lengths, [run["peak_memory_bytes"] / 2**20 for run in runs], style, marker="o", label=label
            )
            axes[1, column].loglog(lengths, [run["seconds"] for run in runs], style, marker="o", label=label)
    for column, title in enumerate(("LSTM (and GRU), width 128", "Llama shape, 2 layers, width 128, MLP 512")):
        axes[0, column].set(title=title, ylabel="peak memory beyond model and data, MiB")
        axes[1, column].set(xlabel="length of the sequence, bytes", ylabel="core seconds of a forward and a backward")
        axes[0, column].legend(fontsize=8)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_xscale("log", base=2)
    figure.suptitle(f"One sequence, float32, one thread. {results['machine']}, {results['date']}. {results['note']}")
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the two shortest lengths")
    parser.add_argument("--most_gib", type=float, default=12, help="skip what would take more memory")
    parser.add_argument("--most_seconds", type=float, default=120, help="skip what would take longer")
    parser.add_argument("--note", default="", help="on the state of the machine, for the results")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    most_bytes = min(args.most_gib * 2**30, 0.7 * psutil.virtual_memory().available)
    runs = []
    for kind, arms in ARMS.items():
        for arm in arms:
            lengths = LENGTHS[kind][:2] if args.quick else LENGTHS[kind]
            for record in measure_all(kind, arm, lengths, most_bytes, args.most_seconds):
                print(record, flush=True)
                runs.append(record)
    results = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "note": args.note,
        "versions": versions(),
        "command": shlex.join([".venv/bin/python", "benchmarks/long_sequence.py", *sys.argv[1:]]),
        "skipped beyond": f"{most_bytes / 2**30:.1f} GiB or {args.most_seconds:g} s",
        "runs": runs,
    }
    path = args.output_dir / "long-sequence-cpu"
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
