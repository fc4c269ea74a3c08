"""The process grid: which ranks share samples, layers or pipeline stages, and which average gradients.

A *group* is a set of consecutive ranks, on one node if possible, that process the same samples. In a *sequence group*,
each rank processes a part of the tokens. In a *tensor group*, each rank processes all tokens with a part of every
layer. *Pipeline stages* hold consecutive layers and are farthest apart in rank order. All other parallelism is data
parallelism. Sample counts (batching) are per group; gradient averaging is over ranks with tokens of their own.
"""

from dataclasses import dataclass
from typing import Any

from accelerate import PartialState


@dataclass(frozen=True)
class ProcessGrid:
    """The number of ranks, and the numbers of ranks that share a sample's tokens, a layer, or the model's depth."""

    num_processes: int
    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def group_size(self) -> int:
        """Returns the number of consecutive ranks with the same samples."""
        return self.sequence * self.tensor

    @property
    def data_parallel(self) -> int:
        """Returns the number of groups per stage; each group has its own samples."""
        return max(1, self.stage_size // self.group_size)  # at least 1; sizes that do not divide are rejected elsewhere

    @property
    def stage_size(self) -> int:
        """Returns the number of ranks with the same layers."""
        return self.num_processes // self.pipeline

    @property
    def model_parallel(self) -> int:
        """Returns the number of ranks that report the same values for a sample."""
        return self.tensor * self.pipeline

    @property
    def num_gradient_peers(self) -> int:
        """Returns the number of ranks with tokens of their own and the same weights, which average gradients."""
        return self.data_parallel * self.sequence

    def data_rank(self, rank: int) -> int:
        """Returns the index of a rank's group among the groups with their own samples."""
        return rank % self.stage_size // self.group_size

    def sequence_rank(self, rank: int) -> int:
        """Returns the index of a rank's part of each sample's tokens."""
        return rank // self.tensor % self.sequence

    def stage(self, rank: int) -> int:
        """Returns the index of a rank's part of the model's depth."""
        return rank // self.stage_size

    def describe(self) -> str:
        """Returns the number of processes or groups with their own samples, as text."""
        if self.num_processes == self.data_parallel:
            return f"{self.num_processes} process{'es' * (self.num_processes > 1)}"
        kind, size = ("pipeline", self.pipeline) if self.pipeline > 1 else ("group", self.group_size)
        return f"{self.data_parallel} {kind}{'s' * (self.data_parallel > 1)} of {size} processes"


def set_current_grid(grid: ProcessGrid) -> None:
    """Sets the process grid of this process's run, next to its mode and rank in Accelerate's state."""
    state: Any = PartialState()
    state.process_grid = grid


def current_grid() -> ProcessGrid:
    """Returns the process grid of this process's run; by default, data parallelism over all ranks."""
    state = PartialState()
    return getattr(state, "process_grid", None) or ProcessGrid(state.num_processes)
