"""Exports a checkpoint of any mode as a model that `from_pretrained` loads."""

import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.checkpoint.format import FORMAT
from common.checkpoint.read import Reader, find_damage, newer_line, own_file, read_manifest, require
from common.errors import UserError, one_line
from common.files import PARTIAL, complete_or_absent, nearest_existing, why_not_writable
from common.internals.transformers_uncommon import make_model
from common.models import export_dtype
from common.models.saved_model import ADAPTER_CONFIG
from tools.checkpoint.adapter import class_of, is_adapter, write_adapter

# Suffixes of the files in model/ that are exported: settings and tokenizer formats, never code or pickles.
NAME = re.compile(r"([0-9]_\w+/)?[^/]+")  # sentence-transformers' modules have folders, such as 1_Pooling
OF_LOSS = {"log_temperature"}  # weights that embed.py trains next to the model
EXPORTED = (".json", ".jinja", ".txt", ".model", ".spm", ".bpe", ".codes", ".tiktoken")


def export(directory: Path, target: Path, dtype: str | None = None, merge: bool = False) -> None:
    """Exports a checkpoint as a model that `from_pretrained` loads, with its tokenizer. An error leaves no files.

    dtype: dtype of the written weights; None: as in the checkpoint. merge: merge an adapter into its base.

    Raises UserError: no valid checkpoint; the target is not empty or not writable; or there is no adapter to merge.
    """
    manifest, target = _valid_manifest(directory), Path(os.path.abspath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} already exists; name a different directory")
    if target.is_mount():
        raise UserError(f"{target} is a disk's own directory; name a directory below it")
    if reason := why_not_writable(parent := nearest_existing(target.parent)):
        raise UserError(f"{target} cannot be written: {reason} in {parent}; name a different directory")
    if (unfinished := target.with_name(target.name + PARTIAL)).exists():
        raise UserError(f"{unfinished} already exists, perhaps from a killed export; remove it, or name another target")
    if merge and not is_adapter(manifest):
        raise UserError(f"{directory} contains a full model, not an adapter to merge; remove --merge")
    reader = Reader(directory, manifest)
    weights = {
        name.partition("/")[2]: reader.read(name) for name in reader.tensors if name.startswith(("weight/", "buffer/"))
    }
    weights = {name: weight for name, weight in weights.items() if name not in OF_LOSS}
    with _quietly():
        write = _writer(directory, manifest, weights, dtype, merge)
    # Only files that the manifest lists, and no code.
    files = [name.removeprefix("model/") for name in manifest["files"] if name.startswith("model/")]
    files = [name for name in files if NAME.fullmatch(name) and name.endswith(EXPORTED) and ".index." not in name]
    with complete_or_absent(target, "export again") as unfinished:
        with _quietly():
            write(unfinished)
        for name in files:
            if name not in ("config.json", ADAPTER_CONFIG):
                (unfinished / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(own_file(directory, f"model/{name}"), unfinished / name)


@contextmanager
def _quietly() -> Iterator[None]:
    """Context without warnings of libraries that do not matter here: kernels, deprecated names, replaced heads."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _valid_manifest(directory: Path) -> dict[str, Any]:
    """Returns the manifest of a valid checkpoint; otherwise raises UserError."""
    try:
        manifest = read_manifest(directory)
    except UserError as error:
        raise UserError(f"{directory} is not a checkpoint: {error}; name one of OUTPUT_DIR/checkpoints") from error
    if manifest["format"] > FORMAT:
        raise UserError(f"{directory}: {newer_line(manifest)}")
    if damage := find_damage(directory, manifest):
        raise UserError(f"{directory}: {damage}; export a different checkpoint")
    return manifest


def _writer(
    directory: Path, manifest: dict[str, Any], weights: dict[str, torch.Tensor], dtype: str | None, merge: bool
) -> Callable[[Path], Any]:
    """Returns a function that writes a checkpoint's model, or its adapter, to an empty directory.

    Raises UserError: the weights and the configuration do not match.
    """
    if is_adapter(manifest):
        return partial(write_adapter, directory, manifest, weights, dtype, merge)
    model_class = class_of(manifest)
    weights = export_dtype.cast(weights, dtype)
    if model_class is None:  # a recipe's own class: export configuration and weights unchanged

        def write(target: Path) -> None:
            shutil.copyfile(own_file(directory, "model/config.json"), target / "config.json")
            export_dtype.note(target / "config.json", dtype)
            save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

        return write
    try:
        return _build_model(directory, weights, model_class).save_pretrained
    except Exception as error:  # errors of transformers and torch, depending on the mismatch
        raise UserError(
            f"{directory}: its weights and model/config.json do not form a {manifest['architecture']} "
            f"({one_line(error)}); export a different checkpoint"
        ) from error


def _build_model(directory: Path, weights: dict[str, torch.Tensor], model_class: Any) -> Any:
    """Returns the transformers model with a checkpoint's weights; runs no code from the checkpoint."""
    import transformers

    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    require(is_model, "not a model of transformers")
    dtype = next(value.dtype for value in weights.values() if value.is_floating_point())
    config = model_class.config_class.from_pretrained(directory / "model", local_files_only=True)
    with torch.device("meta"):  # saves memory and time for weights that will be replaced
        model = make_model(model_class, config, dtype=dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tied = set(model.all_tied_weights_keys)
    # Weights that the checkpoint contains separately stay untied.
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    if tied and not model.all_tied_weights_keys.keys() & tied:
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False
    missing = sorted(name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta)
    require(not unexpected and not missing, f"unexpected: {unexpected[:3]}, missing: {missing[:3]}")
    return model
