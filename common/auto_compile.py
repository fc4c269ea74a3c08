"""Decides whether layers are compiled: `--compile`, and `--compile auto`, the default. Chooses attention kernels."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.data.cache import cache_path, only_one
from common.report import flops
from common.training.batching import Samples

# On a GPU, smaller models have not been measured.
FEWEST_PARAMETERS = 100_000_000
# FLOPs of a process in the whole run, per CPU thread or GPU. With fewer, compiling (15 to 30 s) takes about as long as
# it saves: updates are 1.1 times (float32 on a CPU) to 1.4 times as fast (bf16 on an H100).
FEWEST_FLOPS = {"cpu": 5e13, "cuda": 2e16}
# Share of the samples that must have the greatest length: the last block of a corpus is shorter.
MOST_EQUAL = 0.9


def choose_kernels(run: Any, model: Any, train_set: Samples) -> dict[str, str]:
    """Compiles the layers of a bare model if `--compile` asks for it, or if it pays: `--compile auto`, the default.

    It pays in a long run whose samples have the same length, or nearly all of them, in a mode without sharding. With
    many lengths, torch 2.11 has made gradients that were not finite on an H100. The decision depends on nothing that
    is measured, so a resumed run decides the same. Runs of less than 100 updates on a CPU do not call it by default.

    run: a `common.run.Run` with its loader. Its `args.compile` becomes whether the layers are compiled.
    model: of transformers. Returns: a line of the run summary, by label, if the layers are compiled.
    """
    args, is_gpu = run.args, run.device.type == "cuda"
    is_auto = not isinstance(args.compile, bool)  # not set, or auto
    if is_auto:
        args.compile = _can_gain(run, model) and _is_long(run)
    if not (args.compile or is_gpu):
        return {}
    lengths = train_set.lengths(np.arange(len(train_set)))
    is_longest = lengths == lengths.max(0)
    if is_gpu and not is_longest.all():
        # cuDNN builds a plan for each new shape, which takes 0.16 s on an H100; flash attention does not.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not args.compile:
        return {}
    from common.training import compilation

    is_uniform = bool(is_longest.mean() > MOST_EQUAL)
    if is_auto and not (is_uniform and compilation.can_compile(run.device.type)):
        args.compile = False
        return {}
    if is_auto and args.dry_run:  # which must be fast
        return {"compiled": "nothing in this dry run; a run compiles the layers, for each new shape of a micro-batch"}
    keep_code()
    longest = None if is_longest.all() or lengths.ndim > 1 else int(lengths.max())
    compilation.compile_layers(model.base_model, not is_uniform, longest)
    if hasattr(model, "generate"):  # a cache grows with each token, so that each would compile the layers again
        model.generate = torch.compiler.set_stance("force_eager")(model.generate)
    return {"compiled": "the layers, for each new shape of a micro-batch; their code is kept on disk for later runs"}


def keep_code() -> None:
    """Makes torch keep compiled code in the cache, unless TORCHINDUCTOR_CACHE_DIR is set, for later runs and resumes.

    Otherwise torch sets the variable to a directory for temporary files, which many machines empty.
    """
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torchinductor_")).name.startswith("torchinductor_"):
        directory = cache_path("compiled", [torch.__version__])
        with only_one(directory):
            directory.mkdir(mode=0o700, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)


def _can_gain(run: Any, model: Any) -> bool:
    """Returns whether compiled layers were measured to be faster than others here, in a long run."""
    grid, mode = run.launch_config.grid, run.launch_config.mode
    is_whole = mode in ("plain", "DDP") and grid.data_parallel == run.launch_config.num_processes
    if not (run.traits.compiles_layers and is_whole):
        return False
    if run.device.type == "cuda":
        is_large = sum(p.numel() for p in model.parameters()) >= FEWEST_PARAMETERS
        return is_large and run.args.activation_checkpointing != "offload"
    # On a CPU, the attention of documents is faster outside of compiled code: see models.document_attention.
    is_float32 = torch.get_default_dtype() == torch.float32
    return run.device.type == "cpu" and is_float32 and not run.args.shared("document_mask")


def _is_long(run: Any) -> bool:
    work, threads = flops.count(run.meta_model, run.loader.dataset), torch.get_num_threads()
    if work is None:
        return False
    per_process = work.of(run.loader.dataset[0]) * run.args.num_updates / run.launch_config.num_processes
    return per_process >= FEWEST_FLOPS[run.device.type] * (threads if run.device.type == "cpu" else 1)
