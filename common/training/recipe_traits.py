"""Properties of a recipe that shared code depends on. Recipes pass them; they are never inferred from flag names.

A recipe passes its traits to `Run`, if they differ from those of `recipes/lm.py`:

    run = Run(args, size_flags=("sequence_length", "target_length"))
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traits:
    """Properties of a recipe."""

    lengths_vary: bool = True  # whether samples have different lengths, so that --micro_batch_tokens applies
    size_flags: tuple[str, ...] = ("sequence_length",)  # flags whose sum is the maximum length of a sample, in tokens
    sequences_per_sample: int = 1  # 2 for preference pairs
    shares_texts: bool = False  # whether --micro_batch_size counts texts, of which a sample has several
    splits_sequences: bool = True  # whether a process can compute the loss of a part of a sequence
    pipeline_schedule: str | None = None  # schedule of the pipeline's stages; None: the recipe has no stages
    compiles_layers: bool = True  # whether a large model's layers are compiled on a GPU, without --compile
    held_out_flags: tuple[str, ...] = ()  # the recipe's own flags that have no effect without a held-out set

    def longest_sample(self, args: argparse.Namespace) -> int:
        """Returns the tokens of the longest possible sample; 0 if all samples have the same length."""
        if not self.lengths_vary:
            return 0
        return self.sequences_per_sample * sum(getattr(args, name) or 0 for name in self.size_flags)


class Arguments(argparse.Namespace):
    """The parsed flags of a recipe.

    shared_flags: names of the flags that `common.arguments` has added. A slot, because vars() contains only the flags.
    """

    __slots__ = ("shared_flags",)
    shared_flags: frozenset[str]

    def __init__(self, shared_flags: frozenset[str] = frozenset(), **flags: Any):
        super().__init__(**flags)
        self.shared_flags = shared_flags

    def shared(self, name: str) -> Any:
        """Returns the value of a shared flag; None without it, even if the recipe has an own flag of this name."""
        return vars(self)[name] if name in self.shared_flags else None


def given_flags() -> set[str]:
    """Returns the flags on the command line, such as "--seed"; abbreviated flags are rejected elsewhere."""
    return {word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")}
