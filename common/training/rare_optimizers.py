"""Builds the optimizers that few runs use, from groups of parameters, model, learning rate and AdamW's betas."""

from typing import Any

import torch
from torch import nn

Groups = list[dict[str, Any]]


def _adamw_8bit(
    groups: Groups, model: nn.Module, learning_rate: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    from common.training.adamw_8bit import adamw_8bit

    return adamw_8bit(groups, model, learning_rate, betas)


def _muon(groups: Groups, model: nn.Module, learning_rate: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    from common.training.muon import Muon

    return Muon(groups, model, learning_rate, betas)


def _adafactor(groups: Groups, _: nn.Module, learning_rate: float, __: tuple[float, float]) -> torch.optim.Optimizer:
    # In torch.optim.Adafactor, the update is learning_rate x RMS(parameter), and the rate at most 1/sqrt(update).
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=learning_rate, scale_parameter=False, relative_step=False, warmup_init=False)


BUILDERS = {"adamw8bit": _adamw_8bit, "muon": _muon, "adafactor": _adafactor}  # by the names of `optimizers.OPTIMIZERS`
