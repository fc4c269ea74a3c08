"""`--plan`: for each config and way to keep activations, the largest micro-batch that fits, what it takes, how long."""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import psutil
import torch

from common.errors import UserError
from common.models import adapters, model_setup
from common.plan import configs, machines
from common.plan.cost import Cost, cost_of, micro_batches_of
from common.plan.forecast import Forecaster, NotPlayed, Played, Player, in_bytes
from common.plan.machines import GIB, Machine
from common.plan.memory import Mode, Shape, needs, on_host, peak, shape_of
from common.plan.profile import Parts, Profile
from common.plan.rehearsal import examine_head_once
from common.training.batching import Samples
from common.training.process_grid import Degrees

CHECKPOINTING = ("none", "selective", "full")
# Of a GPU, beside what is allocated: what CUDA takes, and NCCL where there are several processes, as measured on A100s
# (github.com/stas00/ml-engineering, training/performance: 0.47 GB with torch 2.1; 1.45 GB at the first barrier of two).
CONTEXT, NCCL = 0.47 * GIB, 1.45 * GIB
# Reserved by torch's allocator, of what is allocated: 1.20 to 1.36 with FSDP (pytorch/torchtitan#165).
FRAGMENTS = 1.25
# Of a CPU: `accelerate launch` itself, as measured; what a process grows by beside its tensors, from the plan to its
# last update; what glibc keeps, of activations and logits (0.7 to 0.95 were measured). `benchmarks/plan_limits.py`
# shows how far the sum is from the peaks of runs.
LAUNCHER, GROWTH, KEPT = 172 * 2**20, 128 * 2**20, 1.0
BUSY = {"cpu": 1024, "cuda": 8192}  # tokens at once: with fewer, a device waits for its own small steps
NO_SLOWER = 1.03  # than the fastest: the model of costs knows no better


@dataclass
class Row:
    """One line of the table."""

    mode: Mode
    checkpointing: str
    rows: int  # samples in a micro-batch
    tokens: int  # that a process computes at once
    micro_batches: int
    parts: Parts
    host: float
    files: float
    cost: Cost
    lacks: float  # bytes; 0 where it fits


def plan(
    model_class: Any,
    run: Any,
    config: Any,
    make_empty: Callable[[], torch.nn.Module],
    samples: Samples,
    held_out: Samples | None,
) -> None:
    """Prints the plan and ends the run; comes back only in a process that plays. model_class: an Auto class."""
    args = run.args
    machine = machines.this_machine() if args.plan == "here" else machines.parse_machine(args.plan)
    make_rows = partial(_plan_rows, model_class, run, config, samples=samples, held_out=held_out, machine=machine)
    try:
        shape, rows, left_out = make_rows(make_empty)
        lines = list(_page(args, samples, machine, shape, rows, left_out))
        if best_of(rows) is None:
            lines += _adapter_lines(model_class, run, config, make_rows)
    except Played:
        return
    except NotPlayed as reason:
        raise UserError(
            f"--plan: this model's update cannot be played without data ({reason}); use --dry_run"
        ) from reason
    print("\n".join(lines), flush=True)
    sys.exit()


def _plan_rows(
    model_class: Any,
    run: Any,
    config: Any,
    make_empty: Callable[[], torch.nn.Module],
    samples: Samples,
    held_out: Samples | None,
    machine: Machine,
) -> tuple[Shape, list[Row], list[str]]:
    """The model's sizes, the rows of the table, and the names of the configs without one.

    Raises NotPlayed, or Played in a process that plays.
    """
    args, check_model = run.args, partial(check_shared_model, config, model_class, make_empty)
    modes, left_out = configs.modes_for(machine, args, check_model)
    shape = shape_of(make_empty())
    forecaster = Forecaster(Player(run, config, samples, held_out), shape, machine.kind)
    share = max(math.ceil(args.global_batch_size / mode.degrees.data) for mode in modes)
    few = max(1, min(share, 1024 // samples.max_length))
    # Not twice or four times as many: where a vocabulary has as many entries as there are tokens, all would be logits.
    pair = (few, max(few + 1, min(share, 3 * few)))
    ways = CHECKPOINTING if run_can_checkpoint(make_empty()) else ("none",)
    examine_head_once(make_empty())
    profiles = _profiles(forecaster, modes, ways, pair, args.optimizer)
    return shape, list(_rows(args, samples, modes, ways, shape, machine, profiles, pair)), left_out


def _adapter_lines(
    model_class: Any, run: Any, config: Any, make_rows: Callable[..., tuple[Shape, list[Row], list[str]]]
) -> list[str]:
    """Where a whole pretrained model does not fit: the adapters on it that do, with their memory and launch lines.

    Raises Played in a process that plays.
    """
    args, lines = run.args, []
    if "lora_rank" not in args or adapters.is_asked(args) or not args.model_name_or_path:
        return lines
    before = dict(vars(args))
    for flags in ({"lora_rank": 16}, {"lora_rank": 16, "quantize": "nf4"}):
        vars(args).update(before | flags)
        words = " ".join(f"--{name} {value}" for name, value in flags.items())
        try:
            _, rows, _ = make_rows(cache(partial(adapters.empty_base, args, config, model_class)))
        except (NotPlayed, UserError):  # a model without adapters, or without 4 bits
            continue
        if best := best_of(rows):
            lines.append(f"\nan adapter fits, {words}, with a peak of {in_bytes(sum(best.parts.values()))}:\n")
            lines.append(f"    {launch_line(args, best)} {words}")
    vars(args).update(before)
    return lines


def best_of(rows: list[Row]) -> Row | None:
    """The fastest row that fits; among rows that are about as fast, the plainest."""
    fitting = [row for row in rows if not row.lacks]
    fastest = min((row.cost.seconds for row in fitting), default=0.0)
    return min((row for row in fitting if row.cost.seconds <= NO_SLOWER * fastest), key=_plainness, default=None)


def check_shared_model(
    config: Any, model_class: Any, make_empty: Callable[[], torch.nn.Module], degrees: Degrees
) -> list[str]:
    """What keeps a model from being shared so."""
    if degrees.pipeline == 1:
        return model_setup.check_model(config, model_class, make_empty, degrees)
    from common.tasks.pipeline import stages  # not for a recipe without stages

    problems = list(stages.check_stages(config, degrees))
    return problems if problems or stages.find_parts(make_empty()) else ["other parts than its pipeline plan says"]


def run_can_checkpoint(model: torch.nn.Module) -> bool:
    """Whether the model's layers can compute their activations again."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def _kind(mode: Mode) -> tuple[str, str, int]:
    # DeepSpeed's weights in bf16 without autocast allocate what FSDP2's do with it: one recording for both. And a part
    # of a sequence what as large a part of the samples does.
    return (mode.precision, mode.weights_dtype, mode.tensor)


def _profiles(
    forecaster: Forecaster, modes: list[Mode], ways: tuple[str, ...], pair: tuple[int, int], optimizer: str
) -> dict[Any, tuple[Profile, Profile]]:
    """Of each kind of mode and way, the whole model's profile at two sizes of micro-batch."""
    kinds = {_kind(mode): replace(mode, sequence=1) for mode in modes}
    keys = [(kind, way, rows) for kind in kinds for way in ways for rows in pair]
    cases = {key: forecaster.cases(kinds[key[0]], key[2], key[1], optimizer) for key in keys}
    played = iter(
        forecaster.player.play([case for key in keys for case in cases[key]], at_once=psutil.cpu_count() or 1)
    )
    whole = {key: forecaster.profile([next(played) for _ in cases[key]]) for key in keys}
    return {(kind, way): (whole[kind, way, pair[0]], whole[kind, way, pair[1]]) for kind in kinds for way in ways}


def _rows(
    args: argparse.Namespace,
    samples: Samples,
    modes: list[Mode],
    ways: tuple[str, ...],
    shape: Shape,
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
                number = micro_batches_of(args.global_batch_size, mode.degrees.data, rows)
                _, parts = peak(needs(profile, shape, mode, number))
                host, files = on_host(shape, mode)
                lacking = lacks(machine, mode, parts, host, files)
                tokens = math.ceil(rows * samples.max_length / mode.sequence)
                sends_again = way == "full" or (way != "none" and mode.sequence > 1)
                cost = cost_of(profile, shape, mode, machine, number, sends_again)
                row = Row(mode, way, rows, tokens, number, parts, host, files, cost, lacking)
                gains = best is None or best.tokens < BUSY[machine.kind] or row.cost.seconds < 0.99 * best.cost.seconds
                if best is not None and (lacking or not gains):
                    break
                best = row
            if best is not None:
                yield best


def _micro_batch_sizes(args: argparse.Namespace, mode: Mode) -> Iterator[int]:
    """Numbers of samples that a micro-batch can have; a pipeline takes only what divides, and enough for its stages."""
    share = math.ceil(args.global_batch_size / mode.degrees.data)
    for rows in [2**power for power in range(share.bit_length()) if 2**power <= share]:
        number, rest = divmod(args.global_batch_size, rows * mode.degrees.data)
        if mode.pipeline == 1 or (not rest and number >= mode.pipeline):
            yield rows


def lacks(machine: Machine, mode: Mode, parts: Parts, host: float, files: float) -> float:
    """How many bytes are missing where most are: on a device, on the host, or on the disk."""
    if machine.kind == "cpu":
        # What this process has itself is no longer left, and the first process of the run takes its place.
        return max(0.0, held_on_cpu(parts) - machine.memory, need_on_cpu(mode, parts, host) - _own() - machine.host)
    held = sum(parts.values())
    device = held * FRAGMENTS + CONTEXT + (NCCL if mode.processes > 1 else 0) - machine.memory
    on_host = host - machine.host if machine.host is not None else 0.0
    on_disk = files - machine.disk if machine.disk is not None else 0.0
    return max(0.0, device, on_host, on_disk)


def held_on_cpu(parts: Parts) -> float:
    """Bytes that a process of a CPU takes for its updates: its tensors, and what malloc keeps of those it freed."""
    kept = 0.0 if _maps_tensors() else KEPT * (parts.get("activations", 0) + parts.get("logits", 0))
    return sum(parts.values()) + kept + GROWTH


def need_on_cpu(mode: Mode, parts: Parts, host: float) -> float:
    """Bytes of memory that a run takes in all: its processes, what they have before training, and the launcher."""
    return mode.processes * (_own() + held_on_cpu(parts)) + LAUNCHER + host


def _own() -> float:
    """Bytes of this process that no other one shares. Files that are mapped do not count: the kernel drops them."""
    memory = psutil.Process().memory_info()
    return float(memory.rss - getattr(memory, "shared", 0))


def _maps_tensors() -> bool:
    """Whether malloc gives each tensor pages of its own, and gives them back with it."""
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return threshold.isdecimal() and int(threshold) <= 2**20


COLUMNS = ("weights", "gradients", "optimizer state", "activations", "logits")


def _page(
    args: argparse.Namespace, samples: Samples, machine: Machine, shape: Shape, rows: list[Row], left_out: list[str]
) -> Iterator[str]:
    yield f"   machine  {machines.describe(machine)}"
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
        yield f"\nnothing fits; {least.mode.name} with {least.checkpointing} lacks {in_bytes(least.lacks)}: take"
        yield "more devices, a smaller --sequence_length, or --optimizer adamw8bit or adafactor"
        return
    yield f"\nthe fastest that fits, {best.cost.seconds:,.3g} s an update by this model of costs:\n"
    yield "    " + launch_line(args, best)
    if best.mode.nodes > 1:
        yield "\non each node: R is its number, 0 to begin with, and IP an address of node 0 (docs/nodes.md)"


def _plainness(row: Row) -> tuple[int, int, int]:
    """Of rows that are as fast, which to take: the mode with fewer parts that can go wrong, and nothing recomputed."""
    mode = row.mode
    kinds = ("plain", "DDP", "FSDP", "DeepSpeed")
    offloads = (mode.state_on != "device") + (mode.weights_on != "device")
    shared = mode.replicas + mode.degrees.group * mode.pipeline
    return offloads, kinds.index(mode.kind) + mode.stage + shared, CHECKPOINTING.index(row.checkpointing)


def _cells(row: Row, unit: float) -> Iterator[str]:
    """unit: of sizes, in bytes."""

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
    """The command to paste: this one, with the config and the flags of a row."""
    words, kept = iter(sys.argv[1:]), []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word[2:].partition("=")[0] in REPLACED
        if not skipping:
            kept.append(word)
    size = (
        f"--micro_batch_tokens {row.tokens}"
        if hasattr(args, "micro_batch_tokens") and not args.micro_batch_size and row.mode.pipeline == 1
        else f"--micro_batch_size {row.rows}"
    )
    line = f"accelerate launch --config_file {configs.folder() / row.mode.name}.yaml"
    line += "".join(f" {flag}" for flag in row.mode.flags) + " --machine_rank R" * (row.mode.nodes > 1)
    return f"{line} {sys.argv[0]} {shlex.join(kept)} {size} --activation_checkpointing {row.checkpointing}".replace(
        "  ", " "
    )
