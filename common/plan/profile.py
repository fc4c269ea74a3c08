"""From what was recorded at two depths to what a model of any depth holds in each part of an update."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from common.plan.rehearsal import Recording

Parts = dict[str, float]  # bytes, by what they hold


@dataclass
class Profile:
    """What one process holds at the peak of each segment of an update, and what it computes; for one micro-batch size.

    A backward has its peak where it begins, with all activations, or where it ends, with all gradients: so each segment
    is two, its first and its second half, and in either the peak grows linearly with the number of layers.
    """

    segments: dict[str, Parts]
    flops: float  # of a micro-batch, forward and backward, with what is computed again
    tokens: float = 0  # of a micro-batch of text, with its padding
    outside: "Profile | None" = None  # of a model without layers, where that is known

    def at_depth(self, other: "Profile", few: int, more: int, layers: int) -> "Profile":
        """Of a model of so many layers, this one being of a `few` and the other of `more`; with what is outside."""
        whole, outside = (self.scaled(other, (depth - few) / (more - few)) for depth in (layers, 0))
        return replace(whole, outside=outside)

    def scaled(self, other: "Profile", at: float) -> "Profile":
        """On the line through this one (0) and another (1), at `at`."""

        def between(a: float, b: float) -> float:
            return max(0.0, a + (b - a) * at)

        segments = {}
        for name in self.segments:
            one, two = self.segments[name], other.segments.get(name, {})
            segments[name] = {part: between(one.get(part, 0), two.get(part, 0)) for part in one | two}
        outside = self.outside.scaled(other.outside, at) if self.outside and other.outside else None
        return Profile(segments, between(self.flops, other.flops), between(self.tokens, other.tokens), outside)


def profile_of(recording: Recording) -> Profile:
    """The peaks of a recording, as in a later update: with the optimizer's state from the beginning on."""
    by_segment: dict[str, list[int]] = defaultdict(list)
    for index, (segment, _, _) in enumerate(recording.events):
        by_segment[segment].append(index)
    halves = {}
    for segment, indices in by_segment.items():
        for number, index in enumerate(indices):
            halves[index] = (segment, number * 2 >= len(indices))
    live: Parts = defaultdict(float)
    peaks: dict[Any, Parts] = {}
    for index, (segment, storage, size) in enumerate(recording.events):
        live[recording.parts.get(storage, "activations")] += size
        if segment != "start" and sum(live.values()) > sum(peaks.get(halves[index], {}).values()):
            peaks[halves[index]] = dict(live)
    state = max((parts.get("optimizer state", 0) for parts in peaks.values()), default=0)
    for (segment, _), parts in peaks.items():
        if segment.startswith(("forward", "backward", "clip")):
            parts["optimizer state"] = state
    named = {f"{segment}, {'end' if half else 'beginning'}": parts for (segment, half), parts in peaks.items()}
    flops = sum(count for name, count in recording.flops.items() if name in ("forward 1", "backward 1"))
    return Profile(named, flops, recording.tokens)
