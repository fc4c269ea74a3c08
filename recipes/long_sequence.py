"""Trains on sequences of which not even one fits the memory: 131,072 bytes and more, back-propagated in full.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/long_sequence.py
a GRU          the same with --architecture gru; a transformer with --architecture transformer
longer         the same with --sequence_length 1048576 --global_batch_size 1, and --levels 2 for less memory
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 \\
                   recipes/long_sequence.py --train_file 'logs/*.txt' --global_batch_size 8 --hidden_size 1024
dry run        the same with --dry_run, on any machine
resume         the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in a different mode

A recurrent network runs over the sequence in segments and keeps the state at the start of each; backward recomputes one
segment at a time: memory grows with the square root of the length (--levels: slower still), and the gradient is that
of the whole sequence. A transformer keeps neither logits nor the wide tensors of its MLPs: both are made in tiles.
A token is a byte: the tokenizer has 256 of them and one for the end of a document.
"""

import sys
from functools import partial
from pathlib import Path

# The repository root comes after this file's directory (index 0), so a common/ next to this file takes precedence.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments  # isort: skip  # before torch: see common/__init__.py
import torch

from common.data.text import tokenize
from common.errors import raise_errors
from common.models.load import build_model, check_model, describe_use
from common.parallel.shutdown import exit_on_user_error
from common.report.tracking import describe_held_out
from common.run import Run
from common.tasks.long_sequence import architectures
from common.tasks.long_sequence.recurrent import RecurrentLM
from common.training.accumulation import loss_scale, mean_losses, skip_step, synchronize_gradients
from common.training.batching import collate_tokens
from common.training.clipping import clip_gradients
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate


def segments(text):
    """argparse type: none, sqrt or a number."""
    return text if text in ("none", "sqrt") else arguments.positive(text)


def parse_arguments():
    parser = arguments.recipe_parser(__doc__, lengths_vary=False)
    arguments.add_language_arguments(parser, longest="131072, a transformer's 8192")
    parser.set_defaults(num_updates=30, global_batch_size=1, micro_batch_size=1)
    positive, group = arguments.positive, parser.add_argument_group("long sequences")
    default = "network type (default: lstm, or the pretrained model's)"
    group.add_argument("--architecture", **arguments.one_of(architectures.ARCHITECTURES, default))
    group.add_argument("--hidden_size", type=positive, help="width, from scratch (default: 128)")
    group.add_argument("--num_layers", type=positive, help="layers, from scratch (default: 1, a transformer 4)")
    about = "recurrent: number of recomputed segments; sqrt: equal to the steps per segment (default: sqrt)"
    group.add_argument("--segments", type=segments, metavar="none|sqrt|N", help=about)
    about = "recurrent: levels of nested segments; each saves memory and adds a forward pass (default: 1)"
    group.add_argument("--levels", type=positive, metavar="K", help=about)
    about = "recurrent: truncate back-propagation to N bytes; NOT the gradient of the whole sequence"
    group.add_argument("--truncate", type=positive, metavar="N", help=about)
    about = f"transformer: positions per MLP tile; 0: all (default: {architectures.MLP_ROWS} if MLPs are found)"
    group.add_argument("--mlp_rows", type=arguments.not_negative, metavar="R", help=about)
    args = parser.parse_args()
    if args.architecture and args.model_name_or_path:
        parser.error("--architecture and --model_name_or_path are mutually exclusive; pass only one")
    return args


def load_data(args):
    """Returns tokenizer, model config, training samples, and held-out samples or None."""
    source, held_out_source = arguments.text_sources(args)
    config, tokenizer = architectures.choose_model(args, source)
    raise_errors(check_model(config, tokenizer, args.sequence_length))
    tokens = partial(tokenize, tokenizer=tokenizer, sequence_length=args.sequence_length, shape="blocks")
    train_set, held_out = tokens(source), held_out_source and tokens(held_out_source, measure_compression=True)
    architectures.check_segments(args, config, train_set.max_length)
    return tokenizer, config, train_set, held_out


def sum_losses(model, micro_batch):
    """Returns the summed loss of a micro-batch's targets; `main` makes the model return it (`sum_losses_in_pieces`)."""
    return model(**micro_batch)


@torch.no_grad()
def evaluate(run, model):
    """Returns the mean loss over all held-out targets, each counted once; for mixed data also per source."""
    model.eval()
    measured = []
    for batch in run.held_out:
        loss_sums = [sum_losses(model, micro_batch) for micro_batch, _ in run.micro_batches(batch)]
        measured.append((batch.source, batch.num_targets, loss_sums))
    model.train()
    return mean_losses(run.accelerator, measured)


def train(args, run, model, optimizer, batches):
    """Training loop: per global batch, forward and backward of its micro-batches, then one update."""
    accelerator = run.accelerator
    run.evaluations.repeat(evaluate, model)  # on resume, if a request to stop interrupted it
    for batch in batches:
        rate = learning_rate(batch.update, args.lr_schedule, args.learning_rate, args.num_updates, args.warmup_updates)
        set_learning_rate(optimizer, rate)
        scale, loss_sums, loss_sum = loss_scale(accelerator, batch.num_targets), [], None
        for micro_batch, is_last in run.micro_batches(batch):
            with synchronize_gradients(accelerator, model, now=is_last):
                loss_sum = sum_losses(model, micro_batch)
                accelerator.backward(loss_sum * scale)
                loss_sums.append(loss_sum.detach())
        if args.dry_run:
            break
        grad_norm = clip_gradients(accelerator, model, args.max_grad_norm)
        if run.all_finite(batch, loss_sums, grad_norm):
            optimizer.step()
            optimizer.zero_grad()
        else:
            skip_step(accelerator, optimizer)
        metrics = {"learning_rate": rate} | run.evaluations.after_update(evaluate, model)
        if run.end_update(batch, **metrics):
            break


def main():
    args = parse_arguments()
    run = Run(args, lengths_vary=False, compiles_layers=False)
    tokenizer, config, train_set, held_out = load_data(args)
    run.begin(config, tokenizer, train_set, held_out, "truncate")
    model = build_model(config, args.model_name_or_path, args.trust_remote_code)
    name = (
        "common.tasks.long_sequence.recurrent.RecurrentLM" if isinstance(model, RecurrentLM) else "AutoModelForCausalLM"
    )
    # model(...) now returns the summed loss of a micro-batch's targets.
    loss_description = architectures.sum_losses_in_pieces(model, args, train_set.max_length)
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    collate = partial(collate_tokens, pad_token_id=tokenizer.pad_token_id)
    describe_use(model, config, tokenizer, train_set.end_tokens)
    model, optimizer = run.prepare(model, optimizer, collate, train_set, held_out, loss=loss_description)
    with run.training(config, tokenizer) as batches:
        train(args, run, model, optimizer, batches)
    results = run.end_training()
    run.write_model(name, tokenizer)
    with run.optional_steps():
        results |= describe_held_out(evaluate(run, model), held_out) if held_out else {}
    line = f"memory grew by {results['memory_growth_bytes'] / 2**20:,.0f} MiB while training; {loss_description}"
    run.finish(results, line)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
