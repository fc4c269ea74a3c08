"""Writes a checkpoint during training: copies the state, writes a file per rank, then renames the directory.

The checkpoint is written under a temporary name (`.partial`), flushed, and renamed when its manifest is on the disk. So
a killed save never looks like a checkpoint. host_copy.py copies the state; a thread does the rest.
"""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from common.checkpoint.agreement import Agreement
from common.checkpoint.format import MANIFEST, hash_of, in_chunks, safetensors_header
from common.checkpoint.parts import Piece
from common.files import PARTIAL, fsync, remove, replace_directory, write_file
from common.process import this_process

# On a CPU, seconds that the writing thread pauses per second of computing. So many updates are slower by a fiftieth,
# instead of a few by a tenth.
PAUSE_RATIO = 50


class Writer:
    """Writes one checkpoint at a time, from the pieces of each rank. All ranks call `start` and `finish` together."""

    def __init__(self, ranks: Agreement, device: torch.device, keep_last: int, keep_best: bool):
        self.ranks, self.device, self.keep_last, self.keep_best = ranks, device, keep_last, keep_best
        self.model_files: dict[str, bytes] = {}  # on rank 0: files that the export needs besides the weights
        self.corrupted: set[Path] = set()  # checkpoints that were skipped on resume
        # Otherwise, the thread of each process would use GPU 0, and allocate a CUDA context there.
        set_device = torch.cuda.set_device if device.type == "cuda" else torch.cpu.set_device
        self.pool = ThreadPoolExecutor(1, "checkpoint", set_device, (device.index or 0,))
        self.is_awaited = threading.Event()  # set if a caller waits for the write, so that the thread does not pause
        self.writing: Future | None = None  # write of this rank's files, until all ranks know that all are written
        self.committing: Future | None = None  # on rank 0: manifest, rename, removal of older checkpoints
        self.copy: Any = None  # the `HostCopy`, from the first save that may copy
        self.may_copy, self.holds_copy = True, False  # whether a copy is allowed; whether all ranks hold one

    def start(
        self,
        manifest: dict[str, Any],
        rank_metadata: dict[str, Any],
        owned: list[Piece],
        optimizer: torch.optim.Optimizer,
        in_place: bool,
    ) -> None:
        """Copies the pieces that this rank owns, and starts to write them. Raises UserError: the disk is full."""
        self.manifest = manifest
        partial = self.ranks.directory / f"update-{manifest['update']:06}{PARTIAL}"
        # Sorted by element size, the largest first, so that each tensor is aligned to its element size in the file.
        tensors = [(piece.name, piece.tensor) for piece in sorted(owned, key=lambda piece: -piece.tensor.itemsize)]
        header = safetensors_header(tensors)
        copying = None
        if self.copy is None and not in_place:
            from common.checkpoint.host_copy import HostCopy

            self.copy = HostCopy(self.device)
        if self._make_room(partial, len(header) + sum(tensor.nbytes for _, tensor in tensors), in_place):
            copying = self.copy.start(header, tensors, optimizer)
            self.is_awaited.clear()
        contents = [header, *(tensor for _, tensor in tensors)]
        self.writing = self.pool.submit(self._write_rank, partial, rank_metadata, contents, copying)
        if copying is None:
            self.ranks.together(self.writing.result)

    def _make_room(self, partial: Path, size: int, in_place: bool) -> bool:
        """Creates the directory if the disk has room. Returns whether the ranks copy the state: all or none.

        size: bytes of this rank's file. The copies need host memory for the state of all ranks on this machine.
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        lacks_memory = in_place or not self.may_copy or not self.copy.fits(size, local)
        needed, num_in_place = self.ranks.sum(size + 65536 * (1 + len(self.model_files)), lacks_memory)
        self.holds_copy = num_in_place == 0
        if num_in_place and not in_place:
            self.copy.free()
        self.ranks.needed = int(needed)

        def make() -> None:
            self.ranks.directory.mkdir(parents=True, exist_ok=True)
            if needed > shutil.disk_usage(self.ranks.directory).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
            remove(partial)
            partial.mkdir()

        self.ranks.together(make, only_main=True)
        return self.holds_copy

    def _write_rank(self, partial: Path, metadata: dict[str, Any], contents: list[Any], copying: Future | None) -> None:
        if copying is not None:
            copying.result().synchronize()
            contents = [self.copy.buffer]
        name = f"rank-{self.ranks.rank:05}"
        files = {f"{name}.safetensors": write_file(partial / f"{name}.safetensors", self._paused(in_chunks(contents)))}
        if self.ranks.rank == 0:
            (partial / "model").mkdir()
            for file, content in self.model_files.items():
                (path := partial / "model" / file).parent.mkdir(parents=True, exist_ok=True)
                files[f"model/{file}"] = write_file(path, [content])
            for folder in {partial / "model", *((partial / "model" / file).parent for file in self.model_files)}:
                fsync(folder)
        write_file(partial / f"{name}.json", [json.dumps(metadata | {"files": files}).encode()])

    def _paused(self, parts: Iterable[Any]) -> Iterator[Any]:
        """Yields the parts, with a pause after each if the writing thread shares a CPU with the training."""
        for part in parts:
            began = time.thread_time()
            yield part  # resumes when the part is written
            if self.device.type == "cpu":
                self.is_awaited.wait(PAUSE_RATIO * (time.thread_time() - began))

    def is_written(self) -> bool:
        """Returns whether this rank has written its part of the current save."""
        return self.writing is not None and self.writing.done()

    def failure(self) -> str | None:
        """Returns the message for an error in this rank's thread, or None."""
        for future in (self.writing, self.committing):
            if future is not None and future.done() and (error := future.exception()) is not None:
                if not isinstance(error, OSError):
                    raise error
                from common.disk_errors import checkpoint_line

                return checkpoint_line(error, self.ranks.directory, self.ranks.needed)
        return None

    def commit_soon(self) -> None:
        """Starts the commit after all ranks have written: the main rank completes the checkpoint."""
        self.writing = None
        if self.ranks.rank == 0:
            self.committing = self.pool.submit(self._commit, self.manifest)

    def finish(self) -> None:
        """Waits on all ranks until the current save is a complete checkpoint."""
        self.is_awaited.set()
        if self.writing is not None:
            self.ranks.together(self.writing.result)
            self.commit_soon()
        self.ranks.together(lambda: self.committing and self.committing.result(), only_main=True)
        self.committing = None

    def _commit(self, manifest: dict[str, Any]) -> None:
        final = self.ranks.directory / f"update-{manifest['update']:06}"
        partial = final.with_name(final.name + PARTIAL)
        files: dict[str, dict[str, Any]] = {}
        for rank in range(self.ranks.world):
            name = f"rank-{rank:05}.json"
            content = (partial / name).read_bytes()
            files |= json.loads(content)["files"]
            files[name] = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
        manifest = manifest | {"files": files}
        manifest = json.loads(json.dumps(manifest))  # as it will be read back: tuples become lists, keys become strings
        manifest["sha256"] = hash_of(manifest)
        write_file(partial / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        fsync(partial)
        if (metrics := self.ranks.output_dir / "metrics.jsonl").is_file():
            fsync(metrics)  # so that the lines up to this update survive a power failure
        replace_directory(partial, final)
        self.corrupted.discard(final)
        if len(os.listdir(self.ranks.directory)) > self.keep_last or self.corrupted:
            from common.checkpoint.read import remove_older

            remove_older(self.ranks.output_dir, self.corrupted, self.keep_last, self.keep_best)
        if this_process().remote is not None:
            this_process().remote.send_soon()
