"""What an update of a mode sends, and how long it takes: a model of few terms, all of them stated here.

Computing: the recorded operations of all micro-batches over the rate. Sent: what the mode's collectives carry, by ring
algorithms: (N - 1) / N of the data for a gather or a scatter, twice that for a sum. Hidden: of DDP's sum, what the
backward of the last micro-batch takes; of the gathers of FSDP2 and ZeRO-3, what the computing takes; nothing of ZeRO-1
and 2. Each collective takes LATENCY, however small it is. Offload: gradients down and weights up the bus, and an Adam
of the host at HOST_ADAM elements a second.
"""

import math
from typing import NamedTuple

from common.plan.machines import Machine
from common.plan.memory import FILES, HOST, Mode, Shape
from common.plan.profile import Profile

LATENCY = 30e-6  # seconds of a collective, however small; assumed
DDP_BUCKET = 25 * 2**20  # bytes: torch's default
HOST_ADAM = 1.0e9  # parameters a second, all cores of a host together; assumed


class Cost(NamedTuple):
    """Of one update, for each process."""

    sent: float  # bytes
    seconds: float


def cost_of(profile: Profile, shape: Shape, mode: Mode, machine: Machine, micro_batches: int) -> Cost:
    """Bytes sent and seconds; `micro_batches` is how many each process computes."""
    n = mode.processes
    width = 2 if mode.weights_dtype != "float32" else 4
    rate = machine.rate_float32 if mode.precision == "no" else machine.rate
    rate = rate / n if machine.kind == "cpu" else rate  # the processes share its cores
    computing = micro_batches * profile.flops / rate
    ring = (n - 1) / n
    gradients, weights = 4.0 * shape.trained, float(width * shape.parameters)
    layers = (shape.parameters - shape.outside) / max(1, shape.largest_layer)
    if mode.kind == "FSDP" or mode.stage == 3:
        sent = micro_batches * ring * (2 * weights + gradients)
        sending = sent / machine.link + (n > 1) * micro_batches * 3 * (layers + 1) * LATENCY
        exposed = max(0.0, sending - computing)
    elif mode.stage:
        sent = ring * (weights + gradients * (micro_batches if mode.stage == 2 else 2))
        exposed = sent / machine.link + (n > 1) * LATENCY * 2
    else:
        sent = 2 * ring * gradients
        sending = sent / machine.link + (n > 1) * LATENCY * math.ceil(gradients / DDP_BUCKET)
        exposed = max(0.0, sending - computing / micro_batches * 2 / 3)
    moved = 0.0
    if mode.state_on != "device":
        moved += (gradients + weights) / n / machine.bus + shape.trained / HOST_ADAM
    if mode.state_on == FILES:
        moved += 24.0 * shape.trained / machine.disk_rate  # read and written
    if mode.weights_on in (HOST, FILES):
        moved += max(0.0, micro_batches * 2 * weights / n / machine.bus - computing)
    return Cost(sent, computing + exposed + moved)


def micro_batches_of(global_batch_size: int, processes: int, rows: int) -> int:
    """How many micro-batches a process computes in an update."""
    return math.ceil(math.ceil(global_batch_size / processes) / rows)
