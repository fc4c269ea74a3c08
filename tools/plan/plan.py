"""`--plan`: largest useful micro-batch that fits, memory and time, per config and activation-checkpointing mode."""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from common.errors import UserError
from common.host_memory import format_bytes
from common.models import adapters
from common.parallel import mode_checks
from common.planner import repeated_flags
from common.training.optimizer_choice import smaller_optimizers
from common.training.process_grid import ProcessGrid
from tools.plan import configs, hardware
from tools.plan.cost import Cost, count_micro_batches, estimate_cost
from tools.plan.hardware import GIB, Machine
from tools.plan.memory import Mode, ModelSizes, measure_model, needs, on_host, peak
from tools.plan.memory_forecast import Forecaster, TraceError, Tracer
from tools.plan.memory_profile import Parts
from tools.plan.process_memory import held_on_cpu, held_on_gpu, need_on_cpu, own_memory
from tools.plan.traced_run import examine_head_once

CHECKPOINTING = ("none", "selective", "full")
BUSY = {"cpu": 1024, "cuda": 8192}  # tokens per micro-batch that saturate a device
NO_SLOWER = 1.03  # rows within this factor of the fastest count as equal; the cost model is not more precise


@dataclass
class Row:
    """A row of the table."""

    mode: Mode
    checkpointing: str
    rows: int  # samples per micro-batch
    tokens: int  # tokens per micro-batch and process
    micro_batches: int
    parts: Parts  # bytes on the device at its peak
    host: float  # bytes in host memory, per node
    files: float  # offloaded bytes on disk, per node
    cost: Cost
    shortfall: float  # bytes; 0 if it fits


def plan(tracer: Tracer, model_class: Any, meta_model: Callable[[], Any], machine: Machine) -> list[str]:
    """Returns the lines of the plan. model_class: an Auto class.

    Raises UserError: the recipe cannot be traced. Raises InTraceProcess in a process that traces it.
    """
    try:
        shape, rows, left_out = _find_rows(tracer, model_class, meta_model, machine)
        lines = list(_page(tracer, machine, shape, rows, left_out))
        if best_of(rows) is None:
            lines += _adapter_lines(tracer, model_class, machine)
    except TraceError as reason:
        raise UserError(f"--plan: this model's update cannot be traced without data ({reason})") from reason
    return lines


def _find_rows(
    tracer: Tracer, model_class: Any, meta_model: Callable[[], Any], machine: Machine
) -> tuple[ModelSizes, list[Row], list[str]]:
    """Returns the model's sizes, the rows of the table, and the names of the configs without a row.

    Raises TraceError, or InTraceProcess in a tracing process.
    """
    args, max_length = tracer.run.args, tracer.samples.max_length
    check_model = partial(check_shared_model, tracer.config, model_class, meta_model)
    modes, left_out = configs.modes_for(machine, args, tracer.run.traits, check_model)
    if not modes:
        rejected = "; ".join(left_out) or "there is none"
        raise UserError(f"--plan: no config of accelerate_configs/ can run this: {rejected}")
    model = meta_model()
    forecaster = Forecaster(tracer, measure_model(model), machine.kind)
    share = max(math.ceil(args.global_batch_size / mode.grid.data_parallel) for mode in modes)
    few = max(1, min(share, 1024 // max_length))
    # 3 times, not 2 or 4, because vocabulary sizes are often powers of two: if the number of tokens equals this size,
    # all tensors count as logits.
    sizes = (few, max(few + 1, min(share, 3 * few)))
    savings = CHECKPOINTING if getattr(model, "supports_gradient_checkpointing", False) else ("none",)
    examine_head_once(model)
    forecaster.trace(modes, savings, sizes, args.optimizer)
    rows = (_largest_row(forecaster, machine, mode, checkpointing) for mode in modes for checkpointing in savings)
    return forecaster.model, [row for row in rows if row], left_out


def _adapter_lines(tracer: Tracer, model_class: Any, machine: Machine) -> list[str]:
    """Returns the adapters that fit if full training of a pretrained model does not, with memory and launch command.

    Raises InTraceProcess in a tracing process.
    """
    args, lines = tracer.run.args, []
    if "lora_rank" not in args.shared_flags or adapters.is_asked(args) or not args.model_name_or_path:
        return []
    before = dict(vars(args))
    for flags in ({"lora_rank": 16}, {"lora_rank": 16, "quantize": "nf4"}):
        vars(args).update(before | flags)
        words = " ".join(f"--{name} {value}" for name, value in flags.items())
        meta_model = cache(partial(adapters.build_meta_base, args, tracer.config, model_class))
        try:
            _, rows, _ = _find_rows(tracer, model_class, meta_model, machine)
        except (TraceError, UserError):  # the model does not support adapters, or 4 bits
            continue
        if best := best_of(rows):
            lines.append(f"\nan adapter fits, {words}, with a peak of {format_bytes(sum(best.parts.values()))}:\n")
            lines.append(f"    {launch_line(args, best)} {words}")
    vars(args).update(before)
    return lines


def best_of(rows: list[Row]) -> Row | None:
    """Returns the fastest row that fits; among rows of about equal time, the simplest."""
    fitting = [row for row in rows if not row.shortfall]
    fastest = min((row.cost.seconds for row in fitting), default=0.0)
    return min((row for row in fitting if row.cost.seconds <= NO_SLOWER * fastest), key=_complexity, default=None)


def check_shared_model(config: Any, model_class: Any, meta_model: Callable[[], Any], grid: ProcessGrid) -> list[str]:
    """Returns the reasons why a model does not support this process grid."""
    if grid.pipeline == 1:
        return mode_checks.check_shared_model(config, model_class, meta_model, grid)
    from common.tasks.pipeline import stages  # here because few recipes have stages

    problems = list(stages.check_stages(config, grid))
    return problems if problems or stages.find_parts(meta_model()) else ["modules that differ from its pipeline plan"]


def _largest_row(forecaster: Forecaster, machine: Machine, mode: Mode, checkpointing: str) -> Row | None:
    """Returns the row of the largest micro-batch that fits and saves time, else of the smallest; None without one."""
    args, best = forecaster.tracer.run.args, None
    for rows in _micro_batch_sizes(args, mode):
        profile = forecaster.profile_of(mode, checkpointing, rows)
        number = count_micro_batches(args.global_batch_size, mode.grid.data_parallel, rows)
        _, parts = peak(needs(profile, forecaster.model, mode, number))
        host, files = on_host(forecaster.model, mode, args.optimizer)
        shortfall = find_shortfall(machine, mode, parts, host, files)
        tokens = math.ceil(rows * forecaster.tracer.samples.max_length / mode.sequence)
        sends_again = checkpointing == "full" or (checkpointing != "none" and mode.sequence > 1)
        cost = estimate_cost(profile, forecaster.model, mode, machine, number, sends_again)
        row = Row(mode, checkpointing, rows, tokens, number, parts, host, files, cost, shortfall)
        gains = best is None or best.tokens < BUSY[machine.kind] or cost.seconds < 0.99 * best.cost.seconds
        if best is not None and (shortfall or not gains):
            break
        best = row
    return best


def _micro_batch_sizes(args: argparse.Namespace, mode: Mode) -> Iterator[int]:
    """Yields powers of two; in a pipeline, only divisors of the batch with at least one micro-batch per stage."""
    share = math.ceil(args.global_batch_size / mode.grid.data_parallel)
    for rows in [2**power for power in range(share.bit_length()) if 2**power <= share]:
        number, rest = divmod(args.global_batch_size, rows * mode.grid.data_parallel)
        if mode.pipeline == 1 or (not rest and number >= mode.pipeline):
            yield rows


def find_shortfall(machine: Machine, mode: Mode, parts: Parts, host: float, files: float) -> float:
    """Returns the largest shortfall in bytes: on a device, on the host, or on the disk."""
    on_host = math.inf if machine.host is None else machine.host
    if machine.kind == "cpu":
        # The memory of this process counts as used now, but it will be free when the run starts.
        needed = need_on_cpu(mode, parts, host) - own_memory()
        return max(0.0, held_on_cpu(parts) - machine.memory, needed - on_host)
    on_disk = math.inf if machine.disk is None else machine.disk
    return max(0.0, held_on_gpu(mode, parts) - machine.memory, host - on_host, files - on_disk)


COLUMNS = ("weights", "gradients", "optimizer state", "activations", "logits")


def _page(tracer: Tracer, machine: Machine, shape: ModelSizes, rows: list[Row], left_out: list[str]) -> Iterator[str]:
    args, samples = tracer.run.args, tracer.samples
    yield f"   machine  {hardware.describe(machine)}"
    yield f"     model  {shape.parameters:,} parameters, {args.optimizer}"
    of_up_to = f"samples of up to {samples.max_length:,} tokens" if samples.unit == "tokens" else samples.unit
    rows_are = "a row has the largest micro-batch that fits and improves throughput"
    yield f"     batch  {args.global_batch_size} {of_up_to}; {rows_are}"
    size, unit = (GIB, "GiB") if max(sum(row.parts.values()) for row in rows) >= GIB else (2**20, "MiB")
    yield f"      peak  {unit} of tensors in the process with the most; whether it fits includes also " + (
        "the process itself\n" if machine.kind == "cpu" else "CUDA, NCCL and fragmentation\n"
    )
    head = ["config", "checkpointing", samples.unit, "micro-steps", "peak", *COLUMNS, "gathered, buckets", "host"]
    head += ["files", "GB sent", "s/update", ""]
    table = [head, *(list(_cells(row, size)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        padded[:2] = [cell.ljust(width) for cell, width in zip(line[:2], widths, strict=False)]
        yield "  ".join(padded).rstrip()
    if left_out:
        few = [name.removesuffix(configs.TOO_FEW) for name in left_out if name.endswith(configs.TOO_FEW)]
        refused = [name for name in left_out if not name.endswith(configs.TOO_FEW)]
        notes = [f"saving nothing on so few devices: {', '.join(few)}"] if few else []
        notes += [f"not planned, because a run would reject them: {', '.join(refused)}"] if refused else []
        yield "\n" + "; ".join(notes)
    best = best_of(rows)
    if best is None:
        least = min(rows, key=lambda row: row.shortfall)
        shortfall = f"has a shortfall of {format_bytes(least.shortfall)}"
        yield f"\nnothing fits; {least.mode.name} with {least.checkpointing} {shortfall}: take"
        smaller = smaller_optimizers(args.optimizer, *least.mode.splits)
        others = f", or --optimizer {' or '.join(smaller)}" if smaller else ""
        yield f"more devices{',' if smaller else ' or'} a smaller --sequence_length{others}"
        return
    yield f"\nthe fastest that fits, {best.cost.seconds:,.3g} s an update by this model of costs:\n"
    yield "    " + launch_line(args, best)
    if best.mode.nodes > 1:
        yield "\non each node: R is its number, 0 to begin with, and IP an address of node 0 (docs/nodes.md)"


def _complexity(row: Row) -> tuple[int, int, int]:
    """Returns the sort key for rows of equal time: simpler modes first, then less recomputation."""
    mode = row.mode
    kinds = ("plain", "DDP", "FSDP", "DeepSpeed")
    offloads = (mode.state_on != "device") + (mode.weights_on != "device")
    shared = mode.replicas + mode.grid.group_size * mode.pipeline
    return offloads, kinds.index(mode.kind) + mode.stage + shared, CHECKPOINTING.index(row.checkpointing)


def _cells(row: Row, unit: float) -> Iterator[str]:
    """Yields the cells of a row. unit: the unit of the sizes (MiB or GiB), in bytes."""

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
    yield f"shortfall {cell(row.shortfall)}" if row.shortfall else "fits"


REPLACED = ("--plan", "--micro_batch_size", "--micro_batch_tokens", "--activation_checkpointing")


def launch_line(args: argparse.Namespace, row: Row) -> str:
    """Returns the launch command: the current command with the config and the flags of a row."""
    size = f"--micro_batch_size {row.rows}"
    if "micro_batch_tokens" in args.shared_flags and not args.micro_batch_size and row.mode.pipeline == 1:
        size = f"--micro_batch_tokens {row.tokens}"
    launcher = ["--config_file", f"{configs.folder() / row.mode.name}.yaml", *row.mode.flags]
    launcher += ["--machine_rank R"] if row.mode.nodes > 1 else []
    recipe = [sys.argv[0], *map(shlex.quote, repeated_flags(sys.argv[1:], REPLACED))]
    return " ".join(["accelerate launch", *launcher, *recipe, size, "--activation_checkpointing", row.checkpointing])
