"""Batch sizes of an evaluation, and the padding of bf16 runs on a CPU."""

import argparse
import inspect
import math
from collections.abc import Callable
from typing import Any

from common.training.padding import round_up
from common.training.recipe_traits import Traits

EVALUATED_TOKENS = 1 << 20  # tokens sorted and split together, over all ranks; at most 24 MiB per host
# oneDNN compiles a bf16 matmul again for each number of rows: up to 3 ms, and 1 MB that stays allocated.
FEW_LENGTHS = 32


def evaluation_sizes(
    args: argparse.Namespace, traits: Traits, max_length: int, is_cpu: bool
) -> tuple[int, int | None, int | None]:
    """Returns the global batch size, micro-batch size and tokens per micro-batch of the held-out set.

    No update depends on them. Sorted in larger groups than an update's, samples of all lengths need little padding.
    Without a graph, a micro-batch of twice the size uses less memory than training. This may not hold with
    --activation_checkpointing. It may not hold on a CPU either, because memory that training has freed is too
    fragmented for larger tensors.
    """
    larger = 2 if args.activation_checkpointing == "none" and not is_cpu else 1
    micro_batch_size = args.micro_batch_size and args.micro_batch_size * larger
    if not traits.lengths_vary:
        return args.global_batch_size, micro_batch_size, None
    groups = max(1, EVALUATED_TOKENS // (args.global_batch_size * max_length))
    tokens = args.micro_batch_tokens and args.micro_batch_tokens * larger
    return args.global_batch_size * groups, micro_batch_size, tokens


def bf16_multiple(
    args: argparse.Namespace, traits: Traits, collate: Callable[..., Any], max_length: int, num_parts: int
) -> int:
    """Returns the number to whose multiples a bf16 run on a CPU pads lengths, for few different lengths.

    A padded row stays within its flag's limit, for which the model has positions, and a micro-batch within its own.
    """
    if not traits.lengths_vary or "multiple_of" not in inspect.signature(collate).parameters:
        return 1
    limits = [getattr(args, name) for name in traits.size_flags]
    multiple = math.gcd(FEW_LENGTHS, *limits)
    longest = round_up(max_length, multiple) + multiple * (len(limits) - 1)  # each sequence has padding
    return 1 if args.micro_batch_tokens and longest > args.micro_batch_tokens * num_parts else multiple
