"""Compares throughput and memory of the recipes with other ways to train the same models on the same samples.

    make bench                                   the language model in the precision of the config
    make bench ARGS="--data functions blocks classify seq2seq vision --precisions float32 bf16 --rounds 6"     all rows
    .venv/bin/python benchmarks/throughput.py --sizes medium --arms recipe plain --merge     adds to earlier results
    .venv/bin/python benchmarks/throughput.py --rounds 0 --merge                             draws the page again
    .venv/bin/python benchmarks/throughput.py --quick --arms recipe plain --output_dir runs/bench      about two minutes

All arms have in common: the initial weights and the tokenizer; the targets; the samples of every update and their
order, drawn by the recipe's own rule and written to a file for the peers (with two exceptions, see below); AdamW
(fused, same betas, constant learning rate, weight decay, clipping at 1.0); `accelerate launch` with the same config
file and `--mixed_precision`; the number of threads. All activations are kept, and only two arms compile.

Differences between the arms:
    recipe   the recipe as shipped, with its default micro-batches: sorts the samples of an update by length, splits
             them by a token budget, divides the loss by the number of targets of the full update
    plain    the padded Accelerate loop of the tutorials: micro-batches of a fixed number of samples, mean of their mean
             losses, weight decay on every parameter
    tuned    a faster hand-written loop: the samples of an update sorted by length, micro-batches of at most
             --tuned_tokens tokens with padding (a decoder's last token, only a target, does not count), exact weights;
             the model's own loss
    trainer  transformers.Trainer (Seq2SeqTrainer): the same micro-batches; on a GPU Liger kernels, if installed
    grouped  the Trainer with group_by_length, which selects the samples of an update by length. Its updates have
             different samples and numbers of tokens, so its throughput is that of the full run, over the same samples
    sft      trl.SFTTrainer, like trainer, without packing; its gradient checkpointing, on by default, is off here; it
             also computes entropy and accuracy of the tokens, as always
    packed   the same with packing ("wrapped"; "bfd" requires FlashAttention, which does not run on a CPU): the samples
             are concatenated and split into blocks of 512. So a sample may be split, and attends to earlier samples in
             its block. Its throughput is that of the full run too
    compiled, trainer_compiled
             the recipe with --compile, which compiles each layer; the Trainer with torch_compile, which compiles the
             model. The first update, in which they compile, does not count. They have their own targets

The data is Python's standard library: its functions, each with its own length; its files, concatenated and split into
blocks of 512 (both for recipes/lm.py), also for a LoRA adapter of rank 16 on a frozen base (adapter); functions
labelled with their package (classify); functions with their docstrings (seq2seq); and scikit-learn's digits (vision),
with a ViT. Models: --sizes, by the recipes' names.

Each arm is a new process; a round runs all arms, and every second round runs them in reverse order (ABBA), so that a
machine that slows down slows all arms. Ratios are computed within a round. Nothing is downloaded; caches and outputs
are in a temporary directory (--work_dir keeps models and data for the next call).

Tokens per second: tokens of an update without padding (images, for vision) / wall time, the median of the updates
after the warm-up, because layers may be compiled for a new shape in one of them; for full runs, the mean.
Memory growth: the peak of the process (resident memory; on a GPU, allocated memory) minus its memory when the model
was loaded and the loop began, measured by the same two functions in every arm.
"""

import argparse
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from flags import not_negative, output_dir
from machine import describe_machine, device_name, num_cores
from throughput_data import DATA, MODELS, ROOT, SEED, data_flags, prepare, settings_of
from throughput_page import ARMS, WHOLE_RUN, draw, headline, targets_table, write_page

from common.report.tracking import versions

SHARED_FLAGS = ["--learning_rate", "1e-3", "--weight_decay", "0.1", "--max_grad_norm", "1.0"]  # of every arm
BENCHMARK_FLAGS = [*SHARED_FLAGS, "--seed", str(SEED), "--optimizer", "adamw", "--lr_schedule", "constant"]
BENCHMARK_FLAGS += ["--warmup_updates", "0"]  # of a recipe
ON_GPU = torch.cuda.is_available()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--data", nargs="+", choices=DATA, default=["functions", "blocks"])
    parser.add_argument("--sizes", nargs="+", choices=("small", "medium", "1b", "8b"), default=["small"])
    about = "of all arms (default: the config's)"
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bf16"), help=about)
    parser.add_argument("--rounds", type=not_negative, default=2, help="each runs every arm once (default: 2)")
    parser.add_argument("--measured", type=int, help="updates of a run that are measured (default: by data)")
    about = "the recipe's (default: as it chooses itself)"
    parser.add_argument("--micro_batch_tokens", type=int, help=about)
    about = "micro-batch of the tuned loop, with padding (default: 1024, the fastest of 1024 to 4096; on a GPU 16384)"
    parser.add_argument("--tuned_tokens", type=int, default=16384 if ON_GPU else 1024, help=about)
    parser.add_argument("--quick", action="store_true", help="toy models, some minutes: shows that it runs")
    parser.add_argument("--merge", action="store_true", help="keep what the result file holds, and add to it")
    parser.add_argument("--work_dir", type=Path, help="keep models and data here, and take them from here")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    args.command = this_command()
    if "recipe" not in args.arms:
        parser.error("--arms: name recipe too, with which the others are compared")
    missing = [name for name in ("trl", "datasets") if not importlib.util.find_spec(name)]
    skipped = [arm for arm in ("sft", "packed") if arm in args.arms and missing]
    if skipped and {"functions", "blocks"} & set(args.data) and args.rounds:
        args.arms = [arm for arm in args.arms if arm not in skipped]
        print(f"skipped arms: {' '.join(skipped)}; to run them, pip install {' '.join(missing)}", flush=True)
    args.precisions = args.precisions or ["bf16" if ON_GPU else "float32"]
    args.sizes = ["quick"] if args.quick else args.sizes
    return args


def this_command():
    """Returns the command for the page, without the output directory."""
    without = argparse.ArgumentParser(add_help=False)
    without.add_argument("--output_dir")
    without.add_argument("--work_dir")
    script = f".venv/bin/python benchmarks/{Path(sys.argv[0]).name}"
    return f"{script} {shlex.join(without.parse_known_args()[1])}".strip()


def launch(precision, script, config="single_gpu" if ON_GPU else "cpu"):
    """Runs a script of the repository in one process, through `accelerate launch`; returns what it printed.

    config: of a GPU, or else a CPU.

    Raises SystemExit, with all that it printed, where it fails.
    """
    command = [Path(sys.executable).parent / "accelerate", "launch", "--config_file"]
    command += [f"accelerate_configs/{config}.yaml", "--num_processes", 1]
    command += ["--mixed_precision", "no" if precision == "float32" else precision, *script]
    result = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"error: {script} failed (exit status {result.returncode}):\n{result.stdout}{result.stderr}")
    return result.stdout


def run_arm(args, arm, row, facts, folder, output_dir):
    """Runs a new process; returns tokens/s after the warm-up, memory growth, and seconds and loss of every update."""
    tokens = [sum(map(sum, update)) for update in facts["lengths"]]
    flags = ["--model_name_or_path", folder / "model", "--output_dir", output_dir, "--num_updates", len(tokens)]
    flags += ["--global_batch_size", row["global_batch"], *row.get("more", [])]
    if arm in ("recipe", "compiled"):
        flags += [*data_flags(folder, row), *BENCHMARK_FLAGS, "--compile" if arm == "compiled" else "--no-compile"]
        flags += ["--micro_batch_tokens", args.micro_batch_tokens] if args.micro_batch_tokens else []
        launch(row["precision"], [f"recipes/{row['recipe']}.py", *flags])
        results = json.loads((output_dir / "run.json").read_text())["results"]
        updates = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
        assert [update["sample_digest"] for update in updates] == facts["digests"], "other samples than the peers'"
        seconds = [n / update["tokens_per_second"] for n, update in zip(tokens, updates, strict=True)]
        results |= {"seconds": seconds, "losses": [update["loss"] for update in updates]}
    else:
        flags += ["--train_file", folder / "batches.jsonl", "--model_class", MODELS[row["recipe"]][1], *SHARED_FLAGS]
        flags += ["--micro_batch_size", row["micro_batch"], "--micro_batch_tokens", args.tuned_tokens]
        launch(row["precision"], ["benchmarks/peers.py", arm, *flags])
        results = json.loads((output_dir / "results.json").read_text())
        assert results["num_threads"] == num_threads(), "an arm ran with another number of threads"
        tokens = results.get("tokens", tokens)
    shutil.rmtree(output_dir)
    return {
        "tokens_per_second": speed(arm, row["warmup"], tokens, results["seconds"]),
        "memory_growth_bytes": results["memory_growth_bytes"],
        "memory_bytes": results.get("memory_bytes") or results["peak_memory_bytes"],
        **{name: results[name] for name in ("seconds", "losses")},
    }


def speed(arm, warmup, tokens, seconds):
    """Tokens per second of a run, from tokens and seconds of each of its updates."""
    if arm in WHOLE_RUN:
        return sum(tokens) / sum(seconds)
    return statistics.median(n / time for n, time in zip(tokens[warmup:], seconds[warmup:], strict=True))


def measure(args, work, results, save):
    """Adds every run of every arm, in ABBA order, to `results`, and saves them; returns the arms that failed."""
    failed = []
    for name, size, precision in itertools.product(args.data, args.sizes, args.precisions):
        if size not in MODELS[DATA[name]["recipe"]][0] or (size in ("1b", "8b") and size not in DATA[name]):
            continue
        settings = settings_of(name, size, ON_GPU)
        settings["measured"] = args.measured or settings["measured"]
        facts = prepare(work, name, size, settings)
        if not args.rounds:
            continue  # a later call finds it in --work_dir
        key, arms = f"{name}, {size}, {precision}", [arm for arm in args.arms if arm in settings["arms"]]
        row = describe_row(args, name, size, precision, settings, facts)
        if results["rows"].setdefault(key, row) != row:
            sys.exit(f"error: {key} was measured with other settings; measure it again without --merge")
        done = len({run["round"] for run in results["runs"] if run["row"] == key})
        for number in range(done, done + args.rounds):
            for arm in arms if number % 2 == 0 else arms[::-1]:
                shutil.rmtree(work / "run", ignore_errors=True)  # of a call that was interrupted, or an arm that failed
                try:
                    measured = run_arm(args, arm, row, facts, work / f"{name}-{size}", work / "run")
                except SystemExit as error:  # the other arms are measured all the same
                    print(f"{key}, round {number + 1}, {arm}: {error}", file=sys.stderr, flush=True)
                    failed.append(f"{key}, {arm}")
                    continue
                results["runs"].append({"row": key, "arm": arm, "round": number} | measured)
                print(
                    f"{key}, round {number + 1}, {arm}: {measured['tokens_per_second']:,.0f} tokens/s, "
                    f"+{measured['memory_growth_bytes'] / 1e6:,.0f} MB, {sum(measured['seconds']):.0f} s",
                    flush=True,
                )
                save()
    return failed


def describe_row(args, name, size, precision, settings, facts):
    """Returns the settings of all arms of a row, for the JSON file and the page."""
    tokens = [sum(map(sum, update)) for update in facts["lengths"]]
    lengths = [sum(sample) for update in facts["lengths"] for sample in update]
    row = settings | {"data": name, "size": size, "precision": precision, "parameters": facts["parameters"]}
    row |= {"tuned_tokens": args.tuned_tokens, "micro_batch_tokens": args.micro_batch_tokens, "tokens": tokens}
    row |= {"mean_length": sum(lengths) / len(lengths), "max_length": max(lengths)}
    return json.loads(json.dumps(row))  # lists for tuples


def num_threads():
    """Returns the number of threads of every arm; `accelerate launch` passes the variable to torch."""
    return int(os.environ["OMP_NUM_THREADS"])


def begin(work):
    """Sets the environment of all arms; returns the folder for models and data, absolute."""
    os.environ.setdefault("OMP_NUM_THREADS", str(num_cores()))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer alone in its process would take all GPUs
    work = work.resolve()
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")  # the recipe's cache of tokens: gone with the rest
    return work


def main():
    args = parse_arguments()
    started = time.perf_counter()
    data = args.output_dir / f"throughput-{device_name()}.json"
    page, picture = data.with_suffix(".md"), data.with_suffix(".png")
    with tempfile.TemporaryDirectory() as temporary:
        work = begin(args.work_dir or Path(temporary))
        facts = {"machine": describe_machine(), "threads": num_threads(), "quick": args.quick}
        more = [name for name in ("trl", "liger-kernel") if importlib.util.find_spec(name.replace("-", "_"))]
        facts["versions"] = versions() | {name: version(name) for name in more}
        results = facts | {"commands": [], "rows": {}, "runs": []}
        if args.merge and data.exists():
            results = json.loads(data.read_text())
            if args.rounds and (different := [name for name in facts if results[name] != facts[name]]):
                sys.exit(f"error: {data} was measured with another {', '.join(different)}; leave out --merge")
        if args.rounds:
            results["commands"].append(f"{time.strftime('%Y-%m-%d')}: {args.command}")
        failed = []
        if args.rounds or args.work_dir:
            failed = measure(args, work, results, lambda: data.write_text(json.dumps(results, indent=1) + "\n"))
    if not results["runs"]:
        return
    if importlib.util.find_spec("matplotlib"):
        draw(results, picture, results["rows"])
        draw(results, picture.with_name(picture.name.replace("throughput", "throughput-lm")), headline(results))
    else:
        print("no picture: matplotlib is not installed; pip install -r benchmarks/requirements.txt")
        picture = None
    write_page(results, page, picture)
    print("\n".join(targets_table(results)))
    print(f"{page}, {time.perf_counter() - started:.0f} s in all")
    if failed:
        sys.exit(f"error: these arms failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
