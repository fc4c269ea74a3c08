"""Computes which models can be trained on one and two cards of 24 GB: full, with an adapter, and with a 4-bit base.

    .venv/bin/python benchmarks/fits.py             # a quarter of an hour on two CPU cores; no GPU and no weights

Each case is a plan (`--plan`) of recipes/lm.py, or moe.py, for a model of a public shape, written as its config.json.
Activation checkpointing is full, precision bf16, and adapters have rank 16. Micro-batches grow in powers of two up to
128 samples of 1,024 tokens. Their memory depends on the number of tokens alone, because attention stores no scores, so
the number of tokens that fits is also the longest context. Cards are planned as `4090` (23.6 GiB), with the plan's
reserve for fragmentation, CUDA and NCCL; the host has 128 GiB. Writes results/fits.json and .md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))
RESULTS = ROOT / "benchmarks/results/fits"
HOST, TOKENS, ROWS = "host 128GiB", 1024, 128
ADAPTER = ["--lora_rank", "16"]
METHODS = {"full": [], "LoRA": ADAPTER, "4-bit LoRA": [*ADAPTER, "--quantize", "nf4"]}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# The sizes of Llama 3.2 1B and 3B, Llama 3.1 8B, Llama 2 13B, Qwen2.5 32B, Llama 3.1 70B: SIZES, vocabulary, tied.
LLAMAS = {
    "1B": (2048, 8192, 16, 32, 8, 128256, True),
    "3B": (3072, 8192, 28, 24, 8, 128256, True),
    "8B": (4096, 14336, 32, 32, 8, 128256, False),
    "13B": (5120, 13824, 40, 40, 40, 32000, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "70B": (8192, 28672, 80, 64, 8, 128256, False),
}
# The sizes of Qwen3 30B-A3B.
MIXTURE = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
MIXTURE |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128}
MIXTURE |= {"num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False}
MODELS = [*LLAMAS, "30B-A3B"]
CONFIGS = {1: ("single_gpu", "fsdp2_offload"), 2: ("fsdp2", "fsdp2_offload")}


def write_models(directory):
    """Writes a text, and for each model a directory with its configuration and a small tokenizer, without weights."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    from common.data.source_types import Source
    from common.data.tokenizer import train_tokenizer

    text = directory / "text.txt"
    text.write_text("one two three four\n" * 100_000)
    tokenizer = train_tokenizer(Source(files=(str(text),)), 384)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    positions = {"max_position_embeddings": TOKENS * ROWS}
    for name, (*sizes, vocabulary, tied) in LLAMAS.items():
        shape = dict(zip(SIZES, sizes, strict=True)) | {"vocab_size": vocabulary, "tie_word_embeddings": tied}
        LlamaConfig(**shape, **ids, **positions).save_pretrained(directory / name)
    Qwen3MoeConfig(**MIXTURE, **ids, **positions).save_pretrained(directory / "30B-A3B")
    for name in MODELS:
        tokenizer.save_pretrained(directory / name)


def plan_case(recipe, cards, *flags):
    """Prints a line of JSON: of each config the largest micro-batch that fits, from the plan of this process."""
    from tools.plan import __main__ as command
    from tools.plan import plan

    def page(tracer, machine, shape, rows, left_out):
        found = {
            row.mode.name: {
                "tokens": 0 if row.shortfall else row.tokens,
                "peak": round(sum(row.parts.values())),
                "weights": round(row.parts["weights"]),
                "host": round(row.host),
                "shortfall": round(row.shortfall),
            }
            for row in rows
        }
        yield json.dumps({"parameters": shape.parameters, "configs": found})

    modes_for = plan.configs.modes_for

    def chosen_modes(*arguments):
        modes, left_out = modes_for(*arguments)
        return [mode for mode in modes if mode.name in CONFIGS[int(cards)]], left_out

    plan._page, plan._adapter_lines, plan.configs.modes_for = page, lambda *_: [], chosen_modes
    plan.CHECKPOINTING, plan.BUSY = ("full",), {"cuda": float("inf")}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    command._run(str(ROOT / recipe), list(flags), {"machine": f"{cards} x 4090, {HOST}"})


def compute(directory, model, method, cards):
    """Returns what `plan_case` prints in a process of its own."""
    recipe, own = ("recipes/moe.py", ["--balance", "none"]) if model == "30B-A3B" else ("recipes/lm.py", [])
    flags = ["--train_file", directory / "text.txt", "--model_name_or_path", directory / model, *METHODS[method], *own]
    flags += ["--sequence_length", TOKENS, "--global_batch_size", ROWS * cards]
    command = [sys.executable, __file__, "--case", recipe, cards, *flags]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        sys.exit(f"error: {model}, {method}: {result.stderr.strip()[-500:]}")
    return {"model": model, "method": method, "cards": cards} | json.loads(result.stdout.splitlines()[-1])


def describe(case):
    """Returns a cell of the table: the longest context, with the host memory if a config that offloads has more."""
    on_cards, offloaded = (case["configs"].get(name, {"tokens": 0}) for name in CONFIGS[case["cards"]])
    cells = [f"{on_cards['tokens']:,}"] if on_cards["tokens"] else []
    if offloaded["tokens"] > on_cards["tokens"]:
        cells.append(f"{offloaded['tokens']:,} (host {offloaded['host'] / 2**30:.0f} GiB)")
    return "; ".join(cells) or "-"


def write_page(cases):
    """Writes the table of all cases."""
    rows = [f"| model | {' | '.join(f'{method}, {n} x 24 GB' for n in CONFIGS for method in METHODS)} |"]
    rows.append("| --- |" + " ---: |" * (len(CONFIGS) * len(METHODS)))
    for model in MODELS:
        cells = [
            next((describe(c) for c in cases if (c["model"], c["method"], c["cards"]) == (model, method, n)), "?")
            for n in CONFIGS
            for method in METHODS
        ]
        rows.append(f"| {model} | {' | '.join(cells)} |")
    head = ["# Models that fit on one and two cards of 24 GB", ""]
    head += [f"`python benchmarks/fits.py`, {time.strftime('%Y-%m-%d')}; computed by the planner, not measured."]
    head += ["Longest context in tokens, with micro-batches of one sample: on the cards alone (`single_gpu.yaml`, on"]
    head += ["two `fsdp2.yaml`); if more fit with `fsdp2_offload.yaml`, also that, and its use of host memory. At most"]
    head += [f"{TOKENS * ROWS:,} were planned. The docstring of benchmarks/fits.py lists the settings.", ""]
    RESULTS.with_suffix(".md").write_text("\n".join([*head, *rows]) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS, help="models (default: all)")
    only = parser.parse_args().only
    path = RESULTS.with_suffix(".json")
    cases = [case for case in json.loads(path.read_text()) if case["model"] not in only] if path.is_file() else []
    with tempfile.TemporaryDirectory() as directory:
        write_models(Path(directory))
        for model in only:
            for cards in CONFIGS:
                for method in METHODS:
                    cases.append(compute(Path(directory), model, method, cards))
                    print(model, method, f"{cards} x 24 GB:", describe(cases[-1]), flush=True)
            cases.sort(key=lambda case: (MODELS.index(case["model"]), case["cards"]))
            path.write_text(json.dumps(cases, indent=1) + "\n")
            write_page(cases)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        plan_case(*sys.argv[2:])
    else:
        main()
