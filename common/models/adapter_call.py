"""Describes the Python call that loads a saved adapter."""

from typing import Any


def describe_call(settings: dict[str, Any], subfolder: str, model_class: str | None, path: str) -> str:
    """Returns the Python call that loads an adapter directory.

    Only classifiers have adapters with fully trained layers. A DoRA adapter is loaded with peft's class, because
    transformers 5.23 re-initialises its magnitudes from the base.

    settings: peft's configuration of the adapter.
    subfolder: subdirectory with the model configuration if the adapter has its own head, otherwise empty.
    """
    options = ""
    if subfolder:
        model_class = model_class or "AutoModelForSequenceClassification"
        # The head of the base may have a different size.
        options = f', config=AutoConfig.from_pretrained("{path}", subfolder="{subfolder}"), '
        options += "ignore_mismatched_sizes=True"
    if settings.get("use_dora"):
        base = settings["base_model_name_or_path"]
        model = f'{model_class}.from_pretrained("{base}"{options})' if model_class else "base"
        return f'PeftModel.from_pretrained({model}, "{path}")'
    if not options:
        return f"{model_class}.from_pretrained" if model_class else "from_pretrained"
    return f'{model_class}.from_pretrained("{path}"{options})'
