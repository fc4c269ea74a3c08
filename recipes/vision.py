"""Trains an image classifier, from scratch or from a pretrained one, on any machine that accelerate_configs/ names.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/vision.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/vision.py \\
                   --model_config resnet --train_dir photos/train --validation_dir photos/test --image_size 128
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 recipes/vision.py \\
                   --model_name_or_path my_vit/ --dataset_name ylecun/mnist --global_batch_size 512
rehearsal      the same with --dry_run, on any machine
continue       the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in another mode

A directory has one subfolder a class. Without data of yours, scikit-learn's digits of 8 x 8 pixels are learned.
"""

import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import broadcast, send_to_device
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForImageClassification,
    ViTConfig,
)

# The repository's root, behind this file's folder (index 0), so that a copy of common/ beside a copy of this file wins.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments
from common.checkpoint.identity import identify
from common.checkpoint.save import Checkpoints, TrainingState
from common.data import image_files, images
from common.errors import UserError
from common.files import complete_or_absent
from common.models import classifiers, norms
from common.models.classifiers import build_labeller, describe_new_weights
from common.models.image_models import ConvNet, ConvNetConfig, NormResNet, NormResNetConfig
from common.models.load import build_model, count_parameters, load_config, parameter_sizes
from common.parallel import loading
from common.parallel.connect import check_space, make_accelerator, seed_everything
from common.parallel.ending import end_run, user_mistakes_end_here
from common.parallel.launch import check_launch, find_launch, is_rehearsal, runs_on_cpu
from common.report import tracking
from common.report.plots import save_confusion_matrix
from common.report.settings import print_settings
from common.training.accumulation import loss_scale, reduce_update, skip_step, sum_over_ranks, synchronize_gradients
from common.training.activation_checkpointing import apply_activation_checkpointing
from common.training.batching import make_loader
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate
from common.training.stopping import STOPPED, StopRequests

# Models to train from scratch, with AdamW's learning rate at its peak.
MODEL_CONFIGS = {
    "convnet": (4e-3,),  # two convolutions, the ConvNet of the MNIST guides: 1.2 M parameters for 28 x 28 pixels
    "resnet": (2e-3,),  # 6 residual blocks, 32 to 128 channels: 0.7 M
    "vit": (1e-3,),  # 6 layers of width 128: 1.2 M
}
FINE_TUNING_LEARNING_RATE = 5e-5
MOST_CLASSES_DRAWN = 100
LARGEST_CONVNET = 50e6  # parameters; nearly all are in its hidden layer, which sees every pixel


build_model = partial(build_model, model_class=AutoModelForImageClassification)


def parse_arguments():
    parser = arguments.ArgumentParser(description=__doc__, prog="vision.py")
    arguments.add_shared_arguments(parser, lengths_vary=False)
    parser.set_defaults(num_updates=1500, global_batch_size=64)
    group = parser.add_argument_group("data (default: scikit-learn's digits)")
    group.add_argument("--train_dir", metavar="DIR", help="of images, one subfolder a class")
    group.add_argument("--validation_dir", metavar="DIR", help="held-out images, likewise")
    group.add_argument("--dataset_name", help="of the hub, or what save_to_disk wrote; validation or test is held out")
    group.add_argument("--dataset_config", help="the data set's configuration, where it has several")
    group.add_argument("--label_column", help="of the data set (default: its first column of classes)")
    group.add_argument("--image_size", type=arguments.positive, metavar="N", help="scale to N x N (default: as is)")
    augmentations = "\n".join(f"{name}: {text}" for name, text in images.AUGMENTATIONS.items())
    one_of_them = arguments.one_of(images.AUGMENTATIONS)
    group.add_argument("--augment", nargs="+", default=["shift"], help=augmentations, **one_of_them)
    arguments.add_model_arguments(parser)
    group = parser.add_argument_group("image model")
    group.add_argument("--model_config", help="from scratch (default: convnet)", **arguments.one_of(MODEL_CONFIGS))
    help_of_norms = "\n".join(f"{name}: {text}" for name, text in norms.NORMS.items())
    group.add_argument("--norm", help=help_of_norms, **arguments.one_of(norms.NORMS))
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, FINE_TUNING_LEARNING_RATE)
    return args


def check_own_arguments(args, on_cpu):
    """One line for each mistake in this recipe's own flags that can be seen before data or model are touched."""
    problems = images.check_augmentations(args.augment)
    if args.train_dir and args.dataset_name:
        problems.append("--train_dir and --dataset_name are two answers to one question; give one")
    if args.validation_dir and not (args.train_dir or args.dataset_name):
        problems.append("--validation_dir without --train_dir: the digits have held-out images of their own; give both")
    if args.label_column and not args.dataset_name:
        problems.append("--label_column has no effect without --dataset_name; take it out, or name the data set")
    if args.norm == "sync_batch" and on_cpu:
        problems.append("--norm sync_batch: torch synchronises batch norm on GPUs only; use --norm group, or batch")
    if args.norm and args.model_config in ("convnet", "vit"):
        problems.append(f"--norm {args.norm}: {args.model_config} has no batch norm; take it out, or use resnet")
    if args.norm == "group" and args.model_name_or_path:
        problems.append(
            "--norm group: pretrained weights fit the norm that they were trained with; take it out, or train from "
            "scratch with --model_config resnet"
        )
    return problems


def load_data(args):
    """Preprocessing, the model's configuration, training samples, held-out samples or None, and if the head is new."""
    train, validation = image_files.find(args)
    size, new_head = (args.image_size, args.image_size) if args.image_size else None, False
    if args.model_name_or_path:
        auto = AutoModelForImageClassification
        config = load_config(args.model_name_or_path, args.trust_remote_code, auto)
        classes, new_head = classifiers.choose_classes(config, train.classes)
        train, validation = (one and image_files.with_classes(one, classes) for one in (train, validation))
        preprocessing = images.preprocess_for(args.model_name_or_path, config, train, size)
    else:
        # transformers' ViT takes what transformers' pipelines give: three channels, of gray images too.
        preprocessing = images.preprocess(train, size, channels=3 if args.model_config == "vit" else None)
        config = make_config(args, preprocessing)
    config.id2label = dict(enumerate(train.classes))
    config.label2id = {name: number for number, name in config.id2label.items()}
    with torch.device("meta"):
        norms.settle_norm(args, build_model(config, trust_remote_code=args.trust_remote_code))
    train_samples = images.ImageSamples(train, preprocessing, args.augment, args.seed)
    validation_samples = validation and images.ImageSamples(validation, preprocessing)
    arguments.check_samples(args, train_samples, validation_samples)
    return preprocessing, config, train_samples, validation_samples, new_head


def make_config(args, preprocessing):
    """Of a model from scratch, for images of the given size."""
    height, width = preprocessing.height, preprocessing.width
    facts = {"num_channels": len(preprocessing.mean)}
    if min(height, width) < 6:
        raise UserError(f"images of {width} x {height} pixels are too small for a model; give --image_size 8, or more")
    if args.model_config == "convnet":
        config = ConvNetConfig(image_size=(height, width), **facts)
        num_parameters = count_parameters(config, model_class=AutoModelForImageClassification)
        if num_parameters > LARGEST_CONVNET:
            raise UserError(
                f"--model_config convnet: images of {width} x {height} make {num_parameters / 1e6:.0f} M parameters; "
                "use --model_config resnet, or a smaller --image_size"
            )
        return config
    if args.model_config == "resnet":
        shape = {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2], "layer_type": "basic"}
        small, args.norm = min(height, width) < 64, args.norm or "group"
        return NormResNetConfig(norm="group" if args.norm == "group" else "batch", small_images=small, **shape, **facts)
    if height != width:
        raise UserError(f"--model_config vit: images of {width} x {height} are not square; give --image_size {width}")
    shape = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
    return ViTConfig(image_size=height, patch_size=max(2, height // 14), **shape, **facts)


def predict(model, micro_batch):
    """Logits of a micro-batch's images, (N, classes), without a dummy sample's."""
    # As fast on a CPU or up to a sixth faster, and what tensor cores compute with.
    pixels = micro_batch["pixel_values"].contiguous(memory_format=torch.channels_last)
    logits = model(pixel_values=pixels).logits[micro_batch["target_rows"]]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def sum_losses(model, micro_batch):
    """The sum of the losses of a micro-batch's targets."""
    return F.cross_entropy(predict(model, micro_batch), micro_batch["targets"], reduction="sum")


@torch.no_grad()
def evaluate(model, loader, accelerator, with_matrix=False):
    """Mean loss and accuracy over all held-out images, each counted once; if asked, counts of (true, predicted)."""
    model.eval()
    for buffer in model.buffers():  # running statistics: the main process's, which are saved, on all of them
        broadcast(buffer)
    loss_sums, targets, predictions = [], [], []
    for batch in loader:
        for micro_batch in batch.micro_batches:
            micro_batch = send_to_device(micro_batch, accelerator.device, non_blocking=True)
            logits = predict(model, micro_batch)
            loss_sums.append(F.cross_entropy(logits, micro_batch["targets"], reduction="sum"))
            targets.append(micro_batch["targets"])
            predictions.append(logits.argmax(-1))
    model.train()
    targets, predictions, num_images = torch.cat(targets), torch.cat(predictions), len(loader.dataset.samples)
    hits = (targets == predictions).sum().to(loss_sums[0].dtype)
    loss_sum, hits = sum_over_ranks(accelerator, torch.stack(loss_sums).sum(), hits)
    figures = {"validation_loss": loss_sum / num_images, "accuracy": hits / num_images}
    if with_matrix:
        classes = len(loader.dataset.samples.images.classes)
        counts = torch.bincount(targets * classes + predictions, minlength=classes**2)
        figures["confusion"] = accelerator.reduce(counts, reduction="sum").view(classes, classes).tolist()
    return figures


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


def describe_results(results, train, validation):
    """Accuracy beside what costs nothing: always the commonest class; for the digits, a linear model of the pixels."""
    commonest = torch.bincount(torch.from_numpy(train.labels)).argmax().item()
    share = (validation.labels == commonest).mean()
    line = f"held-out accuracy {results['accuracy']:.2%} of {len(validation.labels):,} images"
    line += f"; always {train.classes[commonest]!r}: {share:.2%}"
    if (linear := images.linear_accuracy(train, validation)) is not None:
        line += f"; logistic regression on the pixels: {linear:.2%}"
    return line


def main():
    args = parse_arguments()
    asked = find_launch()
    on_cpu = runs_on_cpu(asked)
    problems = arguments.check_arguments(args, on_cpu=on_cpu, lengths_vary=False)
    problems += check_launch(asked, args)
    problems += check_own_arguments(args, on_cpu=on_cpu)
    if problems:
        raise UserError("\n".join(problems))
    accelerator = make_accelerator(asked, args, log_with=args.report_to or None, project_dir=args.output_dir)
    checkpoints = Checkpoints(args, accelerator)
    preprocessing, config, train_samples, validation_samples, new_head = load_data(args)
    check_space(asked, lambda: parameter_sizes(config, args.trust_remote_code, AutoModelForImageClassification))
    identity = identify(args, accelerator, config, None, train_samples.fingerprint, "augment", "norm")
    resumed = checkpoints.find(identity)  # the newest sound checkpoint, with --resume

    seed_everything(args.seed)  # the same weights on all ranks
    if args.model_name_or_path:
        auto = AutoModelForImageClassification
        model, new_weights = build_labeller(config, args.model_name_or_path, args.trust_remote_code, auto, new_head)
        if new_weights:
            accelerator.print(describe_new_weights(new_weights))
    else:
        model = build_model(config, trust_remote_code=args.trust_remote_code)
    if args.norm == "sync_batch":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    apply_activation_checkpointing(model, args.activation_checkpointing, accelerator.device)
    if args.compile:
        model.base_model.compile(dynamic=True)
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    first_update = resumed.manifest["update"] if resumed else 0
    collate = partial(images.collate_images, preprocessing=preprocessing)
    loader = make_loader(args, train_samples, accelerator, collate, range(first_update, args.num_updates))
    validation_loader = validation_samples and make_loader(args, validation_samples, accelerator, collate)
    held_out = validation_loader and validation_loader.dataset
    rehearsal = is_rehearsal(asked)
    lines = norms.describe_norm(args, accelerator.num_processes)
    lines |= {} if held_out else {"held out": "none; name a --validation_dir to measure"}
    tracking.print_run(args, accelerator, model, loader.dataset, held_out, rehearsal, **lines)
    model, optimizer = loading.prepare(accelerator, model, optimizer)
    seed_everything(args.seed, accelerator)  # another dropout on each rank

    if args.dry_run:
        micro_batch = send_to_device(next(iter(loader)).micro_batches[0], accelerator.device)
        accelerator.backward(sum_losses(model, micro_batch))
        print_settings(args, asked, accelerator)
        accelerator.print("dry run: one forward and one backward done, nothing written")
        return end_run(accelerator)
    output_dir = arguments.make_output_dir(args, accelerator)
    checkpoints.start(config, preprocessing, model=model, versions=tracking.versions())
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
    matrix = None
    if validation_loader:
        results |= evaluate(model, validation_loader, accelerator, with_matrix=config.num_labels <= MOST_CLASSES_DRAWN)
        matrix = results.pop("confusion", None)
    weights = accelerator.get_state_dict(model)  # gathered on the main process, where they are sharded
    if accelerator.is_main_process:
        trained, lines = accelerator.unwrap_model(model), []
        with complete_or_absent(output_dir / "model") as model_dir:
            trained.save_pretrained(model_dir, state_dict=weights)
            preprocessing.save_pretrained(model_dir)
        if validation_samples:
            lines.append(describe_results(results, train_samples.images, validation_samples.images))
        if matrix:
            path = output_dir / "confusion.png"
            save_confusion_matrix(np.array(matrix), train_samples.images.classes, path)
            lines.append(f"confusion  {path}")
        own = isinstance(trained, ConvNet | NormResNet)
        if own:
            lines.append('pipeline   pipeline("image-classification") knows it after `from common import image_models`')
        elif not preprocessing.takes_rgb:
            lines.append("pipeline   none: this model takes one channel, and a pipeline gives three")
        name = f"common.image_models.{type(trained).__name__}" if own else "AutoModelForImageClassification"
        tracking.print_results(results, output_dir, name, *lines)
    end_run(accelerator)


if __name__ == "__main__":
    with user_mistakes_end_here():
        main()
