"""Records which tensors use memory in each phase of an update of a shipped recipe, and draws them as areas.

    .venv/bin/python benchmarks/anatomy.py                                         # the arms below, on the CPU
    .venv/bin/python benchmarks/anatomy.py --recipe classify --model_config small --sequence_length 128

Each arm is a recipe with real tensors, started by `accelerate launch` with a shipped config. It records the second
update, of two micro-batches, so that the optimizer state already exists, and the first micro-batch of an evaluation.
The output of an operator counts until its storage is freed; buffers inside kernels do not count. The base of an adapter
is a model of the same shape, saved by a run of one update. Flags that this command does not know are passed to the
recipe.

    weights           parameters and buffers, and their copies in another precision
    gradients         the gradients that are accumulated for the step
    optimizer state   created in the first step
    activations       tensors that a forward pass keeps for its backward pass
    logits and loss   tensors of a forward pass with the vocabulary as a dimension: logits, and their gradient
    temporaries       samples, recomputed tensors, and tensors that are freed in the phase that created them

Writes results/anatomy-cpu.json, .md and .png.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common import arguments  # isort: skip  # noqa: F401  # before torch
import torch
from flags import output_dir
from machine import describe_machine
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from common.models.adapters import count_parameters
from tools.plan.allocation_tracer import AllocationTracer

AREAS = ("weights", "gradients", "optimizer state", "activations", "logits and loss", "temporaries")
COLOURS = ("#4269d0", "#efb118", "#97bbf5", "#3ca951", "#ff725c", "#9498a0")
ARMS = {  # config and flags of each
    "plain": ("cpu", []),
    "half micro-batches": ("cpu", ["--micro_batch_size", "2"]),
    "bf16": ("cpu_bf16", []),
    "selective": ("cpu", ["--activation_checkpointing", "selective"]),
    "full": ("cpu", ["--activation_checkpointing", "full"]),
    "adafactor": ("cpu", ["--optimizer", "adafactor"]),
    "LoRA": ("cpu", ["--lora_rank", "16"]),
    "LoRA, bf16": ("cpu_bf16", ["--lora_rank", "16"]),
    "LoRA, nf4, bf16": ("cpu_bf16", ["--lora_rank", "16", "--quantize", "nf4"]),
}
SHAPE = ["--micro_batch_size", "4", "--global_batch_size", "8", "--num_updates", "2", "--save_every", "0"]
DEFAULTS = ["--model_config", "small", "--sequence_length", "256"]
RECORDED = 1  # the update
POINTS = 300  # of a curve, each the largest of those around it
MIB = 2**20


class RealTracer(AllocationTracer):
    """Tracer that counts copies of weights in the dtype of the matmuls as weights."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten._to_copy.default and self.parts.get(self.number_of(args[0])) == "weights":
            self.name("weights", out)
        return out


class Recorder:
    """Names the phases and tensors of a run; after update RECORDED, writes the recording to `path` and ends the run."""

    def __init__(self, path):
        self.path, self.tracer, self.facts = path, RealTracer(), {"update": None}

    def begin(self, phase):
        self.tracer.segment = f"{self.facts['update']} {phase}"

    def end(self):
        events = [tuple(event) for event in self.tracer.events if event.size]
        Path(self.path).write_text(json.dumps(self.facts | series(events, self.tracer.parts)))
        os._exit(0)

    def watch(self, run, model):
        """Names the tensors of the model, of its backward passes and of its optimizer, from this call."""
        tracer = self.tracer
        shown = {"parameters": count_parameters(model)[0], "unit": run.loader.dataset.samples.unit}
        self.facts.update(shown)
        tracer.vocabulary = getattr(model.config.get_text_config(), "vocab_size", 0)
        tracer.name("weights", *model.parameters(), *model.buffers())
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: tracer.name("gradients", p.grad))
        register_optimizer_step_pre_hook(lambda *_: self.begin("step"))
        register_optimizer_step_post_hook(self.name_states)
        backward = run.accelerator.backward

        def named_backward(loss, **kwargs):
            tracer.segment = tracer.segment.replace("forward", "backward")
            backward(loss, **kwargs)

        run.accelerator.backward = named_backward

    def name_states(self, optimizer, *_):
        for state in optimizer.state.values():
            self.tracer.name("optimizer state", *[one for one in state.values() if torch.is_tensor(one)])

    def micro_batches(self, run, batch, pairs):
        """Yields the pairs of `Run.micro_batches`, each in its phase."""
        is_evaluated = not run.model.training
        if self.facts["update"] is None:
            self.tracer.__enter__()
        if not is_evaluated:
            self.facts["update"] = batch.update
            shape = next(iter(batch.micro_batches[0].values())).shape
            self.facts["tokens"] = shape[0] if len(shape) > 2 else shape[0] * shape[1]
        for number, pair in enumerate(pairs, start=1):
            self.begin("evaluation" if is_evaluated else f"forward {number}")
            yield pair
            if is_evaluated:
                self.end()
        self.begin("clip")


def measure(path, recipe):
    """Runs the recipe inside `accelerate launch`, and writes the recording to `path`."""
    from common.evaluation import Evaluations
    from common.run import Run

    recorder = Recorder(path)
    prepare, micro_batches, end_update = Run.prepare, Run.micro_batches, Run.end_update

    def named_prepare(run, *args, **lines):
        model, optimizer = prepare(run, *args, **lines)
        recorder.watch(run, model)
        return model, optimizer

    def is_due(evaluations):
        recorder.begin("between updates")  # the loader creates the held-out batches
        return bool(evaluations.run.held_out) and recorder.facts["update"] == RECORDED

    def end_recorded_update(run, batch, **figures):
        if recorder.facts["update"] == RECORDED:
            recorder.end()
        return end_update(run, batch, **figures)

    Run.prepare, Run.end_update, Evaluations.is_due = named_prepare, end_recorded_update, is_due
    Run.micro_batches = lambda run, batch: recorder.micro_batches(run, batch, micro_batches(run, batch))
    runpy.run_path(recipe, run_name="__main__")


def series(events, parts):
    """Returns the bytes of each area after some events of the recorded update, and the peak of each phase."""
    born, ended = {}, {}
    for segment, storage, size in events:
        (born if size > 0 else ended)[storage] = segment

    def area(storage):
        part = {"buffers": "weights"}.get(parts.get(storage), parts.get(storage))
        if part == "logits" and ("forward" in born[storage] or "evaluation" in born[storage]):
            return "logits and loss"
        if part in AREAS:
            return part
        is_kept = ended.get(storage) != born[storage] and "between" not in born[storage]
        return "activations" if is_kept else "temporaries"

    live, curve = defaultdict(int), []
    for segment, storage, size in events:
        live[area(storage)] += size
        update, _, phase = segment.partition(" ")
        if update == str(RECORDED) and phase != "between updates":
            curve.append((phase, [live[name] for name in AREAS]))
    phases = list(dict.fromkeys(phase for phase, _ in curve))
    peaks = {phase: max((sizes for one, sizes in curve if one == phase), key=sum) for phase in phases}
    most = [max(sizes[number] for _, sizes in curve) for number in range(len(AREAS))]
    step = max(1, len(curve) // POINTS)
    thin = [max(curve[at : at + step], key=lambda one: sum(one[1])) for at in range(0, len(curve), step)]
    return {
        "most": dict(zip(AREAS, most, strict=True)),
        "peaks": {phase: dict(zip(AREAS, sizes, strict=True)) for phase, sizes in peaks.items()},
        "curve": [[phases.index(phase), *(size // 1024 for size in sizes)] for phase, sizes in thin],  # KiB
    }


def run_arm(name, recipe, flags, directory):
    """Returns the recording of an arm's update."""
    config, own = ARMS[name]
    path = directory / "recording.json"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yaml"]
    script = [f"recipes/{recipe}.py", *SHAPE, *flags]
    options = {"cwd": ROOT, "capture_output": True, "text": True}
    options["env"] = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    if "--lora_rank" in own and "--model_config" in flags:
        base = directory / "base"
        if not base.is_dir():
            saved = subprocess.run([*launch, *script, "--num_updates", "1", "--output_dir", str(base)], **options)
            assert saved.returncode == 0, saved.stdout + saved.stderr
        at = script.index("--model_config")
        script[at : at + 2] = ["--model_name_or_path", str(base / "model")]
    script += [*own, "--output_dir", str(directory / name.replace(" ", "-"))]
    done = subprocess.run([*launch, __file__, "--measure", str(path), *script], **options)
    if not path.is_file():
        sys.exit(f"{name}: {(done.stdout + done.stderr)[-3000:]}")
    recording = json.loads(path.read_text())
    path.unlink()
    return {"name": name, "flags": " ".join([f"{config}.yaml", *own])} | recording


FORMULAS = {
    "weights": "4, in bf16 4 + 2; frozen 4, in bf16 2, in nf4 0.52",
    "gradients": "4 per trained parameter",
    "optimizer state": "8 per trained parameter, 0.01 with adafactor",
    "activations": "`full`: above 4 x layers x width",
    "logits and loss": "`lm`: in total 4 x vocabulary x (512 + width)",
}


def row(*cells):
    """Returns a line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def areas_of(arms):
    """Returns the table of areas: the maximum of each, in bytes per parameter or per token of a micro-batch."""
    lines = [row("area, bytes", "by formula", *(arm["name"] for arm in arms)), "| --- | --- |" + " --: |" * len(arms)]
    unit = {"tokens": "per token", "images": "per image"}[arms[0]["unit"]]
    for area in AREAS:
        is_state = area in AREAS[:3]
        by, digits = ("parameters", ".2f") if is_state else ("tokens", ",.0f")
        figures = [format(arm["most"][area] / arm[by], digits) for arm in arms]
        lines.append(row(f"{area}, {'per parameter' if is_state else unit}", FORMULAS.get(area, ""), *figures))
    return lines


def summary(arms):
    """Returns the table of peaks: the phase of each peak, and the size of each area at this time."""
    lines = [row("arm", "config and flags", "peak in", "MiB", "of plain", *AREAS), "| --- | --- | --- |" + " --: |" * 8]
    first = None
    for arm in arms:
        phase, sizes = max(arm["peaks"].items(), key=lambda one: sum(one[1].values()))
        peak = sum(sizes.values())
        first = first or peak
        held = [f"{size / MIB:,.1f}" for size in sizes.values()]
        lines.append(row(arm["name"], f"`{arm['flags']}`", phase, f"{peak / MIB:,.1f}", f"{peak / first:.2f}", *held))
    return lines


def page(results):
    """Returns the page as Markdown."""
    arms = results["arms"]
    first = arms[0]
    return "\n".join(
        [
            "# The anatomy of an update's memory",
            "",
            f"`{results['command']}` on {results['machine']}, {results['date']}: {results['versions']}.",
            "",
            f"`recipes/{results['recipe']}.py {results['flags']}`: {first['parameters']:,} parameters, micro-batches "
            f"of {first['tokens']:,} {first['unit']} (half micro-batches: of half as many), the second update.",
            "",
            "f1 is the forward pass of the first micro-batch, b1 its backward pass. The x-axis shows the order of the "
            "allocations, not time. benchmarks/anatomy.py describes the areas.",
            "",
            "![What holds memory in each phase of an update](anatomy-cpu.png)",
            "",
            *summary(arms),
            "",
            *areas_of(arms),
            "",
        ]
    )


def draw(results, path):
    """Draws the areas of each arm, stacked, over the phases of its update."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = results["arms"]
    columns = min(3, len(arms))
    rows = -(-len(arms) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.6 * columns, 3 * rows + 0.6), sharey=True, squeeze=False)
    for axes in grid.flat[len(arms) :]:
        axes.set_visible(False)
    for arm, axes in zip(arms, grid.flat, strict=False):
        phases, *areas = zip(*arm["curve"], strict=True)
        sizes = [[size / 1024 for size in area] for area in areas]
        axes.stackplot(range(len(phases)), sizes, colors=COLOURS, labels=AREAS, linewidth=0)
        top = max(map(sum, zip(*sizes, strict=True)))
        for number, phase in enumerate(arm["peaks"]):
            inside = [at for at, one in enumerate(phases) if one == number]
            if inside:
                axes.axvline(inside[0], color="white", linewidth=0.7)
                text = phase.replace("forward ", "f").replace("backward ", "b").replace("evaluation", "eval")
                if len(inside) > len(phases) / 20:
                    axes.text(inside[0] + len(inside) / 2, top * 1.03, text, fontsize=7, ha="center")
                else:  # too short for a word above it
                    axes.text(inside[0], 4, text, fontsize=6, rotation=90, ha="right", va="bottom", color="white")
        axes.set_title(f"{arm['name']}: {top:,.0f} MiB", fontsize=9, loc="left", pad=14)
        axes.set_xticks([])
        axes.margins(x=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("MiB")
    labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(*(part[::-1] for part in labels), loc="lower center", ncol=len(AREAS), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)


def main():
    if "--measure" in sys.argv:
        _, _, path, recipe, *rest = sys.argv
        sys.argv = [recipe, *rest]
        measure(path, recipe)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="lm", choices=("lm", "classify", "seq2seq", "vision", "moe"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args, flags = parser.parse_known_args()
    flags = flags or (DEFAULTS if args.recipe == "lm" else [])
    from common.report.tracking import versions

    with tempfile.TemporaryDirectory() as directory:
        arms = [run_arm(name, args.recipe, flags, Path(directory)) for name in args.arms]
    found = versions()
    results = {
        "command": "python benchmarks/anatomy.py" + (f" --recipe {args.recipe}" if args.recipe != "lm" else ""),
        "recipe": args.recipe,
        "flags": " ".join(Path(flag).name for flag in [*SHAPE, *flags]),  # of files, their names
        "machine": f"{describe_machine()}, shared with other programs",
        "date": time.strftime("%Y-%m-%d"),
        "versions": ", ".join(f"{name} {found[name]}" for name in ("torch", "accelerate", "transformers")),
        "arms": arms,
    }
    path = args.output_dir / "anatomy-cpu.json"
    path.write_text(json.dumps(results) + "\n")
    path.with_suffix(".md").write_text(page(results))
    draw(results, path.with_suffix(".png"))
    print(page(results))


if __name__ == "__main__":
    main()
