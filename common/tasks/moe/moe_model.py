"""Builds the requested mixture of experts (MoE): from scratch, up-cycled from a dense model, or pretrained."""

import argparse
from typing import Any

import torch
from transformers import Ernie4_5Config, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.data.source_types import Source
from common.data.tokenizer import load_tokenizer, special_token_ids, train_tokenizer
from common.models.adapters import build_base
from common.models.load import build_model, load_config
from common.models.zero3 import whole_weights
from common.tasks.moe import routing
from common.training.recipe_traits import Arguments

UPCYCLED_SIZE = (8, 2)  # defaults of --upcycle: number of experts, experts per token
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")


def resolve_mixture(parser: argparse.ArgumentParser, args: Arguments, size: tuple | None) -> None:
    """Sets defaults of the mixture flags; exits with one line if flags contradict each other.

    Args:
        size: sizes of the model from scratch, as in `choose_mixture`, or None.
    """
    is_pretrained = args.model_name_or_path and not args.upcycle
    if args.upcycle and not args.model_name_or_path:
        parser.error("--upcycle has no effect without --model_name_or_path; name a dense model")
    if args.upcycle and args.lora_rank:
        parser.error("--lora_rank needs a base with files, but --upcycle builds a new model; remove one of them")
    if args.dense and args.model_name_or_path:
        parser.error("--dense is for models from scratch; train a pretrained dense model with recipes/lm.py")
    if args.dense and (args.balance or args.balance_strength or args.num_experts):
        parser.error("--dense has no experts to balance or to count; remove --balance and --num_experts")
    if args.lora_rank and args.balance == "bias":
        parser.error("--balance bias changes the base, which an adapter keeps; use a different --balance")
    args.balance = args.balance or ("none" if args.lora_rank else "bias")
    if is_pretrained and (args.num_experts or args.experts_per_token):
        parser.error("--num_experts and --experts_per_token cannot change a pretrained model; remove them")
    if not is_pretrained:
        num_experts, experts_per_token = size[4:6] if size else UPCYCLED_SIZE
        args.num_experts = args.num_experts or num_experts
        args.experts_per_token = args.experts_per_token or min(experts_per_token, args.num_experts)
        if args.num_experts == 1:
            parser.error("--num_experts 1 is a dense model, with nothing to route; use at least 2, or --dense")
        if args.experts_per_token > args.num_experts:
            parser.error(f"--experts_per_token {args.experts_per_token} is more than --num_experts {args.num_experts}")
    if args.balance_strength and args.balance == "none":
        parser.error("--balance_strength has no effect with --balance none; remove it")
    if args.balance_strength is None:  # pretrained routers need smaller steps
        args.balance_strength = 1e-3 if is_pretrained and args.balance == "bias" else 1e-2


def choose_mixture(
    args: Arguments, sizes: dict[str, tuple], source: Source
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Returns configuration and tokenizer of a pretrained mixture, an up-cycled model, or a model from scratch.

    Raises UserError if `--balance` does not support the pretrained model's routers, or the model cannot be up-cycled.
    """
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code)
        if args.upcycle:
            config = routing.upcycled_config(config, args.num_experts, args.experts_per_token)
        config.get_text_config().output_router_logits = False  # True would add transformers' balancing loss
        with torch.device("meta"):
            routing.check_routers(build_model(config, None, args.trust_remote_code), args.balance)
        return config, tokenizer
    *numbers, _, _, expert_width, vocabulary = sizes[args.model_config][:8]
    tokenizer = train_tokenizer(source, vocabulary)
    shape: dict[str, Any] = dict(zip(SHAPE, numbers, strict=True)) | special_token_ids(tokenizer)
    shape |= {"vocab_size": vocabulary, "max_position_embeddings": max(2048, args.sequence_length)}
    shape |= {"head_dim": shape["hidden_size"] // shape["num_attention_heads"], "tie_word_embeddings": True}
    shape["intermediate_size"] = args.experts_per_token * expert_width
    if args.dense:
        return Ernie4_5Config(**shape), tokenizer
    return routing.moe_config(shape, args.num_experts, args.experts_per_token, expert_width), tokenizer


def build_mixture(args: Arguments, config: PreTrainedConfig) -> PreTrainedModel:
    """Builds the model, identical on every process, in float32; the frozen base of an adapter may have fewer bits."""
    if args.model_name_or_path and not args.upcycle:
        return build_base(args, config)
    model = build_model(config)
    # transformers before 5.18 leaves the routers' weights at 0, so that all experts would have equal scores.
    for layer in routing.find_layers(model):
        torch.nn.init.normal_(layer.router.weight, std=config.initializer_range)
    if not args.upcycle:
        return model
    with whole_weights():
        dense = build_model(load_config(args.model_name_or_path), args.model_name_or_path)
    return routing.upcycle(dense, model)
