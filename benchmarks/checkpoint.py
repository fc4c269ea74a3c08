"""Measures the overhead of a save, compared with Accelerate's save_state and torch's asynchronous save.

    accelerate launch --config_file accelerate_configs/cpu.yaml benchmarks/checkpoint.py

The model is a Llama of 14 M parameters (the recipe's `small`) with the state of AdamW: 165 MB. Each kind of save runs
in its own processes, so that it cannot affect the others; every second round runs the kinds in reverse order. A process
measures updates before any save, makes a save to warm up, and then alternates updates without a save and a save during
updates, until its checkpoint is flushed to the disk. (save_state flushes nothing, so a thread runs `sync` after it.)
For each save:

    stall                  time until the call returns, as a fraction of an update
    updates meanwhile      mean slowdown of the updates during the save, compared with those just before
    in all, s              the stall, plus the slowdown of all these updates
    until complete, s      time from the call until the checkpoint is complete
    after saves            slowdown of the updates between saves, compared with those before any save

An update's time is the median of the updates without a save. The page shows medians over the saves of all rounds, with
95 % intervals.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from flags import output_dir, positive
from machine import describe_machine
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.checkpoint.identity import identify
from common.checkpoint.save import Checkpoints, TrainingState
from common.parallel.distributed_mode import current_mode
from common.report import tracking
from common.training.optimizers import make_optimizer
from common.training.recipe_traits import Arguments

LENGTH = 256  # tokens of a sequence
NUM_USUAL = 4  # updates measured before each save
KINDS = ("ours", "save_state", "async_save", "nothing")


def timed(action):
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def ours(directory, accelerator, config, model, optimizer):
    """A function that starts a save, and returns one that says whether it is complete; as each of the next two."""
    args = Arguments(output_dir=str(directory), save_every=1, keep_last=2, keep_best=False, resume=False)
    args.num_updates, args.global_batch_size, args.seed, args.dry_run = 0, 1, 0, False
    checkpoints, state = Checkpoints(args, accelerator), TrainingState()
    directory.mkdir()
    samples = argparse.Namespace(fingerprint="none")
    checkpoints.identity = identify(args, accelerator, config, None, samples, None)  # no tokenizer is needed to measure
    checkpoints.start(config, model=model)
    writer = checkpoints.writer

    def save():
        state.update += 1
        checkpoints.save(state, model, optimizer)
        return is_complete

    def is_complete():
        if writer.is_written():  # as in the loop when all ranks have written
            writer.commit_soon()
        return writer.writing is None and writer.committing.done()

    return save


def save_state(directory, accelerator, config, model, optimizer):
    def save():
        shutil.rmtree(directory, ignore_errors=True)
        accelerator.save_state(str(directory))
        flushing = threading.Thread(target=os.sync)
        flushing.start()
        return lambda: not flushing.is_alive()

    return save


def nothing(directory, accelerator, config, model, optimizer):
    """The control: no save, and then six updates."""

    def save():
        left = iter([False] * 6)
        return lambda: next(left, True)

    return save


def async_save(directory, accelerator, config, model, optimizer):
    def save():
        shutil.rmtree(directory, ignore_errors=True)
        weights, state = get_state_dict(model, optimizer.optimizer)
        future = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=directory, no_dist=True)
        return future.done

    return save


def measure(kind, num_saves, num_sequences, layers, directory):
    """What one process of this kind measures."""
    accelerator = Accelerator()
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "num_key_value_heads": 6}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=8192, tie_word_embeddings=True, **shape)
    model = LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, make_optimizer("adamw", model, 1e-3, 0.1))
    ids = torch.randint(8192, (num_sequences, LENGTH), device=accelerator.device)

    def update_once():
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    def usual():
        return statistics.median(timed(update_once) for _ in range(NUM_USUAL))

    save = globals()[kind](directory / kind, accelerator, config, model, optimizer)
    usual()  # to warm up
    before_any, saves = [usual(), usual()], []
    for number in range(num_saves + 1):
        without = usual()
        started = time.perf_counter()
        is_complete = save()
        stall, updates = time.perf_counter() - started, []
        while not is_complete():
            updates.append(timed(update_once))
        figures = {"usual": without, "stall": stall, "updates": updates}
        if number:
            saves.append(figures | {"until complete": time.perf_counter() - started})
    facts = {
        "machine": describe_machine(),
        "mode": f"{current_mode(accelerator)}, {torch.get_num_threads()} threads",
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    return {"facts": facts, "before any save": statistics.median(before_any), "saves": saves}


def figures_of(run):
    for one in run["saves"]:
        longer = [update - one["usual"] for update in one["updates"]]
        yield {
            "stall": one["stall"] / one["usual"],
            "updates meanwhile": statistics.mean(longer or [0]) / one["usual"],
            "in all, s": one["stall"] + sum(longer),
            "until complete, s": one["until complete"],
            "after saves": one["usual"] / run["before any save"] - 1,
        }


def median_and_interval(values):
    """By drawing as many again, 2,000 times."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(2000))
    return [round(value, 4) for value in (statistics.median(values), medians[50], medians[-51])]


def summarize(runs):
    found = {kind: [figures for run in runs[kind] for figures in figures_of(run)] for kind in runs}
    return {
        kind: {name: median_and_interval([one[name] for one in figures]) for name in figures[0]}
        for kind, figures in found.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--saves", type=int, default=5, help="in each round")
    parser.add_argument("--sequences", type=int, default=2, help="of an update, of 256 tokens each")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--directory", type=Path, default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    parser.add_argument("--alone", action="store_true", help="one kind in this process, as JSON (it starts itself so)")
    options = parser.parse_args()
    if options.alone:
        with tempfile.TemporaryDirectory(dir=options.directory) as work:
            numbers = (options.saves, options.sequences, options.layers)
            print(json.dumps(measure(options.kinds[0], *numbers, Path(work))))
        return
    runs = {kind: [] for kind in options.kinds}
    for number in range(options.rounds):
        for kind in list(runs)[:: -1 if number % 2 else 1]:
            command = [sys.executable, *sys.argv, "--alone", "--kinds", kind]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
    facts = runs[options.kinds[0]][0]["facts"]
    report = {
        "command": f"accelerate launch --config_file CONFIG benchmarks/checkpoint.py --rounds {options.rounds} --saves "
        f"{options.saves} --sequences {options.sequences} --layers {options.layers} --kinds {' '.join(options.kinds)}",
        "date": time.strftime("%Y-%m-%d"),
        **facts,
        "load average at the end": os.getloadavg()[0],
        "versions": tracking.versions(),
        "bytes": 12 * facts["parameters"],
        "saves of each kind": options.rounds * options.saves,
        "usual update, s": statistics.median(
            one["usual"] for kind in runs for run in runs[kind] for one in run["saves"]
        ),
        "median, 95 % interval": summarize(runs),
    }
    print(json.dumps(report, indent=1))
    path = options.output_dir / f"checkpoint-{facts['machine'].rpartition(', ')[2]}.json"
    saves = {
        kind: [{"before any save": run["before any save"]} | save for run in runs[kind] for save in run["saves"]]
        for kind in runs
    }
    path.write_text(json.dumps(report | {"saves": saves}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
