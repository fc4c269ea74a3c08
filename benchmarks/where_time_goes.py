"""Measures the time of an update by part, and its utilisation of the machine's matmul throughput.

    .venv/bin/python benchmarks/where_time_goes.py --label before      # three recipes in float32 and bf16, on the CPU
    .venv/bin/python benchmarks/where_time_goes.py --label after       # later: the picture shows both
    ... --recipes lm --precisions bf16 --work_dir /tmp/data            # one case (others of the label are kept)

Each recipe runs as shipped, started by `accelerate launch` with the machine's config, with data and model of
benchmarks/throughput.py: a Llama of 13.8 M parameters on the functions of Python's standard library, a T5 of 28 M on
functions and their docstrings, a ViT of 1.2 M on scikit-learn's digits. After the warm-up some updates are timed, and
later ones are recorded by torch.profiler. The time of a part is its fraction of the recorded time, multiplied by the
time of the timed updates. Names of operators identify the parts (`part_of`); the remaining time is Python and torch's
own overhead, to which the profiler adds. On a GPU the times are those of kernels, and the rest is the time without a
kernel.

The matmul throughput is the best of torch.mm on square matrices of 1024, 1536 and 2048, measured right after the run.
The FLOPs of an update of the language model are 6 * parameters * tokens without padding, plus attention: 12 * layers *
width * length per token of a sample, halved because no token attends to later tokens (Kaplan et al., arXiv:2001.08361,
with the backward). Writes results/where-time-goes-DEVICE.json and .png.
"""

import argparse
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from accelerate import Accelerator
from flags import output_dir
from machine import describe_machine, device_name
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

# The recipe's data set in throughput_data, and updates of a run: warm-up, timed, recorded.
RECIPES = {"lm": ("functions", (1, 2, 1)), "seq2seq": ("seq2seq", (2, 4, 2)), "vision": ("vision", (10, 40, 10))}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
PARTS = {
    "matrix products": "#1b6ca8",
    "attention": "#c9a15a",
    "head and loss": "#8d6a9f",
    "norms, activations, dropout": "#6a9f7f",
    "casts, copies, gradient sums": "#c06c5b",
    "optimizer": "#444e58",
    "clipping": "#7a8794",
    "data": "#b4bcc4",
    "Python": "#dfe3e7",
}
CASTS = ("aten::copy_", "aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::cat", "Memcpy")
PRODUCTS = ("aten::mm", "aten::addmm", "convolution", "mkldnn")


def part_of(name, inside):
    """The part that an operator's own time belongs to; `inside`: the part that one around it has named, or None.

    An attention kernel or a batched product is attention (no recipe here has batched products elsewhere), and so is
    whatever runs inside a function of such a name; a plain product is one of the layers, unless it is the head's.
    """
    if name in PARTS:  # what `record` has named, inside a range of the recipe's own too
        return name
    if inside not in (None, "matrix products", "norms, activations, dropout"):
        return inside
    if any(word in name.lower() for word in ("attention", "bmm", "softmax")):
        return "attention"
    if name.startswith("Optimizer.") or "_fused_" in name:
        return "optimizer"
    if "DataLoader" in name:
        return "data"
    if any(word in name for word in ("CrossEntropy", "NllLoss", "nll_loss")):
        return "head and loss"
    if name.startswith(PRODUCTS) or any(word in name for word in PRODUCTS[2:]):
        return "matrix products"
    if name.startswith(CASTS) or "AccumulateGrad" in name:
        return "casts, copies, gradient sums"
    return "norms, activations, dropout" if name.startswith(("aten::", "autograd::")) else inside


def record(flags, recipe, counts, path):
    """Runs the recipe in this process; writes seconds of each timed update, and of each part in the recorded ones."""
    warmup, timed, recorded = counts
    profiler = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()])
    ends, scopes = [], []

    def step_ended(*_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        if len(ends) == warmup + timed:
            profiler.start()
            ends[-1] = time.perf_counter()
        elif len(ends) == warmup + timed + recorded:
            profiler.stop()

    def head_begins(module, *_):
        if module is head[0]:
            scopes.append(record_function("head and loss"))
            scopes[-1].__enter__()

    def backward(self, loss, **kwargs):
        while scopes:  # the head and the loss end where the backward begins
            scopes.pop().__exit__(None, None, None)
        return run_backward(self, loss, **kwargs)

    def clip(self, *args, **kwargs):
        with record_function("clipping"):
            return run_clipping(self, *args, **kwargs)

    def prepare(self, model, *args, **kwargs):
        head[0] = model.get_output_embeddings() or [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1]
        return run_prepare(self, model, *args, **kwargs)

    head = [None]
    run_backward, run_clipping, run_prepare = Accelerator.backward, Accelerator.clip_grad_norm_, Accelerator.prepare
    Accelerator.backward, Accelerator.clip_grad_norm_, Accelerator.prepare = backward, clip, prepare
    register_optimizer_step_post_hook(step_ended)
    torch.nn.modules.module.register_module_forward_pre_hook(head_begins)
    sys.argv = [recipe, *flags]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    timed_seconds = seconds[warmup - 1 : warmup + timed - 1]
    Path(path).write_text(
        json.dumps(
            {"seconds": timed_seconds, "recorded": sum(seconds[-recorded:]), "parts": parts_of(profiler.events())}
        )
    )


def parts_of(events):
    """Seconds of each part, from the profiler's events: each one's own time goes to one part.

    A backward's operators belong to the head and the loss where the forward of the same number in autograd did.
    """
    on_gpu = torch.cuda.is_available()
    named, seconds = {}, Counter()
    numbers = set()  # of autograd, in the forward of head and loss
    for event in sorted(events, key=lambda event: (event.thread, event.time_range.start, -event.time_range.end)):
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        inside = named.get(event.cpu_parent and event.cpu_parent.id)
        if event.name.startswith("autograd::engine::evaluate_function") and event.sequence_nr in numbers:
            inside = "head and loss"
        part = named[event.id] = part_of(event.name, inside)
        if part == "head and loss" and event.sequence_nr >= 0:
            numbers.add(event.sequence_nr)
        if part:
            seconds[part] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
    return seconds


def matrix_rate(dtype, device, repeats=40):
    """The most floating-point operations in a second that torch.mm reaches on square matrices."""
    best, end = 0.0, time.perf_counter() + 30
    for size in (1024, 1536, 2048):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        for _ in range(repeats):
            started = time.perf_counter()
            torch.mm(a, b)
            if device == "cuda":
                torch.cuda.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - started))
            if time.perf_counter() > end:  # a CPU without instructions for bf16 needs seconds per product
                return best
    return best


def measure(args, recipe, precision, work):
    """One recipe in one precision, in a process of its own: the record of the JSON file."""
    from throughput import BENCHMARK_FLAGS, launch
    from throughput_data import data_flags, prepare, settings_of

    name, counts = RECIPES[recipe]
    settings = settings_of(name, args.size, False) | {"warmup": 0, "measured": sum(counts)}
    folder = work / f"{recipe}-{args.size}-profile"
    facts = prepare(folder, name, args.size, settings)
    data = folder / f"{name}-{args.size}"
    with tempfile.TemporaryDirectory() as output_dir:
        job = {"recipe": str(ROOT / f"recipes/{recipe}.py"), "counts": counts, "path": f"{output_dir}/parts.json"}
        job["flags"] = ["--model_name_or_path", str(data / "model"), "--output_dir", f"{output_dir}/run"]
        job["flags"] += [*data_flags(data, settings), *BENCHMARK_FLAGS, "--num_updates", str(sum(counts))]
        job["flags"] += ["--global_batch_size", str(settings["global_batch"])]
        launch(precision, ["benchmarks/where_time_goes.py", "--job", json.dumps(job)])
        measured = json.loads(Path(job["path"]).read_text())
    timed = facts["lengths"][counts[0] : counts[0] + counts[1]]
    tokens = sum(sum(sample) for update in timed for sample in update)
    total, recorded = sum(measured["seconds"]), measured["recorded"]
    parts = measured["parts"] | {"Python": recorded - sum(measured["parts"].values())}
    shares = {part: parts.get(part, 0.0) / recorded for part in PARTS}
    found = {"recipe": recipe, "precision": precision, "label": args.label, "parameters": facts["parameters"]}
    found |= {"updates": counts, "tokens_per_second": tokens / total, "shares": shares}
    found |= {"milliseconds_per_1000_tokens": {part: share * total / tokens * 1e6 for part, share in shares.items()}}
    if recipe == "lm":
        config = json.loads((data / "model/config.json").read_text())
        needed = 6 * facts["parameters"] * tokens
        per_square = 6 * config["num_hidden_layers"] * config["hidden_size"]
        needed += per_square * sum(sum(sample) ** 2 for update in timed for sample in update)
        forward_and_backward = 1 - sum(shares[part] for part in ("optimizer", "clipping", "data"))
        found["flops_of_update"] = needed / total
        found["flops_of_forward_and_backward"] = needed / total / forward_and_backward
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now", help="name of this state of the code, such as before or after")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--precisions", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--size", choices=("small", "quick"), default="small", help="quick: a toy, shows that it runs")
    parser.add_argument("--work_dir", type=Path, help="keeps model and data here (default: a temporary folder)")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # this command starts itself again, inside the launcher
    args = parser.parse_args()
    if args.job:
        return record(**json.loads(args.job))
    from throughput import begin, num_threads

    from common.report.tracking import versions

    with tempfile.TemporaryDirectory() as temporary:
        work = begin(args.work_dir or Path(temporary))
        torch.set_num_threads(num_threads())
        path = args.output_dir / f"where-time-goes-{device_name()}.json"
        results = json.loads(path.read_text()) if path.exists() else {"states": {}, "records": []}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for recipe in args.recipes:
            for precision in args.precisions:
                found = measure(args, recipe, precision, work)
                found["matrix_rate"] = matrix_rate(DTYPES[precision], device, 5 if args.size == "quick" else 40)
                which = (recipe, precision, args.label)
                others = [r for r in results["records"] if (r["recipe"], r["precision"], r["label"]) != which]
                results["records"] = [*others, found]
                print(recipe, precision, f"{found['tokens_per_second']:,.0f} a second", describe(found), flush=True)
    results["states"][args.label] = {
        "machine": describe_machine(),
        "threads": num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "command": f".venv/bin/python benchmarks/where_time_goes.py --label {args.label}",
    }
    path.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, path.with_suffix(".png"))
    print(path.with_suffix(".png"))


def describe(found):
    """The parts, and the share of the matrix rate, in one line."""
    line = ", ".join(f"{part} {share:.0%}" for part, share in found["shares"].items())
    if "flops_of_update" not in found:
        return line
    reached = [found[key] / found["matrix_rate"] for key in ("flops_of_update", "flops_of_forward_and_backward")]
    return line + f"; {reached[0]:.0%} of {found['matrix_rate'] / 1e9:,.0f} GFLOP/s ({reached[1]:.0%} without the step)"


def draw(results, path):
    """A panel a recipe: a bar for each precision and label, of the time for 1,000 tokens (images), by part."""
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    import matplotlib.pyplot as plt

    recipes = [recipe for recipe in RECIPES if any(r["recipe"] == recipe for r in results["records"])]
    figure, axes = plt.subplots(1, len(recipes), figsize=(4 * len(recipes), 4.6), layout="constrained", squeeze=False)
    labels = list(results["states"])
    for axis, recipe in zip(axes[0], recipes, strict=True):
        records = [r for r in results["records"] if r["recipe"] == recipe]
        records.sort(key=lambda r: (r["precision"] == "bf16", labels.index(r["label"])))
        names, bottoms = [f"{r['precision']}\n{r['label']}" for r in records], [0.0] * len(records)
        for part, color in PARTS.items():
            heights = [r["milliseconds_per_1000_tokens"][part] for r in records]
            axis.bar(range(len(records)), heights, 0.7, bottom=bottoms, color=color, label=part)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        for place, (record_, top) in enumerate(zip(records, bottoms, strict=True)):
            if "flops_of_update" in record_:
                share = record_["flops_of_update"] / record_["matrix_rate"]
                axis.text(place, top, f"{share:.0%} of the\nmatrix rate", ha="center", va="bottom", fontsize=7)
        axis.set_xticks(range(len(records)), names, fontsize=8)
        axis.set_title(f"recipes/{recipe}.py, {statistics.median(r['parameters'] for r in records) / 1e6:.1f} M")
        axis.set_ylabel(f"ms for 1,000 {'images' if recipe == 'vision' else 'tokens'}")
        axis.margins(y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(next(iter(results["states"].values()))["machine"], fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
