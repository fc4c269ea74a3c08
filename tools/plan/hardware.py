"""Hardware that a plan assumes: parsed from text, or measured on this machine."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from common.errors import UserError
from common.host_memory import available_per_process, available_total
from common.parallel.precision_choice import measure_throughputs

GIB = 2.0**30
UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


@dataclass(frozen=True)
class Machine:
    """Hardware of a run, in bytes, bytes/s and FLOP/s."""

    devices: int  # per node
    memory: float  # per device; on a CPU, per process
    host: float | None = None  # host memory for all processes of a node together; None: not specified
    disk: float | None = None
    kind: str = "cuda"
    rate: float = 400e12  # matmul throughput in bf16 or fp16 per device that updates achieve
    rate_float32: float = 200e12  # TF32
    link: float = 200e9  # from each device to other devices of the node
    bus: float = 20e9  # between a device and its host
    disk_rate: float = 3e9
    nodes: int = 1
    network: float = 25e9  # from each device to other nodes
    assumed: tuple[str, ...] = ("rate", "link", "bus", "disk rate")


# Memory as torch reports it; from data sheets: throughput of dense matmuls in bf16 (V100: fp16) and in TF32 (V100:
# float32), bandwidth of NVLink or PCIe in one direction. Updates achieve a fraction `REACHED` of the throughput.
KNOWN = {
    "V100": (31.7 * GIB, 125e12, 15.7e12, 150e9),
    "A100": (79.1 * GIB, 312e12, 156e12, 300e9),
    "H100": (79.1 * GIB, 989e12, 494e12, 450e9),
    "H200": (139.8 * GIB, 989e12, 494e12, 450e9),
    "B200": (178.3 * GIB, 2250e12, 1100e12, 900e9),
    "L40S": (44.4 * GIB, 362e12, 183e12, 32e9),
    "5090": (31.4 * GIB, 209e12, 104e12, 64e9),
    "4090": (23.6 * GIB, 165e12, 82e12, 32e9),
    "4080": (15.6 * GIB, 97e12, 48e12, 32e9),
}
# If only a device's memory is known, its other values are those of the first of these with enough memory, or the last.
BY_MEMORY = ("4080", "4090", "5090", "L40S", "H100", "H200", "B200")
REACHED = 0.4
EXAMPLE = '"8 x 80GiB, host 1TiB" or "4 x A100, 2 nodes, host 512GiB, disk 2TB, link 50GB/s, network 25GB/s"'


def parse_machine(text: str) -> Machine:
    """Parses a machine: the number of devices and their memory, then further options, separated by commas.

    Raises UserError: a part is invalid.
    """
    first, *others = [part.strip() for part in text.split(",")]
    match = re.fullmatch(r"(?:(\d+) *x *)?(?:([A-Z]?\d+\w?)|(\d+\.?\d*) *([MGT]i?B))", first)
    if not match or int(match[1] or 1) < 1 or (match[2] and match[2] not in KNOWN):
        names = ", ".join(KNOWN)
        raise UserError(f"--plan {text!r}: {first!r} names no devices; write {EXAMPLE}; known are {names}")
    memory = KNOWN[match[2]][0] if match[2] else float(match[3]) * UNITS[match[4]]
    card = match[2] or next((name for name in BY_MEMORY if memory <= 1.1 * KNOWN[name][0]), BY_MEMORY[-1])
    _, rate, rate_float32, link = KNOWN[card]
    fields: dict[str, Any] = {"rate": REACHED * rate, "rate_float32": REACHED * rate_float32, "link": link}
    assumed = ["bus", "disk rate"] if match[2] else [f"rate of a {card}", f"link of a {card}", "bus", "disk rate"]
    # Sorted, because `network` is valid only if the number of nodes is known.
    for part in sorted(others, key=lambda part: "node" not in part):
        if (option := re.fullmatch(r"(\d+) +nodes?", part)) and int(option[1]) > 0:
            fields["nodes"] = int(option[1])
            assumed = ["network", *assumed] if fields["nodes"] > 1 else assumed
            continue
        option = re.fullmatch(
            r"(host|disk|link|network|bus) +(\d+\.?\d*) *([MGT]i?B)(/s)?|(rate) +(\d+\.?\d*) *TFLOP/s", part
        )
        if option and option[1] == "network" and fields.get("nodes", 1) == 1:
            raise UserError(f"--plan {text!r}: {part!r} is between nodes; add their number (2 nodes), or remove it")
        if not option or bool(option[4]) != (option[1] in ("link", "network", "bus")):
            raise UserError(f'--plan {text!r}: {part!r} cannot be read; write {EXAMPLE}; also "rate 400TFLOP/s"')
        name = option[1] or option[5]
        fields[name] = float(option[2]) * UNITS[option[3]] if option[1] else float(option[6]) * 1e12
        if not fields[name] and name in ("link", "network", "bus", "rate"):
            raise UserError(f"--plan {text!r}: {part!r} is not above 0; use a positive rate")
        if name == "rate":
            fields["rate_float32"] = fields["rate"] / 2
        assumed = [entry for entry in assumed if entry.partition(" of ")[0] != name]
    return Machine(int(match[1] or 1), memory, assumed=tuple(assumed), **fields)


def this_machine() -> Machine:
    """Returns this machine: its GPUs, or its CPU, with measured matmul throughput."""
    host = float(available_total())
    disk = float(psutil.disk_usage(".").free)
    if torch.cuda.is_available():
        rates = measure_throughputs(torch.device("cuda"))
        memory = float(torch.cuda.mem_get_info()[1])
        rate, rate_float32, assumed = REACHED * max(rates.values()), REACHED * rates["no"], ("link", "bus", "disk rate")
        return Machine(torch.cuda.device_count(), memory, host, disk, "cuda", rate, rate_float32, assumed=assumed)
    rates = measure_throughputs(torch.device("cpu"))
    reached = {name: 2 * REACHED * rate for name, rate in rates.items()}  # matmuls dominate a CPU update
    throughput = reached["bf16"], reached["no"]
    return Machine(
        1, float(available_per_process()), host, disk, "cpu", *throughput, link=2e9, assumed=("link", "disk rate")
    )


def describe(machine: Machine) -> str:
    """Returns one line with the hardware that the plan assumes."""
    line = f"{machine.nodes} nodes, each of " if machine.nodes > 1 else ""
    size = f"{machine.memory / GIB:,.0f} GiB" if machine.memory >= 2 * GIB else f"{machine.memory / 2**20:,.0f} MiB"
    line += f"{machine.devices} {'GPUs of' if machine.kind == 'cuda' else 'CPU with'} {size}"
    if machine.kind == "cuda":
        line += f", host {machine.host / GIB:,.0f} GiB" if machine.host else ""
        line += f", disk {machine.disk / GIB:,.0f} GiB" if machine.disk else ""
    line += f"; {machine.rate / 1e12:,.3g} TFLOP/s in bf16, {machine.rate_float32 / 1e12:,.3g} in float32"
    line += f", {machine.link / 1e9:,.3g} GB/s between devices" if machine.devices > 1 else ""
    line += f", {machine.network / 1e9:,.3g} between nodes" if machine.nodes > 1 else ""
    return line + (f" (assumed: {', '.join(machine.assumed)})" if machine.assumed else "")


if __name__ == "__main__":
    print(json.dumps(asdict(this_machine())))
