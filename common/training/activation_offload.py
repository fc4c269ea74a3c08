"""Moves the saved tensors of a checkpointed layer to host memory and back, while other layers compute.

The copies run in a separate stream: out during the next layers' forward pass, and back during the recomputation of the
layer above. (torch's `save_on_cpu` copies in the compute stream, which waits.) The host does not wait; the streams wait
for each other. The design follows torchtune's OffloadActivations.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from common.host_memory import pinned_bytes

# Number of layers whose tensors may be on the device in addition to those in use: on their way out in forward, or back
# in backward.
AHEAD = 2


class _Moved:
    """A tensor in host memory; also on the device until its copy out ends, and from its copy back until its use."""

    def __init__(self, layer: int, tensor: torch.Tensor, buffer: torch.Tensor, owner: "HostOffload"):
        self.layer, self.buffer, self.owner = layer, buffer, owner
        self.tensor: Any = tensor  # None while it is only in host memory
        dense = torch.empty_like(tensor, device="meta")  # same memory order, without gaps
        self.host = buffer[: dense.nbytes].view(tensor.dtype).as_strided(dense.shape, dense.stride())
        self.copied: Any = None  # the event after its latest copy
        self.is_taken = False

    def __del__(self):
        if self.tensor is not None:  # never used: later kernels must not get its memory before the copy ends
            self.owner.streams.current_stream(self.owner.device).wait_event(self.copied)
        # All copies are in one stream, so the next copy into this buffer runs after those requested so far.
        self.owner.pool.append(self.buffer)


class HostOffload:
    """Moves the saved tensors of one model to host memory, if they are on `device` (only its type matters).

    The host memory is pinned and kept for reuse. It has the size of one forward's saved tensors, each rounded up to a
    power of two.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.side: Any = None  # the stream of the copies
        self.pool: list[torch.Tensor] = []  # free buffers in host memory
        self.layer = self.num_of_layer = 0  # number of the newest layer, over all forwards; its tensors so far
        # By (number of the layer, number in the layer).
        self.moved: weakref.WeakValueDictionary[tuple[int, int], _Moved] = weakref.WeakValueDictionary()
        self.leaving: deque[tuple[int, weakref.ref[_Moved]]] = deque()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with the tensors that it saves for backward moved to the host.

        For `torch.utils.checkpoint`, these tensors are the inputs of a layer.
        """

        @torch.compiler.disable  # a compiled graph supports neither streams nor these hooks
        def moving(*args: Any, **kwargs: Any) -> Any:
            self.layer, self.num_of_layer = self.layer + 1, 0
            with saved_tensors_hooks(self.pack, self.unpack):
                return function(*args, **kwargs)

        return moving

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type != self.device.type or not tensor.numel():
            return tensor
        if self.side is None:
            self.device = tensor.device
            self.streams = torch.get_device_module(self.device)
            self.side = self.streams.Stream(self.device)
        moved = _Moved(self.layer, tensor, self._buffer(tensor.nbytes), self)
        self._copy(moved, moved.host, tensor)
        self.moved[self.layer, self.num_of_layer] = moved
        self.num_of_layer += 1
        self.leaving.append((self.layer, weakref.ref(moved)))
        while self.leaving and self.leaving[0][0] <= self.layer - AHEAD:
            if (oldest := self.leaving.popleft()[1]()) is not None and not oldest.is_taken:
                # Deallocated in the order of the compute stream. With `record_stream`, it would be deallocated when the
                # host sees that the copy has ended. A host that is far ahead would then allocate new memory for each
                # layer.
                self._wait_for(oldest)
                oldest.tensor = None
        return moved

    def unpack(self, moved: Any) -> torch.Tensor:
        if not isinstance(moved, _Moved):
            return moved
        self._fetch(moved)
        self._wait_for(moved)
        (tensor, moved.tensor), moved.is_taken = (moved.tensor, None), True
        for layer in range(moved.layer, moved.layer - 1 - AHEAD, -1):  # backward needs these next
            for number in itertools.count():
                if (other := self.moved.get((layer, number))) is None:
                    break
                if not other.is_taken:
                    self._fetch(other)
        return tensor

    def _fetch(self, moved: _Moved) -> None:
        if moved.tensor is None:
            moved.tensor = torch.empty_like(moved.host, device=self.device)
            self._copy(moved, moved.tensor, moved.host)

    def _copy(self, moved: _Moved, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies in the side stream, after all work queued so far: the source is computed, and the target is free."""
        self.side.wait_stream(self.streams.current_stream(self.device))
        with self.streams.stream(self.side):
            target.copy_(source, non_blocking=True)
        moved.copied = self.side.record_event()

    def _wait_for(self, moved: _Moved) -> None:
        self.streams.current_stream(self.device).wait_event(moved.copied)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns the smallest free buffer of at least `num_bytes` bytes, or a new buffer."""
        fitting = [(buffer.nbytes, index) for index, buffer in enumerate(self.pool) if buffer.nbytes >= num_bytes]
        if fitting:
            return self.pool.pop(min(fitting)[1])
        return torch.empty(pinned_bytes([num_bytes]), dtype=torch.uint8, pin_memory=self.device.type != "cpu")
