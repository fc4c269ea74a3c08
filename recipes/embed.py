"""Trains text embeddings: vectors that are close if their texts belong together, on any machine.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/embed.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/embed.py \\
                   --model_name_or_path my_encoder/ --train_file pairs.jsonl --global_batch_size 4096
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 recipes/embed.py \\
                   --model_name_or_path my_encoder/ --train_file pairs.jsonl --validation_file held_out.jsonl
resume         the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in a different mode

A row has an anchor and a positive, and optionally negatives (one text, a list, or several columns) or a score. The loss
contrasts each anchor with all texts of the global batch, and memory is that of a micro-batch (GradCache,
arXiv:2101.06983). Without data, the first line of a function's docstring belongs to the function's body.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

# The repository root comes after this file's directory (index 0), so a common/ next to this file takes precedence.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments  # isort: skip  # before torch: see common/__init__.py
from transformers import AutoModel

from common.models.classifiers import find_inputs
from common.parallel.shutdown import exit_on_user_error
from common.run import Run
from common.tasks.embed import encoder, pairs
from common.tasks.embed.replay import replayed, surrogate
from common.tasks.embed.retrieval import describe_results, measure
from common.training.accumulation import loss_scale, skip_step, synchronize_gradients
from common.training.clipping import clip_gradients
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate

# Models from scratch, of BERT's shape: layers, width, heads, MLP width, vocabulary, AdamW's peak learning rate.
MODEL_CONFIGS = {
    "tiny": (2, 128, 2, 512, 4096, 1e-3),  # 1.0 M parameters
    "small": (6, 384, 6, 1536, 8192, 5e-4),  # 14 M
}
FLAGS = ("loss", "pooling", "normalize", "temperature", "learn_temperature", "symmetric", "dimensions")


def parse_arguments():
    parser = arguments.recipe_parser(__doc__)
    arguments.add_language_arguments(parser, one_text=False, adapters=True)
    parser.set_defaults(global_batch_size=64, num_updates=300, sequence_length=128, weight_decay=0.01)
    group = parser.add_argument_group("pairs")
    group.add_argument("--model_config", **arguments.one_of(MODEL_CONFIGS, "model from scratch (default: tiny)"))
    group.add_argument("--anchor_column", help="column with the anchor (default: anchor, query, question or sentence1)")
    group.add_argument("--positive_column", help="column with the positive (default: positive, passage, answer, ...)")
    group.add_argument("--negative_columns", nargs="+", metavar="NAME", help="columns with negatives, texts or lists")
    group.add_argument("--score_column", help="column with a number, higher for more similar texts (default: score)")
    group.add_argument("--prompt_anchor", default="", help="text before each anchor, such as 'query: '")
    group.add_argument("--prompt_positive", default="", help="text before each positive and negative")
    group = parser.add_argument_group("vectors and their loss")
    group.add_argument("--pooling", **arguments.one_of(encoder.POOLING))
    about = "vectors of length 1, so that similarity is the cosine instead of the dot product"
    group.add_argument("--normalize", action=argparse.BooleanOptionalAction, default=True, help=about)
    about = "contrastive: InfoNCE; cosent: the order of scores (default: cosent if there is a score)"
    group.add_argument("--loss", choices=("contrastive", "cosent"), help=about)
    about = {"default": 0.05, "metavar": "T", "help": "divisor of all similarities, at least 1e-4"}
    group.add_argument("--temperature", type=arguments.positive_float, **about)
    group.add_argument("--learn_temperature", action="store_true", help="train the temperature, from --temperature")
    group.add_argument("--symmetric", action="store_true", help="average with the loss of anchors given positives")
    about = "also train the first D dimensions of the vectors, for each D (Matryoshka, arXiv:2205.13147)"
    group.add_argument("--dimensions", type=arguments.positive, nargs="+", metavar="D", help=about)
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, fine_tuning_rate=2e-5)
    return args


def load_data(args):
    """Returns tokenizer, model config, training samples, and held-out samples or None."""
    source, held_out_source = arguments.text_sources(args)
    columns = pairs.choose_columns(args, source)
    config, tokenizer = encoder.choose_model(args, MODEL_CONFIGS, source, columns)
    options = tokenizer, args.sequence_length, (args.prompt_anchor, args.prompt_positive)
    train_set = pairs.tokenize_pairs(source, columns, *options)
    held_out = held_out_source and pairs.tokenize_held_out(args, held_out_source, columns, *options)
    pairs.check_pairs(args, train_set)
    return tokenizer, config, train_set, held_out


def predict(model, micro_batch):
    """Returns the vectors of a micro-batch's texts, (R, D), and the log temperature, (1,), or None if it is fixed."""
    inputs = {name: x for name, x in micro_batch.items() if "target" not in name}
    vectors, log_temperature = model(**inputs, lengths=micro_batch["target_lengths"])
    return vectors.index_select(0, micro_batch["target_rows"]), log_temperature


def sum_losses(model, micro_batch):
    """Returns a scalar with the gradient of the global batch's loss sum with respect to a micro-batch's vectors."""
    return surrogate(*predict(model, micro_batch), micro_batch)


def evaluate(run, model):
    """Returns the mean held-out loss, and the metrics of retrieval or of the order of scores."""
    return measure(run, model, predict)


def train(args, run, model, optimizer, batches):
    """Training loop: per global batch, forward and backward of its micro-batches, then one update."""
    accelerator = run.accelerator
    run.evaluations.repeat(evaluate, model)  # on resume, if a request to stop interrupted it
    for batch in batches:
        rate = learning_rate(batch.update, args.lr_schedule, args.learning_rate, args.num_updates, args.warmup_updates)
        set_learning_rate(optimizer, rate)
        scale, loss_sums, loss_sum = loss_scale(accelerator, batch.num_targets), [], None
        for micro_batch, is_last in replayed(run, model, batch, predict):
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
    run = Run(args, encoder.check_arguments(args), splits_sequences=False, shares_texts=True)
    tokenizer, config, train_set, held_out = load_data(args)
    run.begin(config, tokenizer, train_set, held_out, *FLAGS, model_class=AutoModel)
    model = encoder.build_encoder(args, config)
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    collate = partial(pairs.collate_texts, pad_token_id=tokenizer.pad_token_id, inputs=find_inputs(model))
    task, files = encoder.describe_task(args), encoder.SentenceFiles(args, config)
    model, optimizer = run.prepare(model, optimizer, collate, train_set, held_out, **task)
    encoder.check_padding(run, model, predict, collate, train_set)
    with run.training(config, tokenizer, files) as batches:
        train(args, run, model, optimizer, batches)
    results = run.end_training()
    run.write_model("AutoModel", tokenizer, files)
    with run.optional_steps():
        results |= evaluate(run, model) if held_out else {}
    run.finish(results, *describe_results(results))


if __name__ == "__main__":
    with exit_on_user_error():
        main()
