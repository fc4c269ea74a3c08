"""The files that an adapter directory has in addition to peft's files, and the description of the adapter."""

import copy
import json
from pathlib import Path
from typing import Any

from common.models.saved_model import ADAPTER_CONFIG, CONFIG


def has_own_layers(directory: Path) -> bool:
    """Returns whether an adapter directory contains layers that were trained in full, such as a new head."""
    path = directory / ADAPTER_CONFIG
    return path.is_file() and bool(json.loads(path.read_text()).get("modules_to_save"))


def write_config(config: Any, directory: Path) -> None:
    """Writes the model's configuration to `CONFIG` in an adapter directory, if the adapter has its own head."""
    if has_own_layers(directory):
        config = copy.deepcopy(config)
        config.dtype = None  # the adapter is loaded in the dtype of the base's files, not of this run
        config.save_pretrained(directory / CONFIG)


def describe_adapter(directory: Path) -> str:
    """Returns a description of an adapter for a model card, from peft's config: flags may be left at their defaults."""
    config = json.loads((directory / ADAPTER_CONFIG).read_text())
    layers, new = [*config["target_modules"], *(config.get("target_parameters") or [])], config.get("modules_to_save")
    names = [", ".join(f"`{name}`" for name in group) for group in (sorted(layers), new or [])]
    text = f"An adapter (LoRA) of rank {config['r']} and alpha {config['lora_alpha']} on {names[0]}"
    return text + (f", with {names[1]} trained whole" if new else "")
