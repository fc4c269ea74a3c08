"""Compiled layers and attention kernels: `--compile`, and what a GPU does without it."""

import importlib.util
import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common.training.batching import Samples

# With fewer parameters, a run may be over before its layers are compiled: that takes about 10 s on an H100.
FEWEST_PARAMETERS = 100_000_000
# Share of the samples that must have the greatest length: the last block of a corpus is shorter.
MOST_EQUAL = 0.9


def choose_kernels(run: Any, model: Any, train_set: Samples) -> None:
    """Compiles the layers of a bare model if `--compile` asks for it, or by default on a GPU.

    The default needs a large model whose samples have the same length, or nearly all of them, in a mode without
    sharding. With many lengths, torch 2.11 has made gradients that were not finite on an H100.

    run: a `common.run.Run`. Its `args.compile` becomes whether the layers are compiled. model: of transformers.
    """
    lengths = train_set.lengths(np.arange(len(train_set)))
    is_longest = lengths == lengths.max(0)
    on_gpu = run.device.type == "cuda"
    if on_gpu and not is_longest.all():
        # cuDNN builds a plan for each new shape, which takes 0.16 s on an H100; flash attention does not.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if run.args.compile is None:
        is_large = sum(p.numel() for p in model.parameters()) >= FEWEST_PARAMETERS
        is_whole = (
            run.launch_config.mode in ("plain", "DDP")
            and run.launch_config.grid.data_parallel == run.launch_config.num_processes
        )
        allowed = run.traits.compiles_layers and is_whole and run.args.activation_checkpointing != "offload"
        run.args.compile = bool(on_gpu and allowed and is_large and is_longest.mean() > MOST_EQUAL and can_compile())
    if run.args.compile:
        compile_layers(model.base_model, not is_longest.all())
        if hasattr(model, "generate"):  # a cache grows with each token, so that each would compile the layers again
            model.generate = torch.compiler.set_stance("force_eager")(model.generate)


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
        # In torch 2.10 to 2.13, fusing a norm's two gradients into one kernel can leave parts of them unwritten
        # (pytorch #193061).
        layer.compile(dynamic=varies or None, options={"triton.mix_order_reduction": False})
    return len(layers)


@cache
def can_compile() -> bool:
    """Returns whether torch.compile can generate GPU kernels here: triton builds its launcher with a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()  # Debian has them in python3-dev
    return bool(importlib.util.find_spec("triton") and compiler and has_headers)
