"""How a process works: its cores and threads, what it waits for, and what it keeps in memory."""

import os
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaModel

from changes import RANK, UNDO, after, before, before_reduce, change
from common import planner, run
from common.checkpoint.save import Checkpoints
from common.models import attention_masks, cpu_kernels, untrained
from common.parallel import process_groups, sharding
from common.report import profiling
from common.report.progress import Progress
from common.tasks.classify import labels
from common.tasks.seq2seq import pairs
from common.training import accumulation, batching

FIND_PACKED = attention_masks.masking_utils.find_packed_sequence_indices  # which a run replaces for good


def cores(count):
    """The machine has so many."""
    change(os, "sched_getaffinity", lambda _: range(count))
    change(psutil, "cpu_count", lambda logical=True: count)


def user_names_threads(_):
    """Of the launcher's environment."""
    change(sharding, "names_threads", lambda launch: True)


def whole_model_on_each_rank(_):
    """Every process makes the model by itself, as with fsdp_cpu_ram_efficient_loading: false."""
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    UNDO.callback(os.environ.__setitem__, name, os.environ[name])
    os.environ[name] = "false"


def gradients_beside_buckets(_):
    """DDP as it is by itself."""
    change(process_groups, "AveragedByPeers", lambda **_: DistributedDataParallelKwargs())


def leak(_):
    """Keeps a tensor of each update, as `losses.append(loss)` would."""
    kept = []
    before_reduce(lambda *_: kept.append(torch.zeros(1)))


def one_more_collective(_):
    """The ranks agree once more in each update."""
    before(Checkpoints, "update_done", lambda *_: torch.distributed.all_reduce(torch.zeros(1)))


def forbid_host_sync(_):
    """CUDA raises where the host waits for the device, from the first forward of an update to its last backward."""
    original = accumulation.synchronize_gradients

    @contextmanager
    def watched(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            with original(*args, **kwargs):
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    change(accumulation, "synchronize_gradients", watched)


def read_each_loss(_):
    """Reads the loss of each micro-batch, as loops do that log it, and once more in its backward."""

    def read(_, loss):
        loss.item()
        loss.register_hook(lambda gradient: gradient.item() and None)

    before(Accelerator, "backward", read)


def look_at_masks(_):
    """transformers looks at positions and padding masks, as it does alone; each micro-batch has such a mask."""
    utils = attention_masks.masking_utils
    change(untrained, "decide_on_the_host", lambda: None)
    change(utils, "find_packed_sequence_indices", FIND_PACKED)
    own = mock.patch.dict(
        attention_masks.AttentionMaskInterface._global_mapping, sdpa=utils.sdpa_mask, eager=utils.eager_mask
    )
    UNDO.enter_context(own)

    def add_mask(micro_batch, *_, **__):
        micro_batch.setdefault("attention_mask", torch.ones_like(micro_batch["input_ids"]))

    after(labels, "collate_texts", add_mask)
    after(pairs, "collate_pairs", add_mask)


def own_kernels(_):
    """transformers' own attention and norms."""
    change(cpu_kernels, "use_cpu_kernels", lambda model: None)
    UNDO.enter_context(mock.patch.dict(AttentionInterface._global_mapping, sdpa=sdpa_attention_forward))


def cast_in_each_micro_batch(_):
    """Autocast drops its copies of the weights at the end of each forward."""
    change(run, "weights_cast_once", nullcontext)


class _CountCasts(TorchDispatchMode):
    """Counts copies of parameters in another type, as autocast makes them."""

    casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _CountCasts.casts += func is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter)
        return func(*args, **kwargs or {})


def count_casts(path):
    """Writes how many casts of parameters the micro-batches of a run took."""
    original, _CountCasts.casts = accumulation.synchronize_gradients, 0

    @contextmanager
    def counted(*args, **kwargs):
        with original(*args, **kwargs), _CountCasts():
            yield

    change(accumulation, "synchronize_gradients", counted)
    UNDO.callback(lambda: Path(path).write_text(str(_CountCasts.casts)))


def slow_phase(how):
    """[phase, seconds, rank]: that part of an update takes so long, on one rank or, without one, on all.

    With --profile only in the recorded updates.
    """
    phase, seconds, *rank = how
    places = {
        "data": (batching.GlobalBatches, "__getitem__"),
        "forward": (LlamaModel, "forward"),
        "backward": (torch.Tensor, "backward"),
        "clipping": (torch.nn.utils, "clip_grad_norm_"),
        "optimizer": (torch.optim.AdamW, "step"),
        "checkpoint": (Checkpoints, "save"),
        "evaluation": (accumulation, "mean_losses"),
        "other": (Progress, "update"),
    }

    def wait(*_, **__):
        is_due = torch.autograd.profiler._is_profiler_enabled or "--profile" not in sys.argv
        if rank in ([], [RANK]) and is_due:
            time.sleep(seconds)

    before(*places[phase], wait)


def draw_in_profile(_):
    """Profiling takes a random number, which the updates then do not."""
    before(profiling, "_named_phases", lambda run: torch.rand(1))


def no_prediction(_):
    """A dry run without the planner's process, which takes longer than all the rest of it."""
    change(planner, "Prediction", lambda _: SimpleNamespace(describe=lambda: ""))


def own_positions(_):
    """A recipe packs rows by itself, and a model does not check their positions, as on a GPU."""

    def restart(micro_batch, *_, **__):
        rows, length = micro_batch["input_ids"].shape
        micro_batch["position_ids"] = (torch.arange(length) % 8).repeat(rows, 1)

    after(batching, "collate_tokens", restart)
    change(attention_masks, "is_tracing", lambda _: True)
