"""Moves the saved tensors of a checkpointed layer to host memory and back, while other layers compute.

The copies run in a separate stream: out during the next layers' forward pass, and back during the recomputation of the
layer above. (torch's `save_on_cpu` copies in the compute stream, which waits.) The host does not wait; the streams wait
for each other. After torchtune's OffloadActivations.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from common.host_memory import pinned_bytes

# Layers whose tensors may be on the device beside those in use: leaving it in forward, coming back in backward.
AHEAD = 2


class _Moved:
    """A tensor in host memory; also on the device while it leaves, and from when it comes back until it is taken."""

    def __init__(self, layer: int, tensor: torch.Tensor, buffer: torch.Tensor, owner: "HostOffload"):
        self.layer, self.tensor, self.buffer, self.owner = layer, tensor, buffer, owner
        dense = torch.empty_like(tensor, device="meta")  # of the same order in memory, without gaps
        self.host = buffer[: dense.nbytes].view(tensor.dtype).as_strided(dense.shape, dense.stride())
        self.copied: Any = None  # the event after its newest copy
        self.is_taken = False

    def __del__(self):
        if self.tensor is not None:  # never taken: what is computed next must not get its memory before the copy ends
            self.owner.streams.current_stream(self.owner.device).wait_event(self.copied)
        # All copies are on one stream: the next one into this memory comes after those that were asked for.
        self.owner.pool.append(self.buffer)


class HostOffload:
    """Moves the saved tensors of one model, those on `device` (its type is enough).

    Its host memory is pinned and kept: as much as one forward needs, each tensor rounded up to a power of two.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.side: Any = None  # the stream of the copies
        self.pool: list[torch.Tensor] = []  # free host memory
        self.layer = self.num_of_layer = 0  # the newest layer, over all forwards; its tensors so far
        self.moved: weakref.WeakValueDictionary[tuple[int, int], _Moved] = weakref.WeakValueDictionary()  # by both
        self.leaving: deque[tuple[int, weakref.ref[_Moved]]] = deque()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, but what it saves for backward is moved: around `torch.utils.checkpoint`, a layer's inputs."""

        @torch.compiler.disable  # a graph has neither streams nor such hooks
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
                # Given back in the order of the stream that computes: `record_stream` would give it back when the host
                # sees that the copy has ended, and a host that is far ahead would take new memory for each layer.
                self._wait_for(oldest)
                oldest.tensor = None
        return moved

    def unpack(self, moved: Any) -> torch.Tensor:
        if not isinstance(moved, _Moved):
            return moved
        self._fetch(moved)
        self._wait_for(moved)
        (tensor, moved.tensor), moved.is_taken = (moved.tensor, None), True
        for layer in range(moved.layer, moved.layer - 1 - AHEAD, -1):  # backward comes to them next
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
        """On the side stream, after all that was asked for so far: the source is computed, the target's memory free."""
        self.side.wait_stream(self.streams.current_stream(self.device))
        with self.streams.stream(self.side):
            target.copy_(source, non_blocking=True)
        moved.copied = self.side.record_event()

    def _wait_for(self, moved: _Moved) -> None:
        self.streams.current_stream(self.device).wait_event(moved.copied)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """The smallest free buffer that is large enough, or a new one."""
        fitting = [(buffer.nbytes, index) for index, buffer in enumerate(self.pool) if buffer.nbytes >= num_bytes]
        if fitting:
            return self.pool.pop(min(fitting)[1])
        return torch.empty(pinned_bytes([num_bytes]), dtype=torch.uint8, pin_memory=self.device.type != "cpu")
