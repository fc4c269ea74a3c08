"""Prepares the reward model according to the flags: a head with one output, its loss, and its metrics."""

from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerBase

from common.data.preferences import columns_of
from common.data.source_types import Source
from common.data.sources import open_source
from common.data.tokenizer import load_tokenizer, special_token_ids, train_tokenizer
from common.errors import UserError, raise_errors
from common.models.classifiers import describe_new_weights, needs_new_head, resolve_head_rate, set_labels
from common.models.load import check_model, load_config
from common.training.recipe_traits import Arguments

SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def choose_model(
    args: Arguments, sizes: dict[str, tuple], source: Source
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Returns configuration and tokenizer of a pretrained model, or of a Llama model from scratch.

    Args:
        sizes: models from scratch by name: the fields of `SHAPE`, vocabulary, ...
        source: the training pairs, on which a new tokenizer is trained.

    Raises UserError: the head of the model has several labels, it is an encoder-decoder, or the pairs do not fit it.
    """
    path = args.model_name_or_path
    if path:
        config = load_config(path, args.trust_remote_code, AutoModelForSequenceClassification)
        tokenizer = load_tokenizer(path, args.trust_remote_code)
        if getattr(config, "is_encoder_decoder", False):
            raise UserError(
                f"--model_name_or_path {path}: {config.model_type} is an encoder-decoder; use a causal model"
            )
        is_new = needs_new_head(config, args.new_head)
        if not is_new and config.num_labels != 1:
            raise UserError(
                f"--model_name_or_path {path}: its head has {config.num_labels} labels, but a reward is one number; "
                "pass --new_head to replace the head, or use a different model"
            )
        resolve_head_rate(args, is_new)
    else:
        resolve_head_rate(args, is_new=False)
        *numbers, vocabulary = sizes[args.model_config][: len(SHAPE) + 1]
        columns = None if source.embedded else columns_of(open_source(source))
        tokenizer = train_tokenizer(source, vocabulary, columns=columns)
        shape: dict[str, Any] = dict(zip(SHAPE, numbers, strict=True), vocab_size=vocabulary)
        shape |= {**special_token_ids(tokenizer), "max_position_embeddings": args.sequence_length}
        config = LlamaConfig(**shape)
    set_labels(config, None, "reward", tokenizer.pad_token_id)
    tokenizer.padding_side = "right"
    raise_errors(check_model(config, tokenizer, args.sequence_length))
    return config, tokenizer


def sum_pairs(rewards: Tensor, margins: Tensor, center: Tensor) -> Tensor:
    """Returns the summed loss of pairs: the negative log-likelihood of a Bradley-Terry model, with margins.

    Per pair: -log sigmoid(chosen - rejected - margin), with the margin of Llama 2 (arXiv:2307.09288, eq. 2; without
    it eq. 1), plus center * (chosen + rejected)^2, which keeps the mean reward near 0 (arXiv:2312.09244).

    Args:
        rewards: (P, 2), of the chosen and the rejected answer.
        margins: (P,). center: a scalar.
    """
    losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margins)
    return (losses + center * rewards.sum(1).square()).sum()


def summarize(rewards: np.ndarray) -> dict[str, float]:
    """Returns accuracy (equal rewards count as wrong), mean margin and mean reward, of rewards (P, 2)."""
    margins = rewards[:, 0] - rewards[:, 1]
    means = {"accuracy": margins > 0, "margin": margins, "reward": rewards}
    return {name: float(values.mean(dtype=np.float64)) for name, values in means.items()}


def describe_metrics(results: dict[str, Any]) -> list[str]:
    """Returns a line on the held-out set, if there is one."""
    if "accuracy" not in results:
        return []
    line = f"the chosen answer has the higher reward in {results['accuracy']:.1%} of the held-out pairs"
    return [f"{line}, by {results['margin']:.4f} on average over all; mean reward {results['reward']:.4f}"]


def describe_task(
    args: Arguments, tokenizer: PreTrainedTokenizerBase, head: list[str], head_learning_rate: float | None
) -> dict[str, str]:
    """Returns the lines on loss, reward and head for the run summary."""
    centring = f", centred with weight {args.center_rewards:g}" if args.center_rewards else ""
    lines = {"loss": f"-log sigmoid(chosen - rejected - margin){centring}"}
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        lines["reward"] = "at the last token that is not the end token, because this is also the padding token"
    return lines | describe_new_weights(head, head_learning_rate)
