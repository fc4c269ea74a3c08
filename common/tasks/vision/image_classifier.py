"""Which image classifier is asked for: what contradicts it, its configuration, its pixels and its classes."""

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from transformers import AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel, ViTConfig

from common.errors import UserError
from common.models.classifiers import build_classifier, choose_classes, resolve_head_rate
from common.models.load import build_model, load_config
from common.models.untrained import empty_model
from common.parallel import launch
from common.tasks.vision import images
from common.tasks.vision.batch_norm import settle_norm
from common.tasks.vision.image_files import Images, with_classes
from common.tasks.vision.image_models import ConvNet, ConvNetConfig, NormResNet, NormResNetConfig

LARGEST_CONVNET = 50e6  # parameters; nearly all are in its hidden layer, which sees every pixel


def check_arguments(args: argparse.Namespace) -> Iterator[str]:
    """One line for each mistake in the flags for images that can be seen before data or model are touched."""
    yield from images.check_augmentations(args.augment)
    if args.train_dir and args.dataset_name:
        yield "--train_dir and --dataset_name are two answers to one question; give one"
    if args.validation_dir and not (args.train_dir or args.dataset_name):
        yield "--validation_dir without --train_dir: the digits have held-out images of their own; give both"
    if args.dataset_config and not args.dataset_name:
        yield "--dataset_config has no effect without --dataset_name; take it out, or name the data set"
    if args.label_column and not args.dataset_name:
        yield "--label_column has no effect without --dataset_name; take it out, or name the data set"
    if args.norm == "sync_batch" and launch.runs_on_cpu(launch.find_launch()):
        yield "--norm sync_batch: torch synchronises batch norm on GPUs only; use --norm group, or batch"
    if args.norm and args.model_config in ("convnet", "vit"):
        yield f"--norm {args.norm}: {args.model_config} has no batch norm; take it out, or use resnet"
    if args.norm == "group" and args.model_name_or_path:
        yield (
            "--norm group: pretrained weights fit the norm that they were trained with; take it out, or train from "
            "scratch with --model_config resnet"
        )


def choose_model(
    args: argparse.Namespace, train: Images, held_out: Images | None
) -> tuple[PreTrainedConfig, images.Preprocessing, Images, Images | None, bool]:
    """Configuration and preprocessing of a pretrained model, or of one from scratch for the training images.

    Also returns the images, with their classes in the model's order, and whether the model needs a new head for them.

    Raises UserError: the images or the flags do not fit the model.
    """
    size, new_head = (args.image_size, args.image_size) if args.image_size else None, False
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code, AutoModelForImageClassification)
        classes, new_head = choose_classes(config, train.classes)
        train, held_out = (one and with_classes(one, classes) for one in (train, held_out))
        preprocessing = images.preprocess_for(args.model_name_or_path, config, train, size)
    else:
        # transformers' ViT takes what transformers' pipelines give: three channels, of gray images too.
        preprocessing = images.preprocess(train, size, channels=3 if args.model_config == "vit" else None)
        config = make_config(args, preprocessing)
    resolve_head_rate(args, is_new=new_head)
    config.id2label = dict(enumerate(train.classes))
    config.label2id = {name: number for number, name in config.id2label.items()}
    with torch.device("meta"):
        settle_norm(args, build_model(config, None, args.trust_remote_code, AutoModelForImageClassification))
    return config, preprocessing, train, held_out, new_head


def make_config(args: argparse.Namespace, preprocessing: images.Preprocessing) -> PreTrainedConfig:
    """Of a model from scratch, for images of the given size."""
    height, width = preprocessing.height, preprocessing.width
    facts = {"num_channels": len(preprocessing.mean)}
    if min(height, width) < 6:
        raise UserError(f"images of {width} x {height} pixels are too small for a model; give --image_size 8, or more")
    if args.model_config == "convnet":
        config = ConvNetConfig(image_size=(height, width), **facts)
        num_parameters = empty_model(config, model_class=AutoModelForImageClassification).num_parameters()
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


def make_model(args: argparse.Namespace, config: PreTrainedConfig, new_head: bool) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the weights of a new head, which start at random."""
    where = (args.model_name_or_path, args.trust_remote_code)
    model, new_weights = build_classifier(config, *where, AutoModelForImageClassification, new_head)
    if args.norm == "sync_batch":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model, new_weights


def describe_class(model: PreTrainedModel | None, preprocessing: images.Preprocessing) -> tuple[str, list[str]]:
    """The name by which the written model is loaded, and a line on pipelines where they need something."""
    if isinstance(model, ConvNet | NormResNet):
        line = 'pipeline   pipeline("image-classification") needs `from common.tasks.vision import image_models`'
        return f"common.tasks.vision.image_models.{type(model).__name__}", [line]
    line = "pipeline   none: this model takes one channel, and a pipeline gives three"
    return "AutoModelForImageClassification", [] if preprocessing.takes_rgb else [line]


def loss_and_accuracy(losses: dict[str, float], predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The figures of what `measure` returns."""
    return losses | {"accuracy": (predictions == targets).mean().item()}


def describe_accuracy(accuracy: float, train: Images, held_out: Images) -> str:
    """Accuracy beside what costs nothing: always the commonest class; for the digits, a linear model of the pixels."""
    commonest = torch.bincount(torch.from_numpy(train.labels)).argmax().item()
    share = (held_out.labels == commonest).mean()
    line = f"held-out accuracy {accuracy:.2%} of {len(held_out.labels):,} images"
    line += f"; always {train.classes[commonest]!r}: {share:.2%}"
    if (linear := images.linear_accuracy(train, held_out)) is not None:
        line += f"; logistic regression on the pixels: {linear:.2%}"
    return line
