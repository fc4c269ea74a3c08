"""Compares the planner's predictions with published peaks of runs on GPUs, to which nothing in it was fitted.

    .venv/bin/python benchmarks/plan_published.py             # a few minutes on a CPU; no GPU and no weights

The updates are those of the published run, not of a recipe: a plain loop over a transformers model of the published
shape, with full logits if the run had them, and with its precision, attention and recomputation. They are traced and
extrapolated in depth as in `--plan`, and sharded by the same formulas (`tools.plan.memory`). Two features that no
recipe has are added here. One is weights, gradients and states in bf16 without float32 master weights (and
cross-entropy over bf16 logits, if the run's code has it). The other is FSDP2 without reduction between micro-batches,
which keeps the full gradient in float32.

"allocated" is compared with the predicted peak, "reserved" with the peak times the plan's fragmentation factor, and a
value of nvidia-smi with this product plus the GPU's context. The page names the sources of model shapes, settings and
values. Writes results/plan-published.json and .md.
"""

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common import arguments  # isort: skip  # noqa: F401  # before torch
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

GIB = 2**30
V100_CONTEXT = 1343 * 2**20  # CUDA 11.2: the same page as BERT's figures
LLAMA_7B = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32)
LLAMA_7B |= dict(intermediate_size=11008, vocab_size=32000)
LLAMA_8B = LLAMA_7B | dict(num_key_value_heads=8, intermediate_size=14336, vocab_size=128256)
LLAMA_13B = LLAMA_8B | dict(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=17920)
TINY_LLAMA = dict(hidden_size=2048, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4)
TINY_LLAMA |= dict(intermediate_size=5632, vocab_size=32000)
BERT_LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
GUIDE = "https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one"
TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_165 = "https://github.com/pytorch/torchtitan/pull/165"
DLROVER = "https://github.com/intelligent-machine-learning/dlrover/blob/master/atorch/examples/llama2/README.md"
LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main/extensions/thunder/README.md"
KEMPNER = "https://github.com/KempnerInstitute/KempnerForge/blob/main/benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md"


def case(name, source, figure, kind, shape, gpus, rows, length, recompute, **more):
    """One published run. figure: GiB. more: what is otherwise than in most."""
    usual = {"type": "llama", "sharding": "FSDP", "weights": "bf16", "autocast": "no", "optimizer": "adamw"}
    usual |= {"accumulates": False, "attention": "sdpa", "pure": False, "keeps_gradient": False}
    usual |= {"narrow_loss": False}
    own = {"name": name, "source": source, "figure": figure * GIB, "kind": kind, "shape": shape, "gpus": gpus}
    return usual | own | {"rows": rows, "length": length, "recompute": recompute} | more


def bert(name, mib, rows, recompute="none", **more):
    """A row of the guide: one V100, 512 tokens, float32 weights and AdamW."""
    how = {"type": "bert", "sharding": "plain", "weights": "float32", "attention": "eager"} | more
    how["accumulates"] = True  # the Trainer of then zeroed gradients in place, so that they are always there
    shape = (BERT_LARGE, 1, rows, 512, recompute)
    return case(f"BERT-large, {name}", GUIDE, mib / 1024, "nvidia-smi", *shape, **how)


FP32 = {"weights": "float32", "autocast": "bf16"}
PURE = {"pure": True}
CASES = [
    bert("plain", 14949, 4),
    bert("accumulation 4", 8681, 1),
    bert("accumulation and checkpointing", 6775, 1, "full"),
    bert("fp16", 13939, 4, autocast="bf16"),
    bert("accumulation, checkpointing, fp16", 7275, 1, "full", autocast="bf16"),
    bert("Adafactor", 12295, 4, optimizer="adafactor"),
    bert("accumulation, checkpointing, fp16, Adafactor", 4847, 1, "full", autocast="bf16", optimizer="adafactor"),
    case("Llama 7B, FSDP2, full", TITAN_165, 22.73, "allocated", LLAMA_7B, 8, 8, 2048, "full"),
    case("Llama 7B, FSDP2, every second product", TITAN_165, 49.54, "allocated", LLAMA_7B, 8, 8, 2048, "second"),
    case("Llama 7B, FSDP1, full", TITAN_165, 23.58, "allocated", LLAMA_7B, 8, 8, 2048, "full"),
    case("Llama 7B, FSDP1, every second product", TITAN_165, 50.35, "allocated", LLAMA_7B, 8, 8, 2048, "second"),
    case("Llama 8B, every second product", TITAN, 82.4, "reserved", LLAMA_8B, 8, 2, 8192, "second"),
    case("Llama 8B, every second product", TITAN, 67.0, "reserved", LLAMA_8B, 128, 2, 8192, "second"),
    *[
        case("Llama 7B, autocast, full", DLROVER, figure, "allocated", LLAMA_7B, gpus, 4, 4096, "full", **FP32)
        for gpus, figure in ((8, 38.67), (16, 33.96), (32, 31.61), (64, 30.43))
    ],
    case("TinyLlama, pure bf16", LITGPT, 20.61, "allocated", TINY_LLAMA, 8, 4, 2048, "none", **PURE),
    *[
        case("Llama 8B, pure bf16, full", KEMPNER, figure, "allocated", LLAMA_8B, gpus, rows, 4096, "full", **PURE,
             accumulates=True, keeps_gradient=True, narrow_loss=True)
        for gpus, rows, figure in ((4, 4, 61.1), (4, 8, 81.0), (32, 4, 51.3))
    ],
    case("Llama 13B, pure bf16, full", KEMPNER, 88.5, "allocated", LLAMA_13B, 8, 4, 4096, "full", **PURE,
         accumulates=True, keeps_gradient=True, narrow_loss=True),
]  # fmt: skip


def make(one, layers):
    """The model of a case with so many layers, without data."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    shape = one["shape"] | {"num_hidden_layers": layers, "max_position_embeddings": one["length"]}
    more = {"num_labels": 2} if one["type"] == "bert" else {"tie_word_embeddings": False}
    config = AutoConfig.for_model(one["type"], **shape, **more)
    kind = AutoModelForSequenceClassification if one["type"] == "bert" else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config, attn_implementation=one["attention"])


def every_second_product():
    """Of the products of a layer, every second one is kept, and attention."""
    count = {False: 0, True: 0}
    attention = (
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
    )

    def policy(context, operator, *_, **__):
        if operator.overloadpacket is torch.ops.aten.mm:
            count[context.is_recompute] += 1
            keeps = count[context.is_recompute] % 2 == 1
        else:
            keeps = operator.overloadpacket in attention
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def record(one, layers):
    """The recording of an update of two micro-batches."""
    from common.training.optimizers import make_optimizer
    from tools.plan import traced_run
    from tools.plan.allocation_tracer import AllocationTracer

    traced_run._use_gpu_kernels()
    model, tracer = make(one, layers), AllocationTracer()
    if one["recompute"] != "none":
        settings = {"use_reentrant": False}
        settings |= {"context_fn": every_second_product} if one["recompute"] == "second" else {}
        model.gradient_checkpointing_enable(settings)
        model.disable_input_require_grads()
    optimizer = make_optimizer(one["optimizer"], model, 1e-4, 0.1)
    with FakeTensorMode(allow_non_fake_inputs=True), tracer:
        parameters = traced_run._fill(model, optimizer, traced_run.DTYPES[one["weights"]])
        tracer.name("weights", *parameters.values())
        tracer.name("buffers", *model.buffers())
        for p in parameters.values():
            p.register_post_accumulate_grad_hook(lambda p: tracer.name("gradients", p.grad))
        tracer.vocabulary = 0 if one["type"] == "bert" else one["shape"]["vocab_size"]
        ids = torch.zeros(one["rows"], one["length"], dtype=torch.int64)
        labels = ids[:, 0] if one["type"] == "bert" else ids
        inputs = {"attention_mask": torch.ones_like(ids)} if one["type"] == "bert" else {"use_cache": False}
        model.train()
        for number in range(2):
            tracer.segment = f"forward {number}"
            with torch.autocast("cpu", torch.bfloat16, enabled=one["autocast"] != "no"):
                if one["narrow_loss"]:
                    loss = F.cross_entropy(model(input_ids=ids, **inputs).logits.flatten(0, 1), labels.flatten())
                else:
                    loss = model(input_ids=ids, labels=labels, **inputs).loss
            tracer.segment = f"backward {number}"
            loss.backward()
            del loss
        tracer.segment = "clip"
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        tracer.segment = "step"
        optimizer.step()
        for state in optimizer.state.values():
            tracer.name("optimizer state", *[value for value in state.values() if torch.is_tensor(value)])
        tracer.segment = "after step"
        optimizer.zero_grad()
    return traced_run.Recording([tuple(event) for event in tracer.events], tracer.parts, dict(tracer.flops), "")


def predict(one):
    """Bytes of the busiest process, as the kind of the figure counts them; and by part."""
    from tools.plan.memory import Mode, measure_model, needs, peak
    from tools.plan.memory_profile import make_profile, split_segments
    from tools.plan.process_memory import FRAGMENTS

    torch.set_num_threads(1)
    recordings = record(one, 2), record(one, 4)
    few, more = (make_profile(recording, split_segments(*recordings)) for recording in recordings)
    layers, model = one["shape"]["num_hidden_layers"], make(one, one["shape"]["num_hidden_layers"])
    precision = "bf16" if one["weights"] == "bf16" else "no"
    mode = Mode(one["name"], one["sharding"], precision, one["gpus"])
    shape = measure_model(model)
    segments = needs(few.scaled(more, (layers - 2) / 2), shape, mode, 1 + one["accumulates"])
    for segment, parts in segments.items():
        if one["pure"]:  # what `needs` takes for float32 is bf16
            for name in ("weights", "gradients", "optimizer state"):
                parts[name] = parts.get(name, 0) / 2
        if one["keeps_gradient"] and segment.startswith(("forward 1", "backward")):
            parts["gradients"] = parts.get("gradients", 0) + 4.0 * shape.trained
    segment, parts = peak(segments)
    size = sum(parts.values())
    size *= FRAGMENTS if one["kind"] != "allocated" else 1
    size += V100_CONTEXT if one["kind"] == "nvidia-smi" else 0
    return {"predicted": size, "at": segment, "parts": parts}


def page(results):
    """Returns the page as Markdown."""
    lines = [
        "# Predicted memory compared with published peaks on GPUs",
        "",
        f"`python benchmarks/plan_published.py`, {results['date']}. GiB; nothing was fitted to these values.",
        "The docstring of benchmarks/plan_published.py describes the compared values and the added settings.",
        "",
        "| run | GPUs | samples x tokens | figure | published | predicted | error |",
        "| --- | --: | --: | --- | --: | --: | --: |",
    ]
    for one in results["cases"]:
        error = one["predicted"] / one["figure"] - 1
        sizes = f"{one['figure'] / GIB:.1f} | {one['predicted'] / GIB:.1f} | {error:+.0%}"
        batch = f"{one['rows']} x {one['length']:,}"
        lines.append(f"| [{one['name']}]({one['source']}) | {one['gpus']} | {batch} | {one['kind']} | {sizes} |")
    return "\n".join([*lines, ""])


def main():
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(predict, CASES))
    kept = ("name", "source", "figure", "kind", "gpus", "rows", "length", "recompute")
    cases = [{name: one[name] for name in kept} | prediction for one, prediction in zip(CASES, found, strict=True)]
    results = {"date": time.strftime("%Y-%m-%d"), "cases": cases}
    directory = ROOT / "benchmarks/results"
    (directory / "plan-published.json").write_text(json.dumps(results, indent=1) + "\n")
    (directory / "plan-published.md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
