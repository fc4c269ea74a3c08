"""Chooses the model for sequences too long for memory, and its computation in pieces."""

import argparse

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.data.source_types import Source
from common.data.tokenizer import load_tokenizer, special_token_ids, train_tokenizer
from common.errors import UserError, refuse
from common.models.load import load_config
from common.tasks.long_sequence.recurrent import RecurrentConfig, RecurrentLM, pieces_of, tile_mlps
from common.training import losses

BYTES = 257  # the 256 byte values and the end of a document
# Defaults for training from scratch. The learning rate is the peak for AdamW.
ARCHITECTURES = {
    # sequence length, hidden size, layers, learning rate
    "lstm": (131072, 128, 1, 2e-2),  # the default, because torch has a fused CPU kernel for it and none for a GRU
    "gru": (131072, 128, 1, 4e-2),
    "transformer": (8192, 128, 4, 3e-3),
}
MLP_ROWS = 1024
FINE_TUNING_SHARE = 0.1  # learning rate of a pretrained model, as a share of that from scratch


def choose_defaults(args: argparse.Namespace, architecture: str) -> None:
    """Sets default values of the flags that depend on the architecture.

    Raises UserError with one line for each flag that has no effect on it, and if the sequence cannot be split as
    requested.
    """
    sequence_length, hidden_size, num_layers, rate = ARCHITECTURES[architecture]
    args.sequence_length = args.sequence_length or sequence_length
    args.learning_rate = args.learning_rate or (rate * FINE_TUNING_SHARE if args.model_name_or_path else rate)
    sizes = {"--hidden_size": args.hidden_size, "--num_layers": args.num_layers}
    recurrent = {"--segments": args.segments, "--levels": args.levels, "--truncate": args.truncate}
    if args.model_name_or_path:
        useless, why = sizes, "a pretrained model has its own"
    else:
        useless, why = {}, ""
        args.hidden_size, args.num_layers = args.hidden_size or hidden_size, args.num_layers or num_layers
    problems = [f"{flag} {value}: {why}; take it out" for flag, value in useless.items() if value]
    if architecture == "transformer":
        why = "is for a recurrent network; a transformer takes --activation_checkpointing and --mlp_rows"
        problems += [f"{flag} {value} {why}" for flag, value in recurrent.items() if value]
        if not args.model_name_or_path and args.hidden_size % 2:
            size = args.hidden_size
            near = f"{size - 1} or {size + 1}" if size > 1 else "2"
            problems.append(f"--hidden_size {size}: a transformer from scratch needs an even one; use {near}")
    else:
        useless = {"--mlp_rows": args.mlp_rows is not None, "--compile": args.compile}
        useless[f"--activation_checkpointing {args.activation_checkpointing}"] = args.activation_checkpointing != "none"
        why = "is for a transformer; a recurrent network takes --segments and --levels"
        problems += [f"{flag} {why}" for flag, given in useless.items() if given]
        problems += _check_segments(args, args.sequence_length, f"--sequence_length {args.sequence_length}")
    refuse(problems)


def _check_segments(args: argparse.Namespace, length: int, what: str) -> list[str]:
    """Sets defaults of --segments and --levels; returns a line for each conflict with other flags or the length."""
    if args.truncate:
        problems = [
            f"--{name} has no effect with --truncate; give one" for name in ("segments", "levels") if vars(args)[name]
        ]
        if args.truncate >= length:
            problems.append(f"--truncate {args.truncate} cuts nothing of {what}; lower it")
        return problems
    args.segments = args.segments or "sqrt"
    if args.segments == "none":
        return ["--levels has no effect without --segments; take it out"] if args.levels else []
    args.levels = args.levels or 1
    most = 1 if args.segments == "sqrt" else args.segments**args.levels
    if most <= length:
        return []
    return [
        f"--segments {args.segments} --levels {args.levels} make {most:,} segments, more than there are steps in "
        f"{what}; use fewer"
    ]


def choose_model(args: argparse.Namespace, source: Source) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Returns configuration and tokenizer of a pretrained model, or of a model from scratch; sets defaults of flags.

    Raises UserError with one line for each flag that has no effect on the model or has an invalid value.
    """
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code)
        choose_defaults(args, getattr(config, "cell", "transformer"))
        return config, load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    choose_defaults(args, args.architecture or "lstm")
    tokenizer = train_tokenizer(source, BYTES, columns=(source.text_column,), flags="--text_column")
    return make_config(args, tokenizer), tokenizer


def check_segments(args: argparse.Namespace, config: PreTrainedConfig, max_length: int) -> None:
    """Raises UserError if a recurrent network's longest sample has fewer tokens than the requested segments."""
    if isinstance(config, RecurrentConfig):
        refuse(_check_segments(args, max_length, f"the longest sample, of {max_length:,} tokens"))


def make_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Returns the configuration of a model from scratch."""
    sizes = {"vocab_size": BYTES, "hidden_size": args.hidden_size, "num_hidden_layers": args.num_layers}
    if args.architecture != "transformer":
        return RecurrentConfig(cell=args.architecture or "lstm", **sizes)
    # Heads are 64 wide or slightly more. The width per head must be even, because rotary positions rotate pairs of
    # values.
    most = max(1, args.hidden_size // 64)
    num_heads = max(number for number in range(1, most + 1) if args.hidden_size % (2 * number) == 0)
    return LlamaConfig(
        **sizes,
        num_attention_heads=num_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.sequence_length,
        tie_word_embeddings=True,
        **special_token_ids(tokenizer),
    )


def sum_losses_in_pieces(model: PreTrainedModel, args: argparse.Namespace, length: int) -> str:
    """Changes `model(...)` to return the summed loss of a micro-batch's targets, computed in pieces.

    Args:
        length: number of tokens of the longest sample.

    Returns: a line that describes the pieces.

    Raises UserError if --mlp_rows is set but the model has no layers with an `mlp`.
    """
    if not isinstance(model, RecurrentLM):
        rows = MLP_ROWS if args.mlp_rows is None else args.mlp_rows
        how, num_tiled = losses.sum_token_losses(model), tile_mlps(model, rows) if rows else 0
        if num_tiled:
            return f"{how}; {num_tiled} MLPs, {rows} rows at once"
        if args.mlp_rows:
            name = type(model).__name__
            raise UserError(f"--mlp_rows {rows}: {name} has no layers with an mlp; take --mlp_rows out")
        return f"{how}; MLPs in one piece"
    model.truncate = args.truncate
    if args.truncate:
        return f"gradient TRUNCATED after {args.truncate:,} bytes: NOT the gradient of the whole sequence"
    if args.segments == "none":
        return "every step kept for backward; the gradient of the whole sequence"
    model.segments, model.levels = args.segments, args.levels
    count = pieces_of(length, args.segments, args.levels)
    cut = " x ".join([f"{count:,}"] * args.levels)
    return f"{cut} segments, computed again in backward; the gradient of the whole sequence"
