"""Loads or builds a model, and checks that it matches its tokenizer and the data."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.models.untrained import build_untrained
from common.training.batching import Samples
from common.training.process_grid import current_grid


def load_config(
    name_or_path: str, trust_remote_code: bool = False, model_class: Any = AutoModelForCausalLM
) -> PreTrainedConfig:
    """Returns the configuration of a directory or a hub name. Raises UserError: `model_class` cannot load its model."""
    from common.models import pretrained

    return pretrained.load_config(name_or_path, trust_remote_code, model_class)


def check_model(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Iterator[str]:
    """Yields one line per mismatch of tokenizer or sequence length with the model."""
    rows = getattr(config.get_text_config(), "vocab_size", None)  # CANINE hashes characters and has no vocabulary
    if rows and len(tokenizer) > rows:
        yield (
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has {rows} rows: take "
            "the model's own tokenizer, or resize the embedding (model.resize_token_embeddings) and save the model"
        )
    if sequence_length > (positions := max_positions(config)):
        yield (
            f"--sequence_length {sequence_length} is beyond the model's {positions} positions; use at most {positions}"
        )


def max_positions(config: PreTrainedConfig) -> float:
    """Returns the maximum number of positions; infinite if the configuration has none, or -1 as XLNet does."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return positions if positions > 0 else math.inf


def attention_length(config: PreTrainedConfig) -> float:
    """Returns the sequence length at which attention needs as many FLOPs as the rest; infinite without attention.

    In a layer of width d, linear layers need about 12 d² multiplications per token (an MLP of width 4 d, or Llama's
    shape). Attention needs 2 d per token attended to. Causal attention is not counted as half, because kernels compute
    the masked tokens too, or reach half the throughput.
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
) -> Any:
    """Returns the model in float32 (torch's default dtype), loaded from `name_or_path` or with random weights.

    Weights saved in half precision are also loaded as float32, because half precision would round away the optimizer's
    small steps. Accelerate sets the precision of the matmuls. Attention is SDPA if the model supports it. Under FSDP2,
    only the main process loads weights; `fsdp_loading.prepare` fills the models of the other processes.
    Raises UserError: the weights are missing or unreadable, or their shapes differ from those in the configuration.

    Args:
        model_class: an Auto class, or a model's own class.
        frozen_dtype: dtype of pretrained matrices that are not trained; None: float32.
        options: further arguments of `from_pretrained`, such as `ignore_mismatched_sizes`. With `output_loading_info`,
            the result is a tuple of the model and the loading report, as in transformers.
    """
    if name_or_path is None:
        return build_untrained(config, trust_remote_code, model_class)
    from common.models import pretrained

    return pretrained.build_model(config, name_or_path, trust_remote_code, model_class, frozen_dtype, **options)


def describe_use(
    model: PreTrainedModel, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, end_tokens: list[int]
) -> None:
    """Sets the end tokens and the maximum length in the configurations and the tokenizer, before they are saved.

    end_tokens: tokens that end the training targets, the most frequent first; empty: the end tokens stay unchanged. The
    generation config also keeps its previous end tokens if they are special tokens of this tokenizer.
    """
    generation = getattr(model, "generation_config", None)
    # `from_pretrained` has given the model a separate copy of the configuration.
    parts = [config, config.get_text_config(), model.config, model.config.get_text_config(), generation]
    for part in {id(part): part for part in parts if part is not None and end_tokens}.values():
        before = getattr(part, "eos_token_id", None)
        before = before if isinstance(before, list) else [before]
        stops = end_tokens + [
            token for token in before if token in tokenizer.added_tokens_decoder and token not in end_tokens
        ]
        part.eos_token_id = stops if part is generation and len(stops) > 1 else stops[0]
    if (positions := max_positions(config)) < math.inf:
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)


@torch.no_grad()
def write_sample(model: Any, tokenizer: Any, samples: Samples, length: int = 100) -> str:
    """Returns up to `length` tokens of text that the model, unsharded, generates after the first sample's beginning."""
    if current_grid().sequence > 1:
        from common.parallel import sequence

        sequence.whole_sequences()
    positions = max_positions(model.config)
    input_ids = torch.from_numpy(samples[0][0][: min(16, positions - 1)]).unsqueeze(0).to(model.device)
    model.eval()
    written = model.generate(
        input_ids,
        max_new_tokens=min(length, positions - input_ids.shape[1]),
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        attention_mask=torch.ones_like(input_ids),
        remove_invalid_values=True,  # in case the weights are NaN
        # The model's generation_config.json may set stop strings, many beams or texts, or outputs besides tokens.
        tokenizer=tokenizer,
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=False,
    )
    return tokenizer.decode(written[0], skip_special_tokens=True)
