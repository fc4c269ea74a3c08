"""Exports an adapter checkpoint, in peft's format or merged into its base model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.checkpoint.architecture import class_of
from common.checkpoint.format import own_file
from common.errors import UserError, one_line
from common.files import fingerprint
from common.internals.transformers import make_model
from common.models import export_dtype
from common.models.adapter_files import ADAPTER_CONFIG, has_own_layers, write_config


def is_adapter(manifest: dict[str, Any]) -> bool:
    """Whether a checkpoint holds an adapter, without its base."""
    return f"model/{ADAPTER_CONFIG}" in manifest["files"]


def write_adapter(
    directory: Path,
    manifest: dict[str, Any],
    weights: dict[str, torch.Tensor],
    dtype: str | None,
    merge: bool,
    target: Path,
) -> None:
    """Writes the adapter of a checkpoint as `PeftModel.from_pretrained` loads it; with `merge` the whole model."""
    (target / ADAPTER_CONFIG).write_bytes(own_file(directory, f"model/{ADAPTER_CONFIG}").read_bytes())
    weights = export_dtype.cast(weights, None if merge else dtype)  # it is merged in float32
    named = {f"base_model.model.{_as_peft_saves(name)}": weight for name, weight in weights.items()}
    save_file(named, target / "adapter_model.safetensors", metadata={"format": "pt"})
    if not merge:
        write_config(_own_config(directory, manifest), target)
    else:
        model = merged(directory, manifest, target)
        for path in target.iterdir():
            path.unlink()
        model.save_pretrained(target, state_dict=export_dtype.cast(model.state_dict(), dtype))
        export_dtype.note(target / "config.json", dtype)


def _own_config(directory: Path, manifest: dict[str, Any]) -> Any:
    """The configuration that the run of a checkpoint had: the base's, with its own labels."""
    own_file(directory, "model/config.json")
    return class_of(manifest).config_class.from_pretrained(directory / "model", local_files_only=True)


def _as_peft_saves(name: str) -> str:
    """The name of an adapter's weight in peft's files, where it has not the name of the adapter in it."""
    name = name.replace(".modules_to_save.default.", ".").replace(
        "lora_magnitude_vector.default.weight", "lora_magnitude_vector"
    )
    return name.replace(".default.", ".")


def merged(directory: Path, manifest: dict[str, Any], adapter: Path) -> Any:
    """The base with the adapter in its weights, in float32. adapter: where `write_adapter` has written it.

    A base in 4 bits is the one that was trained beside: its weights are what the 4 bits stand for.

    Raises UserError: the base is not there, or is another one.
    """
    from peft import PeftModel

    from common.models import quantization

    base = json.loads((adapter / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    was = manifest["identity"]["base"]
    if "@" not in was and (not Path(base).is_dir() or fingerprint(Path(base)) != was):
        raise UserError(f"{directory}: its base {base} is not there, or has changed; put it back where it was")
    model_class = class_of(manifest)
    options = quantization.options(manifest["identity"]["settings"].get("quantize"))
    quantized, own_layers = bool(options), has_own_layers(adapter)
    # The run's configuration, whatever has become of the base's; and its head, whatever size the base's has.
    options |= {"config": _own_config(directory, manifest), "ignore_mismatched_sizes": own_layers}
    if quantized:
        with torch.device("meta"):
            empty = make_model(model_class, options["config"])
        options["quantization_config"].llm_int8_skip_modules = quantization.find_kept(empty)
    options |= {"revision": was.partition("@")[2]} if "@" in was else {}
    try:
        model = model_class.from_pretrained(base, dtype=torch.float32, **options)
        if quantized:
            model = model.dequantize()
    except Exception as error:  # of transformers and of the hub, by what is missing
        raise UserError(f"{directory}: its base {base} cannot be loaded ({one_line(error)})") from error
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()
