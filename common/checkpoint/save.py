"""Checkpoints: complete or absent, the same for every mode, resumed bit for bit, and exported as a model.

    python -m common.checkpoint list OUTPUT_DIR
    python -m common.checkpoint export OUTPUT_DIR/checkpoints/update-000100 DIR

A checkpoint is a directory of safetensors and JSON; common/checkpoint_format.py says what is in it, and reads it.
It is written under another name (`.partial`), flushed, and renamed when its manifest is on the disk: a killed save
leaves nothing that could be taken for a checkpoint. The loop waits only for a copy in memory; a thread writes it.
"""

import argparse
import errno
import hashlib
import json
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from common.checkpoint import layouts
from common.checkpoint.format import (
    DTYPE_NAMES,
    FORMAT,
    MANIFEST,
    Reader,
    TrainingState,
    find_damage,
    hash_of,
    is_number,
    list_checkpoints,
    newer_line,
    safetensors_parts,
)
from common.checkpoint.identity import differences
from common.checkpoint.random_states import random_states, restore_random_states
from common.checkpoint.resume import load_state, restore_scaler, scaler_state
from common.errors import UserError
from common.files import PARTIAL, disk_line, fsync, lock_output_dir, remove, replace_directory, write_file
from common.memory import available_memory, pinned_bytes
from common.parallel.connect import seed_everything
from common.parallel.liveness import wait_for_all
from common.parallel.mode import running_mode
from common.parallel.sharding import offload_devices
from common.training.stopping import StopRequests

SHARED_TIMEOUT = 10  # seconds in which a new file must be seen on all hosts: network file systems keep old listings


class Checkpoints:
    """Saves and resumes the run of one output directory; every method is called by all ranks together.

    Errors of the disk are a UserError of one line, on all ranks.
    """

    def __init__(self, args: argparse.Namespace, accelerator: Accelerator):
        self.args, self.accelerator, self.output_dir = args, accelerator, Path(args.output_dir)
        self.directory = self.output_dir / "checkpoints"
        self.save_every, self.keep_last, self.keep_best = args.save_every, args.keep_last, args.keep_best
        self.load_best = args.load_best_at_end
        self.wants_resume, self.allow_changed = args.resume, args.allow_changed
        self.seed = args.seed
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.group = None  # the ranks agree over the network between the hosts: the GPU is never waited for
        if self.world > 1:  # with time for what one of them does alone: to remove an old run, to write a large part
            self.group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.copying: Future | None = None  # of what the next step changes
        self.writing: Future | None = None  # this rank's files
        self.committing: Future | None = None  # rank 0: manifest, rename, removal of older ones
        self.is_saving = False  # from the start of a save until all ranks know that all files are written
        self.last_saved = -1
        self.needed = 0  # bytes of the newest save, over all ranks
        self.stall_seconds: list[float] = []
        self.copies: dict[str, torch.Tensor] = {}
        self.watched: torch.optim.Optimizer | None = None
        self.num_updates = args.num_updates
        self.damaged: set[Path] = set()  # found so on the way to the one that is continued
        self.cannot = _cannot_save(accelerator)
        if self.cannot and (self.wants_resume or 0 < self.save_every <= args.num_updates):
            raise UserError(self.cannot)
        if self.world > 1:
            self._share_output_dir()

    # The ranks agree on each outcome, so that none goes on alone where another failed.

    def _sum(self, *values: float) -> list[float]:
        if self.world == 1:
            return [float(value) for value in values]
        sums = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(sums, group=self.group)
        return sums.tolist()

    def _together(self, action: Callable[[], Any], only_main: bool = False) -> None:
        """Runs it on all ranks, or on the main one; raises UserError on all if it failed on any."""
        problem = None
        try:
            if self.rank == 0 or not only_main:
                action()
        except OSError as error:
            problem = self._disk_line(error)
        except UserError as error:
            problem = str(error)
        self._raise_first(problem)

    def _raise_first(self, problem: str | None) -> None:
        if self._sum(problem is not None)[0] == 0:
            return
        problems = [problem]
        if self.world > 1:
            problems = [None] * self.world
            torch.distributed.all_gather_object(problems, problem, group=self.group)
        raise UserError(next(one for one in problems if one is not None))

    def _disk_line(self, error: OSError) -> str:
        has_any = any(not path.name.endswith(PARTIAL) for path in self.directory.glob("update-*"))
        advice = "start again with --resume: the last complete checkpoint is untouched" if has_any else "start again"
        return disk_line(error, "no checkpoint could be written", self.directory, self.needed, advice)

    def _share_output_dir(self) -> None:
        """All ranks take rank 0's (the default's name has the time in it), and each host sees what is written there.

        Raises:
            UserError: the hosts do not share it.
        """
        token, told = None, [None]

        def write() -> None:
            nonlocal token
            path = self.output_dir.absolute()
            above = next(number for number, place in enumerate([path, *path.parents]) if place.is_dir())
            told[0] = (str(self.output_dir), above, None, socket.gethostname())
            if not self.args.dry_run and int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) < self.world:
                # In what is there already: a mistake that is found later must not leave a directory.
                token = tempfile.NamedTemporaryFile(dir=[path, *path.parents][above], prefix=".shared-")
                told[0] = (str(self.output_dir), above, Path(token.name).name, socket.gethostname())

        self._together(write, only_main=True)
        torch.distributed.broadcast_object_list(told, src=0, group=self.group)
        self.args.output_dir, above, name, host = told[0]
        self.output_dir = Path(self.args.output_dir)
        self.directory = self.output_dir / "checkpoints"
        if name is None:
            return
        path = self.output_dir.absolute()
        deadline = time.monotonic() + SHARED_TIMEOUT
        while not (seen := ([path, *path.parents][above] / name).exists()) and time.monotonic() < deadline:
            time.sleep(0.2)
        line = (
            f"--output_dir {self.output_dir}: what rank 0 on host {host} writes there is not seen on host "
            f"{socket.gethostname()}; name a directory that all hosts share, by its whole path"
        )
        self._raise_first(None if seen else line)
        if token is not None:
            token.close()

    # --- resuming

    def find(self, identity: dict[str, Any]) -> Reader | None:
        """The newest checkpoint that its manifest confirms; None without --resume. A damaged one is told and passed.

        It takes the output directory first: a run that was asked to stop may still be writing its last checkpoint.

        Raises:
            UserError: another process writes there, nothing to resume, or a line for each thing that is not what the
                run began with.
        """
        wait_for_all()  # one may have tokenised for hours what others had in their caches
        self.identity = identity
        if not self.wants_resume:
            return None
        if not self.args.dry_run:
            self._together(lambda: lock_output_dir(self.output_dir), only_main=True)
        found, problems = list_checkpoints(self.output_dir)
        for path, manifest in found:
            if manifest["format"] > FORMAT:
                raise UserError(f"--resume {path}: {newer_line(manifest)}")
            problem = find_damage(path, manifest, self.rank, self.world)
            damaged = self._sum(problem is not None)[0] > 0
            if damaged:
                self.damaged.add(path)
                if problem:
                    print(f"{path}: {problem}", file=sys.stderr, flush=True)
                continue
            if self.rank == 0:
                for line in problems:
                    print(line, file=sys.stderr, flush=True)
            if self.args.warmup_updates is None:  # what the run began with, however long it is now
                began_with = manifest["identity"]["settings"].get("warmup_updates")
                began_with = began_with if is_number(began_with) else self.num_updates // 20
                self.args.warmup_updates = min(began_with, self.num_updates - 1)
                identity["settings"]["warmup_updates"] = began_with
                if 2 * began_with > self.num_updates:
                    text = f"--num_updates {self.num_updates} is half warm-up: the run began with {began_with} updates"
                    self.accelerator.print(f"{text} of it; --warmup_updates with --allow_changed changes that")
            if lines := list(differences(manifest["identity"], identity, self.allow_changed)):
                raise UserError("\n".join(f"--resume {path}: {line}" for line in lines))
            if manifest["update"] > self.num_updates:
                raise UserError(
                    f"--resume {path}: it has made {manifest['update']} updates already, more than --num_updates "
                    f"{self.num_updates}; give more, or export it as a model"
                )
            self.accelerator.print(f"resuming from {path}, after update {manifest['update']}", flush=True)
            return Reader(path, manifest)
        reason = f"none of its {len(found) + len(problems)} is sound" if found or problems else "there is none"
        raise UserError(
            f"--resume: {self.directory} has no complete checkpoint ({reason}); name the --output_dir of the run, or "
            "start anew without --resume"
        )

    def resume(self, reader: Reader | None, model: torch.nn.Module, optimizer: Any) -> None:
        """Puts weights, optimizer, scaler and random states where the checkpoint has them; `reader` is `find`'s.

        Call it last before the loop: what draws random numbers after it would shift the stream.
        """
        if reader is None:
            return
        manifest, device = reader.manifest, self.accelerator.device
        load_state(reader, self.accelerator, model, optimizer)
        restore_scaler(manifest["scaler"], self.accelerator, optimizer)
        if manifest["world_size"] == self.world:
            restore_random_states(reader.ranks[self.rank]["random"], device)
        else:  # as many new streams as there are ranks now; dropout is another one, all else is the same
            key = hashlib.blake2b(f"{self.seed}/{manifest['update']}".encode(), digest_size=4).digest()
            seed_everything(int.from_bytes(key, "little") >> 2, self.accelerator)
        self.last_saved = manifest["update"]

    # --- saving

    def start(self, *pretrained: Any, model: torch.nn.Module, **facts: Any) -> None:
        """Takes the output directory for this run, and clears what killed saves left there.

        Args:
            pretrained: what the export needs besides the weights, each with a `save_pretrained`.
            facts: go into every manifest.

        Raises:
            UserError: another process writes there.
        """
        self.facts = facts | {"architecture": type(self.accelerator.unwrap_model(model)).__name__}
        generation = getattr(self.accelerator.unwrap_model(model), "generation_config", None)
        pretrained += () if generation is None else (generation,)
        self.model_files = _pretrained_files(*pretrained) if self.rank == 0 else {}

        def take() -> None:
            lock_output_dir(self.output_dir)
            for stale in self.directory.glob(f"*{PARTIAL}"):
                remove(stale)

        self._together(take, only_main=True)

    def news(self, stop: StopRequests) -> dict[str, float]:
        """What the other ranks do not know: whether this one was asked to stop, or its save has failed or is written.

        It travels with the loss of an update (`reduce_update`), whose sums `update_done` takes. A
        request or an end of a write that comes later in the update counts in the next one.
        """
        written = self._is_written()  # before `failed`: a write that ends now must not count as one that went well
        return {"asked": stop.asked, "failed": self._failure() is not None, "written": written}

    def update_done(self, state: TrainingState, model: torch.nn.Module, optimizer: Any, news: dict[str, float]) -> bool:
        """Ends an update: a checkpoint where one is due. True if any rank was asked to stop; it is complete then.

        Args:
            news: `news` summed over the ranks, so that all of them do the same.
        """
        if news["failed"]:
            self._raise_first(self._failure())
        if self.is_saving and news["written"] == self.world:
            self._commit_soon()
        if news["asked"] or (self.save_every and state.update % self.save_every == 0):
            self.save(state, model, optimizer)
        if news["asked"]:
            self.finish()
        return news["asked"] > 0

    def save(self, state: TrainingState, model: torch.nn.Module, optimizer: Any, in_place: bool = False) -> None:
        """Copies the state, and starts to write it; call it between two updates only.

        in_place: without the copy and its memory; the call waits until it is written.

        Raises:
            UserError: the disk has no room for it, or refused the one before.
        """
        if state.update == self.last_saved:
            return
        if self.cannot:
            raise UserError(self.cannot)
        started = time.perf_counter()
        self.finish()  # one at a time
        owned = [piece for piece in layouts.pieces(self.accelerator, model, optimizer) if piece.is_owner]
        size = layouts.num_bytes(owned)
        # The copy takes as much of the host's memory as the state of all ranks of this machine. All make one, or none.
        blocks = [piece.tensor.numel() * piece.tensor.element_size() for piece in owned]
        copied = pinned_bytes(blocks) if self.accelerator.device.type == "cuda" else size
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        lacks_memory = in_place or not (self.copies or available_memory() > 1.25 * copied * local)
        needed, num_lacking = self._sum(size + 65536 * (1 + len(self.model_files)), lacks_memory)
        self.needed, has_memory = int(needed), num_lacking == 0
        partial = self.directory / f"update-{state.update:06}{PARTIAL}"

        def make_room() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.needed > shutil.disk_usage(self.directory).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
            remove(partial)
            partial.mkdir()

        self._together(make_room, only_main=True)
        rank_facts = {
            "numbers": layouts.scalar_state(self.accelerator, model, optimizer),
            "random": random_states(self.accelerator.device),
            "tensors": {
                piece.name: {
                    "dtype": DTYPE_NAMES[piece.tensor.dtype],
                    "shape": piece.shape,
                    "start": piece.start,
                    "elements": piece.tensor.numel(),
                }
                for piece in owned
            },
        }
        self.manifest = {
            "format": FORMAT,
            "update": state.update,
            "samples": state.samples,
            "position": asdict(state),
            "mode": running_mode(self.accelerator),
            "world_size": self.world,
            "scaler": scaler_state(self.accelerator, optimizer),
            "untrained": layouts.untrained(self.accelerator, model, optimizer),
            "identity": self.identity,
            **self.facts,
        }
        if has_memory:
            # Until the optimizer's step only buffers change: on a CPU the rest is copied beside forward and backward.
            # (On a GPU a copy would stand in line with what it computes.)
            on_cpu = self.accelerator.device.type == "cpu"
            later = [piece for piece in owned if on_cpu and not piece.name.startswith("buffer/")]
            self._copy([piece for piece in owned if not on_cpu or piece.name.startswith("buffer/")])
            self._watch(layouts.inner_optimizer(optimizer))
            self.copying = self.pool.submit(self._copy, later)
        self.writing = self.pool.submit(self._write_rank, partial, owned, rank_facts, has_memory)
        self.is_saving, self.last_saved = True, state.update
        if not has_memory:
            self._together(self.writing.result)
        self.stall_seconds.append(time.perf_counter() - started)

    def _watch(self, inner: torch.optim.Optimizer) -> None:
        """Makes the optimizer wait until all is copied before it changes anything, also where DeepSpeed calls it."""
        if self.watched is not inner:
            inner.register_step_pre_hook(lambda *_: self._wait_for_copy())
            self.watched = inner

    def _wait_for_copy(self) -> None:
        if self.copying is not None:
            self.copying.result()
            self.copying = None

    def _copy(self, pieces: list[layouts.Piece]) -> None:
        """On the host, in the memory of the save before: fresh pages take several times as long as the copy."""
        for name, tensor, *_ in pieces:
            copy = self.copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
                self.copies[name] = copy
            copy.copy_(tensor)

    def _write_rank(self, partial: Path, owned: list[layouts.Piece], facts: dict[str, Any], is_copied: bool) -> None:
        tensors = [(piece.name, self.copies[piece.name] if is_copied else piece.tensor) for piece in owned]
        name = f"rank-{self.rank:05}"
        files = {f"{name}.safetensors": write_file(partial / f"{name}.safetensors", safetensors_parts(tensors))}
        if self.rank == 0:
            (partial / "model").mkdir()
            for file, content in self.model_files.items():
                files[f"model/{file}"] = write_file(partial / "model" / file, [content])
            fsync(partial / "model")
        write_file(partial / f"{name}.json", [json.dumps(facts | {"files": files}).encode()])

    def _is_written(self) -> bool:
        return self.is_saving and self.writing is not None and self.writing.done()

    def _failure(self) -> str | None:
        """The line that tells what the thread of this rank met, or None."""
        for future in (self.writing, self.committing):
            if future is not None and future.done() and (error := future.exception()) is not None:
                if not isinstance(error, OSError):
                    raise error
                return self._disk_line(error)
        return None

    def _commit_soon(self) -> None:
        """All ranks have written: the main one makes it a checkpoint."""
        self.is_saving, self.writing = False, None
        if self.rank == 0:
            self.committing = self.pool.submit(self._commit, self.manifest)

    def _commit(self, manifest: dict[str, Any]) -> None:
        final = self.directory / f"update-{manifest['update']:06}"
        partial = final.with_name(final.name + PARTIAL)
        files = {}
        for rank in range(self.world):
            name = f"rank-{rank:05}.json"
            content = (partial / name).read_bytes()
            files |= json.loads(content)["files"]
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = manifest | {"files": files}
        manifest = json.loads(json.dumps(manifest))  # as it will be read: tuples are lists, keys are text
        manifest["sha256"] = hash_of(manifest)
        write_file(partial / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        fsync(partial)
        if (metrics := self.output_dir / "metrics.jsonl").is_file():
            fsync(metrics)  # the lines up to this update are there after a power cut too
        replace_directory(partial, final)
        self.damaged.discard(final)
        self._remove_older()

    def _remove_older(self) -> None:
        """Keeps the newest ones and the best. What was found damaged does not count, and goes; other names stay."""
        found, _ = list_checkpoints(self.output_dir)
        found = [(path, manifest) for path, manifest in found if path.name == f"update-{manifest['update']:06}"]
        sound = [(path, manifest) for path, manifest in found if path not in self.damaged]
        kept = {path for path, _ in sound[: self.keep_last]}
        if self.keep_best:
            kept.add(find_best(sound))
        for path, _ in found:
            if path not in kept:
                going = path.with_name(path.name + ".old" + PARTIAL)
                remove(going)
                path.rename(going)  # half removed, it must not look like a damaged checkpoint
                remove(going)

    def training_done(self, state: TrainingState, model: torch.nn.Module, optimizer: Any) -> None:
        """After the last update: a checkpoint of the end, for a run that dies before its model is written."""
        if self.save_every and not self.cannot:
            self.save(state, model, optimizer, in_place=True)
        self.finish()

    def best_at_end(self, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
        """With --keep_best, the best checkpoint as the run's results name it; call it after `training_done`.

        With --load_best_at_end the model has its weights from here on: they are measured and written in the place of
        the last ones.
        """
        if not self.keep_best:
            return {}
        found, _ = list_checkpoints(self.output_dir)
        while (path := find_best(found)) is not None and self.load_best:  # to name it, nobody need read all of it
            manifest = dict(found)[path]
            problem = find_damage(path, manifest, self.rank, self.world)
            if self._sum(problem is not None)[0] == 0:
                load_state(Reader(path, manifest), self.accelerator, model, optimizer)
                break
            if problem:
                print(f"{path}: {problem}", file=sys.stderr, flush=True)
            found = [one for one in found if one[0] != path]
        if path is None:
            return {"best": None}
        state = dict(found)[path]["position"]
        is_model = self.load_best or state["update"] == self.last_saved
        return {"best": {"checkpoint": str(path), "loss": state["validation_loss"], "is_model": is_model}}

    def finish(self) -> None:
        """Waits until the save that was started is a checkpoint, on all ranks."""
        if self.is_saving:
            self._together(self.writing.result)
            self._commit_soon()
        if self.last_saved >= 0:
            self._together(lambda: self.committing and self.committing.result(), only_main=True)
            self.committing = None


def find_best(found: list[tuple[Path, dict[str, Any]]]) -> Path | None:
    """The checkpoint of the lowest validation loss, or None where none was measured; a NaN is no measure."""
    losses = {path: manifest["position"]["validation_loss"] for path, manifest in found}
    measured = [path for path, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return min(measured, key=losses.__getitem__, default=None)


def _cannot_save(accelerator: Accelerator) -> str | None:
    """Why this run's state cannot be saved, or None."""
    plugin = accelerator.deepspeed_plugin
    zero = plugin.deepspeed_config.get("zero_optimization", {}) if plugin is not None else {}
    if offload_devices(zero)["offload_optimizer"] == "nvme":
        return (
            "--save_every, --resume: checkpoints do not hold an optimizer state that lies in files (nvme_path); give "
            "--save_every 0, or take zero3_offload_cpu.yaml"
        )
    return None


def _pretrained_files(*pretrained: Any) -> dict[str, bytes]:
    """What `save_pretrained` of each writes, by name."""
    with tempfile.TemporaryDirectory() as directory:
        for one in pretrained:
            one.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}
