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
    """Whole parameters, where ZeRO-3 has cut them while the model was loaded; `modifier_rank` may change them."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank)


@contextmanager
def whole_weights() -> Iterator[None]:
    """ZeRO-3 cuts weights while a model is made, and then draws others than one process would: here they are whole.

    Each process then holds a model from scratch for a moment. Pretrained weights are cut as they are loaded.
    """
    plugin = AcceleratorState().deepspeed_plugin if is_initialized() else None
    if plugin is None or deepspeed_config() is None:  # also inside another such block
        yield
        return
    # Not the plugin's own zero3_init_context_manager(enable=False): transformers 5.23 cuts the weights all the same.
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()


def empty_model(
    config: PreTrainedConfig, trust_remote_code: bool = False, model_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The model of a configuration without data, on the `meta` device."""
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
    """Makes a new model one that every mode can take, and returns it."""
    follow_precision(model)
    decide_on_the_host()
    use_cpu_kernels(model)
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # CANINE has several
        return model
    # Of the modules that FSDP2 is to shard as a whole, leave out what contains the input embedding (BertEmbeddings,
    # ViTEmbeddings): Accelerate 1.15 shards that by itself, after these, and fails where it has been sharded already.
    kinds = {type(module).__name__ for module in model.modules() if embedding not in module.modules()}
    set_unsplit_layers(model, kinds & unsplit_layers(model))
    return model
