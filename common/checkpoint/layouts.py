"""Maps each rank's part of weights and optimizer state to the parameters' own names, in every mode.

The same checkpoint format serves all modes, because each layout splits a tensor into ranges of its flattened elements.
FSDP2 splits the first dimension, ZeRO-3 each parameter, ZeRO-1 and 2 the concatenated parameters; DDP does not split.
So a part is (name, start, elements), and a checkpoint of any layout can be read into any layout. Tensor parallelism
splits some matrices by columns. For these, a part also lists its columns, and its range refers to their elements.
"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from common.checkpoint.format import DTYPE_NAMES
from common.checkpoint.parts import OptimizerState, Part, Piece, check_known, replicated_parts
from common.models.adapters import has_adapter
from common.models.model_setup import without_wrapper
from common.parallel.distributed_mode import is_sharded


class Layout:
    """This rank's part of the state: float32 weights, persistent buffers, optimizer state."""

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any):
        self.rank, self.model, self.optimizer = accelerator.process_index, without_wrapper(model), optimizer
        self.state = OptimizerState(optimizer)
        self.is_sharded = is_sharded(accelerator)
        if self.is_sharded:
            from common.checkpoint.sharded_layouts import sharded_parts

            self.parts = list(sharded_parts(self.model, optimizer, self.rank))
        else:
            named = dict(self.model.named_parameters())
            check_known(named, optimizer)
            self.parts = list(replicated_parts(named, self.rank, list(range(accelerator.num_processes))))

    def _buffers(self) -> Iterator[Piece]:
        # Most models have no persistent buffers. If the model is sharded, state_dict could run hooks that all-gather.
        if not self.is_sharded and not any(map(_has_persistent_buffers, self.model.modules())):
            return
        from common.checkpoint.buffers import buffer_pieces

        yield from buffer_pieces(self.model, self.rank)

    def pieces(self) -> Iterator[Piece]:
        """Yields this rank's pieces. For an adapter, the frozen base is omitted, because no update changes it."""
        is_adapter = has_adapter(self.model)
        for part in self.parts:
            if is_adapter and part.state_key is None:
                continue
            yield Piece(f"weight/{part.name}", part.weight, part.start, part.shape, part.is_owner, part.columns)
            for key, value in self.state.of(part.state_key).items():
                if torch.is_tensor(value) and value.ndim:
                    yield _state_piece(f"optimizer.{key}/{part.name}", value, part)
        yield from self._buffers()

    def scalar_state(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the scalar optimizer state (a step count) that this rank writes, by "optimizer.KEY/NAME".

        The second dict contains the dtypes of those values that are tensors.
        """
        scalars = {
            f"optimizer.{key}/{part.name}": value
            for part in self.parts
            if part.is_owner
            for key, value in self.state.of(part.state_key).items()
            if not (torch.is_tensor(value) and value.ndim)
        }
        tensors = {name: value for name, value in scalars.items() if torch.is_tensor(value)}
        if tensors:  # a single transfer for all values
            values = torch.stack([value.detach().double() for value in tensors.values()]).tolist()
            scalars |= dict(zip(tensors, values, strict=True))
        return scalars, {name: DTYPE_NAMES[value.dtype] for name, value in tensors.items()}

    def state_keys(self) -> dict[str, torch.Tensor | None]:
        """Returns each parameter's key in `optimizer.state` (`Part.state_key`), by name; None if it is not trained."""
        state_keys = {part.name: part.state_key for part in self.parts}
        if self.is_sharded:
            from common.checkpoint.sharded_layouts import state_keys_elsewhere

            state_keys |= state_keys_elsewhere(self.model, self.optimizer)
        return state_keys

    def untrained(self) -> list[str]:
        """Returns the names of the parameters without optimizer state.

        They are frozen, never had a gradient, or the optimizer keeps no state for them. Call it on all ranks together,
        because the stages of a pipeline exchange their names.
        """
        names = [name for name, state_key in self.state_keys().items() if not self.state.of(state_key)]
        if hasattr(self.model, "pipeline_stages"):
            from common.checkpoint.sharded_layouts import gather_names

            return gather_names(names)
        return names


def _has_persistent_buffers(module: torch.nn.Module) -> bool:
    """Returns whether the module has persistent buffers of its own; skips 4-bit layers, whose state_dict is slow."""
    names = dict(module.named_buffers(recurse=False, remove_duplicate=False)).keys()
    return bool(names) and not names.isdisjoint(module.state_dict())


def _state_piece(name: str, value: torch.Tensor, part: Part) -> Piece:
    if part.state_key is not None and value.shape == part.state_key.shape:
        return Piece(name, part.select(value).detach(), part.start, part.shape, part.is_owner, part.columns)
    from common.checkpoint.block_states import block_piece

    return block_piece(name, value, part)
