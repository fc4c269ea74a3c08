"""What an update of a mode sends, and how long it takes: a model of few terms, all of them stated here.

Computing: the recorded operations of all micro-batches over the rate; of a pipeline the part of a stage, and what it
waits for others. Sent: what the mode's collectives carry, by ring algorithms: (N - 1) / N of the data for a gather or a
scatter, twice that for a sum. Hidden: of DDP's sum, what the backward of the last micro-batch takes; of the gathers of
FSDP2 and ZeRO-3, and of what stages hand on, what the computing takes; nothing of ZeRO-1 and 2, and nothing of what
processes exchange that share a sequence or a layer. Each collective takes LATENCY, however small it is. What goes to
other nodes goes at the rate of the network. Offload: gradients down and weights up the bus, and an Adam of the host at
HOST_ADAM elements a second.
"""

import math
from typing import NamedTuple

from tools.plan.hardware import Machine
from tools.plan.memory import FILES, HOST, Mode, ModelSizes
from tools.plan.memory_profile import Profile

LATENCY = 30e-6  # seconds of a collective, however small; assumed
DDP_BUCKET = 25 * 2**20  # bytes: torch's default
HOST_ADAM = 1.0e9  # parameters a second, all cores of a host together; assumed


class Cost(NamedTuple):
    """Of one update, for each process."""

    sent: float  # bytes
    seconds: float


def estimate_cost(
    profile: Profile, shape: ModelSizes, mode: Mode, machine: Machine, micro_batches: int, recomputes: bool = False
) -> Cost:
    """Bytes sent and seconds; `micro_batches` is how many each process computes, again in backward if `recomputes`."""
    rate = machine.rate_float32 if mode.precision == "no" else machine.rate
    rate = rate / mode.processes if machine.kind == "cpu" else rate  # the processes share its cores
    bubble = (micro_batches + mode.pipeline - 1) / micro_batches
    computing = micro_batches * profile.flops / mode.pipeline / rate * bubble
    gradients, weights = _sizes(shape, mode)
    sent, exposed = _averaging(shape, mode, machine, micro_batches, computing)
    more_sent, waits = _sharing(profile, shape, mode, machine, micro_batches, recomputes)
    handed, link = _handed_on(profile, shape, mode, micro_batches), machine.network if mode.nodes > 1 else machine.link
    exposed += waits + max(0.0, handed / link - computing)
    moved = 0.0
    if mode.state_on != "device":
        moved += (gradients + weights) / mode.processes / machine.bus + shape.trained / mode.nodes / HOST_ADAM
    if mode.state_on == FILES:
        moved += 24.0 * shape.trained / mode.nodes / machine.disk_rate  # read and written
    if mode.weights_on in (HOST, FILES):
        moved += max(0.0, micro_batches * 2 * weights / mode.processes / machine.bus - computing)
    return Cost(sent + more_sent + handed, computing + exposed + moved)


def _sizes(shape: ModelSizes, mode: Mode) -> tuple[float, float]:
    """Bytes of the gradients and of the weights that data parallelism sends, of a process's part of the model."""
    part = 1 / (mode.tensor * mode.pipeline)
    width = 2 if mode.weights_dtype != "float32" else 4
    return 4.0 * part * shape.trained, width * part * shape.parameters


def _averaging(
    shape: ModelSizes, mode: Mode, machine: Machine, micro_batches: int, computing: float
) -> tuple[float, float]:
    """Bytes that data parallelism sends, and the seconds of it that no computing hides."""
    gradients, weights = _sizes(shape, mode)
    collectives = (shape.parameters - shape.outside) / max(1, shape.largest_layer) + 1  # of a gather of all weights
    n = mode.degrees.averaged
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
    """Bytes that processes exchange which share sequences or layers (docs/machines.md), and how long they wait."""
    n = mode.degrees.group
    if n == 1:
        return 0.0, 0.0
    link, rounds = machine.link if n <= machine.devices else machine.network, 3 if recomputes else 2
    if mode.sequence > 1:  # in the type of the products
        numbers = shape.layers * shape.exchanged * rounds
        size = 2 if mode.precision != "no" else 4
    else:  # sums in float32, over the group
        numbers, size = shape.width * (4 * shape.layers * rounds + 4), 4
    sent = micro_batches * profile.tokens * numbers * size * (n - 1) / n
    return sent, sent / link + micro_batches * shape.layers * 2 * rounds * LATENCY


def _handed_on(profile: Profile, shape: ModelSizes, mode: Mode, micro_batches: int) -> float:
    """Bytes that a stage of a pipeline hands to its neighbours: hidden states and their gradients, in float32."""
    neighbours = min(2, mode.pipeline - 1)
    return micro_batches * profile.tokens * shape.width * 4.0 * neighbours


def count_micro_batches(global_batch_size: int, groups: int, rows: int) -> int:
    """How many micro-batches an update has in each of so many groups of processes with samples of their own."""
    return math.ceil(math.ceil(global_batch_size / groups) / rows)
