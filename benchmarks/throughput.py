"""Measures speed and memory of recipes/lm.py beside three other ways to train the same language model.

    make bench                                   all, on the GPU or else the CPU (two cores: a quarter of an hour)
    make bench ARGS="--repeats 3"                more rounds
    .venv/bin/python benchmarks/throughput.py --quick --arms recipe plain --output_dir runs/bench      seconds

The same in all arms: the initial weights (a Llama shape of 14 M parameters, no dropout) and the tokenizer; the samples
of every update and their order, drawn by the recipe's own rule and written out for the peers; what is predicted (every
token of a sample but its first, the end token too; samples are cut after 512); AdamW (fused, same betas, constant
learning rate, weight decay, clipping at 1.0); `accelerate launch` with the same config file, so device and precision;
the number of threads; full activations kept, nothing compiled.

What each arm does in its own way:
    recipe   recipes/lm.py as shipped: sorts the samples of an update by length, cuts them by a budget of tokens,
             computes the loss in chunks, and divides it by the number of targets of the whole update
    plain    the padded Accelerate loop of the tutorials: micro-batches of a fixed number of samples, mean of their mean
             losses, weight decay on every parameter
    trainer  transformers.Trainer with its defaults: the same micro-batches (it does not group by length unless asked)
    sft      trl.SFTTrainer, likewise, without packing; its gradient checkpointing, on by default, is off here; it also
             computes entropy and accuracy of the tokens, as it always does

The two data sets are Python's standard library: its functions, each at its own length, and its files joined and cut
into blocks of 512. Each arm is a fresh process; a round is all arms, and every second round goes through them backwards
(ABBA), so that a machine that slows down slows all arms. Ratios are taken within a round.

Nothing is downloaded and nothing is left behind but the results: caches and outputs lie in a temporary directory.

Tokens per second: tokens of the update without padding (the same number in each arm) / wall time, after the warm-up.
Memory growth: the most that the process held (resident memory; on a GPU, allocated memory) less what it held when the
model was loaded and the loop began.
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from throughput_page import ARMS, draw, targets_table, write_page  # noqa: E402

from common.data.rows import Source  # noqa: E402
from common.data.sources import open_source  # noqa: E402
from common.data.text import tokenize  # noqa: E402
from common.data.tokenizer import train_tokenizer  # noqa: E402
from common.parallel.connect import seed_everything  # noqa: E402
from common.report.tracking import versions  # noqa: E402
from common.training.batching import sample_ids_of  # noqa: E402

SEQUENCE_LENGTH = 512
SEED = 0
OPTIMIZER = ["--learning_rate", "1e-3", "--weight_decay", "0.1", "--max_grad_norm", "1.0"]  # flags of every arm
MODEL = {"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6}
VOCABULARY = 8192
# Samples of an update and of a peer's micro-batch; updates of a run that are not measured, and that are.
DATA = {
    "functions": {"shape": "examples", "global_batch": 128, "micro_batch": 8, "warmup": 1, "measured": 1},
    "blocks": {"shape": "blocks", "global_batch": 16, "micro_batch": 4, "warmup": 1, "measured": 4},
}
GPU_UPDATES = {"warmup": 5, "measured": 30}
QUICK_MODEL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
QUICK_DATA = {"global_batch": 8, "micro_batch": 4, "warmup": 1, "measured": 1}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--repeats", type=int, default=1, help="ABBA passes: each arm runs twice as often (default: 1)")
    parser.add_argument("--measured", type=int, help="updates of a run that are measured (default: by data)")
    parser.add_argument(
        "--micro_batch_tokens", type=int, help="the recipe's (default: 1024; GPU: 4096, a peer's 8 x 512)"
    )
    parser.add_argument("--quick", action="store_true", help="seconds, with a toy model: shows that it runs, no more")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    # For the page: how to measure the same again, wherever the results went.
    without = argparse.ArgumentParser(add_help=False)
    without.add_argument("--output_dir")
    args.flags = shlex.join(without.parse_known_args()[1])
    if "recipe" not in args.arms:
        parser.error("--arms: name recipe too, with which the others are compared")
    if "sft" in args.arms and not importlib.util.find_spec("trl"):
        parser.error("trl is not installed; pip install -r benchmarks/requirements.txt (make bench does)")
    args.config = "single_gpu" if torch.cuda.is_available() else "cpu"
    args.micro_batch_tokens = args.micro_batch_tokens or (4096 if args.config == "single_gpu" else 1024)
    args.settings = {name: dict(DATA[name]) for name in args.data}
    for settings in args.settings.values():
        settings |= QUICK_DATA if args.quick else GPU_UPDATES if args.config == "single_gpu" else {}
        settings["measured"] = args.measured or settings["measured"]
    return args


def write_text(work, quick):
    """The text of both data sets as JSONL (`work`/functions.jsonl, `work`/blocks.jsonl); without held-out files."""
    for name, whole_files in (("functions", False), ("blocks", True)):
        with open(work / f"{name}.jsonl", "w") as file:
            for number, row in enumerate(open_source(Source(embedded="train")).rows(("text",), whole_files)):
                if quick and number == 100:
                    break
                file.write(json.dumps({"text": row.values["text"]}) + "\n")


def write_model(work, quick):
    """The initial model and the tokenizer that all arms load (`work`/model)."""
    tokenizer = train_tokenizer(Source(files=(str(work / "blocks.jsonl"),)), VOCABULARY)
    config = LlamaConfig(
        **(QUICK_MODEL if quick else MODEL),
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    seed_everything(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    return tokenizer, model.num_parameters()


def write_global_batches(work, name, settings, tokenizer):
    """The samples of every update, in the order in which the recipe draws them, for the peers."""
    source = Source(files=(str(work / f"{name}.jsonl"),))
    samples = tokenize(source, tokenizer, SEQUENCE_LENGTH, settings["shape"])
    lengths = []
    with open(work / f"{name}.batches.jsonl", "w") as file:
        for update in range(settings["warmup"] + settings["measured"]):
            for sample in sample_ids_of(update, len(samples), settings["global_batch"], SEED):
                input_ids, targets, _ = samples[sample]
                lengths.append(len(input_ids))
                file.write(json.dumps({"input_ids": np.append(input_ids, targets[-1]).tolist()}) + "\n")
    return {"samples": len(samples), "mean_length": statistics.mean(lengths), "max_length": max(lengths)}


def run_arm(args, arm, name, work, output_dir):
    """One fresh process; returns tokens/s after the warm-up, memory growth, and the loss of every update."""
    settings = args.settings[name]
    flags = ["--model_name_or_path", work / "model", "--output_dir", output_dir, *OPTIMIZER]
    flags += ["--num_updates", settings["warmup"] + settings["measured"]]
    if arm == "recipe":
        script = ["recipes/lm.py", "--train_file", work / f"{name}.jsonl", "--shape", settings["shape"]]
        flags += ["--sequence_length", SEQUENCE_LENGTH, "--seed", SEED]
        flags += ["--global_batch_size", settings["global_batch"], "--micro_batch_tokens", args.micro_batch_tokens]
        flags += ["--optimizer", "adamw", "--lr_schedule", "constant", "--warmup_updates", 0]
    else:
        script = ["benchmarks/peers.py", arm, "--train_file", work / f"{name}.batches.jsonl"]
        flags += ["--micro_batch_size", settings["micro_batch"]]
        flags += ["--accumulation_steps", settings["global_batch"] // settings["micro_batch"]]
    launch = [Path(sys.executable).parent / "accelerate", "launch", "--config_file"]
    command = [*launch, f"accelerate_configs/{args.config}.yaml", *script, *flags]
    result = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"error: {arm} on {name} failed (exit status {result.returncode}):\n{result.stdout}{result.stderr}")
    results = json.loads((output_dir / "run.json").read_text())["results"]
    assert results.get("num_threads", num_threads()) == num_threads(), "an arm ran with another number of threads"
    updates = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    tokens = [update["target_tokens"] for update in updates]
    seconds = [update["target_tokens"] / update["tokens_per_second"] for update in updates]
    warmup = settings["warmup"]
    return {
        "tokens_per_second": sum(tokens[warmup:]) / sum(seconds[warmup:]),
        "memory_growth_bytes": results["memory_growth_bytes"],
        "tokens": tokens,
        "seconds": seconds,
        "losses": [update["loss"] for update in updates],
    }


def measure(args, work):
    """Every run of every arm, in ABBA order: a list of records."""
    runs = []
    for name in args.data:
        for number in range(2 * args.repeats):
            for arm in args.arms if number % 2 == 0 else args.arms[::-1]:
                measured = run_arm(args, arm, name, work, work / f"{name}-{arm}-{number}")
                runs.append({"data": name, "arm": arm, "round": number} | measured)
                print(
                    f"{name}, round {number + 1}, {arm}: {measured['tokens_per_second']:,.0f} tokens/s, "
                    f"+{measured['memory_growth_bytes'] / 1e6:,.0f} MB, {sum(measured['seconds']):.0f} s",
                    flush=True,
                )
        different = {tuple(run["tokens"]) for run in runs if run["data"] == name}
        assert len(different) == 1, f"the arms did not compute the same tokens: {different}"
    return runs


def num_threads():
    """Of every arm; `accelerate launch` hands the variable on to torch."""
    return int(os.environ["OMP_NUM_THREADS"])


def describe_machine(args):
    """The machine in words, without its name."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    cpu = names[0].split(":")[1].strip() if names else platform.processor() or platform.machine()
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB of memory"
    machine = f"{cpu}, {num_cores()} cores, {memory}, {platform.system()}"
    return f"{torch.cuda.get_device_name()}; {machine}" if args.config == "single_gpu" else machine


def num_cores():
    """Physical cores that this process may use."""
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count()
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def main():
    args = parse_arguments()
    started = time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", str(num_cores()))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer alone in its process would take all GPUs
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = work  # the recipe's cache of tokens: gone with the rest
        work = Path(work)
        write_text(work, args.quick)
        tokenizer, parameters = write_model(work, args.quick)
        for name, settings in args.settings.items():
            settings |= write_global_batches(work, name, settings, tokenizer)
        print(f"model and data written, {time.perf_counter() - started:.0f} s", flush=True)
        runs = measure(args, work)
    results = {
        "machine": describe_machine(args),
        "threads": num_threads(),
        "precision": "float32 weights" + (", bf16 matrix products" if args.config == "single_gpu" else ""),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions() | ({"trl": version("trl")} if "sft" in args.arms else {}),
        "command": f".venv/bin/python benchmarks/throughput.py {args.flags}".strip(),
        "quick": args.quick,
        "parameters": parameters,
        "arms": args.arms,
        "rounds": 2 * args.repeats,
        "micro_batch_tokens": args.micro_batch_tokens,
        "data": args.settings,
        "runs": runs,
    }
    device = "cpu" if args.config == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    data, page, picture = (args.output_dir / f"throughput-{device}.{kind}" for kind in ("json", "md", "png"))
    data.write_text(json.dumps(results, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        draw(results, picture)
    else:
        print("no picture: matplotlib is not installed; pip install -r benchmarks/requirements.txt")
        picture = None
    write_page(results, page, picture)
    print("\n".join(targets_table(results)))
    print(f"{page}, {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
