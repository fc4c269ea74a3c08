"""Normalisation layers of image classifiers: batch norm and its replacements.

Batch norm uses the statistics of a micro-batch on one rank. Therefore the update depends on the micro-batch size and
the number of ranks, unlike everything else in this project. Group norm uses the statistics of a single image.
"""

import argparse
import math

from torch import nn

from common.errors import UserError
from common.training.precision import BATCH_NORMS

NORMS = {
    "group": "statistics of each image: the update is the same however it is cut; from scratch only, the default there",
    "batch": "statistics of each micro-batch: another layout is another update; what pretrained ResNets have",
    "sync_batch": "statistics of a micro-batch over all ranks: exact over ranks, not over accumulation; GPUs only",
}


def use_group_norm(model: nn.Module) -> None:
    """Replaces batch norm by group norm (Wu and He, 2018, arXiv:1803.08494) with 16 channels per group if divisible."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            channels = module.num_features
            model.set_submodule(name, nn.GroupNorm(math.gcd(channels, max(1, channels // 16)), channels))


def resolve_norm(args: argparse.Namespace, model: nn.Module) -> None:
    """For a model with batch norm, sets the default of `args.norm`, and `args.drop_last_window`.

    Raises UserError if --norm has no effect on the model, or a micro-batch is too small for batch norm.
    """
    if not any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        if args.norm in ("batch", "sync_batch"):
            raise UserError(f"--norm {args.norm}: {type(model).__name__} has no batch norm; remove it")
        return
    args.norm = args.norm or "batch"
    if args.micro_batch_size == 1 and args.norm == "batch":
        raise UserError("--micro_batch_size 1: batch norm needs several images for its statistics; use at least 2")
    # The last, shorter global batch has smaller micro-batches, and a rank without samples computes a black dummy image.
    # Both would change the statistics.
    args.drop_last_window = True


def describe_norm(args: argparse.Namespace, world_size: int) -> dict[str, str]:
    """Returns a line for the run summary on the effect of batch norm on the update; empty without batch norm."""
    if args.norm not in ("batch", "sync_batch"):
        return {}
    at_once = args.micro_batch_size * (world_size if args.norm == "sync_batch" else 1)
    text = f"{args.norm}, over {at_once} images at once; an epoch's short last global batch is dropped"
    if at_once < args.global_batch_size:
        parts = args.global_batch_size // at_once
        text += f"\n{'':>10}  WARNING: a global batch is split into {parts} parts; a different split changes the update"
    return {"norm": text}
