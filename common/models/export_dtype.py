"""Converts weights and config.json to the dtype of an export, if it differs from the dtype in training."""

import json
from pathlib import Path

import torch


def cast(weights: dict[str, torch.Tensor], dtype: str | None) -> dict[str, torch.Tensor]:
    """Returns the weights in a dtype; None: unchanged. Integer tensors keep their dtype; tied weights stay tied."""
    if dtype is None:
        return weights
    made: dict[tuple, torch.Tensor] = {}
    for weight in weights.values():
        key = weight.data_ptr(), weight.shape, weight.stride()
        if key not in made:
            made[key] = weight.to(getattr(torch, dtype)) if weight.is_floating_point() else weight
    return {name: made[weight.data_ptr(), weight.shape, weight.stride()] for name, weight in weights.items()}


def note(config_file: Path, dtype: str | None) -> None:
    """Sets the dtype in a model's config.json and in its nested configurations; None: unchanged."""

    def with_dtype(config: dict) -> dict:
        config = {key: with_dtype(value) if isinstance(value, dict) else value for key, value in config.items()}
        return config | ({"dtype": dtype} if "dtype" in config else {})

    if dtype is not None:
        config = with_dtype(json.loads(config_file.read_text()) | {"dtype": dtype})
        config_file.write_text(json.dumps(config, indent=2) + "\n")
