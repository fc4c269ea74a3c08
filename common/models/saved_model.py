"""The files of a saved model: their dtype and size, and the call that loads them."""

import json
from pathlib import Path

from safetensors import safe_open

EXPORT_DTYPES = ("float32", "bfloat16")
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # names in safetensors files
ADAPTER_CONFIG = "adapter_config.json"  # file name that peft uses
# Subdirectory with the configuration of the model and its labels, next to an adapter with its own head. (A config.json
# next to an adapter makes transformers load the directory as a full model.)
CONFIG = "config"


def describe_weights(directory: Path) -> str:
    """Returns a description of the dtype and size of the weights in a directory."""
    paths, kinds = sorted(directory.glob("*.safetensors")), set()
    for path in paths:
        with safe_open(path, "pt") as file:
            kinds |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  it is not a dict
    names = [DTYPE_NAMES[kind] for kind in sorted(kinds & DTYPE_NAMES.keys())]
    size = sum(path.stat().st_size for path in paths) / 1e6
    return f"{' and '.join(names)}, {size:,.{0 if size >= 100 else 1}f} MB"


def loading_call(directory: Path, model_class: str | None = None, shown: str | None = None) -> str:
    """Returns the Python call that loads a directory with a model or an adapter.

    shown: replaces the path of the directory in the call.
    """
    if (adapter := directory / ADAPTER_CONFIG).is_file():
        from common.models.adapter_call import describe_call

        subfolder = CONFIG if (directory / CONFIG).is_dir() else ""
        return describe_call(json.loads(adapter.read_text()), subfolder, model_class, shown or str(directory))
    return f"{model_class}.from_pretrained" if model_class else "from_pretrained"
