"""The dtype of exported model files, if it differs from the dtype of the weights."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

EXPORT_DTYPES = ("float32", "bfloat16")
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # names in safetensors files


def cast(weights: dict[str, torch.Tensor], dtype: str | None) -> dict[str, torch.Tensor]:
    """Returns the weights in a dtype; None: unchanged. Integer tensors keep their dtype, shared tensors stay shared."""
    if dtype is None:
        return weights
    made: dict[tuple, torch.Tensor] = {}
    for weight in weights.values():
        key = weight.data_ptr(), weight.shape, weight.stride()
        if key not in made:
            made[key] = weight.to(getattr(torch, dtype)) if weight.is_floating_point() else weight
    return {name: made[one.data_ptr(), one.shape, one.stride()] for name, one in weights.items()}


def note(config_file: Path, dtype: str | None) -> None:
    """Sets the dtype in a model's config.json and in its nested configurations; None: unchanged."""

    def named(config: dict) -> dict:
        config = {key: named(value) if isinstance(value, dict) else value for key, value in config.items()}
        return config | ({"dtype": dtype} if "dtype" in config else {})

    if dtype is not None:
        config = named(json.loads(config_file.read_text()) | {"dtype": dtype})
        config_file.write_text(json.dumps(config, indent=2) + "\n")


def describe(directory: Path) -> str:
    """Returns a description of the dtype and size of the weights in a directory."""
    paths, found = sorted(directory.glob("*.safetensors")), set()
    for path in paths:
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  it is not a dict
    names = [DTYPE_NAMES[kind] for kind in sorted(found & DTYPE_NAMES.keys())]
    size = sum(path.stat().st_size for path in paths) / 1e6
    return f"{' and '.join(names)}, {size:,.{0 if size >= 100 else 1}f} MB"
