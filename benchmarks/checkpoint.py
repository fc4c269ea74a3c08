"""Measures how long a save holds up the training loop, beside Accelerate's save_state on the same model.

    accelerate launch --config_file accelerate_configs/cpu.yaml benchmarks/checkpoint.py

A Llama of 14 M parameters (the recipe's `small`) with the state of AdamW, 165 MB in all. A round is one save of each
kind, in turn, every second round backwards; before each, the disk is synced. The stall is the time until the loop could
go on; `until complete` is until the checkpoint has its final name and is flushed. save_state flushes nothing: its files
are in the page cache when it returns, so it is measured with a sync too. Both directories lie on the same disk.

`waiting`: the loop waits for the thread, so that the time with and without the hash is the thread's own.
The loop that goes on shares the processors with the thread that writes: `while writing` is how much longer an update
took meanwhile, times the number of those updates, and counts as stall too in `stall in all`; so does the wait of the
next step for the copy of what it changes.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.checkpoint.identity import identify
from common.checkpoint.save import Checkpoints, TrainingState
from common.parallel.mode import running_mode
from common.report import tracking
from common.training.optimizers import make_optimizer


def timed(action):
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure_ours(checkpoints, state, model, optimizer, update_once=None, usual=0.0):
    """A save beside updates, of which one alone takes `usual` seconds; without `update_once` the loop waits."""
    os.sync()
    state.update += 1
    started = time.perf_counter()
    checkpoints.save(state, model, optimizer)
    stall = time.perf_counter() - started
    longer = 0.0
    while update_once and not checkpoints.writer.is_written():
        longer += timed(update_once) - usual
    checkpoints.writer.finish()
    return {"stall": stall, "until complete": time.perf_counter() - started, "while writing": max(0.0, longer)}


def measure_save_state(accelerator, directory):
    shutil.rmtree(directory, ignore_errors=True)
    os.sync()
    started = time.perf_counter()
    accelerator.save_state(str(directory))
    stall = time.perf_counter() - started
    os.sync()
    return {"stall": stall, "until complete": time.perf_counter() - started}


class NoHash:
    def update(self, _):
        pass

    def hexdigest(self):
        return ""


HASHED = hashlib.sha256


def set_hash(is_real):
    # (The few bytes of JSON are hashed all the same, as hashing them takes no time.)
    hashlib.sha256 = HASHED if is_real else (lambda *data: HASHED(*data) if data else NoHash())


def make_checkpoints(directory, accelerator, config, model):
    args = argparse.Namespace(output_dir=str(directory), save_every=1, keep_last=2, keep_best=False, resume=False)
    args.num_updates, args.global_batch_size, args.seed, args.dry_run = 0, 1, 0, False
    checkpoints = Checkpoints(args, accelerator)
    directory.mkdir()
    checkpoints.identity = identify(args, accelerator, config, None, "none")  # no tokenizer is needed to measure
    checkpoints.start(config, model=model)
    return checkpoints


def measure(kinds, rounds):
    """The figures of each kind of save in each round, every second round backwards."""
    runs = {kind: [] for kind in kinds}
    try:
        for number in range(rounds + 1):
            for kind in list(kinds)[:: -1 if number % 2 else 1]:
                set_hash("no hash" not in kind)
                figures = kinds[kind]()
                if number:  # the first round is warm-up
                    runs[kind].append(figures)
    finally:
        set_hash(True)
    return runs


def summarize(runs):
    def median(kind, figure):
        return statistics.median(run[figure] for run in runs[kind])

    return {
        "median, s": {kind: {figure: median(kind, figure) for figure in runs[kind][0]} for kind in runs},
        "stall / save_state's": median("ours", "stall") / median("save_state", "stall"),
        "stall in all / save_state's": statistics.median(r["stall"] + r["while writing"] for r in runs["ours"])
        / median("save_state", "stall"),
        "until complete, with / without hash": median("ours, waiting", "until complete")
        / median("ours, waiting, no hash", "until complete"),
        "runs": runs,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    accelerator = Accelerator()
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "num_key_value_heads": 6}
    config = LlamaConfig(num_hidden_layers=options.layers, vocab_size=8192, tie_word_embeddings=True, **shape)
    model = LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, make_optimizer("adamw", model, 1e-3, 0.1))
    ids = torch.randint(8192, (2, 256), device=accelerator.device)

    def update_once():
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    usual = statistics.median([timed(update_once) for _ in range(8)][3:])  # the first ones are warm-up
    with tempfile.TemporaryDirectory(dir=options.directory) as work:
        checkpoints = make_checkpoints(Path(work) / "ours", accelerator, config, model)
        ours = (checkpoints, TrainingState(), model, optimizer)
        kinds = {
            "ours": lambda: measure_ours(*ours, update_once, usual),
            "ours, waiting": lambda: measure_ours(*ours),
            "ours, waiting, no hash": lambda: measure_ours(*ours),
            "save_state": lambda: measure_save_state(accelerator, Path(work) / "theirs"),
        }
        runs = measure(kinds, options.rounds)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {accelerator.device.type}, {running_mode(accelerator)}",
        "load average at the end": os.getloadavg()[0],
        "versions": tracking.versions(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": checkpoints.ranks.needed,
        "usual update, s": usual,
        **summarize(runs),
    }
    options.output_dir.mkdir(parents=True, exist_ok=True)
    path = options.output_dir / f"checkpoint-{accelerator.device.type}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "runs"}, indent=1), f"\n{path}")


if __name__ == "__main__":
    main()
