"""The run summary, run.json, trackers and results: everything that a run prints and records about itself."""

import argparse
import json
import math
import os
import socket
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import UserError, reported_in_one_line
from common.host_memory import most_resident
from common.models import export_dtype
from common.models.adapter_files import loading_call
from common.models.adapters import describe_frozen, number_of
from common.parallel import liveness
from common.parallel.distributed_mode import describe_mode, describe_precision, running_mode
from common.parallel.matmul_throughput import advise
from common.redaction import redact
from common.report import drawing
from common.report.model_card import write_model_card
from common.report.totals import Totals, describe_pauses
from common.report.totals import describe as describe_totals
from common.training.batching import GlobalBatches
from common.training.process_grid import running
from common.versions import versions

# Trackers' names for the ID with which a run is continued. (Other trackers use the same directory or experiment.)
RUN_NAMES = {"wandb": "id", "trackio": "name"}


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process so far: allocated GPU memory, or resident memory on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else most_resident()


def memory_in_use_bytes(device: torch.device) -> int:
    """Returns the current memory of this process, measured as in `peak_memory_bytes`."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def to_json_line(record: dict[str, Any]) -> str:
    """Returns a line of JSON, with 17 significant digits for floats (exact for a double), and null if non-finite."""

    def value(item: Any) -> str:
        if isinstance(item, float):
            return format(item, ".17g") if abs(item) < float("inf") else "null"
        return json.dumps(item)

    return "{" + ", ".join(f"{json.dumps(key)}: {value(item)}" for key, item in record.items()) + "}\n"


def write_run(output_dir: Path, facts: dict[str, Any]) -> None:
    """Writes run.json, without secrets, to a temporary file and renames it, so that it is never incomplete."""
    unfinished = output_dir / "run.json.partial"
    unfinished.write_text(json.dumps(redact(facts), indent=2, default=lambda one: redact(str(one))) + "\n")
    os.replace(unfinished, output_dir / "run.json")


def start_run(run: Any, config: PreTrainedConfig) -> None:
    """Writes run.json (requested and effective settings, versions) and starts the trackers of --report_to.

    A resumed run removes metrics after its checkpoint, and continues its trackers. run: a `common.run.Run`.
    """
    args, accelerator, output_dir, state = run.args, run.accelerator, run.output_dir, run.state
    batches = run.loader.dataset
    if accelerator.is_main_process:
        before = read_earlier(output_dir)
        if before and (how := _describe_killed(output_dir)):
            print(f"{output_dir}: the run before this start: {how}", flush=True)
        launcher = run.asked.command or ["python"] * (accelerator.num_processes == 1)
        totals = Totals(state.training)
        totals.add_repeated(cut_metrics(output_dir / "metrics.jsonl", state.update), before.get("repeated", {}))
        is_cuda = accelerator.device.type == "cuda"
        earlier = before.get("earlier_data", [])
        if "dataset" in args.allow_changed:
            earlier = _earlier_data(before, batches, state.update)
        facts = {
            "arguments": vars(args),
            "command": sys.argv,
            "commands": [*before.get("commands", []), [*launcher, *sys.argv]],
            "world_size": accelerator.num_processes,
            "mode": running_mode(accelerator),
            "mixed_precision": accelerator.mixed_precision,
            "device": torch.cuda.get_device_name() if is_cuda else accelerator.device.type,
            "versions": versions(),
            "host": socket.gethostname(),
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "status": "running",
            "resumed_at": state.update,
            "repeated": totals.repeated(),
            "model": config.to_dict(),
            "data": batches.samples.describe(),
            "sources": _sources(batches, args.num_updates * args.global_batch_size, earlier),
            "earlier_data": earlier,
            "held_out": run.held_out and run.held_out.dataset.samples.describe(),
            "held_out_sources": run.held_out and _sources(run.held_out.dataset),
            **(run.budget.to_record(args) if run.budget else {}),
        }
        if state.update == state.end(args) and before:  # a finished run keeps its results
            facts["results"] = before.get("results", {})
            facts |= {name: before[name] for name in ("data", "sources", "earlier_data") if name in before}
        write_run(output_dir, facts)
    liveness.note_failure = partial(_end_failed, output_dir)
    if args.report_to:
        flags = {
            key: value if isinstance(value, int | float | str) else str(value)
            for key, value in redact(vars(args)).items()
        }
        accelerator.init_trackers(
            Path(sys.argv[0]).stem,
            config=flags,
            init_kwargs={name: {RUN_NAMES[name]: one, "resume": "allow"} for name, one in state.tracker_runs.items()},
        )
        state.tracker_runs = {
            tracker.name: str(getattr(tracker.tracker, RUN_NAMES[tracker.name]))
            for tracker in accelerator.trackers
            if tracker.name in RUN_NAMES
        }


def _describe_killed(output_dir: Path) -> str | None:
    from common.report.killed_runs import describe_killed

    return describe_killed(output_dir, is_over=True)


def read_earlier(output_dir: Path) -> dict[str, Any]:
    """Returns run.json of the previous start; {} if it is missing, or corrupted by a power failure.

    `commands` has a command for each start. Older runs kept only the last start's command, without the launcher.
    """
    try:
        run = json.loads((output_dir / "run.json").read_text())
        return {"commands": [run["command"]]} | run
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def _earlier_data(before: dict[str, Any], batches: GlobalBatches, update: int) -> list[dict[str, Any]]:
    """Returns the different data that the first `update` updates were trained on, each with its last update."""
    earlier = before.get("earlier_data", [])
    kept = [one for one in earlier if one["until"] < update]
    last = earlier[len(kept)] if kept != earlier else before  # the data in use at that time
    if update and last.get("data") not in (None, batches.samples.describe()):
        kept.append({"until": update, "data": last["data"], "sources": last.get("sources")})
    return kept


def _sources(
    batches: GlobalBatches, num_samples: int = 0, earlier: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]] | None:
    """Returns the sources of mixed data, with counts in `num_samples` samples of a run; None if data is not mixed."""
    if not hasattr(batches.samples, "mixing"):
        return None
    size = batches.global_batch_size
    return batches.samples.facts(num_samples, [(size * one["until"], one["sources"] or []) for one in earlier or []])


def _end_failed(output_dir: Path, status: str) -> None:
    """Sets the status in run.json of a run that has not ended; for `liveness.note_failure`."""
    path = output_dir / "run.json"
    # The file may be invisible on this host.
    if path.is_file() and (run := json.loads(path.read_text()))["status"] == "running":
        write_run(output_dir, run | {"status": status})


def cut_metrics(path: Path, num_updates: int) -> list[dict[str, Any]]:
    """Keeps the lines of the first `num_updates` updates; returns the later lines, whose updates are repeated."""
    if path.exists() and not path.is_file():
        raise UserError(f"disk: {path} is no file; move it away, then start again with --resume")
    kept: dict[int, str] = {}
    removed: list[dict[str, Any]] = []
    text = path.read_text(errors="replace") if path.is_file() else ""
    for line in text.splitlines(keepends=True):
        try:
            record = json.loads(line)
            update = record["update"]
        except (ValueError, TypeError, KeyError):  # incomplete or corrupted, after a power failure
            continue
        if line.endswith("\n") and update in range(num_updates):
            kept.setdefault(update, line)
        else:
            removed.append(record)
    if lost := [update for update in range(num_updates) if update not in kept]:
        lines = f"line of update {lost[0]}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
        print(f"{path}: the {lines} before update {num_updates} are lost or damaged", flush=True)
    unfinished = path.with_name(path.name + ".partial")
    unfinished.write_text("".join(kept[update] for update in sorted(kept)))
    os.replace(unfinished, path)
    return removed


def end_early(accelerator: Accelerator, output_dir: Path, state: Any) -> None:
    """Reports the end of a run with a request to stop, and how to resume it; sets `status` in run.json."""
    if accelerator.is_main_process:
        run = json.loads((output_dir / "run.json").read_text())
        write_run(output_dir, run | {"status": f"stopped after update {state.update}"})
        print(f"stopped after update {state.update}, checkpoint written; the same command with --resume goes on")


def print_run(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: PreTrainedModel,
    train: GlobalBatches,
    validation: GlobalBatches | None,
    rehearsal: bool = False,
    **lines: str,
) -> None:
    """Prints the run summary before the run.

    `rehearsal`: a GPU config runs on a CPU. `lines`: the recipe's own lines, by label.
    """
    world, degrees = accelerator.num_processes, running()
    sizes = [(number_of(p), p.requires_grad) for p in model.parameters()]
    total, trainable = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    if hasattr(model, "pipeline_stages"):  # this process holds a single stage
        total, trainable = model.pipeline_stages.num_parameters
    if args.micro_batch_size:
        steps = args.global_batch_size // (args.micro_batch_size * degrees.data)
        cut = f"{args.global_batch_size} = {args.micro_batch_size} micro x {steps} accumulation x {degrees.describe()}"
    else:
        cut = (
            f"{args.global_batch_size} in micro-batches of up to {args.micro_batch_tokens} tokens a process, "
            f"accumulated as each global batch needs, x {degrees.describe()}"
        )
    first = train[0]
    # Only with --micro_batch_tokens; --micro_batch_size is checked earlier.
    if len(first.micro_batches) < degrees.pipeline:
        raise UserError(
            f"--micro_batch_tokens {args.micro_batch_tokens} makes {len(first.micro_batches)} of a global batch, fewer "
            f"than the {degrees.pipeline} stages, which would wait for each other; lower it"
        )
    updates, mean_targets = describe_length(args, train)
    targets = f"{mean_targets:,.0f} an update on average; the first: "
    targets += f"{first.num_targets:,} in {len(first.micro_batches)} micro-steps on each process"
    measures = accelerator.is_main_process and not rehearsal
    precision = getattr(model, "own_precision", None)  # set for models with a fixed precision
    if precision is None:
        precision = describe_precision(accelerator) + describe_frozen(args)
        precision += advise(accelerator.device, accelerator.mixed_precision, total) if measures else ""
    block = {
        "model": f"{type(model).__name__}, {total:,} parameters"
        + (f", {trainable:,} of them trained" if trainable < total else ""),
        "precision": precision,
        "mode": f"{describe_mode(accelerator)}, {world} process{'es' * (world > 1)} on {accelerator.device.type}"
        + (", a rehearsal of its GPUs" if rehearsal else ""),
        **({"ranks": degrees.describe_grid()} if degrees.data < world else {}),
        **({"bubble": degrees.describe_bubble(len(first.micro_batches))} if degrees.pipeline > 1 else {}),
        "optimizer": f"{args.optimizer}, learning rate {args.learning_rate:g}, {args.lr_schedule}",
        "batch": cut,
        "targets": targets,
        "updates": updates,
        "data": train.samples.describe(),
        "held out": validation.samples.describe() if validation else "none; name a --validation_file to measure",
        **lines,
        "output": "nothing (dry run)" if args.dry_run else args.output_dir,
    }
    accelerator.print(redact("\n".join(f"{name:>10}  {text}" for name, text in block.items())), flush=True)


def describe_length(args: argparse.Namespace, train: GlobalBatches) -> tuple[str, float]:
    """Returns the number of epochs of a run as text, and the average number of targets per update."""
    samples = train.samples
    if train.mixing is None:
        epochs = f"{args.num_updates / len(train):.2f} epochs of {len(train):,} updates"
        return f"{args.num_updates:,} = {epochs}", samples.num_target_tokens / len(train)
    facts = samples.facts(args.num_updates * train.global_batch_size)
    epochs = ", ".join(f"{one['epochs']:.2f} of {one['source']}" for one in facts)
    return f"{args.num_updates:,}, epochs: {epochs}", samples.mean_targets * train.global_batch_size


def describe_sources(figures: dict[str, Any]) -> str:
    """Returns the held-out loss of each source with a separate evaluation, as text."""
    found = {name.partition("/")[2]: loss for name, loss in figures.items() if name.startswith("validation_loss/")}
    return f" ({', '.join(f'{loss:.4f} of {source}' for source, loss in found.items())})" if found else ""


def describe_held_out(figures: dict[str, float], samples: Any) -> dict[str, float | None]:
    """Adds perplexity and bits per byte to the metrics of held-out text, and bits per byte of gzip -9 and xz -9."""
    loss = figures["validation_loss"]
    results = figures | {"perplexity": math.exp(min(loss, 700))}
    if getattr(samples, "num_bytes", None):  # every token of the text is a target exactly once
        results["bits_per_byte"] = loss * samples.num_target_tokens / math.log(2) / samples.num_bytes
        for name, size in (("gzip", samples.gzip_bytes), ("xz", samples.xz_bytes)):
            if size:
                results[f"{name}_bits_per_byte"] = 8 * size / samples.num_bytes
    return results


def describe_best(best: dict[str, Any] | None, output_dir: Path) -> str:
    """Returns a line about the result of `Checkpoints.best_at_end`; the run's held-out metrics are those of model/."""
    if best is None:
        return "best       no checkpoint was measured: model/ is the last one"
    line = f"best       {best['checkpoint']}, validation loss {best['loss']:.4f}: "
    if (lowest := best.get("lowest_measured")) is not None:
        line = line[:-2] + f" (the lowest measured loss, {lowest:.4f}, has no sound checkpoint): "
    if best["is_model"]:
        return line + f"{output_dir / 'model'} is this one"
    return line + (
        f"{output_dir / 'model'} is the last one; for this one: python -m tools.checkpoint export "
        f"{best['checkpoint']} {output_dir / 'best'}, or --load_best_at_end next time"
    )


def record_results(results: dict[str, Any], output_dir: Path, model_class: str, **facts: Any) -> bool:
    """Writes the results and `facts` to run.json, and the model card. Returns whether run.json had results before."""
    before = json.loads((output_dir / "run.json").read_text())
    run = before | {"results": results} | facts
    write_run(output_dir, run)
    with reported_in_one_line("the model card could not be written"):
        write_model_card(output_dir / "model", run, model_class)
    return "results" in before


def describe_failure(results: dict[str, Any]) -> str | None:
    """Returns why a completed run trained nothing, or nothing in at least its second half; otherwise None."""
    updates, at_end = results["updates"], results.get("skipped_at_end", 0)
    if not updates or 2 * at_end < updates or (results.get("best") or {}).get("is_model"):
        return None
    made = updates - results["skipped_updates"]
    what = f"the last {at_end:,} of {updates:,} updates were skipped" if made else "no update was made"
    return f"{what}: loss or gradient was not finite; lower --learning_rate, or check the data and the model's weights"


def print_results(results: dict[str, Any], output_dir: Path, model_class: str, is_again: bool, *lines: str) -> None:
    """Prints the end of a run: metrics, the recipe's own `lines`, paths of the outputs. Adds the metrics to run.json.

    is_again: whether the run had finished before, and only its end was repeated.
    """
    failure = describe_failure(results)
    record_results(results, output_dir, model_class, status=f"failed: {failure}" if failure else "finished")
    run = json.loads((output_dir / "run.json").read_text())
    if (picture := output_dir / "curves.png").is_file():
        with reported_in_one_line("curves.png could not be drawn"):
            from common.report import curves

            updates = curves.read(output_dir / "metrics.jsonl")
            if curves.with_end(updates, results) != updates:  # it was drawn without the final held-out loss
                drawing.finish(drawing.start_drawing(output_dir, results["unit"]))
    if is_again:
        print("\nnothing was left to train; the figures of the training are those of the finished run")
    if results["tokens_per_second"]:
        print(
            f"\n{describe_totals(results, len(run['commands']))}; "
            f"padding {results['padding_share']:.1%} of what was computed; the "
            f"busiest process computed {results['work_difference']:.1%} more than the idlest; waiting for data "
            f"{results['waiting_for_data']:.1%}"
        )
        if line := describe_pauses(results):
            print(line)
    if results["skipped_updates"]:
        skipped, updates = results["skipped_updates"], results["updates"]
        print(f"skipped    {skipped:,} of {updates:,} updates, whose loss or gradient was not finite")
    if results.get("model_flops_per_second"):
        line = f"the model's own products: {results['model_flops_per_second'] / 1e9:,.1f} GFLOP/s"
        share = results.get("share_of_rate")
        print(line + (f", {share:.0%} of what this machine multiplies" if share else ""))
    if "validation_loss" in results:
        perplexity = f", perplexity {results['perplexity']:.2f}" if "perplexity" in results else ""
        print(f"held-out loss {results['validation_loss']:.4f}{perplexity}")
    for one in run.get("held_out_sources") or []:
        if (loss := results.get(f"validation_loss/{one['source']}")) is not None:
            print(f"  {loss:.4f} of {one['source']}, which has {float(Fraction(one['share'])):.1%} of the targets")
    if "bits_per_byte" in results:
        others = [
            f"{n} -9 {results[f'{n}_bits_per_byte']:.3f}" for n in ("gzip", "xz") if f"{n}_bits_per_byte" in results
        ]
        print(f"bits per byte of held-out text: this model {results['bits_per_byte']:.3f}, {', '.join(others)}")
    for line in lines:
        print(line)
    if "best" in results:
        print(describe_best(results["best"], output_dir))
    model = output_dir / "model"
    print(f"model      {model} ({export_dtype.describe(model)}; {loading_call(model, model_class)} loads it)")
    print(f"metrics    {output_dir / 'metrics.jsonl'}")
    if picture.is_file():
        print(f"curves     {picture}")
    print(f"settings   {output_dir / 'run.json'}")
    if "error_after_training" in results:
        print(results["error_after_training"])
    if failure:
        print(f"failed     {failure}")
