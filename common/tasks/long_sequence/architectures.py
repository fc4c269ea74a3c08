"""Chooses the model for sequences whose activations do not fit in memory, and splits its computation into pieces."""

import argparse
from collections.abc import Iterator
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.data.source_types import Source
from common.data.tokenizer import load_tokenizer, special_token_ids, train_tokenizer
from common.errors import UserError, raise_errors
from common.models.load import load_config
from common.tasks.long_sequence.recurrent import RecurrentConfig, RecurrentLM, pieces_of, tile_mlps
from common.training import losses

BYTES = 257  # vocabulary size: the 256 byte values and the end of a document
# Defaults for training from scratch. The learning rate is the peak for AdamW.
ARCHITECTURES = {
    # sequence length, hidden size, layers, learning rate
    "lstm": (131072, 128, 1, 2e-2),  # the default; torch has a fused CPU kernel for an LSTM, but none for a GRU
    "gru": (131072, 128, 1, 4e-2),
    "transformer": (8192, 128, 4, 3e-3),
}
MLP_ROWS = 1024
FINE_TUNING_SHARE = 0.1  # default learning rate of a pretrained model, as a fraction of that for a model from scratch


def _resolve_flags(args: argparse.Namespace, architecture: str) -> Iterator[str]:
    """Sets defaults that depend on the architecture; yields a line per flag without effect or with an invalid value."""
    sequence_length, hidden_size, num_layers, rate = ARCHITECTURES[architecture]
    args.sequence_length = args.sequence_length or sequence_length
    args.learning_rate = args.learning_rate or (rate * FINE_TUNING_SHARE if args.model_name_or_path else rate)
    if args.model_name_or_path:
        for name in ("hidden_size", "num_layers"):
            if value := vars(args)[name]:
                yield f"--{name} {value}: a pretrained model has its own; remove it"
    else:
        args.hidden_size, args.num_layers = args.hidden_size or hidden_size, args.num_layers or num_layers
    if architecture != "transformer":
        why = "is for a transformer; a recurrent network uses --segments and --levels"
        if args.mlp_rows is not None:
            yield f"--mlp_rows {why}"
        if args.compile is True:
            yield f"--compile {why}"
        if args.activation_checkpointing != "none":
            yield f"--activation_checkpointing {args.activation_checkpointing} {why}"
        yield from _resolve_segments(args, args.sequence_length, f"--sequence_length {args.sequence_length}")
        return
    for name in ("segments", "levels", "truncate"):
        if value := vars(args)[name]:
            yield (
                f"--{name} {value} is for a recurrent network; a transformer uses --activation_checkpointing and "
                "--mlp_rows"
            )
    if not args.model_name_or_path and args.hidden_size % 2:
        size = args.hidden_size
        near = f"{size - 1} or {size + 1}" if size > 1 else "2"
        yield f"--hidden_size {size}: a transformer from scratch needs an even size; use {near}"


def _resolve_segments(args: argparse.Namespace, length: int, subject: str) -> Iterator[str]:
    """Sets defaults of --segments and --levels; yields a line for each conflict with other flags or the length."""
    if args.truncate:
        for name in ("segments", "levels"):
            if vars(args)[name]:
                yield f"--{name} has no effect with --truncate; pass only one"
        if args.truncate >= length:
            yield f"--truncate {args.truncate} truncates nothing of {subject}; lower it"
        return
    args.segments = args.segments or "sqrt"
    if args.segments == "none":
        if args.levels:
            yield "--levels has no effect without --segments; remove it"
        return
    args.levels = args.levels or 1
    number = 1 if args.segments == "sqrt" else args.segments**args.levels
    if number > length:
        yield (
            f"--segments {args.segments} --levels {args.levels} make {number:,} segments, more than the steps of "
            f"{subject}; use fewer"
        )


def choose_model(args: argparse.Namespace, source: Source) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Returns configuration and tokenizer of a pretrained model, or of a model from scratch; sets defaults of flags.

    Raises UserError with one line for each flag that has no effect on the model or has an invalid value.
    """
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code)
        raise_errors(_resolve_flags(args, getattr(config, "cell", "transformer")))
        return config, load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    raise_errors(_resolve_flags(args, args.architecture or "lstm"))
    tokenizer = train_tokenizer(source, BYTES, columns=(source.text_column,), flags="--text_column")
    return make_config(args, tokenizer), tokenizer


def check_segments(args: argparse.Namespace, config: PreTrainedConfig, max_length: int) -> None:
    """Raises UserError if a recurrent network's longest sample has fewer tokens than the requested segments."""
    if isinstance(config, RecurrentConfig):
        raise_errors(_resolve_segments(args, max_length, f"the longest sample, of {max_length:,} tokens"))


def make_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Returns the configuration of a model from scratch."""
    sizes: Any = {"vocab_size": BYTES, "hidden_size": args.hidden_size, "num_hidden_layers": args.num_layers}
    if args.architecture != "transformer":
        return RecurrentConfig(cell=args.architecture or "lstm", **sizes)
    # As many heads as possible with a width of at least 64 that is even, because rotary embeddings rotate pairs.
    limit = max(1, args.hidden_size // 64)
    num_heads = max(number for number in range(1, limit + 1) if args.hidden_size % (2 * number) == 0)
    sizes |= {"num_attention_heads": num_heads, "intermediate_size": 4 * args.hidden_size}
    sizes |= {"max_position_embeddings": args.sequence_length, "tie_word_embeddings": True}
    return LlamaConfig(**sizes | special_token_ids(tokenizer))


def sum_losses_in_pieces(model: PreTrainedModel, args: argparse.Namespace, length: int) -> str:
    """Changes `model(...)` to return the summed loss of a micro-batch's targets, computed in pieces.

    Args:
        length: number of tokens of the longest sample.

    Returns a line that describes the pieces. Raises UserError if --mlp_rows is set but the model has no layers with an
    `mlp`.
    """
    if not isinstance(model, RecurrentLM):
        rows = MLP_ROWS if args.mlp_rows is None else args.mlp_rows
        line, num_tiled = losses.sum_token_losses(model), tile_mlps(model, rows) if rows else 0
        if num_tiled:
            return f"{line}; {num_tiled} MLPs, {rows} rows at once"
        if args.mlp_rows:
            name = type(model).__name__
            raise UserError(f"--mlp_rows {rows}: {name} has no layers with an mlp; remove --mlp_rows")
        return f"{line}; MLPs in one piece"
    model.truncate = args.truncate
    if args.truncate:
        return f"gradient TRUNCATED after {args.truncate:,} bytes: NOT the gradient of the full sequence"
    if args.segments == "none":
        return "every step kept for backward; the gradient of the full sequence"
    model.segments, model.levels = args.segments, args.levels
    count = pieces_of(length, args.segments, args.levels)
    counts = " x ".join([f"{count:,}"] * args.levels)
    return f"{counts} segments, recomputed in backward; the gradient of the full sequence"
