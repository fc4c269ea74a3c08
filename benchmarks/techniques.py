"""Measures each technique for memory or speed alone, and then the best combination.

    make bench-techniques                                           --preset bert-small; on a GPU --preset bert-large
    make bench-techniques ARGS="--recipe lm --model small"          the recipe of language models; or classify
    make bench-techniques ARGS="--quick --arms plain bf16"          a smoke test with a toy model, in seconds

Each arm is a new process, started by `accelerate launch` with the config for one GPU, or for a CPU without one. A round
runs all arms, and every second round runs them in reverse order. All arms have the same initial weights, samples of
every update in the same order, and number of threads. If the command was stopped, the same command resumes it; if it
was finished, it draws the page again; --overwrite repeats the arms that it names.

Baseline: sorted batches, the chunked loss, fused AdamW and accumulation are always on in the recipes, so no recipe can
be measured without them. Therefore the baseline is a plain loop, benchmarks/techniques_loop.py, without any of them: as
in a tutorial, it computes the full batch of an update at once, padded to its longest sample, with PyTorch's default
AdamW, all logits and all activations. An arm is this loop with one technique, by the function that the recipes call.
There are three exceptions. Sorting has no effect if all samples of an update are computed at once, so that arm also
accumulates: compare it with `accumulation 4`. ZeRO-offload is the recipe, with the full batch at once, under
accelerate_configs/zero3_offload_cpu.yaml. Adapters, also on a 4-bit base, are the recipe's: compare these with
`the recipe`.

Combination: a rule selects the techniques. The gain of a step is (its speed / the speed before) / (its memory / the
memory before), so speed and memory count equally. Start with the recipe as shipped. In the order of their gain alone
over the plain loop, add each technique to the current ones, replacing another of its kind (precision, checkpointing,
optimizer, micro-batch, compile, workers); measure, and keep it if the gain is above 1.05. The result is measured again,
next to the plain loop, in separate rounds, because a selection by measurements would be biased.

Samples and tokens per second (without padding) are those of the updates after the warm-up. Memory on a CPU is the peak
minus the memory when the model was loaded (resident memory; malloc as the environment configures it, see the page); on
a GPU, the peak that torch allocated, and reserved. DeepSpeed creates master weights and state before the loop, so on a
CPU they do not count. "Predicted" is the recipe's own prediction. Optimizer state in bytes per parameter is counted in
the loop; with an adapter, for the parameters that it saves. Utilisation is FLOPs per second of the real tokens (6 per
weight of a linear layer and token; 12 x layers x width x length for attention, halved in a decoder; with an adapter as
the recipe counts them, without the gradients of frozen weights), divided by the best throughput of torch.mm on this
machine in the arm's precision. The loss is that of the last update, in training mode: with dropout, as in BERT, it
differs between arms that draw different random numbers.
"""

import json
import math
import os
import runpy
import shutil
import sys
import tempfile
import textwrap
import time
from functools import cached_property
from pathlib import Path

import torch
import transformers
from machine import describe_machine, device_name
from plan import predicted_bytes
from safetensors import safe_open
from techniques_arms import PARTS, PRESETS, SETTINGS, arm_of, arms_of, candidates_of
from techniques_page import BESIDE_FINAL, FINAL, draw, gain, medians, page, runs_of
from throughput import (
    BENCHMARK_FLAGS,
    ON_GPU,
    SHARED_FLAGS,
    begin,
    launch,
    num_threads,
    this_command,
)
from throughput_data import MODELS, ROOT, data_flags, prepare
from torch.utils.cpp_extension import _get_build_directory
from tqdm import tqdm
from where_time_goes import matrix_rate

from common.arguments import ArgumentParser, positive
from common.errors import UserError
from common.parallel.shutdown import exit_on_user_error
from common.report.tracking import versions

PAYS = 1.05  # a gain above it
LEARNING_RATE = ["--learning_rate", "1e-4"]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_arguments():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, help="(default: bert-small; on a GPU bert-large)")
    parser.add_argument("--recipe", choices=SETTINGS, help="in place of a preset, with its own data")
    about = (
        "a size of the recipe's, or the directory of a model, whose shape is taken with new weights (default: small)"
    )
    parser.add_argument("--model", help=about)
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="these alone; nothing is then tried together")
    parser.add_argument("--rounds", type=positive, default=2, help="how often every arm is measured")
    parser.add_argument("--measured", type=positive, help="updates of a run that are measured")
    parser.add_argument("--overwrite", action="store_true", help="measure again, not only what is missing")
    parser.add_argument("--quick", action="store_true", help="a toy model, two updates: shows that it runs, no more")
    parser.add_argument("--output_dir", default=str(ROOT / "benchmarks/results"))
    parser.add_argument("--work_dir", type=Path, help="keep model and data here, and take them from here")
    args = parser.parse_args()
    if args.preset and (args.recipe or args.model):
        raise UserError("--preset names recipe and model; leave out --recipe and --model, or the preset")
    if args.model and not args.recipe:
        raise UserError("--model needs --recipe lm or --recipe classify, whose model it is; name one")
    if not args.recipe:
        args.preset = args.preset or ("bert-large" if ON_GPU else "bert-small")
    return args


def choose_setting(args):
    """Returns the settings of all arms for the JSON file, and the name of that file."""
    chosen = dict(PRESETS[args.preset] if args.preset else SETTINGS[args.recipe])
    model = chosen.pop("model", None) or args.model or "small"
    sizes = chosen.get("more_sizes", {}) | runpy.run_path(str(ROOT / f"recipes/{chosen['recipe']}.py"))["MODEL_CONFIGS"]
    if args.quick:
        model = MODELS[chosen["recipe"]][0]["quick"]
        chosen |= {"global_batch": 4, "warmup": 1, "measured": 1}
    elif ON_GPU and args.preset != "bert-large":
        chosen |= {"warmup": 5, "measured": 30}
    chosen |= {"measured": args.measured} if args.measured else {}
    if model in sizes:
        chosen |= {"model": model, "model_flags": ["--model_config", model]}
    elif (Path(model) / "config.json").is_file():
        chosen |= {"model": Path(model).name, "model_flags": ["--model_name_or_path", model]}
    else:
        raise UserError(f"--model {model}: neither a model's directory nor one of {', '.join(sizes)}; name one of them")
    chosen |= {"preset": args.preset or "", "quick": args.quick, "parts": PARTS}
    is_default = args.preset == ("bert-large" if ON_GPU else "bert-small")
    parts = [] if is_default else [args.preset] if args.preset else [args.recipe, chosen["model"]]
    return json.loads(json.dumps(chosen)), "-".join(["techniques", *parts, device_name()])


class Measurements:
    """Runs all missing arms, and saves `results` after every run. The bar counts runs."""

    def __init__(self, results, facts, folder, path, bar):
        self.results, self.facts, self.folder, self.path, self.bar = results, facts, folder, path, bar

    @cached_property
    def flops(self):
        return operations(self.facts, self.folder)

    def ask(self, name, arm, number):
        """Measures an arm in a round, unless it is there or has failed."""
        known = runs_of(self.results, name)
        if not any("failed" in run or run["round"] == number for run in known):
            self.bar.set_postfix_str(arm.label)
            run = {"arm": name, "round": number, "label": arm.label, "precision": arm.precision}
            run |= {"flags": " ".join(map(str, arm.flags)), "load": os.getloadavg()[0]}
            try:
                run |= {"failed": arm.cannot} if arm.cannot else self.run(arm)
            except SystemExit as error:  # of `launch`, with all that the process printed
                run["failed"] = reason_of(str(error))
            self.results["runs"].append(run)
            write(self.path, self.results)
            outcome = (
                run.get("failed") or f"{run['samples_per_second']:.2f} samples/s, {run['memory_bytes'] / 1e6:,.0f} MB"
            )
            self.bar.write(f"{arm.label}: {outcome}")
        self.bar.update()

    def run(self, arm):
        """One fresh process; what the table shows of it."""
        setting, facts = self.results["setting"], self.facts
        # Of this run alone: a process that was left by a stopped command may still write.
        output_dir = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        flags = ["--model_name_or_path", self.folder / "model", "--output_dir", output_dir, *arm.flags]
        flags += ["--global_batch_size", setting["global_batch"]]
        if arm.recipe:
            flags += [*data_flags(self.folder, setting), *BENCHMARK_FLAGS, *LEARNING_RATE, "--save_every", 0]
            flags += ["--num_updates", len(facts["lengths"])]
            script, config = [f"recipes/{arm.recipe}.py", *flags], [arm.config] * bool(arm.config)
            predicted = predicted_bytes(launch(arm.precision, [*script, "--dry_run"], *config))
            launch(arm.precision, script, *config)
            found = json.loads((output_dir / "run.json").read_text())["results"]
            updates = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
            assert [update["sample_digest"] for update in updates] == facts["digests"], "other samples than the loop's"
            rates = [update["tokens_per_second"] for update in updates]
            found["seconds"] = [
                sum(map(sum, update)) / rate for update, rate in zip(facts["lengths"], rates, strict=True)
            ]
            found["losses"] = [update["loss"] for update in updates]
            if "--lora_rank" in arm.flags:
                rates = [update["model_flops_per_second"] for update in updates]
                found["flops"] = [rate * seconds for rate, seconds in zip(rates, found["seconds"], strict=True)]
                with safe_open(output_dir / "model/adapter_model.safetensors", "pt") as adapter:
                    sizes = [math.prod(adapter.get_slice(name).get_shape()) for name in adapter.keys()]  # noqa: SIM118
                found["share_trained"] = sum(sizes) / self.results["parameters"]
        else:
            flags += ["--train_file", self.folder / "batches.jsonl", *SHARED_FLAGS, *LEARNING_RATE]
            flags += ["--model_class", MODELS[setting["recipe"]][1]]
            predicted = None
            launch(arm.precision, ["benchmarks/techniques_loop.py", *flags])
            found = json.loads((output_dir / "results.json").read_text())
            assert found["num_threads"] == num_threads(), "an arm ran with another number of threads"
        found |= {"predicted_bytes": predicted}
        shutil.rmtree(output_dir.parent)
        return self.figures(found)

    def figures(self, found):
        """Returns the values of a run for the table, and the values from which they are computed."""
        skipped = self.results["setting"]["warmup"]
        seconds, lengths = sum(found["seconds"][skipped:]), self.facts["lengths"][skipped:]
        kept = ("peak_memory_bytes", "memory_growth_bytes", "predicted_bytes", "optimizer_bytes", "reserved_bytes")
        kept += ("share_trained",) * ("share_trained" in found)
        return {
            "samples_per_second": sum(map(len, lengths)) / seconds,
            "tokens_per_second": sum(sum(map(sum, update)) for update in lengths) / seconds,
            "memory_bytes": found["peak_memory_bytes" if ON_GPU else "memory_growth_bytes"],
            "flops_per_second": sum(found.get("flops", self.flops)[skipped:]) / seconds,
            **{name: found.get(name) for name in (*kept, "seconds", "losses")},
        }


def operations(facts, folder):
    """Returns the FLOPs of each update, forward and backward, without padding and recomputation."""
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    with torch.device("meta"):
        model = getattr(transformers, MODELS[facts["settings"]["recipe"]][1]).from_config(config)
    weights = sum(one.weight.numel() for one in model.modules() if isinstance(one, torch.nn.Linear))
    a_square = (12 if facts["settings"]["recipe"] == "classify" else 6) * config.num_hidden_layers * config.hidden_size
    updates = [[sum(sample) for sample in update] for update in facts["lengths"]]
    return [6 * weights * sum(update) + a_square * sum(length**2 for length in update) for update in updates]


def reason_of(printed):
    """Returns one line for the page, without paths: the recipe's error line, or the last exception that was printed."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    # The launcher's own, about the script's exit status, is the last one.
    errors = [
        line for line in lines if ("Error: " in line or line.startswith("error: ")) and "returned non-zero" not in line
    ]
    ours = [line for line in errors[1:] if line.startswith("error: ")]
    reason = (ours or errors[1:] or errors or lines)[-1 if not ours else 0]
    return textwrap.shorten(reason.removeprefix("error: ").replace(str(ROOT), "."), 240, placeholder=" ...")


def pay_together(measured, arms, rounds):
    """Adds one technique after the other to the recipe, and keeps those that gain.

    Returns the arm that is left; None where the plain loop or the recipe has failed.
    The steps, for the page: results["steps"].
    """
    results, kept, steps = measured.results, {}, []
    flags, recipe = results["setting"]["flags"], results["setting"]["recipe"]
    candidates = candidates_of(flags[flags.index("--sequence_length") + 1])
    labels = {name: one.label or arms[name].label for name, one in candidates.items()}
    found = {name: medians(results, name) for name in ("plain", "recipe", *candidates)}
    if not (found["plain"] and found["recipe"]):
        return None
    best, alone = found["recipe"], {name: gain(found[name], found["plain"]) for name in candidates if found[name]}
    for name in sorted(alone, key=alone.get, reverse=True):
        trial = kept | {candidates[name].kind: name}
        arm = arm_of(trial, candidates, recipe)
        key = f"together: {' + '.join(sorted(trial.values()))}"
        for number in range(rounds):
            measured.ask(key, arm, number)
        figures = medians(results, key)
        step = {"tried": labels[name], "alone": alone[name], "arm": key, "gain": figures and gain(figures, best)}
        step["kept"] = bool(figures) and step["gain"] > PAYS
        if step["kept"]:
            kept, best = trial, figures
        steps.append(step)
    results["steps"] = steps
    label = ", ".join(["all that pays: the recipe", *[labels[name] for name in kept.values()]])
    return arm_of(kept, candidates, recipe)._replace(label=label)


def measure(args, measured, arms):
    """Measures all missing arms in rounds; then the best combination, unless only some arms were requested."""
    names = [name for name in arms if not args.arms or name in args.arms]
    for number in range(args.rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            measured.ask(name, arms[name], number)
    if args.arms:
        return
    if (final := pay_together(measured, arms, args.rounds)) is None:
        return
    results, flags = measured.results, " ".join(map(str, final.flags))
    others = [run for run in runs_of(results, FINAL) if (run["flags"], run["precision"]) != (flags, final.precision)]
    results["runs"] = [run for run in results["runs"] if run not in others]
    for number in range(args.rounds):
        both = [(BESIDE_FINAL, arms["plain"]), (FINAL, final)]
        for name, arm in both if number % 2 == 0 else both[::-1]:
            measured.ask(name, arm, number)


def read_results(args, path, facts):
    """What an earlier call has measured, or nothing yet."""
    if not path.exists():
        return facts | {"commands": [], "matrix_rate": {}, "runs": [], "steps": []}
    results = json.loads(path.read_text())
    different = [name for name in facts if results[name] != facts[name]]
    if different and not (args.overwrite and not args.arms):
        raise UserError(
            f"{path} was measured with another {', '.join(different)}; go on there as it was, or name another "
            "--output_dir, or measure all of it again with --overwrite and without --arms"
        )
    if args.overwrite and not args.arms:
        return facts | {"commands": [], "matrix_rate": {}, "runs": [], "steps": []}
    if args.overwrite:
        results["runs"] = [run for run in results["runs"] if run["arm"] not in args.arms]
    return results


def begin_results(args, path, setting):
    """The results so far, with the setting; and the folder for model and data.

    Raises UserError: they are of another machine, version or setting.
    """
    # What DeepSpeed compiles takes minutes: it stays where it was, while all other caches go with the folder.
    extensions = Path(_get_build_directory("deepspeed_shm_comm", verbose=False)).parent
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions))
    work = begin(args.work_dir)
    malloc = {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    facts = {"machine": describe_machine(), "threads": num_threads(), "malloc": malloc}
    results = read_results(args, path, facts | {"versions": versions(), "setting": setting})
    command = f"{time.strftime('%Y-%m-%d')}: {this_command()}"
    results["commands"] += [command] * (command not in results["commands"])
    return results, work


def main():
    args = parse_arguments()
    setting, name = choose_setting(args)
    arms = arms_of(setting)
    if unknown := [arm for arm in args.arms or () if arm not in arms]:
        raise UserError(f"--arms {' '.join(unknown)}: not among {', '.join(arms)}; name some of these")
    if args.arms and "plain" not in args.arms:
        raise UserError("--arms: name plain too, with which the others are compared")
    path = Path(args.output_dir).resolve() / f"{name}.json"
    with tempfile.TemporaryDirectory() as temporary:
        args.work_dir = args.work_dir or Path(temporary)
        results, work = begin_results(args, path, setting)
        what = (f"techniques-{setting['recipe']}", "quick" if args.quick else "full")
        facts = prepare(work, *what, setting)
        lengths = [sum(sample) for update in facts["lengths"] for sample in update]
        results["samples"] = {"mean": sum(lengths) / len(lengths), "longest": max(lengths), "number": len(lengths)}
        results["parameters"] = facts["parameters"]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(num_threads())
        used = {arm.precision for key, arm in arms.items() if not arm.cannot and key in (args.arms or arms)}
        for precision in sorted(used - results["matrix_rate"].keys()):
            results["matrix_rate"][precision] = matrix_rate(DTYPES[precision], "cuda" if ON_GPU else "cpu")
        tried = [name for name in candidates_of(0) if not arms[name].cannot]
        total = args.rounds * (len(args.arms) if args.arms else len(arms) + len(tried) + 2)
        try:
            with tqdm(total=total, unit="run") as bar:
                measure(args, Measurements(results, facts, work / "-".join(what), path, bar), arms)
        except KeyboardInterrupt:
            print("stopped; the same command goes on", file=sys.stderr)
            sys.exit(130)
    write(path, results)
    path.with_suffix(".md").write_text(page(results, path.with_suffix(".png").name))
    draw(results, path.with_suffix(".png"))
    print(path.with_suffix(".md"))


def write(path, results):
    """Beside its name and renamed: a stopped run leaves it whole."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(unfinished, path)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
