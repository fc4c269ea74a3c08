"""The persistent buffers of a model, such as the running means of batch normalization, as parts of a checkpoint."""

from collections.abc import Iterator
from typing import Any

from common.checkpoint.parts import Piece
from common.internals.torch import persistent_buffers
from common.training.process_grid import current_grid


def buffer_pieces(model: Any, rank: int) -> Iterator[Piece]:
    """Yields each persistent buffer. Of the ranks that hold the same part of the model, only the first one writes."""
    stages = getattr(model, "pipeline_stages", None)
    held_before = stages.held_before if stages else ()
    for prefix, module in model.named_modules():
        for name, buffer in persistent_buffers(module):
            full = f"{prefix}.{name}" if prefix else name
            is_owner = rank % current_grid().stage_size == 0 and full not in held_before
            yield Piece(f"buffer/{full}", buffer.detach(), 0, tuple(buffer.shape), is_owner)
