"""From what was recorded at two depths to what a model of any depth holds in each part of an update."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from tools.plan.traced_run import Recording

Parts = dict[str, float]  # bytes, by what they hold


@dataclass
class Profile:
    """What one process holds at the peak of each segment of an update, and what it computes; for one micro-batch size.

    A backward has its peak where it begins, with all activations, or where it ends, with all gradients: so each segment
    is two, its beginning and its end. In either the peak grows linearly with the number of layers (`split_segments`).
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


def split_segments(few: Recording, more: Recording) -> dict[str, tuple[int, int]]:
    """How many events are the beginning of a segment, and how many its end: the same ones of a model of any depth.

    few, more: of two depths. Of a backward, the end has as many events as half of the layers of which `more` has more,
    and the beginning the others of `few`; of all else, it is the other way round. So each has as many of its own layers
    at both depths, and between them, where the deeper one has more, a line through both is above what is held.
    """
    short, long = (Counter(segment for segment, _, _ in one.events) for one in (few, more))
    pieces = {}
    for segment, count in short.items():
        layers = (long[segment] - count) // 2
        if not 0 < layers < count:
            continue
        pieces[segment] = (count - layers, layers) if segment.startswith("backward") else (layers, count - layers)
    return pieces


def make_profile(recording: Recording, pieces: dict[str, tuple[int, int]] | None = None) -> Profile:
    """The peaks of a recording, as in a later update: with the optimizer's state from the beginning on.

    pieces: of `split_segments`; a segment that it does not have is halved.
    """
    counts, seen = Counter(segment for segment, _, _ in recording.events), Counter[str]()
    live: Parts = defaultdict(float)
    peaks: dict[tuple[str, str], Parts] = {}
    for segment, storage, size in recording.events:
        count = counts[segment]
        first, last = (pieces or {}).get(segment, (count // 2, count - count // 2))
        live[recording.parts.get(storage, "activations")] += size
        seen[segment] += 1
        if segment == "start" or first < seen[segment] <= count - last:
            continue
        place = segment, "beginning" if seen[segment] <= first else "end"
        if sum(live.values()) > sum(peaks.get(place, {}).values()):
            peaks[place] = dict(live)
    state = max((parts.get("optimizer state", 0) for parts in peaks.values()), default=0)
    for (segment, _), parts in peaks.items():
        if segment.startswith(("forward", "backward", "clip")):
            parts["optimizer state"] = state
    named = {f"{segment}, {place}": parts for (segment, place), parts in peaks.items()}
    flops = sum(count for name, count in recording.flops.items() if name in ("forward 1", "backward 1"))
    return Profile(named, flops, recording.tokens)
