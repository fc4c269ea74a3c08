"""Traces which storages the operators of an update allocate and deallocate."""

from collections import defaultdict
from typing import NamedTuple
from weakref import finalize

import torch

from common.internals.torch import dispatch_mode, is_fake, storage_key, tree_leaves, without_fakes
from common.report.flops import FORMULAS
from tools.plan.result_cache import ResultCache

_ATEN = torch.ops.aten
GROUPED = _ATEN._grouped_mm.default
FEW_STEPS = 64
LSTM, LSTM_BACKWARD = _ATEN.mkldnn_rnn_layer.default, _ATEN.mkldnn_rnn_layer_backward.default


COPY, DEVICE = _ATEN._to_copy.default, torch.ops.prim.device.default


def _is_without_data(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or is_fake(tensor)


def _lstm_workspace(args: tuple) -> int:
    """Returns the bytes that oneDNN keeps for the backward pass of an LSTM layer; 0 without gradients.

    They are measured by running the layer on zeros; beyond 2 * FEW_STEPS steps, they are extrapolated linearly.
    """

    def measure(steps: int) -> int:
        first = torch.zeros(steps, *args[0].shape[1:], dtype=args[0].dtype)
        others = (torch.zeros(x.shape, dtype=x.dtype) if torch.is_tensor(x) else x for x in args[1:])
        workspace = LSTM(first, *others)[3]
        return 0 if workspace is None else workspace.nbytes

    steps, few = args[0].shape[0], FEW_STEPS
    with without_fakes():
        if steps <= 2 * few:
            return measure(steps)
        smaller, larger = measure(few), measure(2 * few)
    return smaller + (steps - few) * (larger - smaller) // few


def _with_all_heads(args: tuple) -> list:
    """Returns the arguments of attention, with shapes as if keys and values had as many heads as the queries.

    The FLOPs are the same, but torch 2.11 only counts them if the numbers are equal. It accepts shapes as tensors.
    """
    heads = args[0].shape[1]
    return [
        torch.Size((x.shape[0], heads, *x.shape[2:])) if torch.is_tensor(x) and x.ndim == 4 else x for x in args[:4]
    ] + list(args[4:])


class Event(NamedTuple):
    """An allocation of a storage (size in bytes) or its deallocation (the same size, negative)."""

    segment: str  # part of the update, such as "backward 1"
    storage: int  # index of the storage
    size: int


class AllocationTracer(dispatch_mode()):  # type: ignore[misc]  # the class is private in torch
    """While active, records each allocation by an operator, and each deallocation, as an event."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.segment = "start"
        self.flops: dict[str, int] = defaultdict(int)  # FLOPs by segment
        self.parts: dict[int, str] = {}  # contents of a storage, by its index; default: activations
        self.vocabulary = 0  # tensors with a dimension of this size count as logits
        self._results = ResultCache()
        self._workspaces: dict[tuple, int] = {}  # bytes of `_lstm_workspace`, by the shapes of a layer
        self._numbers: dict[int, int] = {}  # indices of live storages, by `storage_key`

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE and is_fake(args[0]):  # two of three calls; the fake mode takes longer for the same answer
            return args[0].fake_device
        out = self._call(func, args, kwargs or {})
        if (count := FORMULAS.get(func.overloadpacket)) is not None:
            own = _with_all_heads(args) if "scaled_dot_product" in str(func) else args
            self.flops[self.segment] += count(*own, **(kwargs or {}), out_val=out)
        is_copy = func is COPY and self.parts.get(self.number_of(args[0])) == "weights"
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                number = self.number_of(tensor)
                if is_copy:  # autocast's copy, in the dtype of the matmuls
                    self.parts.setdefault(number, "cast weights")
                if self.vocabulary in tensor.shape:
                    self.parts.setdefault(number, "logits")
        return out

    def _call(self, func, args, kwargs):
        if func in (LSTM, LSTM_BACKWARD) and _is_without_data(args[0]):
            return self._call_lstm(func, args)
        if func is not GROUPED or args[0].dtype == torch.bfloat16 or not _is_without_data(args[0]):
            return self._results.call(func, args, kwargs)
        # For tensors without data, torch supports grouped matmuls (of experts) in bf16 only.
        narrow = [arg.to(torch.bfloat16) if arg.is_floating_point() else arg for arg in args]
        return func(*narrow, **kwargs).to(args[0].dtype)

    def _call_lstm(self, func, args):
        """Adds oneDNN's allocations other than the results: repacked weights, gates of all steps, and a workspace.

        A training forward pass keeps the workspace for the backward pass; without data, torch returns it empty.
        """
        steps, rows, _ = args[0].shape
        weights, recurrent = args[1:3]
        gates = steps * rows * recurrent.nbytes // recurrent.shape[1]
        size = weights.nbytes + (1 if func is LSTM else 2) * recurrent.nbytes + gates
        temporary = args[0].new_empty(size, dtype=torch.uint8)
        self.number_of(temporary)
        out = func(*args)
        if func is LSTM:
            shapes = tuple((*arg.shape, arg.dtype) if torch.is_tensor(arg) else str(arg) for arg in args)
            case = torch.is_grad_enabled(), shapes
            if case not in self._workspaces:  # segments of equal shapes have equal workspaces
                self._workspaces[case] = _lstm_workspace(args)
            out = (*out[:3], out[3].new_empty(self._workspaces[case]))
        return out

    def number_of(self, tensor: torch.Tensor) -> int:
        """Returns the index of a tensor's storage; a new storage gets a new index."""
        storage = tensor.untyped_storage()
        address = storage_key(tensor)
        if address not in self._numbers:
            number = self._numbers[address] = len(self.events)
            self.events.append(Event(self.segment, number, storage.nbytes()))
            finalize(storage, self._freed, address, self.events[-1]).atexit = False
        return self._numbers[address]

    def name(self, part: str, *tensors: torch.Tensor | None) -> None:
        """Records what these tensors contain: "weights", "gradients", "optimizer state", "buffers"."""
        for tensor in tensors:
            if tensor is not None:
                self.parts[self.number_of(tensor)] = part

    def _freed(self, address: int, allocation: Event) -> None:
        self._numbers.pop(address, None)
        self.events.append(Event(self.segment, allocation.storage, -allocation.size))
