"""The process grid: which ranks share samples, layers or pipeline stages, and which average gradients.

A *group* is a set of consecutive ranks, on one node if possible, that process the same samples. In a *sequence group*,
each rank processes a part of the tokens. In a *tensor group*, each rank processes all tokens with a part of every
layer. *Pipeline stages* hold consecutive layers and are farthest apart in rank order. All other parallelism is data
parallelism. Sample counts (batching) are per group; gradient averaging is over ranks with tokens of their own.
"""

from dataclasses import dataclass

from accelerate import PartialState


@dataclass(frozen=True)
class Degrees:
    """How many ranks there are, and how many of them share a sample's tokens, a layer, or the model's depth."""

    num_processes: int
    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def group(self) -> int:
        """How many neighbours have the same samples."""
        return self.sequence * self.tensor

    @property
    def data(self) -> int:
        """How many groups there are, in each stage, that take samples of their own."""
        return max(1, self.stage_size // self.group)  # 1: what does not divide is refused, with all else

    @property
    def stage_size(self) -> int:
        """How many ranks hold the same layers."""
        return self.num_processes // self.pipeline

    @property
    def copies(self) -> int:
        """How many ranks tell the same figures of a sample."""
        return self.tensor * self.pipeline

    @property
    def averaged(self) -> int:
        """Over how many ranks, those with tokens of their own and the same weights, gradients are averaged."""
        return self.data * self.sequence

    def data_rank(self, rank: int) -> int:
        """Which of the groups with samples of their own a rank is in."""
        return rank % self.stage_size // self.group

    def sequence_rank(self, rank: int) -> int:
        """Which part of each sample's tokens it has."""
        return rank // self.tensor % self.sequence

    def tensor_rank(self, rank: int) -> int:
        """Which part of each layer it has."""
        return rank % self.tensor

    def stage(self, rank: int) -> int:
        """Which part of the model's depth it has."""
        return rank // self.stage_size

    def neighbours(self, rank: int) -> list[int]:
        """The ranks with the same samples and layers as this one, itself among them."""
        start = rank // self.group * self.group
        return list(range(start, start + self.group))

    def stages(self, rank: int) -> list[int]:
        """The ranks that a sample passes through which this one computes on, itself among them."""
        return list(range(rank % self.stage_size, self.num_processes, self.stage_size))

    def ends(self, rank: int) -> list[int]:
        """The first and the last of these ranks, where it is one of them; else itself alone."""
        first, *_, last = self.stages(rank)
        return [first, last] if rank in (first, last) else [rank]

    def peers(self, rank: int) -> list[int]:
        """The ranks with the same weights as this one, itself among them: those that average their gradients."""
        start = self.stage(rank) * self.stage_size
        return list(range(start + self.tensor_rank(rank), start + self.stage_size, self.tensor))

    def describe(self) -> str:
        """What takes samples of its own, for the arithmetic of a batch."""
        if self.num_processes == self.data:
            return f"{self.num_processes} processes"
        if self.pipeline > 1:
            return f"{self.data} pipeline{'s' * (self.data > 1)} of {self.pipeline} processes"
        return f"{self.data} group{'s' * (self.data > 1)} of {self.group} processes"

    def describe_grid(self) -> str:
        """Which ranks are in a group, for the first printed block."""
        size = self.stage_size if self.pipeline > 1 else self.group
        rows = [range(start, start + size) for start in range(0, self.num_processes, size)]
        shown = [" ".join(map(str, row)) for row in rows[:4]] + ["..."] * (len(rows) > 4)
        if self.pipeline > 1:
            return f"{' | '.join(shown)}: the stages of the pipeline, each with its part of the layers"
        part = "all of its tokens, with a part of each layer" if self.tensor > 1 else f"1 / {self.group} of its tokens"
        return f"{' | '.join(shown)}: a group shares each sample, a rank has {part}"

    def describe_bubble(self, num_micro_batches: int) -> str:
        """In which part of the time a stage waits for others, by the micro-batches of an update."""
        stages = self.pipeline
        share = (stages - 1) / (num_micro_batches + stages - 1)
        return f"{share:.1%} of the time: ({stages} stages - 1) / ({num_micro_batches} micro-batches + {stages} - 1)"


_running: Degrees | None = None


def set_running(degrees: Degrees) -> None:
    """From now on these are the degrees of this process's run."""
    global _running
    _running = degrees


def running() -> Degrees:
    """Those of this process's run: of data parallelism over all ranks, where no run has set any."""
    return _running or Degrees(PartialState().num_processes)


def stage_of(rank: int) -> str:
    """Which stage of a pipeline a rank is, for a message behind its number; nothing where there is no pipeline."""
    if _running is None or _running.pipeline == 1:
        return ""
    return f" (stage {_running.stage(rank) + 1} of {_running.pipeline})"
