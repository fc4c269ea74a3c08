"""Trains an image classifier, from scratch or from a pretrained one, with any config of accelerate_configs/.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/vision.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/vision.py \\
                   --model_config resnet --train_dir photos/train --validation_dir photos/test --image_size 128
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 recipes/vision.py \\
                   --model_name_or_path my_vit/ --dataset_name ylecun/mnist --global_batch_size 512
resume         the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in a different mode

An image directory has one subfolder for each class. Without data of yours it learns scikit-learn's 8 x 8 digits.
"""

import sys
from functools import partial
from pathlib import Path

# The repository root comes after this file's directory (index 0), so a common/ next to this file takes precedence.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments  # isort: skip  # before torch: see common/__init__.py
import torch
from transformers import AutoModelForImageClassification

from common.models.classifiers import HEAD_RATE_HELP, describe_new_weights
from common.parallel.shutdown import exit_on_user_error
from common.report.metric_flag import compute_metrics, load_metrics
from common.report.predictions import draw_confusion, measure
from common.run import Run
from common.tasks.vision import batch_norm, image_classifier, image_files, images
from common.training.accumulation import loss_scale, skip_step, synchronize_gradients
from common.training.clipping import clip_gradients
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate

# Models to train from scratch, with AdamW's learning rate at its peak.
MODEL_CONFIGS = {
    "convnet": (4e-3,),  # two convolutions, the ConvNet of the MNIST guides: 1.2 M parameters for 28 x 28 pixels
    "resnet": (2e-3,),  # 6 residual blocks, 32 to 128 channels: 0.7 M
    "vit": (1e-3,),  # 6 layers of width 128: 1.2 M
}


def parse_arguments():
    parser = arguments.recipe_parser(__doc__, lengths_vary=False)
    parser.set_defaults(num_updates=1500, global_batch_size=64)
    group = parser.add_argument_group("data (default: scikit-learn's digits)")
    group.add_argument("--train_dir", metavar="DIR", help="training images: one subfolder per class")
    group.add_argument("--validation_dir", metavar="DIR", help="held-out images, in the same format")
    group.add_argument("--dataset_name", help="hub name or save_to_disk folder; validation or test is held out")
    group.add_argument("--dataset_config", help="dataset configuration, if there are several")
    group.add_argument("--label_column", help="column with the classes (default: the first such column)")
    group.add_argument("--image_size", type=arguments.positive, metavar="N", help="scale to N x N (default: unchanged)")
    group.add_argument("--augment", nargs="+", default=["shift"], **arguments.one_of(images.AUGMENTATIONS))
    arguments.add_model_arguments(parser)
    group = parser.add_argument_group("image model")
    group.add_argument("--model_config", **arguments.one_of(MODEL_CONFIGS, "model from scratch (default: convnet)"))
    group.add_argument("--norm", **arguments.one_of(batch_norm.NORMS))
    group.add_argument("--head_learning_rate", type=arguments.positive_float, metavar="X", help=HEAD_RATE_HELP)
    group.add_argument("--metric", **arguments.METRIC)
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, fine_tuning_rate=5e-5)
    return args


def load_data(args):
    """Returns preprocessing, model config, training samples, held-out samples or None, and whether the head is new."""
    train, held_out = image_files.find(args)
    config, preprocessing, train, held_out, new_head = image_classifier.choose_model(args, train, held_out)
    train_set = images.ImageSamples(train, preprocessing, args.augment, args.seed)
    held_out = held_out and images.ImageSamples(held_out, preprocessing)
    return preprocessing, config, train_set, held_out, new_head


def predict(model, micro_batch):
    """Returns the summed cross-entropy of a micro-batch, and its predictions, (N,)."""
    # channels_last is the layout that tensor cores compute in; on a CPU it is as fast or up to a sixth faster.
    pixels = micro_batch["pixel_values"].contiguous(memory_format=torch.channels_last)
    logits = model(pixel_values=pixels).logits[micro_batch["target_rows"]]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, micro_batch["targets"], reduction="sum"), logits.argmax(1)


def sum_losses(model, micro_batch):
    """Returns the summed loss of a micro-batch's targets."""
    return predict(model, micro_batch)[0]


def evaluate(run, model):
    """Returns mean loss and accuracy over all held-out images, each counted once."""
    return image_classifier.loss_and_accuracy(*measure(run, model, predict))


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
    run = Run(args, image_classifier.check_arguments(args), lengths_vary=False, size_flags=("image_size",))
    preprocessing, config, train_set, held_out, new_head = load_data(args)
    load_metrics(run, held_out, int, config.num_labels)
    flags = ("augment", "norm", "head_learning_rate")
    run.begin(config, None, train_set, held_out, *flags, model_class=AutoModelForImageClassification)
    model, new_weights = image_classifier.make_model(args, config, new_head)
    name, more = image_classifier.describe_class(model, preprocessing)
    head = {"head": new_weights, "head_learning_rate": args.head_learning_rate}
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay, **head)
    collate = partial(images.collate_images, preprocessing=preprocessing)
    lines = batch_norm.describe_norm(args, run.accelerator.num_processes) | describe_new_weights(**head)
    lines |= {} if held_out else {"held out": "none; pass --validation_dir to evaluate"}
    model, optimizer = run.prepare(model, optimizer, collate, train_set, held_out, **lines)
    with run.training(config, preprocessing) as batches:
        train(args, run, model, optimizer, batches)
    results, lines = run.end_training(), []
    written = run.write_model(name, preprocessing)
    with run.optional_steps():
        if held_out:
            losses, *answers = measure(run, model, predict)
            results |= image_classifier.loss_and_accuracy(losses, *answers) | compute_metrics(run, *answers)
        if written and held_out:
            lines = [image_classifier.describe_accuracy(results["accuracy"], train_set.images, held_out.images)]
            if config.num_labels <= 100:  # more would not be readable
                lines.append(draw_confusion(*answers, train_set.images.classes, run.output_dir))
    run.finish(results, *lines, *more)


if __name__ == "__main__":
    with exit_on_user_error():
        main()
