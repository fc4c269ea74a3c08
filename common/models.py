"""Loads a causal language model, pretrained or from scratch, and checks that it fits its tokenizer and the data."""

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def load_config(name_or_path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a pretrained causal language model: a local directory or a hub name.

    Raises:
        ValueError: there is none, or it is not one of a causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"--model_name_or_path {name_or_path}: no model can be loaded from there ({reason})"
        ) from error
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        raise ValueError(
            f"--model_name_or_path {name_or_path}: {config.model_type} has no causal language model in transformers"
        )
    return config


def check_model(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> list[str]:
    """One line for each way in which tokenizer and sequence length do not fit the model."""
    problems = []
    text = config.get_text_config()
    if len(tokenizer) > text.vocab_size:
        problems.append(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has {text.vocab_size} rows: take "
            "the model's own tokenizer, or resize the embedding (model.resize_token_embeddings) and save the model"
        )
    # `max_position_embeddings` also names GPT-2's n_positions and the like; a model without positions has neither.
    positions = getattr(text, "max_position_embeddings", None)
    if positions and sequence_length > positions:
        problems.append(
            f"--sequence_length {sequence_length} is beyond the model's {positions} positions; use at most {positions}"
        )
    return problems


def build_model(
    config: PreTrainedConfig, name_or_path: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model in float32 (torch's default dtype): loaded from `name_or_path`, or with random weights from `config`.

    Weights saved in half precision are loaded as float32 too, since the optimizer's small steps would be lost in
    them; the precision of the matrix products is Accelerate's business. Attention is SDPA where the model has it.
    """
    dtype = torch.get_default_dtype()
    if name_or_path is None:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return AutoModelForCausalLM.from_pretrained(
        name_or_path, config=config, dtype=dtype, trust_remote_code=trust_remote_code
    )
