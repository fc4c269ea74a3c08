"""Loads or builds a model, and checks that it matches its tokenizer and the data."""

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import unset_hf_deepspeed_config
from transformers.integrations.deepspeed import deepspeed_config

from common.errors import UserError, shorten
from common.models import model_setup
from common.models.attention_masks import decide_on_the_host
from common.models.cpu_kernels import use_cpu_kernels
from common.training.batching import Samples
from common.training.precision import follow_precision
from common.training.process_grid import running


def load_config(
    name_or_path: str, trust_remote_code: bool = False, model_class: Any = AutoModelForCausalLM
) -> PreTrainedConfig:
    """Returns the configuration of a pretrained model of an Auto class: a local directory or a hub name.

    Raises UserError: there is none, or `model_class` has no model of its type.
    """
    from common.models import pretrained

    return pretrained.load_config(name_or_path, trust_remote_code, model_class)


def check_model(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Iterator[str]:
    """One line for each way in which tokenizer and sequence length do not fit the model."""
    text = config.get_text_config()
    rows = getattr(text, "vocab_size", None)  # CANINE hashes characters: it has no vocabulary
    if rows and len(tokenizer) > rows:
        yield (
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has {rows} rows: take "
            "the model's own tokenizer, or resize the embedding (model.resize_token_embeddings) and save the model"
        )
    # `max_position_embeddings` also names GPT-2's n_positions and the like; a model without positions has neither, or
    # says -1 (XLNet).
    positions = getattr(text, "max_position_embeddings", None)
    if positions and 0 < positions < sequence_length:
        yield (
            f"--sequence_length {sequence_length} is beyond the model's {positions} positions; use at most {positions}"
        )


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
        return build_model(config, trust_remote_code=trust_remote_code, model_class=model_class)


def attention_length(config: PreTrainedConfig) -> float:
    """The length of a row at which its attention costs as much as all else; infinite for a model without attention.

    In a layer of width d, linear maps take about 12 d² multiplications a token (Llama's shape, or a MLP of 4 d), and
    attention 2 d for each token that it looks at; it computes those to come as well, or is half as fast.
    """
    text = config.get_text_config()
    is_attending = getattr(text, "num_attention_heads", None) and getattr(text, "hidden_size", None)
    return 6 * text.hidden_size if is_attending else math.inf


def build_model(
    config: PreTrainedConfig,
    name_or_path: str | None = None,
    trust_remote_code: bool = False,
    model_class: Any = AutoModelForCausalLM,
    frozen_dtype: torch.dtype | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model in float32 (torch's default dtype): loaded from `name_or_path`, or with random weights from `config`.

    Weights saved in half precision are loaded as float32 too, since the optimizer's small steps would be lost in
    them; the precision of the matrix products is Accelerate's business. Attention is SDPA where the model has it.
    Under FSDP2 a process other than the main one makes a model without data, for `loading.prepare` to fill.

    Args:
        model_class: an Auto class, or a model's own class.
        frozen_dtype: what pretrained matrices are read in, if they are not to be trained; None: float32.
        options: more of its `from_pretrained`, such as `ignore_mismatched_sizes`.

    Raises UserError: there are no weights, they cannot be read, or they are of other shapes than the configuration's.
    """
    dtype = torch.get_default_dtype()
    if name_or_path is not None and not model_setup.holds_weights():
        model = build_model(copy.deepcopy(config), None, trust_remote_code, model_class).eval()
        if "quantization_config" in options:
            from common.models import quantization

            quantization.imagine(model, options["quantization_config"].bnb_4bit_compute_dtype)
        return (model, {"missing_keys": [], "mismatched_keys": []}) if "output_loading_info" in options else model
    if name_or_path is None:
        with whole_weights(), nullcontext() if model_setup.holds_weights() else torch.device("meta"):
            if not hasattr(model_class, "from_config"):
                model = model_class._from_config(config, dtype=dtype)
            else:
                model = model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        return _ready(model)
    from common.models import pretrained

    asks_loaded = options.pop("output_loading_info", False)
    model, loaded = pretrained.load(config, name_or_path, trust_remote_code, model_class, frozen_dtype, options)
    missing = sorted(set(loaded["missing_keys"]) & {name for name, _ in model.named_parameters(remove_duplicate=False)})
    if missing and not asks_loaded:
        raise UserError(
            f"--model_name_or_path {name_or_path}: its files have no {shorten(missing)}, which would start at random; "
            'use a model whose files are complete, or set "tie_word_embeddings": true in its config.json if a missing '
            "head is the embedding"
        )
    _ready(model)
    return (model, loaded) if asks_loaded else model


def _ready(model: PreTrainedModel) -> PreTrainedModel:
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
    model._no_split_modules = kinds & set(model._no_split_modules or ())
    return model


def describe_use(
    model: PreTrainedModel, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, end_tokens: list[int]
) -> None:
    """Writes into what is saved beside the weights how the model is to be used: where it stops, how much it takes.

    Args:
        end_tokens: those that it is taught to end with, the most frequent one first. What it had been told to stop at
            before stays, where that is a special token of this tokenizer. Empty: there is none, and nothing changes.
    """
    generation, text = getattr(model, "generation_config", None), config.get_text_config()
    # from_pretrained gives the model a copy of the configuration.
    parts = [config, text, model.config, model.config.get_text_config(), generation] if end_tokens else []
    for part in {id(part): part for part in parts if part is not None}.values():
        before = getattr(part, "eos_token_id", None)
        before = before if isinstance(before, list) else [before]
        stops = end_tokens + [one for one in before if one in tokenizer.added_tokens_decoder and one not in end_tokens]
        part.eos_token_id = stops if part is generation and len(stops) > 1 else stops[0]
    if (positions := getattr(text, "max_position_embeddings", None) or 0) > 0:
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)


@torch.no_grad()
def write_sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Samples) -> str:
    """Text that the model writes after the beginning of the first sample; in one process, which has it whole."""
    if running().sequence > 1:
        from common.parallel import sequence

        sequence.whole_sequences()
    first_tokens, *_ = samples[0]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    most = positions if positions > 0 else math.inf
    input_ids = torch.from_numpy(first_tokens[: min(16, most - 1)]).unsqueeze(0).to(model.device)
    model.eval()
    written = model.generate(
        input_ids,
        max_new_tokens=min(100, most - input_ids.shape[1]),
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        attention_mask=torch.ones_like(input_ids),
        remove_invalid_values=True,  # of weights that have become NaN
        # What the model's own generation_config.json may ask for: text to stop at, several texts, more than tokens.
        tokenizer=tokenizer,
        num_return_sequences=1,
        return_dict_in_generate=False,
    )
    return tokenizer.decode(written[0], skip_special_tokens=True)
