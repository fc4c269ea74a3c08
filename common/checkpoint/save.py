"""Checkpoints for the training loop: atomic, in the same format for every mode, resumed bit for bit.

A checkpoint is a directory of safetensors and JSON; format.py describes its contents.
"""

import argparse
import random
import tempfile
from base64 import b64encode
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.profiler import record_function

from common.checkpoint.agreement import Agreement
from common.checkpoint.format import FORMAT
from common.checkpoint.layouts import Layout
from common.checkpoint.training_state import TrainingState
from common.checkpoint.write import Writer
from common.errors import UserError
from common.files import PARTIAL, lock_output_dir, remove
from common.models.model_setup import save_pretrained, without_wrapper
from common.parallel.distributed_mode import current_mode
from common.report.totals import SAVING, pause
from common.training.optimizers import inner_optimizer
from common.training.process_grid import current_grid
from common.training.stop_signals import StopRequests

# Optimizers whose full state is in `optimizer.state`. Others are checked, because a user may have written them.
KNOWN = (torch.optim.AdamW, torch.optim.SGD)


class Checkpoints:
    """Saves and resumes the run of an output directory. All ranks call each method together.

    A disk error raises a UserError of one line, on all ranks.
    """

    def __init__(self, args: argparse.Namespace, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self.ranks = Agreement(accelerator, Path(args.output_dir))
        self.writer = Writer(self.ranks, accelerator.device, args.keep_last, args.keep_best)
        self.last_saved = -1  # update
        self.interval: Any = None  # `save_interval.SaveInterval` of --save_every auto, on rank 0
        self.steps: Any = None  # `optimizer_checks.Steps` of a user's own optimizer
        self.unsupported: str | None = None  # reason why the state of this run cannot be saved
        if accelerator.deepspeed_plugin is not None:
            from common.checkpoint.sharded_layouts import why_not_saved

            self.unsupported = why_not_saved(accelerator)
        if self.ranks.world > 1:
            from common.checkpoint.shared_files import share_output_dir

            share_output_dir(self.ranks, args)

    def find(self, identity: dict[str, Any], size_flags: Iterable[str]) -> Any:
        """Returns the newest valid checkpoint, or None without --resume. Prints and skips corrupted checkpoints.

        Raises UserError: the directory is in use, or there is no valid checkpoint, or one of different settings.
        """
        every = self.args.save_every
        is_requested = every == "auto" or 0 < every <= self.args.num_updates or self.args.keep_best
        if self.unsupported and (self.args.resume or is_requested):
            raise UserError(self.unsupported)
        if self.ranks.world > 1:
            from common.checkpoint.shared_files import check_identity

            check_identity(identity)
        self.identity = identity
        if not self.args.resume:
            return None
        from common.checkpoint.resume import find_own

        return find_own(self, identity, size_flags)

    def resume(self, reader: Any, model: torch.nn.Module, optimizer: Any) -> None:
        """Restores weights, optimizer, scaler and RNG states from a checkpoint; `reader` is the result of `find`.

        Call it last before the loop, because random numbers drawn afterwards would change the RNG states.
        """
        if type(inner_optimizer(optimizer)) not in KNOWN:
            from common.checkpoint.optimizer_checks import Steps

            self.steps = Steps(optimizer)
        if reader is not None:
            from common.checkpoint.resume import load_run

            load_run(reader, self.accelerator, model, optimizer, self.args.seed)
            self.last_saved = reader.manifest["update"]

    def start(self, *pretrained: Any, model: torch.nn.Module, **metadata: Any) -> None:
        """Locks the output directory, and removes files of killed saves. Raises UserError: another process uses it."""
        model = without_wrapper(model)
        # The class name in a single process; FSDP2 uses its own class, FSDPLlamaForCausalLM.
        self.metadata = metadata | {"architecture": type(model).__name__.removeprefix("FSDP")}
        generation: Any = getattr(model, "generation_config", None)
        adapters: Any = getattr(model, "peft_config", {})
        pretrained += (() if generation is None else (generation,)) + tuple(adapters.values())

        if self.ranks.rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                save_pretrained(pretrained, directory)
                paths = sorted(path for path in Path(directory).rglob("*") if path.is_file())
                self.writer.model_files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}

        def lock() -> None:
            lock_output_dir(self.ranks.output_dir)
            for stale in self.ranks.directory.glob(f"*{PARTIAL}"):
                remove(stale)

        self.ranks.together(lock, only_main=True)
        if self.args.save_every == "auto" and self.ranks.rank == 0:
            from common.checkpoint.save_interval import SaveInterval

            self.interval = SaveInterval(self.ranks.output_dir)

    def values_to_reduce(self, stop: StopRequests, state: TrainingState) -> dict[str, float]:
        """Returns whether this rank has a request to stop, whether its save has failed or is written, or a save is due.

        `reduce_update` sums these values over the ranks together with the loss, and `update_done` receives the sums. A
        request, or the end of a write, that comes later in the update counts in the next update.
        """
        written = self.writer.is_written()  # before `failed`, so that a write that fails now does not count as written
        sums = {"save_due": self.interval is not None and self.interval.is_due(state), "written": written}
        return sums | {"stop_requested": stop.is_requested, "failed": self.writer.failure() is not None}

    @record_function("checkpoint")  # name in a profiler trace
    def update_done(self, state: TrainingState, model: torch.nn.Module, optimizer: Any, sums: dict[str, float]) -> bool:
        """Ends an update: saves a checkpoint if due. Returns whether the run must stop; the save is then complete.

        Due: as --save_every sets, on a request to stop, and with --keep_best at each new lowest validation loss.
        sums: those of `values_to_reduce` over the ranks, so that all ranks do the same.
        """
        if sums["failed"]:
            self.ranks.raise_first(self.writer.failure())
        if sums["written"] * current_grid().model_parallel == self.ranks.world:
            self.writer.commit_soon()
        every = self.args.save_every
        is_due = sums["save_due"] if every == "auto" else every and state.update % every == 0
        if sums["stop_requested"] or is_due or (self.args.keep_best and state.is_best):
            with pause(state.training, SAVING):
                self.save(state, model, optimizer)
        if sums["stop_requested"]:
            self.writer.finish()
        return sums["stop_requested"] > 0

    def save(self, state: TrainingState, model: torch.nn.Module, optimizer: Any, in_place: bool = False) -> None:
        """Copies the state and starts to write it; call it only between two updates.

        in_place: write without a copy, which saves memory; the call returns when the state is written.
        Raises UserError: the disk is full, the previous save failed, or a part of the state would be missing.
        """
        if state.update == self.last_saved:
            return
        if self.unsupported:
            raise UserError(self.unsupported)
        self.writer.finish()  # one save at a time
        layout = Layout(self.accelerator, model, optimizer)
        numbers, number_dtypes = layout.scalar_state()
        problem = None
        if self.steps is not None or not all(isinstance(value, int | float | None) for value in numbers.values()):
            from common.checkpoint.optimizer_checks import problems

            problem = next(problems(layout.state, layout.state_keys(), self.steps), None)
        self.ranks.raise_first(problem and f"no checkpoint can be saved: {problem}")
        owned = [piece for piece in layout.pieces() if piece.is_owner]
        rank_metadata = {
            "numbers": numbers,
            "number_dtypes": number_dtypes,
            "random": random_states(self.accelerator.device),
            "tensors": {piece.name: piece.to_record() for piece in owned},
        }
        manifest = {
            "format": FORMAT,
            "update": state.update,
            "samples": state.samples,
            **state.to_record(),
            "mode": current_mode(self.accelerator),
            "world_size": self.ranks.world,
            "scaler": _scaler_state(self.accelerator, optimizer),
            "optimizer": type(inner_optimizer(optimizer)).__name__,
            "untrained": layout.untrained(),
            "identity": self.identity,
            **self.metadata,
        }
        self.writer.start(manifest, rank_metadata, owned, inner_optimizer(optimizer), in_place)
        self.last_saved = state.update

    def training_done(self, state: TrainingState, model: torch.nn.Module, optimizer: Any) -> None:
        """Saves a checkpoint after the last update, in case the run dies before its model is written."""
        with pause(state.training, SAVING) if self.args.save_every or self.args.keep_best else nullcontext():
            if self.args.save_every and not self.unsupported:
                self.save(state, model, optimizer, in_place=True)
            self.writer.finish()

    def best_at_end(self, state: TrainingState, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
        """Returns the best checkpoint for the run's results, {} without --keep_best; call it after `training_done`.

        With --load_best_at_end, loads its weights, which are then evaluated and written instead of the last weights.
        """
        if not self.args.keep_best:
            return {}
        from common.checkpoint.resume import find_best_at_end

        return {"best": find_best_at_end(self, state, model, optimizer)}


def random_states(device: torch.device) -> dict[str, Any]:
    """Returns the RNG states of this rank as JSON: Python, numpy, torch on the CPU and on the device."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type != "cpu":
        states[device.type] = _encode(torch.get_device_module(device).get_rng_state())
    return states


def _encode(state: torch.Tensor) -> str:
    return b64encode(state.cpu().numpy().tobytes()).decode()


def _scaler_state(accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
    """Returns the loss scale of fp16 and its counters, from Accelerate or DeepSpeed; {} for other precisions."""
    if accelerator.scaler is not None:
        return accelerator.scaler.state_dict()
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return {key: value for key, value in vars(scaler).items() if isinstance(value, int | float)} if scaler else {}
