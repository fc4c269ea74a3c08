"""Batch sizes of an evaluation, and the padding of bf16 runs on a CPU."""

import argparse
import inspect
import math
from collections.abc import Callable
from typing import Any

from common.training.padding import round_up
from common.training.recipe_traits import Traits

EVALUATED_TOKENS = 1 << 20  # tokens of a global batch in an evaluation, over all ranks; at most 24 MiB per host
# For few different lengths: oneDNN compiles a bf16 matmul per number of rows, in up to 3 ms, and keeps 1 MB for it.
PAD_MULTIPLE = 32


def evaluation_sizes(
    args: argparse.Namespace, traits: Traits, max_length: int, is_cpu: bool
) -> tuple[int, int | None, int | None]:
    """Returns the global batch size, micro-batch size and tokens per micro-batch of the held-out set.

    No update depends on them. Sorting more samples than those of an update gives little padding. Without a graph, a
    micro-batch of twice the size uses less memory than training, but not always with --activation_checkpointing, nor
    on a CPU, where the memory that training has freed may be too fragmented for larger tensors.
    """
    factor = 2 if args.activation_checkpointing == "none" and not is_cpu else 1
    micro_batch_size = args.micro_batch_size and args.micro_batch_size * factor
    if not traits.lengths_vary:
        return args.global_batch_size, micro_batch_size, None
    num_updates = max(1, EVALUATED_TOKENS // (args.global_batch_size * max_length))
    tokens = args.micro_batch_tokens and args.micro_batch_tokens * factor
    return args.global_batch_size * num_updates, micro_batch_size, tokens


def bf16_multiple(
    args: argparse.Namespace, traits: Traits, collate: Callable[..., Any], max_length: int, num_parts: int
) -> int:
    """Returns the number to a multiple of which a bf16 run on a CPU pads lengths, for few different lengths.

    Padded rows stay within the length flags, because the model may not have more positions; and padded micro-batches
    within --micro_batch_tokens.
    """
    if not traits.lengths_vary or "multiple_of" not in inspect.signature(collate).parameters:
        return 1
    limits = [getattr(args, name) for name in traits.size_flags]
    multiple = math.gcd(PAD_MULTIPLE, *limits)
    longest = round_up(max_length, multiple) + multiple * (len(limits) - 1)  # each sequence has padding
    return 1 if args.micro_batch_tokens and longest > args.micro_batch_tokens * num_parts else multiple
