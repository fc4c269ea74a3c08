"""Trains on sequences of which not even one fits: 131,072 bytes and more, back-propagated in full.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/long_sequence.py
a GRU          the same with --architecture gru; a transformer with --architecture transformer
longer         the same with --sequence_length 1048576 --global_batch_size 1, and --levels 2 for less memory
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 \\
                   recipes/long_sequence.py --train_file 'logs/*.txt' --global_batch_size 8 --hidden_size 1024
rehearsal      the same with --dry_run, on any machine
continue       the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in another mode

A recurrent network walks the sequence in segments, keeps the state at the start of each, and computes one after the
other again in backward: memory grows with the square root of the length (--levels: slower still), and the gradient is
that of the whole sequence. A transformer keeps neither logits nor the wide tensors of its MLPs: both come in tiles.
A token is a byte: the tokenizer has 256 of them and one for the end of a document.
"""

import math
import sys
import time
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from transformers import LlamaConfig

# The repository's root, behind this file's folder (index 0), so that a copy of common/ beside a copy of this file wins.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments
from common.checkpoint.identity import identify
from common.checkpoint.save import Checkpoints, TrainingState
from common.data.text import tokenize
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import UserError
from common.files import complete_or_absent
from common.models.load import build_model, check_model, describe_use, load_config, parameter_sizes
from common.models.recurrent import RecurrentConfig, RecurrentLM, pieces_of, tile_mlps
from common.parallel import loading
from common.parallel.connect import check_space, make_accelerator, seed_everything
from common.parallel.ending import end_run, user_mistakes_end_here
from common.parallel.launch import check_launch, find_launch, is_rehearsal, runs_on_cpu
from common.report import tracking
from common.report.settings import print_settings
from common.training.accumulation import loss_scale, reduce_update, skip_step, sum_over_ranks, synchronize_gradients
from common.training.activation_checkpointing import apply_activation_checkpointing
from common.training.batching import collate_tokens, make_loader
from common.training.losses import sum_token_losses
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate
from common.training.stopping import STOPPED, StopRequests

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


def segments(text):
    """argparse type: none, sqrt or a number."""
    return text if text in ("none", "sqrt") else arguments.positive(text)


def parse_arguments():
    parser = arguments.ArgumentParser(description=__doc__, prog="long_sequence.py")
    arguments.add_shared_arguments(parser, lengths_vary=False)
    arguments.add_language_arguments(parser)
    group = parser.add_argument_group("long sequences")
    group.add_argument(
        "--architecture", help="(default: lstm, or the pretrained model's)", **arguments.one_of(ARCHITECTURES)
    )
    group.add_argument("--hidden_size", type=arguments.positive, help="from scratch (default: 128)")
    group.add_argument("--num_layers", type=arguments.positive, help="from scratch (default: 1, a transformer 4)")
    group.add_argument(
        "--segments",
        type=segments,
        metavar="none|sqrt|N",
        help="recurrent: computed again in backward; sqrt: as many as a segment has steps (default: sqrt)",
    )
    group.add_argument(
        "--levels",
        type=arguments.positive,
        metavar="K",
        help="cut each segment likewise, K times in all: less memory, one more forward each (default: 1)",
    )
    group.add_argument(
        "--truncate",
        type=arguments.positive,
        metavar="N",
        help="recurrent: cut the gradient after N bytes; NOT the gradient of the sequence",
    )
    group.add_argument(
        "--mlp_rows",
        type=arguments.not_negative,
        metavar="R",
        help=f"transformer: positions that an MLP sees at once (default: {MLP_ROWS}, where the model's MLPs are found; "
        "0: all)",
    )
    parser.set_defaults(sequence_length=None, num_updates=30, global_batch_size=1, micro_batch_size=1)
    args = parser.parse_args()
    if args.architecture and args.model_name_or_path:
        parser.error("--architecture and --model_name_or_path are two answers to one question; give one")
    args.output_dir = args.output_dir or time.strftime("runs/long_sequence-%Y%m%d-%H%M%S")
    return args


def choose_defaults(args, architecture):
    """Fills in the flags that depend on the architecture, and refuses those that have no effect on it.

    Raises:
        UserError: a line for each of them, and for a sequence that cannot be cut as asked.
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
        problems += check_segments(args, args.sequence_length, f"--sequence_length {args.sequence_length}")
    if problems:
        raise UserError("\n".join(problems))


def check_segments(args, length, what):
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


def load_data(args):
    """Tokenizer, the model's configuration, training samples, and held-out samples or None."""
    train_source, validation_source = arguments.text_sources(args)
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code)
        choose_defaults(args, getattr(config, "cell", "transformer"))
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    else:
        choose_defaults(args, args.architecture or "lstm")
        tokenizer = train_tokenizer(train_source, BYTES, columns=(train_source.text_column,))
        config = make_config(args, tokenizer)
    if problems := check_model(config, tokenizer, args.sequence_length):
        raise UserError("\n".join(problems))
    train = tokenize(train_source, tokenizer, args.sequence_length, "blocks")
    validation = validation_source and tokenize(
        validation_source, tokenizer, args.sequence_length, "blocks", measure_compression=True
    )
    arguments.check_samples(args, train, validation)
    if isinstance(config, RecurrentConfig):
        what = f"the longest sample, of {train.max_length:,} tokens"
        if problems := check_segments(args, train.max_length, what):
            raise UserError("\n".join(problems))
    return tokenizer, config, train, validation


def make_config(args, tokenizer):
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
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def shape_sequences(model, args, length):
    """Makes `model(...)` the sum of the losses of a micro-batch's targets, in pieces; and a line that says which.

    `length` is that of the longest sample.
    """
    if not isinstance(model, RecurrentLM):
        rows = MLP_ROWS if args.mlp_rows is None else args.mlp_rows
        how, num_tiled = sum_token_losses(model), tile_mlps(model, rows) if rows else 0
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


def sum_losses(model, micro_batch):
    """The sum of the losses of a micro-batch's targets."""
    return model(**micro_batch)


@torch.no_grad()
def evaluate(model, loader, accelerator):
    """Mean loss over all target tokens of the held-out samples, each counted once."""
    model.eval()
    loss_sums, num_targets = [], 0
    for batch in loader:
        for micro_batch in batch.micro_batches:
            loss_sums.append(sum_losses(model, send_to_device(micro_batch, accelerator.device, non_blocking=True)))
        num_targets += batch.num_targets
    model.train()
    (loss_sum,) = sum_over_ranks(accelerator, torch.stack(loss_sums).sum())
    return {"validation_loss": loss_sum / num_targets}


def train(args, accelerator, model, optimizer, loader, validation_loader, output_dir, checkpoints, state):
    """The loop: a global batch of micro-batches, then one update. Also returns whether it was asked to stop."""
    model.train()
    with tracking.Progress(accelerator, output_dir, args.num_updates, state) as progress, StopRequests() as stop:
        for batch in progress.batches(loader):
            rate = learning_rate(
                batch.update,
                schedule=args.lr_schedule,
                peak=args.learning_rate,
                num_updates=args.num_updates,
                warmup_updates=args.warmup_updates,
            )
            set_learning_rate(optimizer, rate)
            scale = loss_scale(accelerator, batch.num_targets)
            loss_sums = []
            for step, micro_batch in enumerate(batch.micro_batches, start=1):
                with synchronize_gradients(accelerator, model, now=step == len(batch.micro_batches)):
                    loss_sum = sum_losses(model, send_to_device(micro_batch, accelerator.device, non_blocking=True))
                    accelerator.backward(loss_sum * scale)
                loss_sums.append(loss_sum.detach())
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
            news = checkpoints.news(stop)  # of this rank; from here on of all, by the one collective of an update
            loss, grad_norm, news = reduce_update(accelerator, loss_sums, grad_norm, batch, news)

            finite = math.isfinite(loss) and math.isfinite(grad_norm)  # the same on all ranks, as loss and norm are
            if finite:
                optimizer.step()
                optimizer.zero_grad()
            else:
                skip_step(accelerator, optimizer)
            state.skipped_in_a_row = 0 if finite else state.skipped_in_a_row + 1
            state.skipped_updates += not finite
            state.update, state.validation_loss = batch.update + 1, None
            state.samples += batch.num_samples
            record = {"update": batch.update, "loss": loss, "grad_norm": grad_norm, "learning_rate": rate}
            is_end = args.keep_best and state.update == args.num_updates  # it may be the best
            if validation_loader and args.eval_every and (state.update % args.eval_every == 0 or is_end):
                record |= evaluate(model, validation_loader, accelerator)
                state.measured(record["validation_loss"])
            progress.update(batch, **record)
            if state.skipped_in_a_row == args.max_skipped_updates:
                raise RuntimeError(
                    f"update {batch.update}: loss or gradient not finite {state.skipped_in_a_row} times in a row; "
                    "lower --learning_rate, or look at the data"
                )
            if checkpoints.update_done(state, model, optimizer, news):
                return progress, True
        checkpoints.training_done(state, model, optimizer)
    return progress, False


def main():
    args = parse_arguments()
    asked = find_launch()
    problems = arguments.check_arguments(args, on_cpu=runs_on_cpu(asked), lengths_vary=False)
    problems += check_launch(asked, args)
    if problems:
        raise UserError("\n".join(problems))
    accelerator = make_accelerator(asked, args, log_with=args.report_to or None, project_dir=args.output_dir)
    checkpoints = Checkpoints(args, accelerator)
    tokenizer, config, train_samples, validation_samples = load_data(args)
    check_space(asked, lambda: parameter_sizes(config, args.trust_remote_code))
    identity = identify(args, accelerator, config, tokenizer, train_samples.fingerprint, "truncate")
    resumed = checkpoints.find(identity)  # the newest sound checkpoint, with --resume

    seed_everything(args.seed)  # the same weights on all ranks
    model = build_model(config, args.model_name_or_path, args.trust_remote_code)
    # From here on, model(...) is the sum of the losses of a micro-batch's targets.
    how = shape_sequences(model, args, train_samples.max_length)
    apply_activation_checkpointing(model, args.activation_checkpointing, accelerator.device)
    if args.compile:
        model.base_model.compile(dynamic=True)
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    first_update = resumed.manifest["update"] if resumed else 0
    collate = partial(collate_tokens, pad_token_id=tokenizer.pad_token_id)
    loader = make_loader(args, train_samples, accelerator, collate, range(first_update, args.num_updates))
    validation_loader = validation_samples and make_loader(args, validation_samples, accelerator, collate)
    held_out = validation_loader and validation_loader.dataset
    rehearsal = is_rehearsal(asked)
    tracking.print_run(args, accelerator, model, loader.dataset, held_out, rehearsal, loss=how)
    model, optimizer = loading.prepare(accelerator, model, optimizer)
    seed_everything(args.seed, accelerator)  # another dropout on each rank

    if args.dry_run:
        micro_batch = send_to_device(next(iter(loader)).micro_batches[0], accelerator.device)
        accelerator.backward(sum_losses(model, micro_batch))
        print_settings(args, asked, accelerator)
        accelerator.print("dry run: one forward and one backward done, nothing written")
        return end_run(accelerator)
    output_dir = arguments.make_output_dir(args, accelerator)
    describe_use(accelerator.unwrap_model(model), config, tokenizer, train_samples.end_tokens)
    checkpoints.start(config, tokenizer, model=model, versions=tracking.versions())
    state = TrainingState(**resumed.manifest["position"]) if resumed else TrainingState()
    tracking.start_run(args, accelerator, output_dir, state, model=config.to_dict())
    checkpoints.resume(resumed, model, optimizer)  # last: the random streams go on from here
    progress, stopped = train(
        args, accelerator, model, optimizer, loader, validation_loader, output_dir, checkpoints, state
    )
    if stopped:
        tracking.end_early(accelerator, output_dir, state)
        return end_run(accelerator, STOPPED)
    results = progress.results() | checkpoints.best_at_end(model, optimizer)
    if validation_loader:
        results |= evaluate(model, validation_loader, accelerator)
        results |= tracking.held_out_results(results["validation_loss"], validation_samples)
    weights = accelerator.get_state_dict(model)  # gathered on the main process, where they are sharded
    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(model)
        with complete_or_absent(output_dir / "model") as model_dir:
            trained.save_pretrained(model_dir, state_dict=weights)
            tokenizer.save_pretrained(model_dir)
        name = "common.models.recurrent.RecurrentLM" if isinstance(trained, RecurrentLM) else "AutoModelForCausalLM"
        line = f"memory grew by {results['memory_growth_bytes'] / 2**20:,.0f} MiB while training; {how}"
        tracking.print_results(results, output_dir, name, line)
    end_run(accelerator)


if __name__ == "__main__":
    with user_mistakes_end_here():
        main()
