"""Compiled layers: `--compile`."""

import importlib.util
import os
import shutil
import sysconfig
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.internals.torch_uncommon import compiled_only_if

# In torch 2.10 to 2.13, fusing a norm's two gradients into one kernel can leave parts of them unwritten
# (pytorch #193061).
OPTIONS = {"triton.mix_order_reduction": False}


def compile_layers(model: nn.Module, varies: bool, longest: int | None = None) -> int:
    """Compiles each layer of a model's stacks of equal layers in place, or the whole model if it has no such stack.

    All layers of a stack share one compiled graph. So compilation takes as long as for one layer, however many there
    are, and attention masks, which need decisions on the host, stay outside of the graphs.

    Args:
        varies: whether shapes differ between micro-batches. True: one graph for any shape. False: one graph per shape,
            for training only; a shape has the same graph whatever came before it, so a resumed run stays the same.
        longest: sequences of other lengths are not compiled; None: all are.

    Returns: the number of compiled modules.
    """
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1 and len(set(map(type, m))) == 1]
    nested = {id(module) for stack in stacks for module in stack.modules() if module is not stack}
    layers = [layer for stack in stacks if id(stack) not in nested for layer in stack] or [model]
    for layer in layers:
        layer.compile(dynamic=varies, options=OPTIONS)
        if not varies:
            compiled_only_if(layer, partial(_is_for_training, longest))
    return len(layers)


def _is_for_training(longest: int | None, *args: Any, **kwargs: Any) -> bool:
    """Returns whether a layer's call has gradients, and its input (B, L, ...) the length `longest`, if that is set."""
    first = args[0] if args else next(iter(kwargs.values()))
    return torch.is_grad_enabled() and (longest is None or first.shape[1] == longest)


@cache
def can_compile(device_type: str) -> bool:
    """Returns whether torch.compile can generate code for a device here.

    On a GPU, triton builds its launcher with a C compiler; on a CPU, torch uses a C++ compiler.
    """
    is_gpu = device_type == "cuda"
    names = ("cc", "gcc", "clang") if is_gpu else ("g++", "clang++")
    compiler = os.environ.get("CC" if is_gpu else "CXX") or any(map(shutil.which, names))
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()  # Debian has them in python3-dev
    return bool(compiler and has_headers and (not is_gpu or importlib.util.find_spec("triton")))
