"""Builds a model with random weights, or without data on the `meta` device, so that every mode can train it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations import unset_hf_deepspeed_config
from transformers.integrations.deepspeed import deepspeed_config

from common.internals.transformers import make_model, set_unsplit_layers, unsplit_layers
from common.models.attention_masks import decide_on_the_host
from common.models.cpu_kernels import use_cpu_kernels
from common.models.single_copy import holds_weights
from common.training.precision import follow_precision


def gathered(parameters: list[torch.nn.Parameter], modifier_rank: int | None = None) -> AbstractContextManager:
    """Returns a context with full parameters if ZeRO-3 has partitioned them; `modifier_rank` may change them."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank)


@contextmanager
def whole_weights() -> Iterator[None]:
    """Context manager in which ZeRO-3 does not partition the weights of a model while it is built.

    Partitioned weights would be drawn with different random numbers than on a single process. Each process temporarily
    holds the full model from scratch. Pretrained weights are partitioned while they are loaded.
    """
    plugin = AcceleratorState().deepspeed_plugin if is_initialized() else None
    if plugin is None or deepspeed_config() is None:  # also in a nested block
        yield
        return
    # The plugin's own zero3_init_context_manager(enable=False) has no effect: transformers 5.23 partitions the weights
    # nevertheless.
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()


def empty_model(
    config: PreTrainedConfig, trust_remote_code: bool = False, model_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Returns the model of a configuration without data, on the `meta` device."""
    with torch.device("meta"):
        return build_untrained(config, trust_remote_code, model_class)


def build_untrained(config: PreTrainedConfig, trust_remote_code: bool, model_class: Any) -> PreTrainedModel:
    """Returns the model of a configuration in float32 (torch's default dtype) with random weights."""
    dtype = torch.get_default_dtype()
    with whole_weights(), nullcontext() if holds_weights() else torch.device("meta"):
        if not hasattr(model_class, "from_config"):
            model = make_model(model_class, config, dtype=dtype)
        else:
            model = model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return make_ready(model)


def make_ready(model: PreTrainedModel) -> PreTrainedModel:
    """Prepares a new model for training in any mode, and returns it."""
    follow_precision(model)
    decide_on_the_host()
    use_cpu_kernels(model)
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # CANINE has several embeddings
        return model
    # FSDP2 must not shard modules that contain the input embedding (BertEmbeddings, ViTEmbeddings) as a unit.
    # Accelerate 1.15 shards the embedding separately afterwards, and fails if it is already sharded.
    kinds = {type(module).__name__ for module in model.modules() if embedding not in module.modules()}
    set_unsplit_layers(model, kinds & unsplit_layers(model))
    return model
