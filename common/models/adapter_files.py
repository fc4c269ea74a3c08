"""The files of an adapter directory next to peft's own, and the call that loads them."""

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
    """The call that loads a directory with a model or an adapter. Only a classifier's adapter has layers of its own.

    A DoRA adapter needs peft's class: transformers 5.23 initialises its magnitudes again, from the base.
    shown: the name of the directory in the call, instead of its path.
    """
    path, options = shown or directory, ""
    if (directory / CONFIG).is_dir():
        model_class = model_class or "AutoModelForSequenceClassification"
        # The base may have a head of another size.
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
