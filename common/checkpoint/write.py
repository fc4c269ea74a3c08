"""Writes a checkpoint during training: a copy in memory, a file per rank, then the rename that completes it.

The checkpoint is written under a temporary name (`.partial`), flushed, and renamed when its manifest is on the disk. So
a killed save never looks like a checkpoint. The state is copied during the next forward and backward pass, on a GPU in
a separate stream. The optimizer step waits for the copy; a thread does the rest.
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
from torch.profiler import record_function

from common.checkpoint.agreement import Agreement
from common.checkpoint.format import MANIFEST, find_best, hash_of, in_chunks, list_checkpoints, safetensors_header
from common.checkpoint.layouts import Piece
from common.files import PAGE, PARTIAL, fsync, remove, replace_directory, write_file
from common.host_memory import available_memory, most_resident, pinned_bytes

# On a CPU, seconds that the writing thread pauses per second of computing. Its computing slows down the updates, so
# that each loses a fiftieth, instead of a few losing a tenth.
REST = 50


def unhurried(parts: Iterable[Any], device: torch.device, is_awaited: threading.Event) -> Iterator[Any]:
    """Yields the parts, with a pause after each if the writing thread shares a CPU with the training."""
    for part in parts:
        began = time.thread_time()
        yield part  # resumes when the part is written
        if device.type == "cpu":
            is_awaited.wait(REST * (time.thread_time() - began))


def has_memory(copied: int, held: int, local: int) -> bool:
    """Returns whether the host has room for a copy by each of `local` processes, plus half of each process's peak.

    The reserve is needed because they may still grow. copied, held: bytes of a copy, and of the existing copy.
    """
    return available_memory() + held * local > local * (1.25 * copied + most_resident() / 2)


class Writer:
    """Writes one checkpoint at a time, from the pieces of each rank. All ranks call `start` and `finish` together."""

    def __init__(self, ranks: Agreement, device: torch.device, keep_last: int, keep_best: bool):
        self.ranks, self.device, self.keep_last, self.keep_best = ranks, device, keep_last, keep_best
        self.model_files: dict[str, bytes] = {}  # on rank 0: files that the export needs besides the weights
        self.damaged: set[Path] = set()  # corrupted checkpoints that were skipped on resume
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.is_awaited = threading.Event()  # set if a caller waits for the write; then the thread does not pause
        self.streams = torch.get_device_module(device) if device.type == "cuda" else torch.cpu  # CPU streams do nothing
        self.beside = self.streams.Stream()
        self.copying: Future | None = None  # event after the copy of tensors that the next step changes
        self.writing: Future | None = None  # write of this rank's files, until all ranks know that all are written
        self.committing: Future | None = None  # on rank 0: manifest, rename, removal of older checkpoints
        self.image = torch.empty(0, dtype=torch.uint8)  # contents of this rank's file
        self.may_copy, self.copies = True, False  # whether this rank may hold a copy, and whether all ranks hold one
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
            rank_facts: contents of this rank's JSON file.
            optimizer: waits before its next step until everything is copied.
            in_place: write without a copy, which saves its memory; the call returns when all is written.

        Raises UserError: the disk is full.
        """
        self.manifest = manifest
        partial = self.ranks.directory / f"update-{manifest['update']:06}{PARTIAL}"
        # Sorted by element size, the largest first, so that each tensor is aligned to its element size in the file.
        tensors = [(piece.name, piece.tensor) for piece in sorted(owned, key=lambda one: -one.tensor.element_size())]
        header = safetensors_header(tensors)
        contents: list[Any] = [header, *(tensor for _, tensor in tensors)]
        copying = None
        if self._make_room(partial, contents, in_place):
            # Only buffers change before the optimizer step. The other tensors are copied during forward and backward.
            contents[1:] = [tensor.clone() if name.startswith("buffer/") else tensor for name, tensor in tensors]
            if self.watched is not optimizer:  # the hook also runs if DeepSpeed calls the step
                optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())
                self.watched = optimizer
            self.beside.wait_stream(self.streams.current_stream())
            # In a thread that ends after the copy. While a second thread has OpenMP threads, those of the training
            # sleep instead of spinning, which makes every update a fifth longer.
            once = ThreadPoolExecutor(1)
            copying = self.copying = once.submit(self._copy, *contents)
            once.shutdown(wait=False)
            if self.device.type not in ("cpu", "cuda"):  # other devices have no streams here
                self._wait_for_copy()
            self.is_awaited.clear()
        self.writing = self.pool.submit(self._write_rank, partial, rank_facts, contents, copying)
        if copying is None:
            self.ranks.together(self.writing.result)

    def _make_room(self, partial: Path, contents: list[Any], in_place: bool) -> bool:
        """Creates the directory if the disk has room. Returns whether all ranks copy the state; otherwise none does."""
        # The copies need as much host memory as the state of all ranks of this machine.
        size = len(contents[0]) + sum(tensor.nbytes for tensor in contents[1:])
        copied = pinned_bytes([size + PAGE]) if self.device.type == "cuda" else size
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        lacks_memory = in_place or not self.may_copy or not has_memory(copied, len(self.image), local)
        needed, num_lacking = self.ranks.sum(size + 65536 * (1 + len(self.model_files)), lacks_memory)
        self.copies = num_lacking == 0
        if num_lacking and not in_place:
            self.image = self.image[:0].clone()
        self.ranks.needed = int(needed)

        def make() -> None:
            self.ranks.directory.mkdir(parents=True, exist_ok=True)
            if needed > shutil.disk_usage(self.ranks.directory).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
            remove(partial)
            partial.mkdir()

        self.ranks.together(make, only_main=True)
        return self.copies

    def free_copy(self) -> bool:
        """Frees the copy and disables further copies. Returns whether there was a copy, the same on all ranks."""
        had_one, self.copies, self.may_copy = self.copies, False, False
        if had_one:
            self.finish()
            self.image = self.image[:0].clone()
        return had_one

    @record_function("checkpoint")  # its name in a trace
    def _wait_for_copy(self) -> None:
        """Waits for the copy before a step. On a GPU, only the stream waits, not the host."""
        if self.copying is not None:
            self.copying.result().wait()
            self.copying = None

    def _copy(self, header: bytes, *tensors: torch.Tensor) -> Any:
        """Copies the file contents to memory, and returns the event after the copy.

        The memory of the previous save is reused, because new pages take several times as long as the copy.
        """
        size = len(header) + sum(tensor.nbytes for tensor in tensors)
        if len(self.image) != size:
            room = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self.image = room[-room.data_ptr() % PAGE :][:size]
        begin = len(header)
        self.image[:begin] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        with self.streams.stream(self.beside):
            for tensor in tensors:
                end = begin + tensor.nbytes
                self.image[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=tensor.is_cuda)
                begin = end
            copied = self.streams.Event()
            copied.record(self.beside)
        return copied

    def _write_rank(self, partial: Path, facts: dict[str, Any], contents: list[Any], copying: Future | None) -> None:
        if copying is not None:
            copying.result().synchronize()
            contents = [self.image]
        name = f"rank-{self.ranks.rank:05}"
        parts = unhurried(in_chunks(contents), self.device, self.is_awaited)
        files = {f"{name}.safetensors": write_file(partial / f"{name}.safetensors", parts)}
        if self.ranks.rank == 0:
            (partial / "model").mkdir()
            for file, content in self.model_files.items():
                files[f"model/{file}"] = write_file(partial / "model" / file, [content])
            fsync(partial / "model")
        write_file(partial / f"{name}.json", [json.dumps(facts | {"files": files}).encode()])

    def is_written(self) -> bool:
        """Returns whether this rank has written its part of the current save."""
        return self.writing is not None and self.writing.done()

    def failure(self) -> str | None:
        """Returns the message for an error in this rank's thread, or None."""
        for future in (self.writing, self.committing):
            if future is not None and future.done() and (error := future.exception()) is not None:
                if not isinstance(error, OSError):
                    raise error
                return self.ranks.disk_line(error)
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
        files = {}
        for rank in range(self.ranks.world):
            name = f"rank-{rank:05}.json"
            content = (partial / name).read_bytes()
            files |= json.loads(content)["files"]
            files[name] = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
        manifest = manifest | {"files": files}
        manifest = json.loads(json.dumps(manifest))  # as it will be read: tuples become lists, keys become text
        manifest["sha256"] = hash_of(manifest)
        write_file(partial / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        fsync(partial)
        if (metrics := self.ranks.output_dir / "metrics.jsonl").is_file():
            fsync(metrics)  # so that the lines up to this update survive a power failure
        replace_directory(partial, final)
        self.damaged.discard(final)
        self._remove_older()

    def _remove_older(self) -> None:
        """Keeps the newest checkpoints and the best, and removes all others; corrupted checkpoints do not count.

        Directories with different names remain.
        """
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
                path.rename(going)  # an interrupted removal must not look like a corrupted checkpoint
                remove(going)
