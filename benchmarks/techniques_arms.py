"""The arms of benchmarks/techniques.py: what each one runs, and what is tried together."""

from typing import NamedTuple

import torch
from throughput import ON_GPU
from throughput_data import DATA

ADAPTER = ("--lora_rank", 16)
PARTS = 4  # micro-batches of an accumulated update
# warmup and measured: updates of a run.
COMMON = {"global_batch": 16, "warmup": 1, "measured": 4}
SETTINGS = {
    "lm": COMMON | {"recipe": "lm", "rows": "functions", "flags": DATA["functions"]["flags"]},
    "classify": COMMON | {"recipe": "classify", "rows": "classify", "flags": ["--sequence_length", "512"]},
}
PRESETS = {
    "bert-small": SETTINGS["classify"] | {"rows": "two packages", "model": "small"},
    # The setting of transformers' performance guide: 512 samples, each of 512 tokens, with one of two labels.
    "bert-large": SETTINGS["classify"]
    | {"rows": "pieces", "model": "large", "global_batch": 4, "warmup": 8, "measured": 120}
    # layers, width, heads, MLP width, vocabulary, learning rate
    | {"more_sizes": {"large": (24, 1024, 16, 4096, 30522, 1e-4)}},
}


class Arm(NamedTuple):
    """What runs: the loop, or a recipe, with these flags; or why it cannot run here."""

    label: str
    flags: tuple = ()
    precision: str = "float32"
    recipe: str = ""  # its name; empty: the loop
    config: str = ""  # another one than the machine's
    cannot: str = ""


class Candidate(NamedTuple):
    """A technique that may pay together: of which kind, the flags of a recipe, the precision."""

    kind: str
    flags: tuple = ()
    precision: str = ""
    label: str = ""  # where it is not that of the arm which shows what it does alone


def arms_of(setting):
    """The rows of the table, by name, in their order."""
    batch, recipe = setting["global_batch"], setting["recipe"]
    whole, parts = ("--micro_batch_size", batch), ("--micro_batch_size", batch // PARTS)
    full = ("--activation_checkpointing", "full")
    half = "fp16" if ON_GPU else "bf16"
    three = f"accumulation, checkpointing, {half}"
    no_rows = "" if recipe == "lm" else "a classifier has one row of logits a sample: there is nothing to cut"
    no_gpu, no_fp16, no_tf32 = "", "", ""
    if not ON_GPU:
        no_gpu = "on a CPU host memory is all there is: the same as full"
        no_fp16 = "Accelerate has no fp16 on a CPU: it would compute in float32"
        no_tf32 = "TF32 is how GPUs since Ampere multiply; a CPU has no such products"
    elif torch.cuda.get_device_capability() < (8, 0):
        no_tf32 = "TF32 needs a GPU since Ampere"

    def checkpointing(mode):
        return (*whole, "--activation_checkpointing", mode)

    return {
        "plain": Arm("plain padded loop", whole),
        "accumulation": Arm(f"accumulation {PARTS}", parts),
        "sorted": Arm(f"sorted batches (with accumulation {PARTS})", (*parts, "--sort")),
        "chunked": Arm("chunked loss", (*whole, "--chunked_loss"), cannot=no_rows),
        "selective": Arm("checkpointing, selective", checkpointing("selective")),
        "full": Arm("checkpointing, full", checkpointing("full")),
        "offload": Arm("checkpointing, offload", checkpointing("offload"), cannot=no_gpu),
        "bf16": Arm("bf16", whole, "bf16"),
        "fp16": Arm("fp16", whole, "fp16", cannot=no_fp16),
        "tf32": Arm("TF32", (*whole, "--tf32"), cannot=no_tf32),
        "fused": Arm("fused AdamW", (*whole, "--optimizer", "adamw")),
        "adamw8bit": Arm("8-bit AdamW", (*whole, "--optimizer", "adamw8bit")),
        "adafactor": Arm("Adafactor", (*whole, "--optimizer", "adafactor")),
        "compile": Arm("compile", (*whole, "--compile")),
        "workers": Arm("2 workers", (*whole, "--num_workers", 2)),
        "zero_offload": Arm("ZeRO-offload (of the recipe)", whole, recipe=recipe, config="zero3_offload_cpu"),
        "two": Arm("accumulation, checkpointing", (*parts, *full)),
        "three": Arm(three, (*parts, *full), half),
        "three_adafactor": Arm(f"{three}, Adafactor", (*parts, *full, "--optimizer", "adafactor"), half),
        "three_adamw8bit": Arm(f"{three}, 8-bit AdamW", (*parts, *full, "--optimizer", "adamw8bit"), half),
        "recipe": Arm("the recipe as shipped", recipe=recipe),
        "lora": Arm("LoRA, rank 16 (of the recipe)", ADAPTER, recipe=recipe),
        "lora_nf4": Arm("LoRA on a base in 4 bits (of the recipe)", (*ADAPTER, "--quantize", "nf4"), recipe=recipe),
    }


def candidates_of(longest):
    """What is tried together, by the name of the arm that shows what it does alone. longest: tokens of a sample."""
    modes = {mode: Candidate("checkpointing", ("--activation_checkpointing", mode)) for mode in ("selective", "full")}
    modes["offload"] = Candidate("checkpointing", ("--activation_checkpointing", "offload"))
    precisions = {name: Candidate("precision", precision=name) for name in ("bf16", "fp16")}
    optimizers = {name: Candidate("optimizer", ("--optimizer", name)) for name in ("adamw8bit", "adafactor")}
    return {
        **modes,
        **precisions,
        **optimizers,
        "accumulation": Candidate(
            "micro-batch", ("--micro_batch_tokens", longest), label=f"micro-batches of {longest} tokens"
        ),
        "compile": Candidate("compile", ("--compile",)),
        "workers": Candidate("workers", ("--num_workers", 2)),
    }


def arm_of(kept, candidates, recipe):
    """The recipe with the techniques that are kept."""
    chosen = [candidates[name] for name in kept.values()]
    flags = tuple(flag for one in chosen for flag in one.flags)
    precision = next((one.precision for one in chosen if one.precision), "float32")
    return Arm(f"the recipe, {', '.join(kept.values())}", flags, precision, recipe)
