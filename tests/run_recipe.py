"""Runs a recipe several times in one process, each time unchanged but for the named changes around it.

    accelerate launch ... tests/run_recipe.py SPEC.json

SPEC.json is a list of {"flags": [...], "changes": {NAME: VALUE}}. A change observes (gradients, live tensors), sets
a condition, or takes out what a test guards, to show that the test would notice.
"""

import ctypes
import gc
import inspect
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import accelerate.utils
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common.accumulation  # noqa: E402
import common.batching  # noqa: E402
import common.checkpoint  # noqa: E402
import common.files  # noqa: E402
import common.launch  # noqa: E402
import common.liveness  # noqa: E402
import common.losses  # noqa: E402
import common.optimizers  # noqa: E402
import common.routing  # noqa: E402
import common.settings  # noqa: E402
import common.shards  # noqa: E402
import common.tracking  # noqa: E402

CHANGED = (common.accumulation, common.batching, common.checkpoint, common.launch, common.losses, common.optimizers)
ORIGINALS = [(module, dict(vars(module))) for module in (*CHANGED, common.files, common.shards)]


def is_main():
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def float64(_):
    torch.set_default_dtype(torch.float64)


def float64_experts(_):
    """Float64 throughout ERNIE's mixture of experts, of which transformers computes parts in float32 at any dtype.

    Where these round, a difference in the sixteenth digit, by the cut of a window, can become one in the eighth.
    """
    from transformers.integrations import moe
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie

    own = [(moe, "_can_use_grouped_mm", moe._can_use_grouped_mm)]  # torch's kernel knows no float64
    moe._can_use_grouped_mm = lambda *_: False
    sum_losses = common.losses.sum_token_losses
    common.losses.sum_token_losses = lambda model: sum_losses(model.double())  # its routers are born in float32
    for owner, name in (
        (ernie, "apply_rotary_pos_emb"),
        (ernie.Ernie4_5_MoeRMSNorm, "forward"),
        (ernie.Ernie4_5_MoeTopKRouter, "forward"),
    ):
        own.append((owner, name, getattr(owner, name)))
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        names = dict(vars(ernie))
        exec(source.replace("float32", "double").replace("float", "double"), names)
        setattr(owner, name, names[name])
    return lambda: [setattr(*one) for one in own]


def own_counts(_):
    """Each rank moves the biases of its routers by what it counted itself."""
    end = common.routing.Routing.end_window

    def alone(self, accelerator, finite):
        reduce, accelerator.reduce = accelerator.reduce, lambda tensor, reduction: tensor
        try:
            return end(self, accelerator, finite)
        finally:
            accelerator.reduce = reduce

    common.routing.Routing.end_window = alone
    return lambda: setattr(common.routing.Routing, "end_window", end)


def save_gradients(path):
    """Writes the reduced gradients of the first optimizer step, by shape and order of the parameters."""

    def hook(optimizer, args, kwargs):
        if is_main() and not Path(path).exists():
            torch.save([p.grad.clone() for group in optimizer.param_groups for p in group["params"]], path)

    return register_optimizer_step_pre_hook(hook)


def wrap_forward(wrap):
    """`wrap(model, forward, batch)`, called for each micro-batch, makes its loss; `forward()` is the recipe's own."""
    original = common.losses.sum_token_losses

    def patched(model, **kwargs):
        name = original(model, **kwargs)
        forward = model.forward

        def wrapped(*args, **batch):
            if "targets" not in batch:
                return forward(*args, **batch)
            return wrap(model, lambda: forward(*args, **batch), batch)

        model.forward = wrapped
        return name

    common.losses.sum_token_losses = patched


def mean_of_means(_):
    """What loops do that divide by the number of micro-batches: each micro-batch's mean counts alike."""
    counts, item, backward = [], common.batching.WindowDataset.__getitem__, Accelerator.backward

    def getitem(self, update):
        window = item(self, update)
        counts[:] = [len(micro_batch["targets"]) for micro_batch in window.micro_batches]
        return window

    common.batching.WindowDataset.__getitem__ = getitem
    common.accumulation.window_scale = lambda accelerator, num_targets: 1 / len(counts)
    Accelerator.backward = lambda self, loss: backward(self, loss / counts.pop(0))

    def undo():
        common.batching.WindowDataset.__getitem__, Accelerator.backward = item, backward

    return undo


def no_broadcast(_):
    """Processes that keep their own running statistics."""
    original, accelerate.utils.broadcast = accelerate.utils.broadcast, lambda tensor: tensor
    return lambda: setattr(accelerate.utils, "broadcast", original)


def unsorted(_):
    """Micro-batches of the samples as they come, in the place of sorted ones."""

    def cut(lengths, world_size, micro_batch_size=None, micro_batch_tokens=None):
        size = micro_batch_size or max(1, micro_batch_tokens // int(lengths.max()))
        batches = [np.arange(start, min(start + size, len(lengths))) for start in range(0, len(lengths), size)]
        batches += [np.arange(0)] * (-len(batches) % world_size)
        return [batches[rank::world_size] for rank in range(world_size)]

    common.batching.cut_window = cut


def nan_loss(at):
    """The loss of one micro-batch in training is NaN: `at` is [rank, call]."""
    rank, call = at
    calls = []

    def broken(model, forward, _):
        calls.append(model.training)
        here = int(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0) == rank
        bad = here and model.training and (sum(calls) == call or call == "all")
        return forward() * (float("nan") if bad else 1.0)

    wrap_forward(broken)


def no_guard(_):
    """A step that is not finite is taken all the same."""
    common.accumulation.skip_step = lambda accelerator, optimizer: (optimizer.step(), optimizer.zero_grad())


def decay_all(_):
    """Weight decay pulls at every parameter, norms too."""
    original = common.optimizers.parameter_groups

    def one_group(model, weight_decay):
        groups = original(model, weight_decay)
        return [groups[0] | {"params": [parameter for group in groups for parameter in group["params"]]}]

    common.optimizers.parameter_groups = one_group


def count_tensors(path):
    """Writes the number of live tensors at every tenth update."""
    original, counts, updates = common.accumulation.reduce_window, [], itertools.count()

    def counted(*args):
        result = original(*args)
        if next(updates) % 10:
            return result
        gc.collect()
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        Path(path).write_text(json.dumps(counts))
        return result

    common.accumulation.reduce_window = counted


def measure_state(path):
    """Writes the bytes of weights and of optimizer state that each rank holds after the last update."""
    original = common.accumulation.reduce_window

    def num_bytes(tensor):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return tensor.numel() * tensor.element_size()

    def measured(accelerator, *args):
        optimizer = common.shards.inner_optimizer(accelerator._optimizers[0])
        states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        weights = accelerator.unwrap_model(accelerator._models[0]).parameters()
        # ZeRO-3 leaves nothing in a parameter but its share beside it.
        weights = sum(num_bytes(p) or num_bytes(p.ds_tensor) for p in weights)
        record = {"weights": weights, "optimizer": sum(map(num_bytes, states))}
        Path(f"{path}-{accelerator.process_index}.json").write_text(json.dumps(record))
        return original(accelerator, *args)

    common.accumulation.reduce_window = measured


def forbid_host_sync(_):
    """CUDA raises where the host waits for the device, from the first forward of a window to its last backward."""
    original = common.accumulation.synchronize_gradients

    @contextmanager
    def watched(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            with original(*args, **kwargs):
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    common.accumulation.synchronize_gradients = watched


def item_of_each_loss(_):
    """Reads the loss of each micro-batch, as loops do that log it."""

    def read(model, forward, _):
        loss = forward()
        loss.detach().item()
        return loss

    wrap_forward(read)


def silence(seconds):
    """How long a process may be silent; a number, or "inf"."""
    common.liveness.SILENCE = float(seconds)


def hold_lock(at):
    """One process holds Python's lock: `at` is [rank, update, seconds]."""
    original, updates = common.accumulation.reduce_window, itertools.count()

    def holding(accelerator, *args):
        if next(updates) == at[1] and accelerator.process_index == at[0]:
            ctypes.PyDLL(None).sleep(at[2])
        return original(accelerator, *args)

    common.accumulation.reduce_window = holding


def no_watch(_):
    """Processes that do not watch each other."""
    common.liveness.start = lambda timeout: None


def late(at):
    """One process comes later than the others: `at` is [rank, seconds]."""
    start, (rank, seconds) = common.liveness.start, at
    common.liveness.start = lambda timeout: (time.sleep(seconds * (int(os.environ["RANK"]) == rank)), start(timeout))


def broken_rank(at):
    """One process fails at an update: `at` is [rank, update]."""
    original, updates = common.accumulation.reduce_window, itertools.count()

    def broken(accelerator, *args):
        if next(updates) == at[1] and accelerator.process_index == at[0]:
            raise RuntimeError("this rank is broken")
        return original(accelerator, *args)

    common.accumulation.reduce_window = broken


def copy_run(paths):
    """The run begins with what another one had after an update: [from, to, update]."""
    source, target, update = paths
    if is_main():
        shutil.copytree(source, target)
        for path in Path(target, "checkpoints").iterdir():
            if path.name > f"update-{update:06}":
                shutil.rmtree(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def signal_at(when):
    """[update, rank, signal, times]: the rank sends itself a signal while it computes the update."""
    update, rank, name, times = when
    original = common.tracking.Progress.update

    def signalled(self, window, **record):
        if window.update == update and self.accelerator.process_index == rank:
            for _ in range(times):
                os.kill(os.getpid(), getattr(signal, name))
        return original(self, window, **record)

    common.tracking.Progress.update = signalled
    return lambda: setattr(common.tracking.Progress, "update", original)


def forget(what):
    """A resume that leaves something out."""
    checkpoint = common.checkpoint
    if what == "random":
        checkpoint.restore_random_states = lambda *_: None
    if what == "scaler":
        checkpoint.restore_scaler = lambda *_: None
    if what == "optimizer":
        common.shards.make_state = lambda *_: None
        pieces = common.shards.pieces
        common.shards.pieces = lambda *args: (piece for piece in pieces(*args) if piece.name.startswith("weight/"))
        return lambda: setattr(common.shards, "pieces", pieces)
    if what == "buffers":
        buffers = common.shards._buffers
        common.shards._buffers = lambda *args: iter(())
        return lambda: setattr(common.shards, "_buffers", buffers)
    if what == "learning_rate":
        rate, first = common.optimizers.learning_rate, []

        def from_zero(update, **settings):
            first.append(update)
            return rate(update - first[0], **settings)

        common.optimizers.learning_rate = from_zero
    if what == "samples":
        sample_ids, first = common.batching.window_sample_ids, []

        def from_start(update, *args, **settings):
            first.append(update)
            return sample_ids(update - min(first[1:] or [update]), *args, **settings)

        common.batching.window_sample_ids = from_start
    return None


def loss_scaler(interval):
    """A scaler as fp16 has it, on the CPU: its scale doubles after so many updates."""
    make = common.launch.make_accelerator

    def with_scaler(*args, **kwargs):
        accelerator = make(*args, **kwargs)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=interval)
        return accelerator

    common.launch.make_accelerator = with_scaler


def fill_disk(room):
    """[update, directory, bytes]: something else fills the disk while that update's checkpoint is written."""
    update, directory, left = room
    checkpoint = common.checkpoint
    write = checkpoint.write_file

    def on_a_full_disk(path, parts):
        ballast = Path(directory, "ballast")
        if f"update-{update:06}" in str(path) and not ballast.exists():
            ballast.write_bytes(bytes(max(0, shutil.disk_usage(directory).free - left)))
        return write(path, parts)

    checkpoint.write_file = on_a_full_disk


def slow_copy(settings):
    """[seconds, wait]: a save's copy beside the next update takes so long; whether the optimizer waits for it."""
    seconds, wait = settings
    checkpoints = common.checkpoint.Checkpoints
    copy, wait_for_copy = checkpoints._copy, checkpoints._wait_for_copy

    def slow(self, pieces):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        return copy(self, pieces)

    checkpoints._copy = slow
    if not wait:
        checkpoints._wait_for_copy = lambda self: None

    def undo():
        checkpoints._copy, checkpoints._wait_for_copy = copy, wait_for_copy

    return undo


def slow_updates(seconds):
    """Updates that last long enough to be met by a kill."""
    original = common.accumulation.reduce_window

    def slow(*args):
        time.sleep(seconds)
        return original(*args)

    common.accumulation.reduce_window = slow


def kill_in_save(when):
    """[rank, step, file]: the rank kills itself at that step of its second save or a later one; it leaves the file.

    A step is a moment before, in the middle of or after a write, flush, rename or removal. Without a step every rank
    writes the names of all of its own to FILE-RANK.
    """
    rank, kill_at, file = when
    checkpoint, here, saves, seen, removing = common.checkpoint, int(os.environ.get("RANK", 0)), [], {}, []

    def step(name):
        name = re.sub(r"update-\d+", "update", name)
        if kill_at is None:
            if name not in seen:
                seen[name] = True
                Path(f"{file}-{here}").write_text(json.dumps(list(seen)))
        elif len(saves) >= 2 and (here, name) == (rank, kill_at):
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def is_of_a_save(path):
        return "checkpoints" in Path(path).parts or Path(path).name == "metrics.jsonl"

    def around(function, describe):
        def wrapped(*args, **kwargs):
            name = describe(*args)
            if name:
                step(f"before {name}")
            result = function(*args, **kwargs)
            if name:
                step(f"after {name}")
            return result

        return wrapped

    def flushing(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        return is_of_a_save(path) and f"flushing {path.name}"

    def renaming(path, target):
        return is_of_a_save(path) and f"renaming {path.name} to {target.name}"

    write, rmtree = checkpoint.write_file, shutil.rmtree

    def write_halting(path, parts):
        def halting():
            for number, part in enumerate(parts):
                half = len(part) // 2
                yield part[:half]
                step(f"within {'a later' if number else 'the first'} part of {path.name}")
                yield part[half:]

        return write(path, halting())

    def remove(path, *args, **kwargs):
        if is_of_a_save(path):
            removing.append(path)
            step(f"before removing {path.name}")
        rmtree(path, *args, **kwargs)
        removing.clear()

    def in_removal(function):
        def wrapped(path, **kwargs):
            function(path, **kwargs)
            if removing:
                step(f"after removing {Path(path).name}")

        return wrapped

    checkpoints = checkpoint.Checkpoints
    save = around(checkpoints.save, lambda *_: "the start of a save")
    checkpoints.save = lambda *args, **options: saves.append(1) or save(*args, **options)
    checkpoints._copy = around(checkpoints._copy, lambda _, pieces: pieces and f"the copy of {pieces[0].name}")
    checkpoint.write_file, shutil.rmtree = write_halting, remove
    os.fsync, Path.rename = around(os.fsync, flushing), around(Path.rename, renaming)
    os.unlink, os.rmdir = in_removal(os.unlink), in_removal(os.rmdir)


def lock_timeout(seconds):
    """How long a run waits for another one in its output directory."""
    common.files.LOCK_TIMEOUT = seconds


def no_redaction(_):
    """Secrets are written and printed as they come."""
    common.launch.redact = common.tracking.redact = common.settings.redact = lambda value: value


LEAKED = []


def leak(_):
    """Keeps each update's losses with their graph's tensors, as `losses.append(loss)` would."""
    original = common.accumulation.window_scale

    def leaking(accelerator, num_targets):
        LEAKED.append(torch.zeros(1))
        return original(accelerator, num_targets)

    common.accumulation.window_scale = leaking


def main():
    # A second process group on the launcher's store can meet the keys of the first: one group serves all runs.
    ORIGINALS.append((common.launch, {"end_run": lambda accelerator, status=0: accelerator.wait_for_everyone()}))
    vars(common.launch).update(ORIGINALS[-1][1])
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        undo = [globals()[name](value) for name, value in spec.get("changes", {}).items()]
        recipe = str(ROOT / spec.get("recipe", "recipes/lm.py"))
        argv, sys.argv = sys.argv, [recipe, *spec["flags"]]
        try:
            runpy.run_path(recipe, run_name="__main__")
        finally:
            sys.argv = argv
            for change in undo:
                if callable(change):
                    change()
                elif change is not None:
                    change.remove()
            for module, names in ORIGINALS:
                vars(module).update(names)
            torch.set_default_dtype(torch.float32)
            AcceleratorState._reset_state(reset_partial_state=False)
            GradientState._reset_state()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the recipe ends where it has several processes


if __name__ == "__main__":
    main()
