"""Unties weights that the configuration ties although the model files store different values: the files override it."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from common.internals.transformers_uncommon import find_file

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def find_untied(where: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """Returns the names of weights that the model ties to a source weight although its files store different values.

    where: location of the model, from `locate_pretrained`. model: on the `meta` device.
    """
    ties = {target: source for target, source in model.all_tied_weights_keys.items() if target != source}
    with suppress(Exception):  # unreadable files: loading them reports the reason
        return [target for target, source in ties.items() if _differ(where, target, source)] if ties else []
    return []


def _differ(where: Mapping[str, Any], *names: str) -> bool:
    """Returns whether the files contain both weights, with different values; downloads weights only if both exist."""
    files = _weight_files(where)
    if any(name not in files for name in names):
        return False
    weights = []
    for name in names:
        file_or_name = files[name]
        path = file_or_name if isinstance(file_or_name, Path) else _download(where, file_or_name)
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                weights.append(file.get_tensor(name))
        else:
            weights.append(torch.load(path, map_location="cpu", mmap=True, weights_only=True)[name])
    return not torch.equal(*weights)


def _weight_files(where: Mapping[str, Any]) -> dict[str, Path | str]:
    """Returns the file of each weight: the path, or the file name on the hub if it is not on this machine yet."""
    path = next((path for name in FILES if (path := _find(where, name))), None)
    if path is None:
        if where.get("local_files_only") or Path(where["pretrained_model_name_or_path"]).is_dir():
            return {}
        name, revision = where["pretrained_model_name_or_path"], where.get("revision")
        return dict(get_safetensors_metadata(name, revision=revision).weight_map)
    if path.suffix == ".json":
        files = json.loads(path.read_text())["weight_map"]
        return {name: _find(where, file) or file for name, file in files.items()}
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return dict.fromkeys(file.keys(), path)
    return dict.fromkeys(torch.load(path, map_location="meta", mmap=True, weights_only=True), path)


def _find(where: Mapping[str, Any], name: str) -> Path | None:
    """Returns the path of a model's file; None if it is not on this machine."""
    return find_file(where, name, True, must_exist=False)


def _download(where: Mapping[str, Any], name: str) -> Any:
    """Returns the path of a model's file, downloaded if necessary; raises OSError if it does not exist."""
    return find_file(where, name, where.get("local_files_only", False), must_exist=True)


def follow_files(config: PreTrainedConfig, model: PreTrainedModel, untied: list[str]) -> None:
    """Sets `tie_word_embeddings` to False if, for all tied weights, the files store different values.

    It remains True if only some differ (an encoder-decoder's head, but not its two embeddings). With False,
    transformers would initialise new embeddings; with True, it compares the values in the files.
    """
    if untied and set(untied) == set(model.all_tied_weights_keys):
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            part.tie_word_embeddings = False
