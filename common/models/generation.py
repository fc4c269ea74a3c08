"""How many rows a batch has from which a model generates."""

import argparse

# Size of a batch that generates, relative to a micro-batch. Without a graph, a layer keeps only keys and values of each
# token: about a tenth of its activations in training, unless these are recomputed.
FACTOR = 8


def rows_at_once(args: argparse.Namespace, length: int) -> int:
    """Returns the number of rows of a batch that generates: 8 micro-batches, or one if activations are recomputed.

    It is larger than a micro-batch, because a step of the decoder takes nearly as long for few rows.
    length: tokens of a row at most, with those that it generates.
    """
    size = args.micro_batch_size or args.micro_batch_tokens / length
    return max(1, int(size * (FACTOR if args.activation_checkpointing == "none" else 1)))
