"""Offloads the saved tensors of a checkpointed layer to host memory and back, while other layers compute.

The copies run in a separate stream: to the host during the forward pass of the next layers, and back during the
recomputation of the layer above. (torch's `save_on_cpu` copies in the compute stream, which waits.) The host never
waits; the streams wait for each other's events. The design follows torchtune's OffloadActivations.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from common.host_memory import pinned_bytes

# Number of layers whose tensors may be on the device in addition to those in use: not yet copied to the host in
# forward, or prefetched in backward.
AHEAD = 2


class _Offloaded:
    """A tensor in host memory; also on the device until the copy to the host ends, and from the copy back until use."""

    def __init__(self, layer: int, tensor: torch.Tensor, buffer: torch.Tensor, owner: "HostOffload"):
        self.layer, self.buffer, self.owner = layer, buffer, owner
        self.tensor: Any = tensor  # None while it is only in host memory
        dense = torch.empty_like(tensor, device="meta")  # same memory order, without gaps
        self.host = buffer[: dense.nbytes].view(tensor.dtype).as_strided(dense.shape, dense.stride())
        self.copied: Any = None  # event after the latest copy
        self.is_used = False

    def __del__(self):
        if self.tensor is not None:  # dropped without use: its memory must not be reused before the copy ends
            self.owner.streams.current_stream(self.owner.device).wait_event(self.copied)
        # All copies are in one stream, so the next copy into this buffer runs after those requested so far.
        self.owner.pool.append(self.buffer)


class HostOffload:
    """Offloads the saved tensors of one model to host memory, if they are on a device of the type of `device`.

    The host memory is pinned and kept for reuse. It has the size of one forward's saved tensors, each rounded up to a
    power of two.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.copy_stream: Any = None  # the stream of the copies
        self.pool: list[torch.Tensor] = []  # free buffers in host memory
        self.layer = self.num_in_layer = 0  # running number of the current layer; number of its tensors so far
        # By (number of the layer, number in the layer).
        self.offloaded: weakref.WeakValueDictionary[tuple[int, int], _Offloaded] = weakref.WeakValueDictionary()
        self.copying_out: deque[tuple[int, weakref.ref[_Offloaded]]] = deque()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `function`, so that the tensors that it saves for backward are offloaded to the host.

        For `torch.utils.checkpoint`, these tensors are the inputs of a layer.
        """

        @torch.compiler.disable  # a compiled graph supports neither streams nor these hooks
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.layer, self.num_in_layer = self.layer + 1, 0
            with saved_tensors_hooks(self.pack, self.unpack):
                return function(*args, **kwargs)

        return wrapped

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type != self.device.type or not tensor.numel():
            return tensor
        if self.copy_stream is None:
            self.device = tensor.device
            self.streams = torch.get_device_module(self.device)
            self.copy_stream = self.streams.Stream(self.device)
        offloaded = _Offloaded(self.layer, tensor, self._buffer(tensor.nbytes), self)
        self._copy(offloaded, offloaded.host, tensor)
        self.offloaded[self.layer, self.num_in_layer] = offloaded
        self.num_in_layer += 1
        self.copying_out.append((self.layer, weakref.ref(offloaded)))
        while self.copying_out and self.copying_out[0][0] <= self.layer - AHEAD:
            if (oldest := self.copying_out.popleft()[1]()) is not None and not oldest.is_used:
                # Deallocated in the order of the compute stream. With `record_stream`, it would be deallocated when the
                # host sees that the copy has ended. A host that is far ahead would then allocate new memory for each
                # layer.
                self._wait_for(oldest)
                oldest.tensor = None
        return offloaded

    def unpack(self, offloaded: Any) -> torch.Tensor:
        if not isinstance(offloaded, _Offloaded):
            return offloaded
        self._fetch(offloaded)
        self._wait_for(offloaded)
        (tensor, offloaded.tensor), offloaded.is_used = (offloaded.tensor, None), True
        for layer in range(offloaded.layer, offloaded.layer - 1 - AHEAD, -1):  # prefetch: backward needs these next
            for number in itertools.count():
                if (other := self.offloaded.get((layer, number))) is None:
                    break
                if not other.is_used:
                    self._fetch(other)
        return tensor

    def _fetch(self, offloaded: _Offloaded) -> None:
        if offloaded.tensor is None:
            offloaded.tensor = torch.empty_like(offloaded.host, device=self.device)
            self._copy(offloaded, offloaded.tensor, offloaded.host)

    def _copy(self, offloaded: _Offloaded, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies in the side stream, after all work queued so far: the source is computed, and the target is free."""
        self.copy_stream.wait_stream(self.streams.current_stream(self.device))
        with self.streams.stream(self.copy_stream):
            target.copy_(source, non_blocking=True)
        offloaded.copied = self.copy_stream.record_event()

    def _wait_for(self, offloaded: _Offloaded) -> None:
        self.streams.current_stream(self.device).wait_event(offloaded.copied)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns the smallest free buffer of at least `num_bytes` bytes, or a new buffer."""
        fitting = [(buffer.nbytes, index) for index, buffer in enumerate(self.pool) if buffer.nbytes >= num_bytes]
        if fitting:
            return self.pool.pop(min(fitting)[1])
        return torch.empty(pinned_bytes([num_bytes]), dtype=torch.uint8, pin_memory=self.device.type != "cpu")
