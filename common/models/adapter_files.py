"""The files of an adapter directory besides those of peft."""

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
        config.dtype = None  # the dtype of the base's files applies, whatever the run's precision
        config.save_pretrained(directory / CONFIG)
