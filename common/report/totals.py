"""Training totals of a run, summed over all its starts.

If a start is killed, its updates after the last checkpoint are lost and repeated by the next start. The sums contain
only the repetition; `report.earlier_starts` sums the lost updates as repeated_*. Every checkpoint contains the totals.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

EVALUATION, SAVING = "evaluation_seconds", "saving_seconds"
PAUSES = (EVALUATION, SAVING)  # between updates, while the training waits


@contextmanager
def pause(saved: dict[str, Any], name: str) -> Iterator[None]:
    """Context manager: adds the block's duration in seconds to `saved[name]`. saved: totals. name: one of `PAUSES`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        saved[name] = saved.get(name, 0.0) + time.perf_counter() - began


class Totals:
    """The totals of a run. saved: sums over updates, and seconds of pauses; {} from checkpoints of older versions."""

    def __init__(self, saved: dict[str, Any]):
        self.saved = saved
        self.pauses_before = {name: self.get(name) for name in PAUSES}

    def take_pauses(self) -> dict[str, float]:
        """Returns the seconds of each kind of pause since the last call, if there were any."""
        before, self.pauses_before = self.pauses_before, {name: self.get(name) for name in PAUSES}
        return {name: self.get(name) - before[name] for name in PAUSES if self.get(name) > before[name]}

    def get(self, name: str) -> float:
        return self.saved.get(name, 0)

    def add(self, batch: Any, **sums: float) -> None:
        """Adds an update, with `sums`, to the totals. The work per rank restarts if the number of ranks changes."""
        sums |= {"updates": 1, "tokens": int(batch.num_tokens), "processed": int(batch.num_processed)}
        for name, value in sums.items():
            self.saved[name] = self.get(name) + value
        work = torch.tensor(self.saved.get("rank_work", []), dtype=torch.float64)
        work = work + batch.rank_work if len(work) == len(batch.rank_work) else batch.rank_work
        self.saved["rank_work"] = work.tolist()

    def metrics(self) -> dict[str, Any]:
        """Returns the totals for the results."""
        seconds = self.get("seconds") + self.get("repeated_seconds")
        tokens, processed = self.get("tokens"), self.get("processed")
        work = self.saved.get("rank_work", [])
        return {
            "training_seconds": seconds,
            "tokens_per_second": (tokens + self.get("repeated_tokens")) / seconds if seconds else 0.0,
            "timed_updates": self.get("updates"),
            "repeated_updates": self.get("repeated_updates"),
            "repeated_seconds": self.get("repeated_seconds"),
            **{name: self.get(name) + self.get(f"repeated_{name}") for name in PAUSES},
            "padding_share": 1 - tokens / processed if processed else 0.0,  # of the processed tokens
            "work_difference": max(work) / min(work) - 1 if work else 0.0,  # load imbalance between the ranks
            "waiting_for_data": self.get("waited") / self.get("seconds") if self.get("seconds") else 0.0,
        }


def describe(results: dict[str, Any], num_starts: int) -> str:
    """Returns training time and throughput as text, and the updates that the time covers if these are not all."""
    parts = [f"{num_starts} starts"] if num_starts > 1 else []
    if repeated := results.get("repeated_updates"):
        parts.append(f"{results['repeated_seconds']:.0f} s for {repeated:,} repeated update{'s' * (repeated > 1)}")
    if (timed := results.get("timed_updates", results["updates"])) < results["updates"]:
        parts.append(f"{timed:,} of {results['updates']:,} updates: an older version did not save the time of the rest")
    seconds, more = results["training_seconds"], f" ({'; '.join(parts)})" if parts else ""
    text = f"trained in {seconds:.{int(seconds < 10)}f} s{more}"
    return f"{text}, {results['tokens_per_second']:,.0f} {results['unit']}/s"


def describe_pauses(results: dict[str, Any]) -> str | None:
    """Returns the time of evaluations and saves as text, without those below 0.05 s; None if nothing is left."""
    parts = {"evaluation": results.get(EVALUATION), "saving checkpoints": results.get(SAVING)}
    words = " and ".join(f"{seconds:.1f} s of {name}" for name, seconds in parts.items() if seconds and seconds > 0.05)
    return f"not counted as training time: {words}" if words else None
