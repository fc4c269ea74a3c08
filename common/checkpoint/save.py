"""Checkpoints for the training loop: complete or absent, the same for every mode, resumed bit for bit.

    python -m tools.checkpoint list OUTPUT_DIR
    python -m tools.checkpoint export OUTPUT_DIR/checkpoints/update-000100 DIR

A checkpoint is a directory of safetensors and JSON; format.py defines and reads its contents.
"""

import argparse
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.profiler import record_function

from common.checkpoint import layouts
from common.checkpoint.agreement import Agreement
from common.checkpoint.architecture import class_name
from common.checkpoint.format import DTYPE_NAMES, FORMAT, Reader, find_best
from common.checkpoint.identity import refuse_other_views
from common.checkpoint.optimizer_state import OptimizerState, Steps
from common.checkpoint.random_states import random_states
from common.checkpoint.training_state import TrainingState
from common.checkpoint.write import Writer
from common.errors import UserError
from common.files import PARTIAL, lock_output_dir, remove
from common.models.model_setup import without_wrapper
from common.parallel.distributed_mode import running_mode
from common.parallel.liveness import wait_for_all
from common.report.totals import SAVING, pause
from common.training.optimizers import inner_optimizer
from common.training.process_grid import running
from common.training.stop_signals import StopRequests


class Checkpoints:
    """Saves and resumes the run of an output directory. All ranks call each method together.

    A disk error raises a UserError of one line, on all ranks.
    """

    def __init__(self, args: argparse.Namespace, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self.ranks = Agreement(accelerator, Path(args.output_dir))
        self.writer = Writer(self.ranks, accelerator.device, args.keep_last, args.keep_best)
        self.last_saved = -1  # update
        self.steps = Steps()  # steps of the optimizer
        self.cannot = _cannot_save(accelerator)
        self.ranks.share_output_dir(args)

    def find(self, identity: dict[str, Any], size_flags: Iterable[str]) -> Reader | None:
        """Returns the newest valid checkpoint, or None without --resume. Corrupted checkpoints are printed and skipped.

        The output directory is locked first, because a stopping run may still be writing its last checkpoint.

        Raises UserError: a different process writes there, nothing to resume, one line per difference to the start of
        the run, or a state that cannot be saved.
        """
        is_asked = 0 < self.args.save_every <= self.args.num_updates or self.args.keep_best
        if self.cannot and (self.args.resume or is_asked):
            raise UserError(self.cannot)
        wait_for_all()  # a rank may have tokenised for hours, while the others had the result in their caches
        refuse_other_views(identity)
        self.identity = identity
        if not self.args.resume:
            return None
        if not self.args.dry_run:
            self.ranks.together(lambda: lock_output_dir(self.ranks.output_dir), only_main=True)
        from common.checkpoint import resume

        reader = resume.find_sound(self.ranks, self.writer.damaged)
        if line := resume.keep_warmup(self.args, reader.manifest, identity):
            self.accelerator.print(line)
        resume.check_is_own(reader, self.args, identity, size_flags)
        update = reader.manifest["update"]
        self.accelerator.print(f"resuming from {reader.directory}, after update {update}", flush=True)
        return reader

    def resume(self, reader: Reader | None, model: torch.nn.Module, optimizer: Any) -> None:
        """Restores weights, optimizer, scaler and RNG states from a checkpoint; `reader` is the result of `find`.

        Call it last before the loop, because random numbers drawn afterwards would change the RNG states.
        """
        self.steps = Steps(optimizer)
        if reader is not None:
            from common.checkpoint import resume

            resume.load_state(reader, self.accelerator, model, optimizer)
            resume.restore_scaler(reader.manifest["scaler"], self.accelerator, optimizer)
            resume.restore_generators(reader, self.accelerator, self.args.seed)
            self.last_saved = reader.manifest["update"]

    def start(self, *pretrained: Any, model: torch.nn.Module, **facts: Any) -> None:
        """Locks the output directory for this run, and removes incomplete files of killed saves.

        Args:
            pretrained: objects with `save_pretrained` that the export needs besides the weights.
            facts: added to every manifest.

        Raises UserError: a different process writes there.
        """
        self.facts = facts | {"architecture": class_name(without_wrapper(model))}
        generation = getattr(without_wrapper(model), "generation_config", None)
        pretrained += () if generation is None else (generation,)
        pretrained += tuple(getattr(without_wrapper(model), "peft_config", {}).values())
        if self.ranks.rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                for one in pretrained:
                    one.save_pretrained(directory)
                paths = sorted(path for path in Path(directory).iterdir() if path.is_file())
                self.writer.model_files = {path.name: path.read_bytes() for path in paths}

        def take() -> None:
            lock_output_dir(self.ranks.output_dir)
            for stale in self.ranks.directory.glob(f"*{PARTIAL}"):
                remove(stale)

        self.ranks.together(take, only_main=True)

    def news(self, stop: StopRequests) -> dict[str, float]:
        """Returns whether this rank has a request to stop, and whether its save has failed or is written.

        `reduce_update` sums these values over the ranks together with the loss, and `update_done` receives the sums. A
        request, or the end of a write, that comes later in the update counts in the next update.
        """
        written = self.writer.is_written()  # before `failed`, so that a write that fails now does not count as written
        return {"asked": stop.asked, "failed": self.writer.failure() is not None, "written": written}

    @record_function("checkpoint")  # name in a profiler trace
    def update_done(self, state: TrainingState, model: torch.nn.Module, optimizer: Any, news: dict[str, float]) -> bool:
        """Ends an update: saves a checkpoint if due. True if any rank has a request to stop; it is then complete.

        Due: every --save_every updates, on a request to stop, and with --keep_best at each new lowest validation loss.
        news: `news` summed over the ranks, so that all ranks act the same.
        """
        if news["failed"]:
            self.ranks.raise_first(self.writer.failure())
        if news["written"] * running().copies == self.ranks.world:
            self.writer.commit_soon()
        is_due = self.args.save_every and state.update % self.args.save_every == 0
        if news["asked"] or is_due or (self.args.keep_best and state.is_best):
            with pause(state.training, SAVING):
                self.save(state, model, optimizer)
        if news["asked"]:
            self.writer.finish()
        return news["asked"] > 0

    def save(self, state: TrainingState, model: torch.nn.Module, optimizer: Any, in_place: bool = False) -> None:
        """Copies the state and starts to write it; call it only between two updates.

        in_place: write without a copy, which saves its memory; the call returns when the state is written.

        Raises UserError: the disk is full, the previous save failed, or a part of the state would be missing.
        """
        if state.update == self.last_saved:
            return
        if self.cannot:
            raise UserError(self.cannot)
        self.writer.finish()  # one save at a time
        whole = (self.accelerator, model, optimizer)
        holders = layouts.holders(*whole)
        problem = next(OptimizerState(optimizer).problems(holders, self.steps), None)
        self.ranks.raise_first(problem and f"no checkpoint can be saved: {problem}")
        owned = [piece for piece in layouts.pieces(*whole) if piece.is_owner]
        rank_facts = {
            "numbers": layouts.scalar_state(*whole),
            "number_dtypes": layouts.scalar_dtypes(*whole),
            "random": random_states(self.accelerator.device),
            "tensors": {
                piece.name: {
                    "dtype": DTYPE_NAMES[piece.tensor.dtype],
                    "shape": piece.shape,
                    "start": piece.start,
                    "elements": piece.tensor.numel(),
                }
                | ({"columns": piece.columns} if piece.columns else {})
                for piece in owned
            },
        }
        manifest = {
            "format": FORMAT,
            "update": state.update,
            "samples": state.samples,
            **state.facts(),
            "mode": running_mode(self.accelerator),
            "world_size": self.ranks.world,
            "scaler": _scaler_state(self.accelerator, optimizer),
            "optimizer": type(inner_optimizer(optimizer)).__name__,
            "untrained": layouts.untrained(holders, model, optimizer),
            "identity": self.identity,
            **self.facts,
        }
        self.writer.start(manifest, rank_facts, owned, inner_optimizer(optimizer), in_place)
        self.last_saved = state.update

    def training_done(self, state: TrainingState, model: torch.nn.Module, optimizer: Any) -> None:
        """Saves a checkpoint after the last update, in case the run dies before its model is written."""
        with pause(state.training, SAVING) if self.args.save_every or self.args.keep_best else nullcontext():
            if self.args.save_every and not self.cannot:
                self.save(state, model, optimizer, in_place=True)
            self.writer.finish()

    def best_at_end(self, state: TrainingState, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
        """Returns the best checkpoint for the run's results, {} without --keep_best; call it after `training_done`.

        With --load_best_at_end, loads its weights, which are then evaluated and written instead of the last weights.
        """
        if not self.args.keep_best:
            return {}
        from common.checkpoint import resume

        load_best = self.args.load_best_at_end
        found = dict(resume.list_on_main(self.ranks)[0])
        path = find_best(found.items())
        while (
            load_best and path and not resume.is_sound(path, found[path], self.ranks)
        ):  # only a checkpoint that is loaded must be valid
            del found[path]
            path = find_best(found.items())
        if path is None:
            return {"best": None}
        if load_best:
            resume.load_state(Reader(path, found[path]), self.accelerator, model, optimizer)
        best = found[path]["position"]
        facts = {"checkpoint": str(path), "loss": best["validation_loss"]}
        facts["is_model"] = load_best or best["update"] == state.update
        lowest = state.best_validation_loss
        # Its loss was measured without --keep_best, or it was corrupted since.
        if lowest is not None and lowest < best["validation_loss"]:
            facts["lowest_measured"] = lowest
        return {"best": facts}


def _cannot_save(accelerator: Accelerator) -> str | None:
    """Returns the reason why this run's state cannot be saved, or None."""
    plugin = accelerator.deepspeed_plugin
    if plugin is None:
        return None
    from common.parallel.deepspeed_files import offload_devices

    zero = plugin.deepspeed_config.get("zero_optimization", {})
    if offload_devices(zero)["offload_optimizer"] == "nvme":
        return (
            "--save_every, --resume: checkpoints do not hold an optimizer state that lies in files (nvme_path); give "
            "--save_every 0, or take zero3_offload_cpu.yaml"
        )
    return None


def _scaler_state(accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
    """Returns the loss scale of fp16 and its counters, from Accelerate or DeepSpeed; {} for other precisions."""
    if accelerator.scaler is not None:
        return accelerator.scaler.state_dict()
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return {key: value for key, value in vars(scaler).items() if isinstance(value, int | float)} if scaler else {}
