"""A copy of a rank's state in host memory, from which a checkpoint is written while the training continues.

The state is copied during the next forward and backward pass, on a GPU in a separate stream. The optimizer step waits
for the copy.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.profiler import record_function

from common.files import PAGE
from common.host_memory import available_memory, pinned_bytes
from common.peak_memory import most_resident


def has_memory(copied: int, held: int, local: int) -> bool:
    """Returns whether host memory fits a copy per local process, plus half of each process's peak, because it may grow.

    copied: bytes of a copy. held: bytes of the existing copy. local: number of processes on this host.
    """
    return available_memory() + held * local > local * (1.25 * copied + most_resident() / 2)


class HostCopy:
    """The copy of a rank's file contents. Its memory is reused for each save."""

    def __init__(self, device: torch.device):
        self.device = device
        self.streams: Any = torch.get_device_module(device) if device.type == "cuda" else torch.cpu
        self.copy_stream = self.streams.Stream()  # CPU streams do nothing
        self.buffer = torch.empty(0, dtype=torch.uint8)  # contents of this rank's file
        self.copying: Future | None = None  # event after the copy of tensors that the next step changes
        self.hooked_optimizer: torch.optim.Optimizer | None = None

    def fits(self, size: int, local: int) -> bool:
        """Returns whether host memory fits a copy of `size` bytes per process, for `local` processes on this host."""
        copied = pinned_bytes([size + PAGE]) if self.device.type == "cuda" else size
        return has_memory(copied, len(self.buffer), local)

    def start(self, header: bytes, tensors: list[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer) -> Future:
        """Starts the copy, and returns the future of the event after it. The optimizer's next step waits for it."""
        # Buffers change in forward, so they are cloned now. The other tensors are copied during forward and backward.
        kept = [tensor.clone() if name.startswith("buffer/") else tensor for name, tensor in tensors]
        if self.hooked_optimizer is not optimizer:  # the hook also runs if DeepSpeed calls the step
            optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())
            self.hooked_optimizer = optimizer
        self.copy_stream.wait_stream(self.streams.current_stream())
        # In a thread that ends after the copy, because while a second thread has OpenMP threads, those of the training
        # sleep instead of spinning, which makes every update a fifth longer. Without a device of its own, it would
        # allocate a CUDA context on GPU 0 in each process.
        executor = ThreadPoolExecutor(1, "checkpoint copy", self.streams.set_device, (self.device.index or 0,))
        copying = self.copying = executor.submit(self._copy, header, *kept)
        executor.shutdown(wait=False)
        if self.device.type not in ("cpu", "cuda"):  # other devices have no streams here
            self._wait_for_copy()
        return copying

    def free(self) -> None:
        self.buffer = self.buffer[:0].clone()

    @record_function("checkpoint")  # name in a profiler trace
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
        if len(self.buffer) != size:
            pages = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self.buffer = pages[-pages.data_ptr() % PAGE :][:size]
        begin = len(header)
        self.buffer[:begin] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        with self.streams.stream(self.copy_stream):
            for tensor in tensors:
                end = begin + tensor.nbytes
                self.buffer[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=tensor.is_cuda)
                begin = end
            copied = self.streams.Event()
            copied.record(self.copy_stream)
        return copied


def free_copy(writer: Any) -> bool:
    """Frees the copy of a `write.Writer` and disables further copies.

    Returns whether there was a copy, equal on all ranks.
    """
    was_copied, writer.holds_copy, writer.may_copy = writer.holds_copy, False, False
    if was_copied:
        writer.finish()
        writer.copy.free()
    return was_copied
