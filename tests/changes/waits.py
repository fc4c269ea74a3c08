"""Where the host would wait for its device within a global batch, noted on a CPU, where nothing shows it."""

import json
import traceback
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from changes import before, before_reduce, change
from common.models import attention_masks
from common.training import accumulation

# What makes a host wait for its device: for a value, or for as many results as there turn out to be.
WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "bincount", "repeat_interleave")
WAITS += ("_unique", "_unique2", "unique_dim", "unique_consecutive", "_linalg_check_errors")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


class WaitNotes(TorchDispatchMode):
    """Notes the operations, of forward and backward, for which a GPU's host would wait, and where they were asked for.

    What reads a CPU tensor's memory without an operation is noted by `Reads`.
    """

    def __init__(self):
        super().__init__()
        self.notes, self.num_operations = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_operations += 1
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        by_values = name in INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if name == "repeat_interleave":
            by_values, name = kwargs.get("output_size") is None, ""
        if name == "_to_copy":
            by_values = torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
        if name in WAITS or by_values:
            self.note(str(function))
        return function(*args, **kwargs)

    def note(self, what):
        frames = [frame for frame in traceback.extract_stack()[:-1] if not frame.name.startswith("__torch_")]
        frames = [frame for frame in frames if "/torch/" not in frame.filename]
        self.notes.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}")


class Reads(TorchFunctionMode):
    """Notes what copies a tensor to the host, on a CPU without an operation."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu):
            self.waits.note(function.__name__)
        return function(*args, **(kwargs or {}))


def note_waits(path):
    """Writes the waits of each global batch, from before its first forward until its gradients are clipped."""
    watch, written = [], []

    def begin(*_):
        waits = WaitNotes()
        watch.extend([waits, Reads(waits)])
        for mode in watch:
            mode.__enter__()

    def end(*_):
        waits = watch[0]
        while watch:
            watch.pop().__exit__(None, None, None)
        assert waits.num_operations > 100, "nothing was watched"
        written.append(waits.notes)
        Path(path).write_text(json.dumps(written))

    # On a CPU, positions are also checked in the model, where reading them waits for nothing; on a GPU they are not.
    change(attention_masks, "is_tracing", lambda _: True)
    before(accumulation, "loss_scale", begin)
    before_reduce(end)
