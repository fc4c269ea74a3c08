"""Exports an adapter checkpoint, in peft's format or merged into its base model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.checkpoint.read import own_file
from common.data.hub import fingerprint
from common.errors import UserError, one_line
from common.internals.transformers_uncommon import make_model
from common.models import export_dtype
from common.models.adapter_files import has_own_layers, write_config
from common.models.saved_model import ADAPTER_CONFIG


def class_of(manifest: dict[str, Any]) -> Any:
    """Returns the class of a checkpoint's model in transformers; None for a recipe's own class."""
    import transformers  # here because `list` does not need it

    # In older checkpoints, the class name has FSDP2's prefix.
    return getattr(transformers, manifest["architecture"].removeprefix("FSDP"), None)


def is_adapter(manifest: dict[str, Any]) -> bool:
    """Returns whether a checkpoint contains an adapter, without its base."""
    return f"model/{ADAPTER_CONFIG}" in manifest["files"]


def write_adapter(
    directory: Path,
    manifest: dict[str, Any],
    weights: dict[str, torch.Tensor],
    dtype: str | None,
    merge: bool,
    target: Path,
) -> None:
    """Writes the adapter of a checkpoint for `PeftModel.from_pretrained`; with `merge`, the full merged model."""
    (target / ADAPTER_CONFIG).write_bytes(own_file(directory, f"model/{ADAPTER_CONFIG}").read_bytes())
    weights = export_dtype.cast(weights, None if merge else dtype)  # merges in float32, then casts
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
    """Returns the model configuration of the checkpoint's run: the base's configuration with the run's labels."""
    own_file(directory, "model/config.json")
    return class_of(manifest).config_class.from_pretrained(directory / "model", local_files_only=True)


def _as_peft_saves(name: str) -> str:
    """Returns the name of an adapter's weight in peft's files: without the adapter's name, `default`."""
    name = name.replace(".modules_to_save.default.", ".").replace(
        "lora_magnitude_vector.default.weight", "lora_magnitude_vector"
    )
    return name.replace(".default.", ".")


def merged(directory: Path, manifest: dict[str, Any], adapter: Path) -> Any:
    """Returns the base with the adapter merged into its weights, in float32. adapter: directory of its files.

    A base in 4 bits is quantised and dequantised first, because the adapter was trained with the rounded values.

    Raises UserError: the base is missing or has changed.
    """
    from peft import PeftModel

    from common.models import packed_experts, quantization

    base = json.loads((adapter / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    was = manifest["identity"]["base"]
    if "@" not in was and (not Path(base).is_dir() or fingerprint(Path(base)) != was):
        raise UserError(f"{directory}: its base {base} is not there, or has changed; put it back where it was")
    model_class = class_of(manifest)
    options = quantization.options(manifest["identity"]["settings"].get("quantize"))
    quantized, own_layers = bool(options), has_own_layers(adapter)
    # The run's configuration and head replace those of the base.
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
            packed_experts.round_as_quantized(model)
    except Exception as error:  # errors of transformers and of the hub, depending on the missing part
        raise UserError(f"{directory}: its base {base} cannot be loaded ({one_line(error)})") from error
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()
