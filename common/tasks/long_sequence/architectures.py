"""A sequence of which not even one fits: what is asked of its model, and how that computes it in pieces."""

import argparse

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.data.source_types import Source
from common.data.tokenizer import load_tokenizer, special_token_ids, train_tokenizer
from common.errors import UserError, refuse
from common.models.load import load_config
from common.tasks.long_sequence.recurrent import RecurrentConfig, RecurrentLM, pieces_of, tile_mlps
from common.training import losses

BYTES = 257  # the 256 and the end of a document
# What is trained from scratch, unless flags say otherwise. The learning rate is AdamW's at its peak.
ARCHITECTURES = {
    # sequence length, hidden size, layers, learning rate
    "lstm": (131072, 128, 1, 2e-2),  # the default: torch has a fused kernel of it for the CPU, and none of a GRU
    "gru": (131072, 128, 1, 4e-2),
    "transformer": (8192, 128, 4, 3e-3),
}
MLP_ROWS = 1024
FINE_TUNING_SHARE = 0.1  # of that learning rate, for a pretrained model


def choose_defaults(args: argparse.Namespace, architecture: str) -> None:
    """Fills in the flags that depend on the architecture, and refuses those that have no effect on it.

    Raises UserError: a line for each of them, and for a sequence that cannot be cut as asked.
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
    """Fills in --segments and --levels; a line for each way in which they contradict something, such as the length."""
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
    """Configuration and tokenizer of a pretrained model, or of one from scratch; fills in the flags' defaults.

    Raises UserError: a line for each flag that has no effect on the model, or cannot be as asked.
    """
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code)
        choose_defaults(args, getattr(config, "cell", "transformer"))
        return config, load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    choose_defaults(args, args.architecture or "lstm")
    tokenizer = train_tokenizer(source, BYTES, columns=(source.text_column,), flags="--text_column")
    return make_config(args, tokenizer), tokenizer


def check_segments(args: argparse.Namespace, config: PreTrainedConfig, max_length: int) -> None:
    """UserError where a recurrent network's longest sample has fewer tokens than the segments that are asked for."""
    if isinstance(config, RecurrentConfig):
        refuse(_check_segments(args, max_length, f"the longest sample, of {max_length:,} tokens"))


def make_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Of a model from scratch."""
    sizes = {"vocab_size": BYTES, "hidden_size": args.hidden_size, "num_hidden_layers": args.num_layers}
    if args.architecture != "transformer":
        return RecurrentConfig(cell=args.architecture or "lstm", **sizes)
    # Heads of 64 or little more: as many as divide the width into even parts, since positions turn pairs of values.
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
    """Makes `model(...)` the sum of the losses of a micro-batch's targets, in pieces; returns a line that says which.

    `length` is that of the longest sample.
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
