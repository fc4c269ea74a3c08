"""Cost model: communication volume and time of one update in each mode.

Compute        FLOPs of all micro-batches divided by FLOP/s; in a pipeline, those of one stage plus the bubble.
Communication  Ring collectives over N ranks: all-gather and reduce-scatter send (N - 1) / N of the data, all-reduce
               twice as much. Each collective adds LATENCY. Traffic between nodes uses the network bandwidth.
Overlap        DDP's all-reduce overlaps with the last micro-batch's backward. FSDP2 and ZeRO-3 traffic and pipeline
               sends overlap with all compute. ZeRO-1/2 and sequence or tensor parallelism do not overlap.
Offload        Gradients to the host and weights back over the bus; CPU Adam at HOST_ADAM parameters per second.
"""

import math
from typing import NamedTuple

from tools.plan.hardware import Machine
from tools.plan.memory import FILES, HOST, Mode, ModelSizes
from tools.plan.memory_profile import Profile

LATENCY = 30e-6  # seconds per collective of any size; assumed
DDP_BUCKET = 25 * 2**20  # bytes; torch's default
HOST_ADAM = 1.0e9  # parameters per second, on all cores of a host together; assumed


class Cost(NamedTuple):
    """Cost of one update, per process."""

    sent: float  # communication volume in bytes
    seconds: float


def estimate_cost(
    profile: Profile, shape: ModelSizes, mode: Mode, machine: Machine, micro_batches: int, recomputes: bool = False
) -> Cost:
    """Returns the cost of an update. micro_batches: per process. recomputes: whether backward repeats communication."""
    rate = machine.rate_float32 if mode.precision == "no" else machine.rate
    rate = rate / mode.processes if machine.kind == "cpu" else rate  # the processes share the cores
    bubble = (micro_batches + mode.pipeline - 1) / micro_batches
    computing = micro_batches * profile.flops / mode.pipeline / rate * bubble
    gradients, weights = _sizes(shape, mode)
    sent, exposed = _averaging(shape, mode, machine, micro_batches, computing)
    more_sent, waits = _sharing(profile, shape, mode, machine, micro_batches, recomputes)
    # Hidden states and gradients that a pipeline stage sends to its neighbours, in float32.
    handed = micro_batches * profile.tokens * shape.width * 4.0 * min(2, mode.pipeline - 1)
    exposed += waits + max(0.0, handed / (machine.network if mode.nodes > 1 else machine.link) - computing)
    moved = 0.0
    if mode.state_on != "device":
        moved += (gradients + weights) / mode.processes / machine.bus + shape.trained / mode.nodes / HOST_ADAM
    if mode.state_on == FILES:
        moved += 24.0 * shape.trained / mode.nodes / machine.disk_rate  # 12 bytes of state, read and written
    if mode.weights_on in (HOST, FILES):
        moved += max(0.0, micro_batches * 2 * weights / mode.processes / machine.bus - computing)
    return Cost(sent + more_sent + handed, computing + exposed + moved)


def _sizes(shape: ModelSizes, mode: Mode) -> tuple[float, float]:
    """Returns the bytes of gradients and weights that data parallelism sends for a process's part of the model."""
    part = 1 / (mode.tensor * mode.pipeline)
    width = 2 if mode.weights_dtype != "float32" else 4
    return 4.0 * part * shape.trained, part * (width * shape.trained + shape.frozen_bytes(width))


def _averaging(
    shape: ModelSizes, mode: Mode, machine: Machine, micro_batches: int, computing: float
) -> tuple[float, float]:
    """Returns the bytes that data parallelism sends, and the seconds that do not overlap with compute."""
    gradients, weights = _sizes(shape, mode)
    # Number of collectives that all-gather the full model: one per layer, and one for the rest.
    collectives = (shape.parameters - shape.outside) / max(1, shape.largest_layer) + 1
    n = mode.grid.num_gradient_peers
    ring, link = (n - 1) / n, machine.network if mode.nodes > 1 else machine.link
    if mode.kind == "FSDP":
        n, copies = mode.shards, mode.replicas
        ring, inside = (n - 1) / n, machine.link if n * mode.tensor <= machine.devices else machine.network
        gathered = micro_batches * ring * (2 * weights + gradients)
        across = micro_batches * 2 * (copies - 1) / copies * gradients / n
        sending = gathered / inside + across / link + (n > 1) * micro_batches * 3 * collectives * LATENCY
        return gathered + across, max(0.0, sending - computing)
    if mode.stage == 3:
        sent = micro_batches * ring * (2 * weights + gradients)
        sending = sent / link + (n > 1) * micro_batches * 3 * collectives * LATENCY
        return sent, max(0.0, sending - computing)
    if mode.stage:
        sent = ring * (weights + gradients * (micro_batches if mode.stage == 2 else 2))
        return sent, sent / link + (n > 1) * LATENCY * 2
    sent = 2 * ring * gradients
    sending = sent / link + (n > 1) * LATENCY * math.ceil(gradients / DDP_BUCKET)
    return sent, max(0.0, sending - computing / micro_batches * 2 / 3)


def _sharing(
    profile: Profile, shape: ModelSizes, mode: Mode, machine: Machine, micro_batches: int, recomputes: bool
) -> tuple[float, float]:
    """Returns bytes and seconds of communication in a sequence or tensor group (docs/machines.md)."""
    n = mode.grid.group_size
    if n == 1:
        return 0.0, 0.0
    link, rounds = machine.link if n <= machine.devices else machine.network, 3 if recomputes else 2
    if mode.sequence > 1:  # in the dtype of the matmuls
        numbers, size = shape.layers * shape.exchanged * rounds, 2 if mode.precision != "no" else 4
    else:  # all-reduce in float32, over the group
        numbers, size = shape.width * (4 * shape.layers * rounds + 4), 4
    sent = micro_batches * profile.tokens * numbers * size * (n - 1) / n
    return sent, sent / link + micro_batches * shape.layers * 2 * rounds * LATENCY


def count_micro_batches(global_batch_size: int, groups: int, rows: int) -> int:
    """Returns micro-batches per update. groups: number of groups with own samples. rows: samples per micro-batch."""
    return math.ceil(math.ceil(global_batch_size / groups) / rows)
