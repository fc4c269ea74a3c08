"""Trains a text classifier, or a regression on texts, on any machine that accelerate_configs/ names.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/classify.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/classify.py \\
                   --model_name_or_path my_encoder/ --train_file reviews.csv --validation_file held_out.csv
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 \\
                   recipes/classify.py --model_name_or_path my_encoder/ --train_file reviews.csv --global_batch_size 128
resume         the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in a different mode

A row has a text (--text_column), or two (--pair_column), and a label (--label_column): a class, or a number to predict
if not all labels are integers. The default data is functions of the standard library, labelled with their packages.
"""

import sys
from functools import partial
from pathlib import Path

# The repository root comes after this file's directory (index 0), so a common/ next to this file takes precedence.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments  # isort: skip  # before torch: see common/__init__.py
import torch
from transformers import AutoModelForSequenceClassification

from common.models.adapters import base_options, with_adapter
from common.models.classifiers import HEAD_RATE_HELP, build_classifier, check_padding, find_inputs, set_pipeline_inputs
from common.parallel.shutdown import exit_on_user_error
from common.report.metric_flag import compute_metrics, load_metrics
from common.report.predictions import draw_confusion, measure
from common.run import Run
from common.tasks.classify import scores, text_baseline, text_classifier
from common.tasks.classify.labels import collate_texts
from common.training.accumulation import loss_scale, skip_step, synchronize_gradients
from common.training.clipping import clip_gradients
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate

# Models to train from scratch, of BERT's shape, and AdamW's learning rate at its peak.
MODEL_CONFIGS = {
    # layers, width, heads, MLP width, vocabulary, learning rate
    "tiny": (2, 128, 2, 512, 4096, 2e-3),  # 1.0 M parameters
    "small": (6, 384, 6, 1536, 8192, 5e-4),  # 14 M
    "base": (12, 768, 12, 3072, 32768, 1e-4),  # 111 M
}


def parse_arguments():
    parser = arguments.recipe_parser(__doc__)
    arguments.add_language_arguments(parser, adapters=True)
    parser.set_defaults(global_batch_size=32, num_updates=400, sequence_length=128)
    group = parser.add_argument_group("classification", text_classifier.ABOUT_RATE)
    group.add_argument("--model_config", **arguments.one_of(MODEL_CONFIGS, "model from scratch (default: tiny)"))
    group.add_argument("--pair_column", help="column with the second text, such as a hypothesis or an answer")
    group.add_argument("--label_column", default="label", help="column with the class or number")
    group.add_argument("--task", choices=("classification", "regression"), help="kind of target (default: by labels)")
    group.add_argument("--new_head", action="store_true", help="replace the pretrained head, for different labels")
    group.add_argument("--head_learning_rate", type=arguments.positive_float, metavar="X", help=HEAD_RATE_HELP)
    group.add_argument("--metric", **arguments.METRIC)
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, fine_tuning_rate=text_classifier.fine_tuning_rate)
    return args


def load_data(args):
    """Returns tokenizer, model config, training samples, held-out samples or None, and the labels or None."""
    source, held_out_source = arguments.text_sources(args)
    train, held_out, names, classes = text_classifier.read_rows(args, source, held_out_source)
    config, tokenizer, names = text_classifier.choose_model(args, MODEL_CONFIGS, source, names, classes)
    samples = partial(text_classifier.label, names=names, tokenizer=tokenizer, args=args)
    return tokenizer, config, samples(train), held_out and samples(held_out), names


def predict(model, micro_batch):
    """Returns the summed loss of a micro-batch (cross-entropy or squared error), and its predictions, (N,)."""
    inputs, targets = {name: x for name, x in micro_batch.items() if "target" not in name}, micro_batch["targets"]
    logits = model(**inputs).logits[micro_batch["target_rows"]]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if targets.is_floating_point():
        return (logits.squeeze(1) - targets).square().sum(), logits.squeeze(1)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), logits.argmax(1)


def sum_losses(model, micro_batch):
    """Returns the summed loss of a micro-batch's targets."""
    return predict(model, micro_batch)[0]


def evaluate(run, model):
    """Returns the mean held-out loss, for mixed data also per source, and the metrics of the predictions."""
    return scores.score(*measure(run, model, predict))


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
    run = Run(args, text_classifier.check_arguments(args))
    tokenizer, config, train_set, held_out, names = load_data(args)
    load_metrics(run, held_out, int if names else float, len(names or ()))
    kind, where = AutoModelForSequenceClassification, (args.model_name_or_path, args.trust_remote_code)
    run.begin(config, tokenizer, train_set, held_out, "head_learning_rate", model_class=kind)
    model, new_weights = build_classifier(config, *where, kind, args.new_head, **base_options(args))
    model, inputs = with_adapter(args, model, new_weights), find_inputs(model)
    head = {"head": new_weights, "head_learning_rate": args.head_learning_rate}
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay, **head)
    dtype, task = torch.int64 if names else torch.float32, text_classifier.describe_task(args, names, **head)
    collate = partial(collate_texts, pad_token_id=tokenizer.pad_token_id, inputs=inputs, target_dtype=dtype)
    model, optimizer = run.prepare(model, optimizer, collate, train_set, held_out, **task)
    check_padding(model, collate, train_set, run.accelerator)
    set_pipeline_inputs(tokenizer, args.sequence_length, inputs)
    with run.training(config, tokenizer) as batches:
        train(args, run, model, optimizer, batches)
    results, lines = run.end_training(), []
    written = run.write_model("AutoModelForSequenceClassification", tokenizer)
    with run.optional_steps():
        if held_out:
            losses, *answers = measure(run, model, predict)
            results |= scores.score(losses, *answers) | compute_metrics(run, *answers)
        if written and held_out and names:
            results |= text_baseline.measure(train_set, held_out, len(names), args.seed)
            lines = [draw_confusion(*answers, names, run.output_dir)]
    run.finish(results, *scores.describe_scores(results), *lines)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
