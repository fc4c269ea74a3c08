"""Writes a checkpoint beside the training: a copy in memory, a file for each rank, then the name that makes it one.

It is written under another name (`.partial`), flushed, and renamed when its manifest is on the disk: a killed save
leaves nothing that could be taken for a checkpoint. The loop waits only for the copy; a thread does the rest.
"""

import errno
import hashlib
import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from common.checkpoint.agreement import Agreement
from common.checkpoint.format import MANIFEST, find_best, hash_of, list_checkpoints, safetensors_parts
from common.checkpoint.layouts import Piece
from common.files import PARTIAL, fsync, remove, replace_directory, write_file
from common.memory import available_memory, pinned_bytes


class Writer:
    """Writes one checkpoint at a time, of what each rank holds; `start` and `finish` are called by all together."""

    def __init__(self, ranks: Agreement, device: torch.device, keep_last: int, keep_best: bool):
        self.ranks, self.device, self.keep_last, self.keep_best = ranks, device, keep_last, keep_best
        self.model_files: dict[str, bytes] = {}  # rank 0: what the export needs besides the weights
        self.damaged: set[Path] = set()  # found so on the way to the one that is continued
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.copying: Future | None = None  # of what the next step changes
        self.writing: Future | None = None  # this rank's files, until all ranks know that all are written
        self.committing: Future | None = None  # rank 0: manifest, rename, removal of older ones
        self.copies: dict[str, torch.Tensor] = {}
        self.watched: torch.optim.Optimizer | None = None

    def start(
        self,
        manifest: dict[str, Any],
        rank_facts: dict[str, Any],
        owned: list[Piece],
        optimizer: torch.optim.Optimizer,
        in_place: bool,
    ) -> None:
        """Copies the pieces that this rank owns, and starts to write them.

        Args:
            rank_facts: of this rank's JSON file.
            optimizer: which waits with its next step until all is copied.
            in_place: without the copy and its memory; the call waits until it is written.

        Raises UserError: the disk has no room for it.
        """
        self.manifest = manifest
        partial = self.ranks.directory / f"update-{manifest['update']:06}{PARTIAL}"
        has_memory = self._make_room(partial, owned, in_place)
        if has_memory:
            # Until the optimizer's step only buffers change: on a CPU the rest is copied beside forward and backward.
            # (On a GPU a copy would stand in line with what it computes.)
            on_cpu = self.device.type == "cpu"
            later = [piece for piece in owned if on_cpu and not piece.name.startswith("buffer/")]
            self._copy([piece for piece in owned if not on_cpu or piece.name.startswith("buffer/")])
            if self.watched is not optimizer:  # also where DeepSpeed calls it
                optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())
                self.watched = optimizer
            self.copying = self.pool.submit(self._copy, later)
        self.writing = self.pool.submit(self._write_rank, partial, owned, rank_facts, has_memory)
        if not has_memory:
            self.ranks.together(self.writing.result)

    def _make_room(self, partial: Path, owned: list[Piece], in_place: bool) -> bool:
        """Makes the directory, if the disk has room. Whether the state is copied: on all ranks, or on none."""
        # The copy takes as much of the host's memory as the state of all ranks of this machine.
        sizes = [piece.tensor.nbytes for piece in owned]
        copied = pinned_bytes(sizes) if self.device.type == "cuda" else sum(sizes)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        lacks_memory = in_place or not (self.copies or available_memory() > 1.25 * copied * local)
        needed, num_lacking = self.ranks.sum(sum(sizes) + 65536 * (1 + len(self.model_files)), lacks_memory)
        self.ranks.needed = int(needed)

        def make() -> None:
            self.ranks.directory.mkdir(parents=True, exist_ok=True)
            if needed > shutil.disk_usage(self.ranks.directory).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
            remove(partial)
            partial.mkdir()

        self.ranks.together(make, only_main=True)
        return num_lacking == 0

    def _wait_for_copy(self) -> None:
        if self.copying is not None:
            self.copying.result()
            self.copying = None

    def _copy(self, pieces: list[Piece]) -> None:
        """On the host, in the memory of the save before: fresh pages take several times as long as the copy."""
        for name, tensor, *_ in pieces:
            copy = self.copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
                self.copies[name] = copy
            copy.copy_(tensor)

    def _write_rank(self, partial: Path, owned: list[Piece], facts: dict[str, Any], is_copied: bool) -> None:
        tensors = [(piece.name, self.copies[piece.name] if is_copied else piece.tensor) for piece in owned]
        name = f"rank-{self.ranks.rank:05}"
        files = {f"{name}.safetensors": write_file(partial / f"{name}.safetensors", safetensors_parts(tensors))}
        if self.ranks.rank == 0:
            (partial / "model").mkdir()
            for file, content in self.model_files.items():
                files[f"model/{file}"] = write_file(partial / "model" / file, [content])
            fsync(partial / "model")
        write_file(partial / f"{name}.json", [json.dumps(facts | {"files": files}).encode()])

    def is_written(self) -> bool:
        """Whether this rank has written all of the save that was started."""
        return self.writing is not None and self.writing.done()

    def failure(self) -> str | None:
        """The line that tells what the thread of this rank met, or None."""
        for future in (self.writing, self.committing):
            if future is not None and future.done() and (error := future.exception()) is not None:
                if not isinstance(error, OSError):
                    raise error
                return self.ranks.disk_line(error)
        return None

    def commit_soon(self) -> None:
        """All ranks have written: the main one makes it a checkpoint."""
        self.writing = None
        if self.ranks.rank == 0:
            self.committing = self.pool.submit(self._commit, self.manifest)

    def finish(self) -> None:
        """Waits until the save that was started is a checkpoint, on all ranks."""
        if self.writing is not None:
            self.ranks.together(self.writing.result)
            self.commit_soon()
        self.ranks.together(lambda: self.committing and self.committing.result(), only_main=True)
        self.committing = None

    def _commit(self, manifest: dict[str, Any]) -> None:
        final = self.ranks.directory / f"update-{manifest['update']:06}"
        partial = final.with_name(final.name + PARTIAL)
        files = {}
        for rank in range(self.ranks.world):
            name = f"rank-{rank:05}.json"
            content = (partial / name).read_bytes()
            files |= json.loads(content)["files"]
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = manifest | {"files": files}
        manifest = json.loads(json.dumps(manifest))  # as it will be read: tuples are lists, keys are text
        manifest["sha256"] = hash_of(manifest)
        write_file(partial / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        fsync(partial)
        if (metrics := self.ranks.output_dir / "metrics.jsonl").is_file():
            fsync(metrics)  # the lines up to this update are there after a power cut too
        replace_directory(partial, final)
        self.damaged.discard(final)
        self._remove_older()

    def _remove_older(self) -> None:
        """Keeps the newest ones and the best. What was found damaged does not count, and goes; other names stay."""
        found, _ = list_checkpoints(self.ranks.output_dir)
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
