"""Extrapolates recordings of a model at two depths to its memory at any depth, in each segment of an update."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from tools.plan.traced_run import Recording

Parts = dict[str, float]  # bytes by contents


@dataclass
class Profile:
    """Peak memory of a process in each segment of an update, and FLOPs, for a given micro-batch size.

    A backward pass peaks at its beginning, with all activations, or at its end, with all gradients. So each segment is
    split into beginning and end. The peak of either grows linearly with the number of layers (`split_segments`).
    """

    segments: dict[str, Parts]
    flops: float  # per micro-batch, forward and backward, including recomputation
    tokens: float = 0  # per micro-batch of text, including padding
    outside: "Profile | None" = None  # profile of a model without layers, if known

    def at_depth(self, other: "Profile", few: int, more: int, layers: int) -> "Profile":
        """Returns the profile of a model with `layers` layers; its `outside` is the profile of 0 layers.

        This profile is of `few` layers, the other of `more`.
        """
        full, outside = (self.scaled(other, (depth - few) / (more - few)) for depth in (layers, 0))
        return replace(full, outside=outside)

    def scaled(self, other: "Profile", at: float) -> "Profile":
        """Returns the profile at `at` on the line through this profile (0) and the other (1)."""

        def between(a: float, b: float) -> float:
            return max(0.0, a + (b - a) * at)

        segments = {}
        for name in self.segments:
            a, b = self.segments[name], other.segments.get(name, {})
            segments[name] = {part: between(a.get(part, 0), b.get(part, 0)) for part in a | b}
        outside = self.outside.scaled(other.outside, at) if self.outside and other.outside else None
        return Profile(segments, between(self.flops, other.flops), between(self.tokens, other.tokens), outside)


def split_segments(few: Recording, more: Recording) -> dict[str, tuple[int, int]]:
    """Returns {segment: (number of events in its beginning, number in its end)}, for models of any depth.

    few, more: recordings at two depths. The end of a backward pass, and the beginning of any other segment, has half of
    the additional events of `more`; the other piece has the remaining events of `few`. A piece is the same layers at
    both depths. Events of `more` between the pieces are ignored: memory there is below the line through both depths.
    """
    short, long = (Counter(segment for segment, _, _ in recording.events) for recording in (few, more))
    pieces = {}
    for segment, count in short.items():
        layers = (long[segment] - count) // 2
        if not 0 < layers < count:
            continue
        pieces[segment] = (count - layers, layers) if segment.startswith("backward") else (layers, count - layers)
    return pieces


def make_profile(recording: Recording, pieces: dict[str, tuple[int, int]] | None = None) -> Profile:
    """Returns the peaks of a recording as in a later update, which has the optimizer state from its beginning.

    pieces: result of `split_segments`; a segment that is not in it is split into halves.
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
