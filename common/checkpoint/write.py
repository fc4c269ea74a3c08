"""Writes a checkpoint during training: a copy in memory, a file per rank, then the rename that completes it.

The checkpoint is written under a temporary name (`.partial`), flushed, and renamed when its manifest is on the disk, so
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

# On a CPU, seconds that the thread which writes rests for each second that it computes. What it computes, the updates
# lose: so each loses a fiftieth, and not one of them a tenth.
REST = 50


def unhurried(parts: Iterable[Any], device: torch.device, is_awaited: threading.Event) -> Iterator[Any]:
    """The parts, each with a rest after it where the thread that writes them shares a CPU with the training."""
    for part in parts:
        began = time.thread_time()
        yield part  # until it is written
        if device.type == "cpu":
            is_awaited.wait(REST * (time.thread_time() - began))


def has_memory(copied: int, held: int, local: int) -> bool:
    """Whether the host has room for a copy of each of `local` processes, and for half of what each has taken so far.

    They may still grow. copied, held: bytes of a copy, and of the one that is there.
    """
    return available_memory() + held * local > local * (1.25 * copied + most_resident() / 2)


class Writer:
    """Writes one checkpoint at a time, of what each rank holds; `start` and `finish` are called by all together."""

    def __init__(self, ranks: Agreement, device: torch.device, keep_last: int, keep_best: bool):
        self.ranks, self.device, self.keep_last, self.keep_best = ranks, device, keep_last, keep_best
        self.model_files: dict[str, bytes] = {}  # rank 0: what the export needs besides the weights
        self.damaged: set[Path] = set()  # found so on the way to the one that is continued
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.is_awaited = threading.Event()  # what is written: the thread does not rest
        self.streams = torch.get_device_module(device) if device.type == "cuda" else torch.cpu  # whose do nothing
        self.beside = self.streams.Stream()
        self.copying: Future | None = None  # the event after the copy of what the next step changes
        self.writing: Future | None = None  # this rank's files, until all ranks know that all are written
        self.committing: Future | None = None  # rank 0: manifest, rename, removal of older ones
        self.image = torch.empty(0, dtype=torch.uint8)  # what the file of this rank holds
        self.may_copy, self.copies = True, False  # whether this rank may hold one, and all ranks now do
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
        # The largest elements first: in the file, each tensor then begins at a multiple of its own.
        tensors = [(piece.name, piece.tensor) for piece in sorted(owned, key=lambda one: -one.tensor.element_size())]
        header = safetensors_header(tensors)
        contents: list[Any] = [header, *(tensor for _, tensor in tensors)]
        copying = None
        if self._make_room(partial, contents, in_place):
            # Until the optimizer's step only buffers change: the rest is copied beside forward and backward.
            contents[1:] = [tensor.clone() if name.startswith("buffer/") else tensor for name, tensor in tensors]
            if self.watched is not optimizer:  # also where DeepSpeed calls it
                optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())
                self.watched = optimizer
            self.beside.wait_stream(self.streams.current_stream())
            # In a thread that ends with it: while a second one has threads of OpenMP, those of the training sleep in
            # the place of spinning, which makes every update a fifth longer.
            once = ThreadPoolExecutor(1)
            copying = self.copying = once.submit(self._copy, *contents)
            once.shutdown(wait=False)
            if self.device.type not in ("cpu", "cuda"):  # it has no streams here
                self._wait_for_copy()
            self.is_awaited.clear()
        self.writing = self.pool.submit(self._write_rank, partial, rank_facts, contents, copying)
        if copying is None:
            self.ranks.together(self.writing.result)

    def _make_room(self, partial: Path, contents: list[Any], in_place: bool) -> bool:
        """Makes the directory, if the disk has room. Whether the state is copied: on all ranks, or on none."""
        # The copy takes as much of the host's memory as the state of all ranks of this machine.
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
        """Gives back the memory of the copy, and takes none from now on. False on all ranks alike: there was none."""
        had_one, self.copies, self.may_copy = self.copies, False, False
        if had_one:
            self.finish()
            self.image = self.image[:0].clone()
        return had_one

    @record_function("checkpoint")  # its name in a trace
    def _wait_for_copy(self) -> None:
        """Before a step. On a GPU only what it computes waits: the host has it stand in line behind the copy."""
        if self.copying is not None:
            self.copying.result().wait()
            self.copying = None

    def _copy(self, header: bytes, *tensors: torch.Tensor) -> Any:
        """As the file will be, in the memory of the save before: fresh pages take several times as long as the copy.

        The event that comes when all is copied.
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
