"""Finds outliers in the results of `tools.check`, and formats tables with an arrow at each outlier.

A rank or machine is compared with the median of the others, so that a single outlier does not affect its reference. Of
two ranks or machines, only the worse one is marked.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_high, median_low
from typing import Any

from common.errors import shorten

# Fractions of the median of the others; a lower value is an outlier. CPUs vary more, because processes share cores and
# caches; GPUs of the same model differ by a few percent.
PRODUCTS = {"cpu": 0.5, "cuda": 0.9}
TOTAL_MEMORY, FREE_MEMORY, FREE_DISK, WRITE_RATE = 0.95, 0.5, 0.5, 0.5
FREE_GPU = 0.9  # fraction of the GPU's total memory, of which this process uses hardly any
FSYNC = 4.0  # multiple of the median of the others
SLOW_FSYNC = 0.02  # seconds; a faster fsync is never an outlier, because it does not slow down a save
BANDWIDTH, LATENCY = 0.5, 3.0  # fraction of the usual bandwidth, multiple of the usual latency
FAR = 5e-3  # one-way latency in seconds; between machines in the same data centre, it is below 1e-3
CLOCK = 0.5  # seconds; with a larger offset, times in logs cannot be compared, and files have times in the future
MOST_ROWS = 64  # a longer table shows only outliers

WAITS = "every update waits for the slowest rank"
NAMES = {"no": "float32"}
GB = 1e9


@dataclass
class Table:
    """A title, column names, and rows: (cells, reasons why the row is an outlier); no reasons: not an outlier."""

    title: str
    columns: list[str]
    rows: list[tuple[list[str], list[str]]] = field(default_factory=list)

    def add(self, *cells: Any, outliers: list[str] | None = None) -> None:
        self.rows.append(([str(cell) for cell in cells], outliers or []))

    @property
    def num_outliers(self) -> int:
        return sum(bool(outliers) for _, outliers in self.rows)

    def __str__(self) -> str:
        shown = self.rows if len(self.rows) <= MOST_ROWS else [row for row in self.rows if row[1]]
        lines: list[tuple[list[str], list[str]]] = [(self.columns, []), *shown]
        widths = [max(map(len, column)) for column in zip(*(cells for cells, _ in lines), strict=True)]
        texts = [self.title]
        for cells, outliers in lines:
            text = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            texts.append(f"  {text}" + (f"  <- {'; '.join(outliers)}" if outliers else ""))
        if len(shown) < len(self.rows):
            texts.append(f"  and {len(self.rows) - len(shown)} rows without outliers")
        return "\n".join(texts)


def share_of_others(values: list[float], at: int) -> float:
    """Returns a value as a fraction of the median of the others; 1 if there are none or the median is 0."""
    others = values[:at] + values[at + 1 :]
    return values[at] / median(others) if others and median(others) else 1.0


def products(ranks: list[dict[str, Any]]) -> Table:
    """Returns a table with the matmul throughput of each device, compared with that of the other devices."""
    rows = [(rank, device) for rank in ranks for device in rank["devices"]]
    precisions = list(rows[0][1]["rates"])
    names = [NAMES.get(name, name) for name in precisions]
    if rows[0][1]["device"] != "cpu":
        names[0] += " as TF32"
    table = Table("matrix products, TFLOP/s, all ranks at once", ["rank", "host", "device", "", *names])
    for at, (rank, device) in enumerate(rows):
        least = PRODUCTS[device["device"].split(":")[0]]
        low, cells = [], []
        for name, precision in zip(names, precisions, strict=True):
            rates = [other["rates"].get(precision, 0.0) for _, other in rows]
            cells.append(f"{rates[at] / 1e12:.3g}")
            if (share := share_of_others(rates, at)) < least:
                low.append(f"{name} {share:.0%}")
        outliers = [f"{', '.join(low)} of the median rate of the others: {WAITS}"] if low else []
        table.add(rank["rank"], rank["host"], device["device"], device["name"], *cells, outliers=outliers)
    return table


def memory(ranks: list[dict[str, Any]], machines: list[dict[str, Any]]) -> Table:
    """Returns a table of total and free memory, with a row per machine and a row per GPU."""
    table = Table("memory, GB", ["rank", "host", "of", "total", "free"])
    totals, frees = ([machine["memory"][what] for machine in machines] for what in ("total", "free"))
    for at, machine in enumerate(machines):
        outliers = []
        if (share := share_of_others(totals, at)) < TOTAL_MEMORY:
            outliers.append(f"{share:.0%} of the memory of the others: what fits there may not fit here")
        elif (share := share_of_others(frees, at)) < FREE_MEMORY:
            outliers.append(f"{share:.0%} of what is free on the others: somebody else holds it")
        table.add(machine["rank"], machine["host"], "host", *in_gb(totals[at], frees[at]), outliers=outliers)
    gpus = [(rank, device) for rank in ranks for device in rank["devices"] if "memory" in device]
    totals = [device["memory"]["total"] for _, device in gpus]
    for at, (rank, device) in enumerate(gpus):
        free, outliers = device["memory"]["free"], []
        if free < FREE_GPU * totals[at]:
            outliers.append(f"{(totals[at] - free) / GB:.1f} GB are taken by other processes: see nvidia-smi")
        if (share := share_of_others(totals, at)) < TOTAL_MEMORY:
            outliers.append(f"{share:.0%} of the memory of the others: what fits there may not fit here")
        table.add(rank["rank"], rank["host"], device["device"], *in_gb(totals[at], free), outliers=outliers)
    return table


def in_gb(*sizes: int) -> list[str]:
    return [f"{size / GB:.1f}" for size in sizes]


def disks(machines: list[dict[str, Any]]) -> Table:
    """Returns a table of free space and write times, with a row per machine; all machines wrote at the same time."""
    columns = ["rank", "host", "directory", "free GB", "write MB/s", "fsync ms"]
    table = Table("disk, a file written and flushed as a checkpoint's are, on all machines at once", columns)
    for at, machine in enumerate(machines):
        disk, outliers = machine["disk"], []
        share = {
            name: share_of_others([other["disk"][name] for other in machines], at)
            for name in ("free", "write_rate", "fsync_seconds")
        }
        if share["free"] < FREE_DISK:
            outliers.append(f"{share['free']:.0%} of the others' free space: it is full first")
        if share["write_rate"] < WRITE_RATE:
            outliers.append(f"written at {share['write_rate']:.0%} of the others' rate: every save waits for it")
        if share["fsync_seconds"] > FSYNC and disk["fsync_seconds"] > SLOW_FSYNC:
            outliers.append(
                f"an fsync takes {share['fsync_seconds']:.1f} times as long as the others': every save has many"
            )
        rate, fsync = f"{disk['write_rate'] / 1e6:.0f}", f"{disk['fsync_seconds'] * 1e3:.2f}"
        table.add(
            machine["rank"], machine["host"], disk["directory"], *in_gb(disk["free"]), rate, fsync, outliers=outliers
        )
    return table


def outlier_links(links: dict[tuple[int, int], dict[str, float]]) -> dict[tuple[int, int], str]:
    """Returns the slow links with a description: high latency, or slow compared with the usual link.

    The usual value is the median over all ranks of the median of a rank's links (of two middle values, the better).
    If one of three ranks is slow, two of the three links are slow, but only one of the three medians.
    """
    own = links_of_ranks(links)
    bandwidth = median(median_high(link["bandwidth"] for link in found.values()) for found in own.values())
    latency = median(median_low(link["latency"] for link in found.values()) for found in own.values())
    outliers = {}
    for pair, link in links.items():
        reasons = []
        if link["latency"] > FAR or link["latency"] > LATENCY * latency:
            times = f"latency {link['latency'] / latency:.1f} times the usual one"
            reasons.append(times if link["latency"] < FAR else "far")
        if link["bandwidth"] < BANDWIDTH * bandwidth:
            reasons.append(f"{link['bandwidth'] / bandwidth:.0%} of the usual bandwidth")
        if reasons:
            outliers[pair] = ", ".join(reasons)
    return outliers


def links_of_ranks(links: dict[tuple[int, int], dict[str, float]]) -> dict[int, dict[int, dict[str, float]]]:
    """Returns the links of each rank, by the rank at the other end."""
    own: dict[int, dict[int, dict[str, float]]] = {}
    for (low, high), link in sorted(links.items()):
        own.setdefault(low, {})[high] = own.setdefault(high, {})[low] = link
    return own


def link_table(title: str, ranks: list[dict[str, Any]], links: dict[tuple[int, int], dict[str, float]]) -> Table:
    """Returns a row per rank. A slow link is reported at the rank with mostly slow links, otherwise at both ranks."""
    columns = ["rank", "host", "links", "latency us: median", "worst", "to", "GB/s: median", "worst", "to"]
    table, outliers, own = Table(title, columns), outlier_links(links), links_of_ranks(links)
    slow = {
        rank: {other: outliers[pair] for other in found if (pair := (min(rank, other), max(rank, other))) in outliers}
        for rank, found in own.items()
    }
    blamed = {rank for rank in own if len(slow[rank]) > len(own[rank]) / 2}
    for rank, found in sorted(own.items()):
        reported = [f"{other}: {text}" for other, text in slow[rank].items() if rank in blamed or other not in blamed]
        notes = []
        if reported:
            to = shorten(reported, most=3)
            notes = [
                f"{len(reported)} of {len(found)} links slow, to rank {to}; a collective waits for the slowest link"
            ]
        cells = []
        for figure, unit, worst in (("latency", 1e-6, max), ("bandwidth", GB, min)):
            values = {other: link[figure] / unit for other, link in found.items()}
            at = worst(values, key=values.__getitem__)
            cells += [f"{median(values.values()):.3g}", f"{values[at]:.3g}", at]
        table.add(rank, ranks[rank]["host"], len(found), *cells, outliers=notes)
    return table


def clock_offsets(links: dict[tuple[int, int], dict[str, float]]) -> dict[int, tuple[float, float]]:
    """Returns, by rank, the seconds by which its clock is ahead of rank 0's, and the maximum error of this value.

    For a rank whose link to rank 0 was not measured, the offsets of the path with the fewest links are added.
    """
    own, offsets, ahead = links_of_ranks(links), {0: (0.0, 0.0)}, deque([0])
    while ahead:
        rank = ahead.popleft()
        offset, error = offsets[rank]
        for other, link in own[rank].items():
            if other not in offsets:
                step = link["offset"] if rank < other else -link["offset"]
                offsets[other] = (offset + step, error + link["latency"])
                ahead.append(other)
    return offsets


def clocks(ranks: list[dict[str, Any]], links: dict[tuple[int, int], dict[str, float]]) -> Table:
    table = Table("clocks, ms ahead of rank 0's", ["rank", "host", "ahead", "at most wrong by"])
    offsets = clock_offsets(links)
    # Offsets are compared with their median, so that a wrong clock of rank 0 marks rank 0 and not all other ranks.
    usual = median_low(offset for offset, _ in offsets.values())
    for rank, (offset, error) in sorted(offsets.items()):
        outliers = []
        if abs(offset - usual) > CLOCK + error:
            outliers.append(f"{abs(offset - usual):.1f} s off: logs and file times mislead, logins may fail; start NTP")
        table.add(rank, ranks[rank]["host"], f"{offset * 1e3:.3f}", f"{error * 1e3:.3f}", outliers=outliers)
    return table


def software(ranks: list[dict[str, Any]]) -> Table:
    """Returns a table with rank 0's version of each package, and the ranks whose version differs."""
    table = Table("versions", ["", "rank 0"])
    for name in sorted({name for rank in ranks for name in rank["versions"]}):
        here = ranks[0]["versions"].get(name, "none")
        others: dict[str, list[str]] = {}
        for rank in ranks[1:]:
            if (there := rank["versions"].get(name, "none")) != here:
                others.setdefault(there, []).append(f"{rank['rank']} on {rank['host']}")
        outliers = [f"{version} at rank {shorten(who, most=4)}" for version, who in others.items()]
        table.add(name, here, outliers=[*outliers, "ranks may compute differently, or hang"] if outliers else [])
    return table


def report(figures: dict[str, Any]) -> tuple[str, int]:
    """Returns the tables as text, and the number of outlier rows. figures: result of `measure`."""
    ranks, links = figures["ranks"], figures["links"]
    machines = [rank for rank in ranks if "disk" in rank]
    head = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {len(machines)} machine{'s' * (len(machines) > 1)}"
    head += f", measured {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC by rank 0's clock"
    tables = [products(ranks), memory(ranks, machines), disks(machines)]
    for is_within, location in ((True, "within a machine"), (False, "between machines")):
        some = {
            (low, high): link
            for (low, high), link in links.items()
            if (ranks[low]["machine"] == ranks[high]["machine"]) == is_within
        }
        if some:
            tables.append(link_table(f"links {location}, over {figures['backend']}", ranks, some))
    tables += [clocks(ranks, links)] if links else []
    tables.append(software(ranks))
    num_outliers = sum(table.num_outliers for table in tables)
    end = (
        f"outliers: {num_outliers} row{'s' * (num_outliers > 1)}, marked with an arrow"
        if num_outliers
        else "no outliers"
    )
    if not links:
        end += "\none process: no links, clocks or versions were compared; for that, launch several processes"
    return "\n\n".join([head, *map(str, tables), end]), num_outliers
