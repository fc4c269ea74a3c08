"""Prepares configuration, preprocessing and classes of the requested image classifier, and checks its flags."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel, ViTConfig

from common.errors import UserError
from common.models.classifiers import build_classifier, choose_classes, resolve_head_rate
from common.models.load import build_model, load_config
from common.parallel import launch
from common.tasks.vision import images
from common.tasks.vision.batch_norm import resolve_norm
from common.tasks.vision.image_files import MAX_PIXELS, Images, with_classes
from common.tasks.vision.image_models import ConvNet, ConvNetConfig, NormResNet, NormResNetConfig
from common.training.recipe_traits import Arguments

LARGEST_CONVNET = 50e6  # maximum parameters; most are in the hidden layer, and proportional to the number of pixels


def check_arguments(args: Arguments) -> Iterator[str]:
    """Yields one line for each invalid image flag that can be found before the data or the model is read."""
    yield from images.check_augmentations(args.augment)
    if args.image_size and args.image_size**2 > MAX_PIXELS:
        largest = math.isqrt(MAX_PIXELS)
        yield f"--image_size {args.image_size}: an image may have {MAX_PIXELS:,} pixels; use at most {largest}"
    if args.train_dir and args.dataset_name:
        yield "--train_dir and --dataset_name are mutually exclusive; pass only one"
    if args.validation_dir and not (args.train_dir or args.dataset_name):
        yield "--validation_dir without --train_dir: the digits have held-out images of their own; give both"
    for flag in ("dataset_config", "label_column"):
        if vars(args)[flag] and not args.dataset_name:
            yield f"--{flag} has no effect without --dataset_name; remove it, or name the dataset"
    if args.norm == "sync_batch" and launch.runs_on_cpu(launch.find_launch()):
        yield "--norm sync_batch: torch synchronises batch norm on GPUs only; use --norm group, or batch"
    if args.norm and args.model_config in ("convnet", "vit"):
        yield f"--norm {args.norm}: {args.model_config} has no batch norm; remove it, or use resnet"
    if args.norm == "group" and args.model_name_or_path:
        yield (
            "--norm group: pretrained weights fit the norm that they were trained with; remove it, or train from "
            "scratch with --model_config resnet"
        )


def choose_model(
    args: Arguments, train: Images, held_out: Images | None
) -> tuple[PreTrainedConfig, images.Preprocessing, Images, Images | None, bool]:
    """Returns config, preprocessing, training and held-out images, and whether a pretrained model needs a new head.

    The classes of the images are in the model's order. Raises UserError if images or flags do not fit the model.
    """
    size, new_head = (args.image_size, args.image_size) if args.image_size else None, False
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code, AutoModelForImageClassification)
        classes, new_head = choose_classes(config, train.classes)
        train, held_out = with_classes(train, classes), held_out and with_classes(held_out, classes)
        preprocessing = images.preprocess_for(args.model_name_or_path, config, train, size)
    else:
        # transformers' pipelines pass three channels to a ViT, also for gray images.
        preprocessing = images.preprocess(train, size, channels=3 if args.model_config == "vit" else None)
        config = make_config(args, preprocessing)
    resolve_head_rate(args, is_new=new_head)
    config.id2label = dict(enumerate(train.classes))
    config.label2id = {name: number for number, name in config.id2label.items()}
    with torch.device("meta"):
        resolve_norm(args, build_model(config, None, args.trust_remote_code, AutoModelForImageClassification))
    return config, preprocessing, train, held_out, new_head


def make_config(args: Arguments, preprocessing: images.Preprocessing) -> PreTrainedConfig:
    """Returns the config of a model from scratch, sets the default of --norm; raises UserError for unsuitable sizes."""
    height, width = preprocessing.height, preprocessing.width
    options: dict[str, Any] = {"num_channels": len(preprocessing.mean)}
    if min(height, width) < 6:
        raise UserError(f"images of {width} x {height} pixels are too small for a model; give --image_size 8, or more")
    if args.model_config == "convnet":
        config = ConvNetConfig(image_size=(height, width), **options)
        with torch.device("meta"):
            num_parameters = ConvNet(config).num_parameters()
        if num_parameters > LARGEST_CONVNET:
            raise UserError(
                f"--model_config convnet: images of {width} x {height} make {num_parameters / 1e6:.0f} M parameters; "
                "use --model_config resnet, or a smaller --image_size"
            )
        return config
    if args.model_config == "resnet":
        args.norm = args.norm or "group"
        options |= {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2], "layer_type": "basic"}
        options |= {"norm": "group" if args.norm == "group" else "batch", "small_images": min(height, width) < 64}
        return NormResNetConfig(**options)
    if height != width:
        raise UserError(f"--model_config vit: images of {width} x {height} are not square; give --image_size {width}")
    options |= {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
    return ViTConfig(image_size=height, patch_size=max(2, height // 14), **options)


def make_model(args: Arguments, config: PreTrainedConfig, new_head: bool) -> tuple[PreTrainedModel, list[str]]:
    """Returns the model, and the names of a new head's weights, which are initialised at random."""
    location = (args.model_name_or_path, args.trust_remote_code)
    model, new_weights = build_classifier(config, *location, AutoModelForImageClassification, new_head)
    if args.norm == "sync_batch":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model, new_weights


def describe_class(model: PreTrainedModel | None, preprocessing: images.Preprocessing) -> tuple[str, list[str]]:
    """Returns the name of the class that loads the model, and a line if pipelines need an import or do not work."""
    if isinstance(model, ConvNet | NormResNet):
        line = 'pipeline   pipeline("image-classification") needs `from common.tasks.vision import image_models`'
        return f"common.tasks.vision.image_models.{type(model).__name__}", [line]
    line = "pipeline   none: this model takes one channel, and a pipeline gives three"
    return "AutoModelForImageClassification", [] if preprocessing.takes_rgb else [line]


def loss_and_accuracy(losses: dict[str, float], predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Returns the losses with the accuracy of the predictions."""
    return losses | {"accuracy": (predictions == targets).mean().item()}


def describe_accuracy(accuracy: float, train: Images, held_out: Images) -> str:
    """Returns a line with the accuracy and baselines: the most frequent class and, for the digits, a linear model."""
    commonest = int(np.bincount(train.labels).argmax())
    share = (held_out.labels == commonest).mean()
    line = f"held-out accuracy {accuracy:.2%} of {len(held_out.labels):,} images"
    line += f"; always {train.classes[commonest]!r}: {share:.2%}"
    if (linear := images.linear_accuracy(train, held_out)) is not None:
        line += f"; logistic regression on the pixels: {linear:.2%}"
    return line
