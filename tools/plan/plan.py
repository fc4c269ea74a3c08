"""`--plan`: the largest micro-batch that fits, with memory and time, per config and activation-checkpointing mode."""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import psutil
import torch

from common.errors import UserError
from common.host_memory import format_bytes
from common.models import adapters, model_setup
from common.training.batching import Samples
from common.training.optimizer_choice import smaller_optimizers
from common.training.optimizers import OPTIMIZERS
from common.training.process_grid import Degrees
from tools.plan import configs, hardware
from tools.plan.cost import Cost, count_micro_batches, estimate_cost
from tools.plan.hardware import GIB, Machine
from tools.plan.memory import Mode, ModelSizes, measure_model, needs, on_host, peak
from tools.plan.memory_forecast import Forecaster, TraceError, Tracer
from tools.plan.memory_profile import Parts, Profile
from tools.plan.process_memory import held_on_cpu, held_on_gpu, need_on_cpu, own_memory
from tools.plan.traced_run import examine_head_once

CHECKPOINTING = ("none", "selective", "full")
BUSY = {"cpu": 1024, "cuda": 8192}  # tokens per micro-batch; with fewer, a device waits for its own small steps
NO_SLOWER = 1.03  # times the fastest; the cost model is not more precise


@dataclass
class Row:
    """A row of the table."""

    mode: Mode
    checkpointing: str
    rows: int  # samples per micro-batch
    tokens: int  # tokens per micro-batch and process
    micro_batches: int
    parts: Parts
    host: float
    files: float
    cost: Cost
    lacks: float  # shortfall in bytes; 0 if it fits


def plan(
    model_class: Any,
    run: Any,
    config: Any,
    make_empty: Callable[[], torch.nn.Module],
    samples: Samples,
    held_out: Samples | None,
    machine: Machine,
) -> list[str]:
    """Returns the lines of the plan. model_class: an Auto class.

    Raises UserError: the recipe cannot be traced. Raises InTraceProcess in a process that traces it.
    """
    args = run.args
    make_rows = partial(_plan_rows, model_class, run, config, samples=samples, held_out=held_out, machine=machine)
    try:
        shape, rows, left_out = make_rows(make_empty)
        lines = list(_page(args, samples, machine, shape, rows, left_out))
        if best_of(rows) is None:
            lines += _adapter_lines(model_class, run, config, make_rows)
    except TraceError as reason:
        raise UserError(f"--plan: this model's update cannot be traced without data ({reason})") from reason
    return lines


def _plan_rows(
    model_class: Any,
    run: Any,
    config: Any,
    make_empty: Callable[[], torch.nn.Module],
    samples: Samples,
    held_out: Samples | None,
    machine: Machine,
) -> tuple[ModelSizes, list[Row], list[str]]:
    """Returns the model's sizes, the rows of the table, and the names of the configs without a row.

    Raises TraceError, or InTraceProcess in a tracing process.
    """
    args, check_model = run.args, partial(check_shared_model, config, model_class, make_empty)
    modes, left_out = configs.modes_for(machine, args, run.traits, check_model)
    shape = measure_model(make_empty())
    forecaster = Forecaster(Tracer(run, config, samples, held_out), shape, machine.kind)
    share = max(math.ceil(args.global_batch_size / mode.degrees.data) for mode in modes)
    few = max(1, min(share, 1024 // samples.max_length))
    # Not twice or four times as many, because if the number of tokens equals the vocabulary size, all tensors would
    # count as logits.
    pair = (few, max(few + 1, min(share, 3 * few)))
    ways = CHECKPOINTING if run_can_checkpoint(make_empty()) else ("none",)
    examine_head_once(make_empty())
    profiles = _profiles(forecaster, modes, ways, pair, args.optimizer)
    return shape, list(_rows(args, samples, modes, ways, shape, machine, profiles, pair)), left_out


def _adapter_lines(
    model_class: Any, run: Any, config: Any, make_rows: Callable[..., tuple[ModelSizes, list[Row], list[str]]]
) -> list[str]:
    """Returns the adapters that fit if full training of a pretrained model does not, with memory and launch command.

    Raises InTraceProcess in a tracing process.
    """
    args, lines = run.args, []
    if "lora_rank" not in args.shared_flags or adapters.is_asked(args) or not args.model_name_or_path:
        return lines
    before = dict(vars(args))
    for flags in ({"lora_rank": 16}, {"lora_rank": 16, "quantize": "nf4"}):
        vars(args).update(before | flags)
        words = " ".join(f"--{name} {value}" for name, value in flags.items())
        try:
            _, rows, _ = make_rows(cache(partial(adapters.empty_base, args, config, model_class)))
        except (TraceError, UserError):  # the model does not support adapters, or 4 bits
            continue
        if best := best_of(rows):
            lines.append(f"\nan adapter fits, {words}, with a peak of {format_bytes(sum(best.parts.values()))}:\n")
            lines.append(f"    {launch_line(args, best)} {words}")
    vars(args).update(before)
    return lines


def best_of(rows: list[Row]) -> Row | None:
    """Returns the fastest row that fits; among rows of about equal time, the simplest."""
    fitting = [row for row in rows if not row.lacks]
    fastest = min((row.cost.seconds for row in fitting), default=0.0)
    return min((row for row in fitting if row.cost.seconds <= NO_SLOWER * fastest), key=_plainness, default=None)


def check_shared_model(
    config: Any, model_class: Any, make_empty: Callable[[], torch.nn.Module], degrees: Degrees
) -> list[str]:
    """Returns the reasons why a model does not support this process grid."""
    if degrees.pipeline == 1:
        return model_setup.check_model(config, model_class, make_empty, degrees)
    from common.tasks.pipeline import stages  # not for a recipe without stages

    problems = list(stages.check_stages(config, degrees))
    return problems if problems or stages.find_parts(make_empty()) else ["other parts than its pipeline plan says"]


def run_can_checkpoint(model: torch.nn.Module) -> bool:
    """Returns whether the model's layers can recompute their activations."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def _kind(mode: Mode) -> tuple[str, str, int]:
    # DeepSpeed's bf16 weights without autocast allocate the same memory as FSDP2's with autocast, so both share a
    # recording. A part of a sequence allocates as much as an equal part of the samples.
    return (mode.precision, mode.weights_dtype, mode.tensor)


def _profiles(
    forecaster: Forecaster, modes: list[Mode], ways: tuple[str, ...], pair: tuple[int, int], optimizer: str
) -> dict[Any, tuple[Profile, Profile]]:
    """Returns, per kind of mode and checkpointing mode, the full model's profile at two micro-batch sizes."""
    kinds = {_kind(mode): replace(mode, sequence=1) for mode in modes}
    keys = [(kind, way, rows) for kind in kinds for way in ways for rows in pair]
    cases = {key: forecaster.cases(kinds[key[0]], key[2], key[1], optimizer) for key in keys}
    played = iter(
        forecaster.tracer.play([case for key in keys for case in cases[key]], at_once=psutil.cpu_count() or 1)
    )
    whole = {key: forecaster.profile([next(played) for _ in cases[key]]) for key in keys}
    return {(kind, way): (whole[kind, way, pair[0]], whole[kind, way, pair[1]]) for kind in kinds for way in ways}


def _rows(
    args: argparse.Namespace,
    samples: Samples,
    modes: list[Mode],
    ways: tuple[str, ...],
    shape: ModelSizes,
    machine: Machine,
    profiles: dict[Any, tuple[Profile, Profile]],
    pair: tuple[int, int],
) -> Iterator[Row]:
    for mode in modes:
        for way in ways:
            best = None
            for rows in _micro_batch_sizes(args, mode):
                few, more = profiles[_kind(mode), way]
                profile = few.scaled(more, (rows / mode.sequence - pair[0]) / (pair[1] - pair[0]))
                number = count_micro_batches(args.global_batch_size, mode.degrees.data, rows)
                _, parts = peak(needs(profile, shape, mode, number))
                host, files = on_host(shape, mode, OPTIMIZERS[args.optimizer].state_bytes)
                lacking = lacks(machine, mode, parts, host, files)
                tokens = math.ceil(rows * samples.max_length / mode.sequence)
                sends_again = way == "full" or (way != "none" and mode.sequence > 1)
                cost = estimate_cost(profile, shape, mode, machine, number, sends_again)
                row = Row(mode, way, rows, tokens, number, parts, host, files, cost, lacking)
                gains = best is None or best.tokens < BUSY[machine.kind] or row.cost.seconds < 0.99 * best.cost.seconds
                if best is not None and (lacking or not gains):
                    break
                best = row
            if best is not None:
                yield best


def _micro_batch_sizes(args: argparse.Namespace, mode: Mode) -> Iterator[int]:
    """Yields possible micro-batch sizes; in a pipeline, only divisors that give each stage enough micro-batches."""
    share = math.ceil(args.global_batch_size / mode.degrees.data)
    for rows in [2**power for power in range(share.bit_length()) if 2**power <= share]:
        number, rest = divmod(args.global_batch_size, rows * mode.degrees.data)
        if mode.pipeline == 1 or (not rest and number >= mode.pipeline):
            yield rows


def lacks(machine: Machine, mode: Mode, parts: Parts, host: float, files: float) -> float:
    """Returns the largest shortfall in bytes: on a device, on the host, or on the disk."""
    if machine.kind == "cpu":
        # The memory of this process is not available now, but the first process of the run takes its place.
        return max(
            0.0, held_on_cpu(parts) - machine.memory, need_on_cpu(mode, parts, host) - own_memory() - machine.host
        )
    device = held_on_gpu(mode, parts) - machine.memory
    on_host = host - machine.host if machine.host is not None else 0.0
    on_disk = files - machine.disk if machine.disk is not None else 0.0
    return max(0.0, device, on_host, on_disk)


COLUMNS = ("weights", "gradients", "optimizer state", "activations", "logits")


def _page(
    args: argparse.Namespace,
    samples: Samples,
    machine: Machine,
    shape: ModelSizes,
    rows: list[Row],
    left_out: list[str],
) -> Iterator[str]:
    yield f"   machine  {hardware.describe(machine)}"
    yield f"     model  {shape.parameters:,} parameters, {args.optimizer}"
    of_up_to = f"samples of up to {samples.max_length:,} tokens" if samples.unit == "tokens" else samples.unit
    yield f"     batch  {args.global_batch_size} {of_up_to}; a row has the largest micro-batch that fits and gains"
    size, unit = (GIB, "GiB") if max(sum(row.parts.values()) for row in rows) >= GIB else (2**20, "MiB")
    yield f"      peak  {unit} of the busiest process, of tensors; whether it fits counts also what " + (
        "the process itself takes\n" if machine.kind == "cpu" else "CUDA, NCCL and fragments take\n"
    )
    head = ["config", "checkpointing", samples.unit, "micro-steps", "peak", *COLUMNS, "gathered, buckets", "host"]
    head += ["files", "GB sent", "s/update", ""]
    table = [head, *([*_cells(row, size)] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    for line in table:
        cells = [
            cell.ljust(w) if n < 2 else cell.rjust(w) for n, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
    if left_out:
        few = [name for name in left_out if name.endswith(configs.TOO_FEW)]
        refused = [name for name in left_out if name not in few]
        yield "\n" + "; ".join(
            [f"saving nothing on so few devices: {', '.join(few).replace(configs.TOO_FEW, '')}"] * bool(few)
            + [f"not planned: {', '.join(refused)}; a run with one of them is refused, and says why"] * bool(refused)
        )
    best = best_of(rows)
    if best is None:
        least = min(rows, key=lambda row: row.lacks)
        yield f"\nnothing fits; {least.mode.name} with {least.checkpointing} lacks {format_bytes(least.lacks)}: take"
        smaller = smaller_optimizers(args.optimizer, least.mode.splits_tensors)
        others = f", or --optimizer {' or '.join(smaller)}" if smaller else ""
        yield f"more devices{',' if smaller else ' or'} a smaller --sequence_length{others}"
        return
    yield f"\nthe fastest that fits, {best.cost.seconds:,.3g} s an update by this model of costs:\n"
    yield "    " + launch_line(args, best)
    if best.mode.nodes > 1:
        yield "\non each node: R is its number, 0 to begin with, and IP an address of node 0 (docs/nodes.md)"


def _plainness(row: Row) -> tuple[int, int, int]:
    """Returns the sort key for rows of equal time: modes with fewer components, and less recomputation, come first."""
    mode = row.mode
    kinds = ("plain", "DDP", "FSDP", "DeepSpeed")
    offloads = (mode.state_on != "device") + (mode.weights_on != "device")
    shared = mode.replicas + mode.degrees.group * mode.pipeline
    return offloads, kinds.index(mode.kind) + mode.stage + shared, CHECKPOINTING.index(row.checkpointing)


def _cells(row: Row, unit: float) -> Iterator[str]:
    """Yields the cells of a row. unit: unit of sizes, in bytes."""

    def cell(size: float) -> str:
        return f"{size / unit:,.2f}" if size < 100 * unit else f"{size / unit:,.0f}"

    yield row.mode.name
    yield row.checkpointing
    yield f"{row.tokens:,}"
    yield f"{row.micro_batches}"
    yield cell(sum(row.parts.values()))
    for name in COLUMNS:
        yield cell(row.parts.get(name, 0))
    yield cell(sum(size for name, size in row.parts.items() if name not in COLUMNS))
    yield cell(row.host) if row.host else "-"
    yield cell(row.files) if row.files else "-"
    yield f"{row.cost.sent / 1e9:,.1f}" if row.cost.sent else "-"
    yield f"{row.cost.seconds:,.3g}"
    yield f"lacks {cell(row.lacks)}" if row.lacks else "fits"


REPLACED = ("plan", "micro_batch_size", "micro_batch_tokens", "activation_checkpointing")


def launch_line(args: argparse.Namespace, row: Row) -> str:
    """Returns the launch command: the current command with the config and the flags of a row."""
    words, kept = iter(sys.argv[1:]), []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word[2:].partition("=")[0] in REPLACED
        if not skipping:
            kept.append(word)
    size = (
        f"--micro_batch_tokens {row.tokens}"
        if "micro_batch_tokens" in args.shared_flags and not args.micro_batch_size and row.mode.pipeline == 1
        else f"--micro_batch_size {row.rows}"
    )
    line = f"accelerate launch --config_file {configs.folder() / row.mode.name}.yaml"
    line += "".join(f" {flag}" for flag in row.mode.flags) + " --machine_rank R" * (row.mode.nodes > 1)
    return f"{line} {sys.argv[0]} {shlex.join(kept)} {size} --activation_checkpointing {row.checkpointing}".replace(
        "  ", " "
    )
