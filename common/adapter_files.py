"""The directory of an adapter: what lies there beside peft's own files, and what loads it."""

import copy
import json
from pathlib import Path
from typing import Any

ADAPTER_CONFIG = "adapter_config.json"  # peft's
# Of the model with its labels, beside an adapter that has a head of its own. (A config.json beside an adapter makes
# transformers take the directory for a whole model.)
CONFIG = "config"


def has_own_layers(directory: Path) -> bool:
    """Whether an adapter's directory has layers that were trained whole, such as a new head."""
    path = directory / ADAPTER_CONFIG
    return path.is_file() and bool(json.loads(path.read_text()).get("modules_to_save"))


def write_config(config: Any, directory: Path) -> None:
    """Writes the model's configuration into `CONFIG` of an adapter's directory, where its base has another head."""
    if has_own_layers(directory):
        config = copy.deepcopy(config)
        config.dtype = None  # that of the base's files, whatever the run computed in
        config.save_pretrained(directory / CONFIG)


def loading_call(directory: Path, model_class: str | None = None, shown: str | None = None) -> str:
    """What loads a directory with a model or an adapter. Only a classifier's adapter has layers of its own.

    shown: what it is called there, in the place of its path.
    """
    if not (directory / CONFIG).is_dir():
        return f"{model_class}.from_pretrained" if model_class else "from_pretrained"
    model_class = model_class or "AutoModelForSequenceClassification"
    path = shown or directory
    config = f'AutoConfig.from_pretrained("{path}", subfolder="{CONFIG}")'
    # The base may have a head of another size.
    return f'{model_class}.from_pretrained("{path}", config={config}, ignore_mismatched_sizes=True)'
