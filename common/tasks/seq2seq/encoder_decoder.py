"""Chooses and prepares an encoder-decoder model, and generates targets on all ranks."""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from tokenizers.processors import TemplateProcessing
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, T5Config

from common.data.source_types import Source
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import UserError, raise_errors
from common.models.adapters import has_adapter
from common.models.decisions import decided_once
from common.models.generation import rows_at_once
from common.models.load import check_model, load_config
from common.models.model_setup import without_wrapper
from common.parallel.distributed_mode import is_sharded
from common.tasks.seq2seq.pairs import Pairs
from common.training.batching import Collate
from common.training.micro_batch_partition import split_global_batch
from common.training.precision import weights_cast_once

# The recipe's arguments of `Traits`.
TRAITS = {"size_flags": ("sequence_length", "target_length"), "held_out_flags": ("generate",)}
SHAPE = ("num_layers", "d_model", "num_heads", "d_kv", "d_ff")
TOKENIZERS = {
    "bpe": "trained on your text, with the vocabulary size of --model_config",
    "bytes": "each byte is a token; for short texts, spelling and numbers",
}


def check_arguments(args: argparse.Namespace) -> Iterator[str]:
    """Yields one line for each flag that has no effect with the other flags."""
    if args.tokenizer and args.model_name_or_path:
        yield "--tokenizer is for models from scratch, a pretrained model has its own; remove it"
    if args.metric and not args.generate:
        yield "--metric compares the texts that --generate N writes, and N is 0; raise it, or remove --metric"
    if args.validation_file and not (args.train_file or args.dataset_name):
        yield "--validation_file needs --train_file or --dataset_name; name the training data"


def choose_model(
    args: argparse.Namespace, sizes: dict[str, tuple], source: Source, columns: tuple[str, str]
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Returns configuration and tokenizer of a pretrained model, or of a T5 model from scratch.

    Args:
        sizes: models from scratch by name: layers per stack, width, heads, width per head, MLP width, vocabulary, ...
        source: the training text; a new tokenizer is trained on its `columns`.

    Raises UserError with one line per reason why tokenizer or lengths do not fit the model.
    """
    config: Any
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code, AutoModelForSeq2SeqLM)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    else:
        *numbers, vocabulary = sizes[args.model_config][:6]
        vocabulary = 257 if args.tokenizer == "bytes" else vocabulary  # the 256 byte values and the end of a text
        text_columns = None if source.embedded else columns
        tokenizer = train_tokenizer(source, vocabulary, columns=text_columns, flags="--source_column, --target_column")
        end = (tokenizer.eos_token, tokenizer.eos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
        shape: Any = dict(zip(SHAPE, numbers, strict=True), vocab_size=vocabulary, feed_forward_proj="gated-gelu")
        shape |= {"eos_token_id": end[1], "pad_token_id": tokenizer.pad_token_id}
        config = T5Config(**shape | {"decoder_start_token_id": tokenizer.pad_token_id})
    raise_errors(_check_lengths(config, tokenizer, args))
    return config, tokenizer


def _check_lengths(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> Iterator[str]:
    """Yields one line per reason why tokenizer, source length or target length do not fit the model."""
    yield from check_model(config, tokenizer, args.sequence_length)
    positions = getattr(config, "max_position_embeddings", None)
    if positions and 0 < positions < args.target_length:
        yield f"--target_length {args.target_length} exceeds the model's {positions} positions; lower it"
    num_special = tokenizer.num_special_tokens_to_add()
    for flag, least in (("sequence_length", num_special + 1), ("target_length", max(1, num_special) + 1)):
        if vars(args)[flag] < least:
            yield f"--{flag} {vars(args)[flag]} is too short for text and special tokens; use at least {least}"
    if getattr(config, "decoder_start_token_id", None) is None:
        yield "the model's config.json has no decoder_start_token_id, with which targets begin; add it"


@torch.no_grad()
def write_targets(
    args: argparse.Namespace,
    model: torch.nn.Module,
    samples: Pairs,
    collate: Collate,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[int, list[int]]:
    """Generates targets greedily for --generate evenly spaced samples; returns {sample id: token ids} on all ranks.

    The samples are partitioned among the ranks like a global batch, each with the maximum length that it can reach.
    """
    ids = np.unique(np.linspace(0, len(samples) - 1, min(args.generate, len(samples))).astype(int))
    lengths = np.maximum(samples.lengths(ids), [0, args.target_length])
    # All batches have the same number of samples, because a batch takes as many steps as its longest answer has tokens.
    size = rows_at_once(args, int(lengths.sum(1).max()))
    model.eval()
    generator: Any = without_wrapper(model)
    register_fsdp_forward_method(generator, "generate")  # FSDP2: all-gathers weights; else no effect
    written: list[tuple[int, list[int]]] = []
    shares = split_global_batch(lengths, accelerator.num_processes, size)
    with weights_cast_once(args.activation_checkpointing == "none"):
        for positions in shares[accelerator.process_index]:
            # Dummy samples and synced_gpus: if weights are sharded, every rank must participate in every forward.
            micro_batch = collate([samples[i] for i in ids[positions]] or [samples.dummy_sample()])
            batch = send_to_device(micro_batch, accelerator.device)
            # generate() calls the encoder without the model's autocast; with an adapter, its weights have two dtypes.
            with accelerator.autocast() if has_adapter(generator) else nullcontext():
                tokens = generator.generate(
                    batch["input_ids"],
                    attention_mask=batch.get("attention_mask", torch.ones_like(batch["input_ids"])),
                    max_new_tokens=args.target_length,
                    do_sample=False,
                    num_beams=1,
                    use_cache=True,  # a config saved after training may say False
                    synced_gpus=is_sharded(accelerator),
                    # The model's generation_config.json may request stop strings, which need the tokenizer.
                    tokenizer=tokenizer,
                    num_return_sequences=1,
                    return_dict_in_generate=False,
                )
            written += zip(ids[positions].tolist(), tokens.tolist(), strict=False)  # drops outputs of a dummy sample
    return dict(sorted(gather_object(written)))


def prepare_encoder_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Replaces the embeddings that share a weight by a single module, and returns the model.

    Call it on the bare model, on all ranks together. transformers creates separate modules for encoder and decoder, and
    FSDP2 rejects a weight in two of its groups. An embedding with a separate weight in the checkpoint stays separate.

    Raises UserError if the model begins targets differently from `collate_pairs` (mBART: with a language token).
    """
    if callable(shift := getattr(model, "prepare_decoder_input_ids_from_labels", None)):
        if shift(torch.arange(2, 6).unsqueeze(0))[0].tolist() != [model.config.decoder_start_token_id, 2, 3, 4]:
            name = type(model).__name__
            raise UserError(f"{name} does not begin all targets with its decoder_start_token_id; use a different model")
    shared, modules = model.get_input_embeddings(), list(model.named_modules())
    # Only a process that has loaded the weights knows whether the checkpoint has separate weights.
    twins = decided_once(
        lambda: [name for name, m in modules if isinstance(m, torch.nn.Embedding) and m.weight is shared.weight]
    )
    for twin in twins:
        model.set_submodule(twin, shared)
    return model
