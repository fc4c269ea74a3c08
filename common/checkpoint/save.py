"""Checkpoints for the training loop: complete or absent, the same for every mode, resumed bit for bit.

    python -m tools.checkpoint list OUTPUT_DIR
    python -m tools.checkpoint export OUTPUT_DIR/checkpoints/update-000100 DIR

A checkpoint is a directory of safetensors and JSON; format.py defines its contents, and reads it.
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
    """Saves and resumes the run of one output directory; every method is called by all ranks together.

    Errors of the disk are a UserError of one line, on all ranks.
    """

    def __init__(self, args: argparse.Namespace, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self.ranks = Agreement(accelerator, Path(args.output_dir))
        self.writer = Writer(self.ranks, accelerator.device, args.keep_last, args.keep_best)
        self.last_saved = -1  # update
        self.steps = Steps()  # of the optimizer
        self.cannot = _cannot_save(accelerator)
        self.ranks.share_output_dir(args)

    def find(self, identity: dict[str, Any], size_flags: Iterable[str]) -> Reader | None:
        """The newest checkpoint that its manifest confirms; None without --resume. A damaged one is told and passed.

        It takes the output directory first: a run that was asked to stop may still be writing its last checkpoint.

        Raises UserError: another process writes there, nothing to resume, a line for each thing that is not what the
            run began with, or a state that cannot be saved.
        """
        is_asked = 0 < self.args.save_every <= self.args.num_updates or self.args.keep_best
        if self.cannot and (self.args.resume or is_asked):
            raise UserError(self.cannot)
        wait_for_all()  # one may have tokenised for hours what others had in their caches
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
        """Puts weights, optimizer, scaler and random states where the checkpoint has them; `reader` is `find`'s.

        Call it last before the loop: what draws random numbers after it would shift the stream.
        """
        self.steps = Steps(optimizer)
        if reader is not None:
            from common.checkpoint import resume

            resume.load_state(reader, self.accelerator, model, optimizer)
            resume.restore_scaler(reader.manifest["scaler"], self.accelerator, optimizer)
            resume.restore_generators(reader, self.accelerator, self.args.seed)
            self.last_saved = reader.manifest["update"]

    def start(self, *pretrained: Any, model: torch.nn.Module, **facts: Any) -> None:
        """Takes the output directory for this run, and clears what killed saves left there.

        Args:
            pretrained: what the export needs besides the weights, each with a `save_pretrained`.
            facts: go into every manifest.

        Raises UserError: another process writes there.
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
        """What the other ranks do not know: whether this one was asked to stop, or its save has failed or is written.

        It travels with the loss of an update (`reduce_update`), whose sums `update_done` takes. A
        request or an end of a write that comes later in the update counts in the next one.
        """
        written = self.writer.is_written()  # before `failed`: a write that ends now must not count as a good one
        return {"asked": stop.asked, "failed": self.writer.failure() is not None, "written": written}

    @record_function("checkpoint")  # its name in a trace
    def update_done(self, state: TrainingState, model: torch.nn.Module, optimizer: Any, news: dict[str, float]) -> bool:
        """Ends an update: a checkpoint where one is due. True if any rank was asked to stop; it is complete then.

        Due: every --save_every updates, on a request to stop, and with --keep_best at each new lowest validation loss.
        news: `news` summed over the ranks, so that all of them do the same.
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
        """Copies the state, and starts to write it; call it between two updates only.

        in_place: without the copy and its memory; the call waits until it is written.

        Raises UserError: the disk has no room for it, or refused the one before; a part of the state would be missing.
        """
        if state.update == self.last_saved:
            return
        if self.cannot:
            raise UserError(self.cannot)
        self.writer.finish()  # one at a time
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
        """After the last update: a checkpoint of the end, for a run that dies before its model is written."""
        with pause(state.training, SAVING) if self.args.save_every or self.args.keep_best else nullcontext():
            if self.args.save_every and not self.cannot:
                self.save(state, model, optimizer, in_place=True)
            self.writer.finish()

    def best_at_end(self, state: TrainingState, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
        """With --keep_best, the best checkpoint as the run's results name it; call it after `training_done`.

        With --load_best_at_end the model has its weights from here on: they are measured and written in the place of
        the last ones.
        """
        if not self.args.keep_best:
            return {}
        from common.checkpoint import resume

        load_best = self.args.load_best_at_end
        found = dict(resume.list_on_main(self.ranks)[0])
        path = find_best(found.items())
        while (
            load_best and path and not resume.is_sound(path, found[path], self.ranks)
        ):  # to name it, nobody need read it
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
        if lowest is not None and lowest < best["validation_loss"]:  # measured without --keep_best, or damaged since
            facts["lowest_measured"] = lowest
        return {"best": facts}


def _cannot_save(accelerator: Accelerator) -> str | None:
    """Why this run's state cannot be saved, or None."""
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
    """The loss scale of fp16 and its counts, Accelerate's or DeepSpeed's; empty for other precisions."""
    if accelerator.scaler is not None:
        return accelerator.scaler.state_dict()
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return {key: value for key, value in vars(scaler).items() if isinstance(value, int | float)} if scaler else {}
