"""Compiled layers and attention kernels: `--compile`, and what a GPU does without it."""

import argparse
import importlib.util
import os
import shutil
from functools import cache

import numpy as np
import torch
from torch import nn

from common.training.batching import Samples

# With fewer parameters, a run may be over before its layers are compiled: that takes about 10 s on an H100.
FEWEST_PARAMETERS = 100_000_000


def choose_kernels(
    args: argparse.Namespace, model: nn.Module, device: torch.device, train_set: Samples, by_default: bool
) -> None:
    """Compiles the layers of a bare model if `--compile` asks for it, or by default on a GPU.

    args: `compile` becomes whether the layers are compiled. by_default: whether the recipe and the mode allow it
    without the flag.
    """
    lengths = train_set.lengths(np.arange(len(train_set)))
    varies = bool((lengths != lengths[0]).any())
    if device.type == "cuda" and varies:
        # cuDNN builds a plan for each new shape, which takes 0.16 s on an H100; flash attention does not.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if args.compile is None:
        is_large = sum(p.numel() for p in model.parameters()) >= FEWEST_PARAMETERS
        args.compile = by_default and device.type == "cuda" and is_large and can_compile()
    if args.compile:
        compile_layers(model, varies)


def compile_layers(model: nn.Module, varies: bool) -> int:
    """Compiles each layer of a model's stacks of equal layers in place, or the whole model if it has no such stack.

    All layers of a stack share one compiled graph. So compilation takes as long as for one layer, however many there
    are, and attention masks, which need decisions on the host, stay outside of the graphs.

    Args:
        varies: whether shapes differ between micro-batches; then the first graph is already for any shape.

    Returns: the number of compiled modules.
    """
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1 and len(set(map(type, m))) == 1]
    nested = {id(module) for stack in stacks for module in stack.modules() if module is not stack}
    layers = [layer for stack in stacks if id(stack) not in nested for layer in stack] or [model]
    for layer in layers:
        layer.compile(dynamic=varies or None)
    return len(layers)


@cache
def can_compile() -> bool:
    """Returns whether torch.compile can generate GPU kernels here: it needs triton and a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return bool(importlib.util.find_spec("triton") and compiler)
