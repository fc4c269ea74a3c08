"""Compares the predicted with the measured peak memory of runs, for many models, configs and memory-saving flags.

    .venv/bin/python benchmarks/plan.py                       # all cases, on the CPU; measured cases are kept
    .venv/bin/python benchmarks/plan.py --only fsdp2 moe      # cases with one of these words in their names

Each case is a shipped recipe, started by `accelerate launch` with a shipped config, for three updates. The prediction
is that of its --dry_run. The measurement is the peak of the second update, on the rank with the highest peak: the bytes
that torch's allocator allocated and freed, as torch.profiler reports them with their addresses. This includes buffers
inside kernels. Memory that a thread of gloo frees is not reported, and counts until its address is allocated again.
Therefore a case with several processes runs twice, and the lower value of each rank counts. Copies that gloo makes to
send do not count.

All samples of a case have the same length, so that every micro-batch is the longest. Writes results/plan-cpu.json, .md
and .png.
"""

import argparse
import json
import os
import random
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common import arguments  # isort: skip  # noqa: F401  # before torch
import torch
from flags import output_dir
from machine import describe_machine
from tqdm import tqdm

NUM_PROCESSES = {"hsdp": 4, "fsdp2_tensor_parallel": 4, "fsdp2_sequence_parallel": 4}
SINGLE = ("cpu", "cpu_bf16", "single_gpu")
LM_CONFIGS = [*SINGLE, "multi_cpu", "multi_gpu", "fsdp2", "fsdp2_offload", "hsdp", "zero1", "zero2", "zero3"]
LM_CONFIGS += ["zero3_offload_cpu"]
SHARED = {"tensor_parallel": "lm", "fsdp2_tensor_parallel": "lm", "sequence_parallel": "lm"}
SHARED |= {"fsdp2_sequence_parallel": "lm", "pipeline": "pipeline"}
ARCHITECTURES = ("llama", "gpt2", "qwen3", "mistral", "gemma2", "opt", "gpt_neox", "olmo2", "phi", "bloom")


def all_cases():
    """Returns name, recipe, config, flags of the launcher and flags of the recipe of each case."""
    for config in LM_CONFIGS:
        for size in ("tiny", "small"):
            yield f"lm {size} {config}", "lm", config, [], ["--model_config", size]
    for config in ("cpu", "fsdp2", "zero3"):
        for way in ("selective", "full", "offload"):
            yield (
                f"lm small {config} {way}",
                "lm",
                config,
                [],
                ["--model_config", "small", "--activation_checkpointing", way],
            )
    for name in ("adafactor", "sgd", "adamw8bit"):
        yield f"lm small cpu {name}", "lm", "cpu", [], ["--model_config", "small", "--optimizer", name]
    for config in ("zero1", "zero2", "zero3"):
        yield f"lm small {config} bf16", "lm", config, ["--mixed_precision", "bf16"], ["--model_config", "small"]
    for number, name in enumerate(ARCHITECTURES):
        config = ("cpu", "cpu_bf16", "multi_cpu", "fsdp2")[number % 4]
        yield f"lm {name} {config}", "lm", config, [], ["--model_name_or_path", f"models/{name}"]
    adapter = ["--model_name_or_path", "models/llama", "--lora_rank", "16"]
    for config in ("cpu", "cpu_bf16", "multi_gpu", "fsdp2", "zero3"):
        yield f"lm lora {config}", "lm", config, [], adapter
    for config in ("cpu", "cpu_bf16", "multi_gpu"):
        yield f"lm lora nf4 {config}", "lm", config, [], [*adapter, "--quantize", "nf4"]
    for config in ("cpu", "multi_gpu"):
        labels = ["--train_file", "labels.jsonl", "--sequence_length", "128"]
        yield f"classify lora {config}", "classify", config, [], [*adapter, *labels]
    for config in ("cpu", "cpu_bf16", "multi_gpu", "fsdp2"):
        pairs, labels = ["--train_file", "pairs.jsonl"], ["--train_file", "labels.jsonl"]
        yield f"classify {config}", "classify", config, [], [*labels, "--sequence_length", "128"]
        yield f"seq2seq {config}", "seq2seq", config, [], [*pairs, "--sequence_length", "96", "--target_length", "64"]
        yield f"moe {config}", "moe", config, [], []
        yield f"vision {config}", "vision", config, [], ["--model_config", "resnet"]
        cut = ["--train_file", "text.txt", "--sequence_length", "16384"]
        yield f"long_sequence {config}", "long_sequence", config, [], cut
    for config, recipe in SHARED.items():
        is_sharded = config.startswith("fsdp2")
        for size in ("small",) if is_sharded else ("tiny", "small"):
            for precision in ("no", "bf16"):
                name = f"{recipe} {size} {config}{' float32' * (precision == 'no')}"
                yield name, recipe, config, ["--mixed_precision", precision], ["--model_config", size]
        for way in () if is_sharded else ("selective", "full"):
            flags = ["--model_config", "small", "--activation_checkpointing", way]
            yield f"{recipe} small {config} {way}", recipe, config, [], flags


def make_inputs(directory: Path) -> None:
    """Rows that are all longer than their samples may be, and ten models of six to eight layers without a download."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from common.data.source_types import Source
    from common.data.tokenizer import train_tokenizer

    if (directory / "models").is_dir():
        return
    words = (ROOT / "README.md").read_text().split()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=600)) for _ in range(400)]
    rows = [{"text": text, "label": f"kind {n % 4}"} for n, text in enumerate(texts)]
    (directory / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"source": text, "target": text[::-1]} for text in texts]
    (directory / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (directory / "text.txt").write_text("\n".join(texts))
    tokenizer = train_tokenizer(Source(files=(str(directory / "text.txt"),)), 2048)
    for number, name in enumerate(ARCHITECTURES):
        depth, width = (6, 8)[number % 2], (192, 256)[number % 2]
        shape = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": 4, "vocab_size": 2048}
        shape |= {"intermediate_size": 3 * width, "num_key_value_heads": 2, "head_dim": width // 4}
        shape |= {"ffn_dim": 3 * width, "word_embed_proj_dim": width, "max_position_embeddings": 512}
        if name in ("gpt2", "bloom"):
            shape = {"n_layer": depth, "hidden_size": width, "n_embd": width, "n_head": 4, "vocab_size": 2048}
        special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape, **special))
        model.save_pretrained(directory / f"models.partial/{name}")
        tokenizer.save_pretrained(directory / f"models.partial/{name}")
    (directory / "models.partial").rename(directory / "models")


def measure(prefix: str, recipe: str) -> None:
    """Runs the recipe inside `accelerate launch`, and writes this rank's peak to `prefix`-RANK.json."""
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    from common.report.progress import Progress

    ends = []
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    update_progress = Progress.update

    def update(self, batch, **record):
        update_progress(self, batch, **record)
        ends.append(time.time_ns())
        if batch.update < 2:
            return
        recording.__exit__(None, None, None)
        facts = {"peak": allocated_peak(recording, ends, _EventType)}
        Path(f"{prefix}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(facts))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        os._exit(0)

    def settled(collective):
        def call(*args, async_op=False, **kwargs):
            work = collective(*args, async_op=True, **kwargs)
            if work is not None:
                work.wait()
            time.sleep(0.005)  # until a thread of gloo has let go of what was sent: what it frees is not reported
            return work if async_op else None

        return call

    collectives = ("all_reduce", "all_gather", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    for name in ("broadcast", *collectives):
        setattr(torch.distributed, name, settled(getattr(torch.distributed, name)))
    Progress.update = update
    recording.__enter__()
    runpy.run_path(recipe, run_name="__main__")


def allocated_peak(recording, ends, types):
    """Returns the peak of the allocated bytes in the second update."""
    events = []

    def walk(node):
        if node.name.startswith("c10d::"):  # copies that gloo sends from: its threads free them
            return
        if node.tag == types.Allocation:
            events.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
        for child in node.children:
            walk(child)

    for root in recording.profiler.kineto_results.experimental_event_tree():
        walk(root)
    live, total, peak = {}, 0, 0
    for when, address, size in sorted(events, key=lambda event: event[0]):
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
        if ends[0] < when <= ends[1]:
            peak = max(peak, total)
    return peak


def run_case(case, directory):
    """Returns the case with its predicted and measured peak, or with the end of its output."""
    name, recipe, config, launch_flags, flags = case
    processes = 1 if config in SINGLE else NUM_PROCESSES.get(config, 2)
    prefix, out = directory / "peak", directory / "run"
    made = ("models/", "labels.", "pairs.", "text.")
    flags = [f"{directory}/{one}" if one.startswith(made) else one for one in flags]
    shared = ["--micro_batch_size", "4", "--global_batch_size", str(8 * processes), "--num_updates", "4"]
    shared += ["--warmup_updates", "1", "--save_every", "0", "--output_dir", str(out), "--overwrite"]
    if recipe in ("lm", "pipeline"):
        shared += ["--sequence_length", "128"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yaml"]
    command += launch_flags
    measured_command = [*command, __file__, "--measure", str(prefix), f"recipes/{recipe}.py", *flags, *shared]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    measured = []
    for _ in range(1 if processes == 1 else 2):
        for old in directory.glob("peak-*"):
            old.unlink()
        done = subprocess.run(measured_command, cwd=ROOT, capture_output=True, text=True, env=environment)
        ranks = [json.loads(path.read_text())["peak"] for path in sorted(directory.glob("peak-*"))]
        if len(ranks) != processes:
            return {"name": name, "failed": (done.stdout + done.stderr)[-1500:]}
        measured.append(ranks)
    shared.remove("--overwrite")
    predicted_command = [*command, f"recipes/{recipe}.py", *flags, *shared, "--dry_run"]
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run(predicted_command, cwd=ROOT, capture_output=True, text=True, env=environment)
    predicted = predicted_bytes(done.stdout)
    return {
        "name": name,
        "processes": processes,
        "predicted": predicted,
        "measured": max(map(min, zip(*measured, strict=True))),
    }


def predicted_bytes(output):
    """Returns the predicted peak in the output of a dry run; None without a prediction."""
    match = re.search(r"predicted peak ([\d.]+) ([MG])iB per process", output)
    return match and float(match[1]) * {"M": 2**20, "G": 2**30}[match[2]]


def error_of(case):
    """Returns the error of the prediction as a fraction of the measurement."""
    return case["predicted"] / case["measured"] - 1


def page(results):
    """Returns the page as Markdown."""
    cases = [case for case in results["cases"] if case.get("predicted")]
    errors = sorted(abs(error_of(case)) for case in cases)
    lines = [
        "# Predicted and measured memory",
        "",
        f"`python benchmarks/plan.py` on {results['machine']}, {results['date']}: {results['versions']}.",
        "",
        f"{len(cases)} cases: median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%}. MiB of the "
        "process with the highest peak, in its second update. The docstring of benchmarks/plan.py describes the "
        "measurement.",
        "",
        "![Predicted against measured](plan-cpu.png)",
        "",
        "| case | processes | predicted | measured | error |",
        "| --- | --: | --: | --: | --: |",
    ]
    for case in cases:
        sizes = f"{case['predicted'] / 2**20:,.1f} | {case['measured'] / 2**20:,.1f} | {error_of(case):+.1%}"
        lines.append(f"| {case['name']} | {case['processes']} | {sizes} |")
    return "\n".join([*lines, ""])


def draw(results, path):
    """Draws each case as a point, the line of equality, and lines 10 % above and below it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [case for case in results["cases"] if case.get("predicted")]
    figure, axes = plt.subplots(figsize=(5.5, 5))
    recipes = sorted({case["name"].split()[0] for case in cases})
    for recipe in recipes:
        own = [case for case in cases if case["name"].split()[0] == recipe]
        x, y = ([case[key] / 2**20 for case in own] for key in ("measured", "predicted"))
        axes.scatter(x, y, s=16, label=recipe, alpha=0.8)
    ends = [
        min(case["measured"] for case in cases) / 2**20 * 0.8,
        max(case["measured"] for case in cases) / 2**20 * 1.2,
    ]
    axes.plot(ends, ends, color="#444e58", linewidth=0.8)
    axes.fill_between(
        ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="#dfe3e7", label="10 %", zorder=0
    )
    axes.set(xscale="log", yscale="log", xlabel="measured, MiB", ylabel="predicted, MiB")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    if "--measure" in sys.argv:
        _, _, prefix, recipe, *rest = sys.argv
        sys.argv = [recipe, *rest]
        measure(prefix, recipe)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="cases with one of these in their names; run again")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    parser.add_argument("--work_dir", type=Path, default=Path(tempfile.gettempdir()) / "plan-benchmark")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    make_inputs(args.work_dir)
    path = args.output_dir / "plan-cpu.json"
    results = json.loads(path.read_text()) if path.is_file() else {"cases": []}
    done = {case["name"] for case in results["cases"] if case.get("predicted")}
    cases = [
        case
        for case in all_cases()
        if (any(word in case[0].split() for word in args.only) if args.only else case[0] not in done)
    ]
    from common.report.tracking import versions

    found = versions()
    results["machine"] = describe_machine()
    results["date"] = time.strftime("%Y-%m-%d")
    results["versions"] = ", ".join(
        f"{name} {found[name]}" for name in ("torch", "accelerate", "transformers", "deepspeed") if name in found
    )
    for case in tqdm(cases, unit="case"):
        found = run_case(case, args.work_dir)
        order = [name for name, *_ in all_cases()]
        results["cases"] = sorted(
            [*(one for one in results["cases"] if one["name"] != case[0]), found],
            key=lambda one: order.index(one["name"]),
        )
        text = f"{error_of(found):+.1%}" if found.get("predicted") else found.get("failed", "not predicted")[-300:]
        tqdm.write(f"{case[0]:40} {text}")
        path.write_text(json.dumps(results, indent=1) + "\n")
    if any(case.get("predicted") for case in results["cases"]):
        (args.output_dir / "plan-cpu.md").write_text(page(results))
        draw(results, args.output_dir / "plan-cpu.png")


if __name__ == "__main__":
    main()
