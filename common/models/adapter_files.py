"""The files of an adapter directory besides those of peft, and the call that loads them."""

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


def loading_call(directory: Path, model_class: str | None, path: str) -> str:
    """Returns the call that loads an adapter directory.

    Only a classifier's adapter has layers of its own. A DoRA adapter needs peft's class, because transformers 5.23
    re-initialises its magnitudes from the base.
    """
    options = ""
    if (directory / CONFIG).is_dir():
        model_class = model_class or "AutoModelForSequenceClassification"
        # The head of the base may have a different size.
        options = f', config=AutoConfig.from_pretrained("{path}", subfolder="{CONFIG}"), ignore_mismatched_sizes=True'
    adapter = directory / ADAPTER_CONFIG
    settings = json.loads(adapter.read_text()) if adapter.is_file() else {}
    if settings.get("use_dora"):
        base = settings["base_model_name_or_path"]
        model = f'{model_class}.from_pretrained("{base}"{options})' if model_class else "base"
        return f'PeftModel.from_pretrained({model}, "{path}")'
    if not options:
        return f"{model_class}.from_pretrained" if model_class else "from_pretrained"
    return f'{model_class}.from_pretrained("{path}"{options})'
