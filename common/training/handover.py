"""Sends a global batch from a DataLoader worker to the training process as a single block of shared memory.

Each tensor that is sent separately needs a file descriptor, and a process has 1,024 by default. If a block does not
fit in shared memory, or no descriptor is left, the block is sent through the pipe between the processes.
"""

import io
import os
import pickle
import resource
import signal
import traceback
from contextlib import suppress
from typing import Any

import torch

from common.internals.python_uncommon import handle_unsent
from common.training.stop_signals import SIGNALS

ALIGNMENT = 64  # bytes, as torch aligns its own tensors
MAX_OPEN_FILES = 65536  # replaces an infinite limit, because some programs loop over all possible descriptors


def pack_batch(batch: Any) -> Any:
    """Packs a batch in a data worker, as a DataLoader's collate_fn.

    The training process receives the unpacked batch, with identical bits.
    """
    return _Packed(batch)


def start_worker(_: int) -> None:
    """Prepares a data worker, as a DataLoader's worker_init_fn. If a batch cannot be sent, the worker and the run end.

    Without this, Python prints the error and drops the batch, and the training process waits for it indefinitely.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    handle_unsent(_end_worker)


def _end_worker(error: BaseException, _: Any) -> None:
    traceback.print_exception(error)
    os._exit(1)


def raise_file_limit() -> None:
    """Raises this process's soft limit of open files to its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):  # macOS has a lower limit that it does not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class _Packed:
    """A batch in transit: all its tensors are in one block. Unpickling it returns the batch."""

    def __init__(self, batch: Any) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(batch)
        self.pickled, self.block = file.getvalue(), torch.empty(pickler.size, dtype=torch.uint8)
        with suppress(RuntimeError):
            self.block.share_memory_()
        for start, tensor in pickler.tensors:
            _view(self.block, start, tensor.dtype, tensor.shape).copy_(tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self.pickled, self.block if self.block.is_shared() else bytearray(self.block.numpy()))


class _Pickler(pickle.Pickler):
    """Pickles all except tensors, which are replaced by their position in the block, dtype and shape."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.size = 0

    def persistent_id(self, value: Any) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
        if not isinstance(value, torch.Tensor):
            return None
        start = self.size
        self.tensors.append((start, value))
        self.size += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        return start, value.dtype, tuple(value.shape)


class _Unpacker(pickle.Unpickler):
    def __init__(self, pickled: bytes, block: torch.Tensor) -> None:
        super().__init__(io.BytesIO(pickled))
        self.block = block

    def persistent_load(self, location: tuple[int, torch.dtype, tuple[int, ...]]) -> torch.Tensor:
        return _view(self.block, *location)


def _view(block: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor of this dtype and shape that starts at byte `start` of the block; a view."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return block[start : start + size].view(dtype).view(shape)


def _unpack(pickled: bytes, block: torch.Tensor | bytearray) -> Any:
    return _Unpacker(
        pickled, block if isinstance(block, torch.Tensor) else torch.frombuffer(block, dtype=torch.uint8)
    ).load()
