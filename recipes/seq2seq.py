"""Trains an encoder-decoder, from scratch or a pretrained one, on any machine that accelerate_configs/ names.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/seq2seq.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/seq2seq.py \\
                   --model_name_or_path my_t5/ --train_file 'news/*.jsonl' --target_column summary
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 \\
                   recipes/seq2seq.py --model_name_or_path my_marian/ --train_file de_en.parquet --global_batch_size 256
resume         the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in a different mode

A row has a source (--source_column) and a target (--target_column), such as a translation or a summary. The default
data is functions and the first lines of their docstrings. The model is a new T5, or any pretrained encoder-decoder.
"""

import sys
from functools import partial
from pathlib import Path

# The repository root comes after this file's directory (index 0), so a common/ next to this file takes precedence.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments  # isort: skip  # before torch: see common/__init__.py
import torch
from transformers import AutoModelForSeq2SeqLM

from common.models.adapters import build_base
from common.models.load import describe_use
from common.parallel.shutdown import exit_on_user_error
from common.report.metric_flag import compute_metrics, load_metrics
from common.report.tracking import describe_held_out
from common.run import Run
from common.tasks.seq2seq import encoder_decoder, scores
from common.tasks.seq2seq.pairs import collate_pairs, tokenize_pairs
from common.training.accumulation import loss_scale, mean_losses, skip_step, synchronize_gradients
from common.training.clipping import clip_gradients
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate

# Models to train from scratch, of T5's shape (1.1: gated MLP), and AdamW's learning rate at its peak.
MODEL_CONFIGS = {
    # layers of each stack, width, heads, a head's width, MLP width, vocabulary, learning rate
    "tiny": (2, 128, 4, 32, 384, 4096, 1e-3),  # 1.5 M parameters
    "small": (6, 384, 6, 64, 1024, 8192, 1e-3),  # 28 M
    "medium": (12, 768, 12, 64, 2048, 32128, 5e-4),  # 223 M
    "large": (24, 1024, 16, 64, 2816, 32128, 3e-4),  # 750 M
}


def parse_arguments():
    parser = arguments.recipe_parser(__doc__)
    arguments.add_language_arguments(parser, one_text=False, adapters=True)
    parser.set_defaults(global_batch_size=16, num_updates=600, sequence_length=128)
    group = parser.add_argument_group("encoder-decoder (--sequence_length limits the tokens of a source)")
    group.add_argument("--model_config", **arguments.one_of(MODEL_CONFIGS, "model from scratch (default: tiny)"))
    group.add_argument("--tokenizer", **arguments.one_of(encoder_decoder.TOKENIZERS, "if from scratch (default: bpe)"))
    group.add_argument("--source_column", default="source", help="column with the source text")
    group.add_argument("--target_column", default="target", help="column with the target text")
    group.add_argument("--target_length", type=arguments.positive, default=64, help="maximum tokens per target")
    about = "number of held-out targets to generate and score at the end; 0: none"
    group.add_argument("--generate", type=arguments.not_negative, default=200, metavar="N", help=about)
    group.add_argument("--metric", **arguments.METRIC)
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, fine_tuning_rate=3e-4)
    return args


def load_data(args):
    """Returns tokenizer, model config, training samples, and held-out samples or None."""
    source, held_out_source = arguments.text_sources(args)
    columns, lengths = (args.source_column, args.target_column), (args.sequence_length, args.target_length)
    config, tokenizer = encoder_decoder.choose_model(args, MODEL_CONFIGS, source, columns)
    train_set = tokenize_pairs(source, columns, tokenizer, *lengths)
    held_out = held_out_source and tokenize_pairs(held_out_source, columns, tokenizer, *lengths)
    return tokenizer, config, train_set, held_out


def sum_losses(model, micro_batch):
    """Returns the summed loss of a micro-batch's targets, in float32 at least."""
    inputs = {name: tensor for name, tensor in micro_batch.items() if not name.startswith("target")}
    # The model's own logits: T5 scales them, Marian adds a bias. Targets are short, so they need no chunks.
    logits = model(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, micro_batch["target_rows"])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, micro_batch["targets"], reduction="sum")


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
    run = Run(args, encoder_decoder.check_arguments(args), **encoder_decoder.TRAITS)
    tokenizer, config, train_set, held_out = load_data(args)
    load_metrics(run, held_out, str)
    run.begin(config, tokenizer, train_set, held_out, model_class=AutoModelForSeq2SeqLM)
    model = encoder_decoder.prepare_encoder_decoder(build_base(args, config, AutoModelForSeq2SeqLM))
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    tokens = {"pad_token_id": tokenizer.pad_token_id, "decoder_start_token_id": config.decoder_start_token_id}
    collate = partial(collate_pairs, **tokens)
    describe_use(model, config, tokenizer, [tokenizer.eos_token_id])
    model, optimizer = run.prepare(model, optimizer, collate, train_set, held_out)
    tokenizer.model_max_length = args.sequence_length  # in use, sources are truncated as in training
    with run.training(config, tokenizer) as batches:
        train(args, run, model, optimizer, batches)
    results, lines = run.end_training(), []
    run.write_model("AutoModelForSeq2SeqLM", tokenizer)
    with run.optional_steps():
        results |= describe_held_out(evaluate(run, model), held_out) if held_out else {}
        if held_out and args.generate:
            written = encoder_decoder.write_targets(args, model, held_out, collate, run.accelerator, tokenizer)
            metrics, lines, *texts = scores.score_targets(written, held_out, train_set, tokenizer)
            results |= metrics | compute_metrics(run, *texts)
    run.finish(results, *lines)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
