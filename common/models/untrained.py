"""Builds a model with random weights or on the `meta` device, and prepares models for training in every mode."""

from contextlib import ExitStack
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from common.internals.transformers import set_unsplit_layers, unsplit_layers
from common.models.attention_masks import decide_on_the_host
from common.models.single_copy import holds_weights
from common.process import this_process
from common.training.precision import is_deepspeed


def empty_model(
    config: PreTrainedConfig, trust_remote_code: bool = False, model_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Returns the model of a configuration without data, on the `meta` device."""
    with torch.device("meta"):
        return build_untrained(config, trust_remote_code, model_class)


def build_untrained(config: PreTrainedConfig, trust_remote_code: bool, model_class: Any) -> PreTrainedModel:
    """Returns the model of a configuration in float32 (torch's default dtype) with random weights."""
    dtype = torch.get_default_dtype()
    with ExitStack() as contexts:
        if is_deepspeed():
            from common.models.zero3 import whole_weights

            contexts.enter_context(whole_weights())
        if not holds_weights():
            contexts.enter_context(torch.device("meta"))
        if not hasattr(model_class, "from_config"):
            from common.internals.transformers_uncommon import make_model

            model = make_model(model_class, config, dtype=dtype)
        else:
            model = model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return make_ready(model)


def make_ready(model: PreTrainedModel) -> PreTrainedModel:
    """Prepares a new model for training in any mode, and returns it."""
    decide_on_the_host()
    # The planner traces half-precision weights without mixed precision, as under DeepSpeed.
    is_float32 = is_initialized() and AcceleratorState().mixed_precision == "no" and not this_process().has_fake_weights
    if not is_float32:
        from common.training import half_precision

        half_precision.follow_precision(model)
    on_gpu = is_initialized() and AcceleratorState().device.type == "cuda"
    if not on_gpu and (not is_float32 or _has_dropout(model)):
        from common.models import cpu_kernels

        cpu_kernels.use_cpu_kernels(model)
    if this_process().has_document_mask:
        from common.models import document_attention

        document_attention.split_rows()
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # CANINE has several embeddings
        return model
    # FSDP2 must not shard modules that contain the input embedding (BertEmbeddings, ViTEmbeddings) as a unit.
    # Accelerate 1.15 shards the embedding separately afterwards, and fails if it is already sharded.
    kinds = {type(module).__name__ for module in model.modules() if embedding not in module.modules()}
    set_unsplit_layers(model, kinds & unsplit_layers(model))
    return model


def _has_dropout(model: PreTrainedModel) -> bool:
    """Returns whether a module or a configuration value, such as `attention_dropout`, sets a dropout rate above 0."""

    def is_set(settings: dict[str, Any]) -> bool:
        return any(is_set(x) if isinstance(x, dict) else "drop" in str(name) and x for name, x in settings.items())

    return is_set(model.config.to_dict()) or any(isinstance(m, nn.Dropout) and m.p for m in model.modules())
