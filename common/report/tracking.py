"""Prints and records the run summary, run.json and the results. For updates see `report.progress`."""

import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import reported_in_one_line
from common.models.adapters import count_parameters, is_asked
from common.models.saved_model import describe_weights, loading_call
from common.parallel.distributed_mode import current_mode, describe_mode, describe_precision
from common.parallel.matmul_throughput import FEWEST_PARAMETERS
from common.peak_memory import most_resident
from common.process import this_process
from common.report import totals
from common.report.model_card import write_model_card
from common.report.records import end_unfinished, read_run, write_run
from common.training.batching import GlobalBatches
from common.training.process_grid import current_grid
from common.training.recipe_traits import Arguments
from common.versions import versions


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process so far: allocated GPU memory, or resident memory on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else most_resident()


def memory_in_use_bytes(device: torch.device) -> int:
    """Returns the current memory of this process, measured as in `peak_memory_bytes`."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def start_run(run: Any, config: PreTrainedConfig) -> None:
    """Writes run.json (requested and effective settings, versions) and starts the trackers of --report_to.

    On resume, removes the metrics after the checkpoint, and continues the trackers. run: a `common.run.Run`.
    """
    args, accelerator, output_dir, state = run.args, run.accelerator, run.output_dir, run.state
    if accelerator.is_main_process:
        samples, held_out = run.loader.dataset.samples, run.held_out and run.held_out.dataset.samples
        is_mixed, is_separate = hasattr(samples, "mixing"), hasattr(held_out, "mixing")
        launcher = run.launch_config.command or ["python"] * (accelerator.num_processes == 1)
        device = accelerator.device.type
        metadata = {
            "arguments": vars(args),
            "command": sys.argv,
            "commands": [[*launcher, *sys.argv]],
            "world_size": accelerator.num_processes,
            "mode": current_mode(accelerator),
            "mixed_precision": accelerator.mixed_precision,
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "versions": versions(),
            "host": socket.gethostname(),
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "status": "running",
            "resumed_at": state.update,
            "repeated": {},
            "model": config.to_dict(),
            "data": samples.describe(),
            "sources": samples.facts(args.num_updates * args.global_batch_size) if is_mixed else None,
            "earlier_data": [],
            "held_out": held_out and held_out.describe(),
            "held_out_sources": held_out.facts() if is_separate else None,
            **(run.budget.to_record(args) if run.budget else {}),
        }
        if state.update or any((output_dir / name).exists() for name in ("run.json", "metrics.jsonl")):
            from common.report import earlier_starts

            metadata = earlier_starts.continued(run, metadata)
        write_run(output_dir, metadata)
    this_process().note_failure = partial(end_unfinished, output_dir)
    if this_process().remote is not None:
        this_process().remote.start(args.overwrite)
    if args.report_to:
        from common.report import trackers

        trackers.start_trackers(args, accelerator, state)


def print_run(
    args: Arguments,
    accelerator: Accelerator,
    model: PreTrainedModel,
    train: GlobalBatches,
    validation: GlobalBatches | None,
    lacks_gpus: bool = False,
    **lines: str,
) -> None:
    """Prints the run summary, before the first update."""
    world, grid, first = accelerator.num_processes, current_grid(), train[0]
    total, trainable = count_parameters(model)
    stages: Any = getattr(model, "pipeline_stages", None)
    if stages is not None:  # this process holds a single stage
        total, trainable = stages.num_parameters
    steps = len(first.micro_batches)
    number = f"{args.global_batch_size} sample{'s' * (args.global_batch_size > 1)}"
    batch = f"{number} = {args.micro_batch_size} per micro-batch x {steps} accumulated x "
    if args.global_batch_size != (args.micro_batch_size or 0) * steps * grid.data_parallel:
        limit = f"{args.micro_batch_size} texts" if args.micro_batch_size else f"{args.micro_batch_tokens} tokens"
        batch = f"{number}; micro-batches of up to {limit} per process, accumulated as needed; "
    grid_lines = {}
    if grid.data_parallel < world:
        from common.report.grid import describe_grid

        grid_lines = describe_grid(grid, steps, args.shared("micro_batch_tokens"))
    updates, mean_targets = _describe_length(args, train)
    targets = f"{mean_targets:,.0f} per update on average; first update: {first.num_targets:,} in {steps} "
    targets += f"micro-batch{'es' * (steps > 1)} per process"
    precision = getattr(model, "own_precision", None)  # set for models with a fixed precision
    if precision is None:
        precision = describe_precision(accelerator)
        if is_asked(args):
            from common.models import lora

            precision += lora.describe_frozen(args)
        can_gain = accelerator.device.type != "cpu" or total >= FEWEST_PARAMETERS
        if can_gain and accelerator.is_main_process and not lacks_gpus:
            from common.parallel.precision_choice import advise

            precision += advise(accelerator.device, accelerator.mixed_precision, total)
    block = {
        "model": f"{type(model).__name__}, {total:,} parameters"
        + (f", {trainable:,} of them trained" if trainable < total else ""),
        "precision": precision,
        "mode": f"{describe_mode(accelerator)}, {world} process{'es' * (world > 1)} on {accelerator.device.type}"
        + (", because no GPU is visible" if lacks_gpus else ""),
        **grid_lines,
        "optimizer": f"{args.optimizer}, peak learning rate {args.learning_rate:g}, {args.lr_schedule} schedule",
        "batch": batch + grid.describe(),
        "targets": targets,
        "updates": updates,
        "training": train.samples.describe(),
        "held out": validation.samples.describe() if validation else "none; pass --validation_file to evaluate",
        **lines,
        "output": "nothing (dry run)" if args.dry_run else args.output_dir,
    }
    accelerator.print("\n".join(f"{name:>10}  {text}" for name, text in block.items()), flush=True)


def _describe_length(args: Arguments, train: GlobalBatches) -> tuple[str, float]:
    """Returns the number of epochs of a run as text, and the average number of targets per update."""
    samples: Any = train.samples
    if train.mixing is None:
        epochs = f"{args.num_updates / len(train):.2f} epochs; {len(train):,} update{'s' * (len(train) > 1)} per epoch"
        return f"{args.num_updates:,} ({epochs})", samples.num_target_tokens / len(train)
    return samples.describe_length(args.num_updates, train.global_batch_size)


def describe_held_out(metrics: dict[str, float], samples: Any) -> dict[str, float]:
    """Returns the metrics of held-out text, plus perplexity and the bits per byte of the model, gzip -9 and xz -9."""
    from common.report import compression

    return compression.describe(metrics, samples)


def record_results(results: dict[str, Any], output_dir: Path, model_class: str, **entries: Any) -> bool:
    """Writes the results and `entries` to run.json, and the model card. Returns whether run.json had results."""
    before = read_run(output_dir)
    run = before | {"results": results} | entries
    write_run(output_dir, run)
    with reported_in_one_line("the model card could not be written"):
        write_model_card(output_dir / "model", run, model_class)
    return "results" in before


def describe_failure(results: dict[str, Any]) -> str | None:
    """Returns a message if at least the last half of a run's updates was skipped as non-finite; otherwise None."""
    if not results["skipped_updates"]:
        return None
    from common.report import skipped_updates

    return skipped_updates.describe_failure(results)


def print_results(results: dict[str, Any], output_dir: Path, model_class: str, is_again: bool, *lines: str) -> None:
    """Prints results, the recipe's own `lines` and the paths of the outputs; writes results and status to run.json.

    is_again: whether run.json already had results, because a finished run was resumed and only its end repeated.
    """
    failure = describe_failure(results)
    record_results(results, output_dir, model_class, status=f"failed: {failure}" if failure else "finished")
    run, printed = read_run(output_dir), []
    if is_again:
        printed.append("\nnothing was left to train; the training metrics are those of the finished run")
    if results["tokens_per_second"]:
        padding = f" without padding (padding {results['padding_share']:.1%}, " if results["unit"] == "tokens" else " ("
        printed.append(
            f"\n{totals.describe(results, len(run['commands']))}{padding}"
            f"load imbalance {results['work_difference']:.1%}, data-loading time {results['waiting_for_data']:.1%})"
        )
        printed += [line] if (line := totals.describe_pauses(results)) else []
    if skipped := results["skipped_updates"]:
        printed.append(
            f"skipped    {skipped:,} of {results['updates']:,} updates, whose loss or gradient was not finite"
        )
    if flops := results.get("model_flops_per_second"):
        share = results.get("share_of_rate")
        rate = f", {share:.0%} of this machine's measured matmul throughput" if share else ""
        printed.append(f"model FLOPs: {flops / 1e9:,.1f} GFLOP/s{rate}")
    losses: list[str] = []
    best: list[str] = []
    if "validation_loss" in results or "best" in results:
        from common.report import final_losses

        losses, best = final_losses.describe_results(results, run.get("held_out_sources"), output_dir)
    model, picture = output_dir / "model", output_dir / "curves.png"
    printed += [
        *losses,
        *lines,
        *best,
        f"model      {model} ({describe_weights(model)}; load with {loading_call(model, model_class)})",
        f"metrics    {output_dir / 'metrics.jsonl'}",
        *([f"curves     {picture}"] if picture.is_file() else []),
        f"settings   {output_dir / 'run.json'}",
        *([results["error_after_training"]] if "error_after_training" in results else []),
        *([f"failed     {failure}"] if failure else []),
    ]
    print("\n".join(printed))
