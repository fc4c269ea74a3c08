"""Puts weights, optimizer state and loss scale where a checkpoint has them."""

from typing import Any

import torch
from accelerate import Accelerator

from common.checkpoint import layouts
from common.checkpoint.format import Reader
from common.errors import UserError
from common.parallel.liveness import wait_for_all


def scaler_state(accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
    """The loss scale of fp16 and its counts, Accelerate's or DeepSpeed's; empty for other precisions."""
    if accelerator.scaler is not None:
        return accelerator.scaler.state_dict()
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return {key: value for key, value in vars(scaler).items() if isinstance(value, int | float)} if scaler else {}


def restore_scaler(state: dict[str, Any], accelerator: Accelerator, optimizer: Any) -> None:
    """Sets the loss scale to what `scaler_state` gave; a run of another precision keeps its own."""
    if accelerator.scaler is not None:
        if state:
            accelerator.scaler.load_state_dict(state)
    elif scaler := getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None):
        vars(scaler).update({key: value for key, value in state.items() if key in vars(scaler)})


@torch.no_grad()
def load_state(reader: Reader, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:
    """Weights, buffers and optimizer state from a checkpoint of any mode and world size; each rank reads its part."""
    layouts.make_state(accelerator, model, optimizer, reader.tensors, reader.scalar_state)
    for piece in layouts.pieces(accelerator, model, optimizer):
        if piece.name not in reader.tensors or reader.tensors[piece.name][1] != tuple(piece.shape):
            saved = reader.tensors.get(piece.name, (None, "not there"))[1]
            raise UserError(f"--resume {reader.directory}: {piece.name} is {tuple(piece.shape)}, and {saved} in it")
        values = reader.read(piece.name, piece.start, piece.tensor.numel())
        piece.tensor.copy_(values.view(piece.tensor.shape))
    wait_for_all()  # one may read slowly
    layouts.refresh(optimizer)
