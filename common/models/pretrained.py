"""Reads the configuration and the weights of a pretrained model, and checks that the model can be used."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import find_adapter_config_file

from common.data.hub import locate_pretrained
from common.errors import UserError, one_line, shorten
from common.internals.transformers_uncommon import has_model, keep_untied, read_matrices_in
from common.models import tied_weights
from common.models.config_checks import build_checked, check_generation, check_index
from common.models.single_copy import holds_weights
from common.models.untrained import build_untrained, empty_model, make_ready
from common.training.out_of_memory import is_out_of_memory

# Names for the models of an Auto class, for messages.
JOBS = {
    AutoModelForCausalLM: "causal language model",
    AutoModelForSeq2SeqLM: "encoder-decoder",
    AutoModelForSequenceClassification: "classifier of texts",
    AutoModelForImageClassification: "classifier of images",
}


def load_config(
    name_or_path: str, trust_remote_code: bool = False, model_class: Any = AutoModelForCausalLM
) -> PreTrainedConfig:
    """Returns the configuration of a pretrained model of an Auto class: a local directory or a hub name.

    Raises UserError: the model cannot be found or read, is only an adapter, or `model_class` does not support its type.
    """
    where, problem = locate_pretrained(name_or_path)
    name, revision = where["pretrained_model_name_or_path"], where.get("revision")
    try:
        is_adapter = find_adapter_config_file(name, revision=revision, local_files_only=bool(problem))
        config: Any = None if is_adapter else AutoConfig.from_pretrained(**where, trust_remote_code=trust_remote_code)
    except Exception as error:  # a dozen types, depending on the missing part
        reason = problem or f"its config.json cannot be loaded: {one_line(error)}"
        raise UserError(f"--model_name_or_path {name_or_path}: {reason}") from error
    if is_adapter:
        raise UserError(
            f"--model_name_or_path {name_or_path}: it is an adapter; make a whole model of it (python -m "
            "tools.checkpoint export CHECKPOINT DIR --merge), or name its base"
        )
    location = f"--model_name_or_path {name_or_path}"
    check_generation(Path(name), location, model_class in (AutoModelForCausalLM, AutoModelForSeq2SeqLM))
    check_index(Path(name), location)
    remote = model_class.__name__ in (getattr(config, "auto_map", None) or {})
    if not has_model(model_class, config) and not remote:
        kind = JOBS.get(model_class, model_class.__name__)
        what = f"{config.model_type} has no {kind} in transformers; use a model of a different type"
        raise UserError(f"--model_name_or_path {name_or_path}: {what}")
    reads_ahead = getattr(config, "is_decoder", True) is False and type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if model_class is AutoModelForCausalLM and reads_ahead:
        raise UserError(
            f"--model_name_or_path {name_or_path}: this {config.model_type} is not causal: it attends to the tokens it "
            'predicts; set "is_decoder": true in its config.json, or use a causal model'
        )
    model = build_checked(config, location, trust_remote_code, model_class)
    if getattr(config, "tie_word_embeddings", False):
        tied_weights.follow_files(config, model, tied_weights.find_untied(where, model))
    return config


def build_model(
    config: PreTrainedConfig,
    name_or_path: str,
    trust_remote_code: bool,
    model_class: Any,
    frozen_dtype: torch.dtype | None,
    output_loading_info: bool = False,
    **options: Any,
) -> Any:
    """Implements `load.build_model` for a pretrained model."""
    if not holds_weights():
        model = build_untrained(copy.deepcopy(config), trust_remote_code, model_class).eval()
        if "quantization_config" in options:
            from common.models import quantization

            quantization.imagine(model)
        return (model, {"missing_keys": [], "mismatched_keys": []}) if output_loading_info else model
    model, loaded = _load(config, name_or_path, trust_remote_code, model_class, frozen_dtype, options)
    missing = sorted(set(loaded["missing_keys"]) & {name for name, _ in model.named_parameters(remove_duplicate=False)})
    if missing and not output_loading_info:
        raise UserError(
            f"--model_name_or_path {name_or_path}: its files have no {shorten(missing)}, which would start at random; "
            'use a model whose files are complete, or set "tie_word_embeddings": true in its config.json if a missing '
            "head is the embedding"
        )
    make_ready(model)
    return (model, loaded) if output_loading_info else model


def _load(
    config: PreTrainedConfig,
    name_or_path: str,
    trust_remote_code: bool,
    model_class: Any,
    frozen_dtype: torch.dtype | None,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns the model with its pretrained weights, tied as in its files, and the report of `from_pretrained`."""
    where, _ = locate_pretrained(name_or_path)
    options = {**where, **options, "config": config, "trust_remote_code": trust_remote_code}
    try:
        empty = empty_model(copy.deepcopy(config), trust_remote_code, model_class)
        reading = read_matrices_in(frozen_dtype)
        if "quantization_config" in options:
            from common.models import packed_experts, quantization

            options["quantization_config"].llm_int8_skip_modules = quantization.find_kept(empty)
            reading = packed_experts.quantized_on_load()
        with reading, keep_untied(tied_weights.find_untied(where, empty)):
            model, loaded = model_class.from_pretrained(
                **options, dtype=torch.get_default_dtype(), output_loading_info=True
            )
        if "quantization_config" in options:
            quantization.pack_layers(model)
        return model, loaded
    except Exception as error:
        # Errors caused by the files: truncated, of different shapes, of an unknown kind, of invalid settings, or
        # requiring a missing package. Running out of memory is not one of them.
        if isinstance(error, UserError | MemoryError) or is_out_of_memory(error):
            raise
        raise UserError(
            f"--model_name_or_path {name_or_path}: its weights cannot be loaded ({one_line(error)}); save the model "
            "again, or download it again"
        ) from error
