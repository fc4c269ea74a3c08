"""Turns images into samples: size and colours, augmentation, normalisation, and micro-batches.

    train = folder("photos/train")                       # one subfolder per class
    preprocessing = preprocess(train)                    # size, channels, mean and standard deviation
    samples = ImageSamples(train, preprocessing, augment=("shift",), seed=0)
    collate = partial(collate_images, preprocessing=preprocessing)

An image is decoded when its global batch is first built, on the DataLoader's workers if there are any; small datasets
are then kept in memory (`decoded_images`). Its augmentation is a function of (seed, epoch, index of the image), so that
the update is the same for any split and after a resume.
"""

import copy
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig
from transformers.image_processing_base import ImageProcessingMixin

from common.data.hub import locate_pretrained
from common.errors import UserError, one_line
from common.tasks.vision.decoded_images import DecodedImages
from common.tasks.vision.image_files import DIGITS, Images, evenly_spaced, fingerprint_of, open_image

# "shift" and "flip" are implemented here because torchvision is optional: PyPI has no wheel for a CPU build of torch.
# More complex augmentations (crop, rand) use torchvision, which has no shift that repeats the edge.
AUGMENTATIONS = {
    "none": "the images as they are",
    "shift": "moved by up to an eighth of its size, its edge repeated; the default",
    "flip": "mirrored, left to right, every other time: not for digits or letters",
    "crop": "RandomResizedCrop of torchvision",
    "rand": "RandAugment of torchvision",
}


@dataclass(frozen=True)
class Preprocessing:
    """The conversion of pixels to model inputs: (pixel / 255 - mean) / std, for images of the same size."""

    height: int
    width: int
    mean: tuple[float, ...]  # per channel: one or three values
    std: tuple[float, ...]
    is_scaled: bool = True  # True: images of other sizes are scaled; False: UserError
    takes_rgb: bool = True  # True: accepts RGB, as pipelines pass it; False: a pretrained model for gray images only

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes preprocessor_config.json, with which `AutoImageProcessor` preprocesses images as in training."""
        repeats = 3 // len(self.mean) if self.takes_rgb else 1  # a model with one channel converts RGB to gray
        settings = {
            "image_processor_type": "ViTImageProcessor",  # the basic processor: resize, rescale, normalise
            "do_convert_rgb": self.takes_rgb,
            "do_resize": True,
            "size": {"height": self.height, "width": self.width},
            "resample": int(Image.Resampling.BILINEAR),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean) * repeats,
            "image_std": list(self.std) * repeats,
        }
        Path(directory, "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def linear_accuracy(train: Images, validation: Images) -> float | None:
    """Returns the held-out accuracy of logistic regression on the digits' pixels (takes a second); None for others."""
    if not train.name.startswith(DIGITS):
        return None
    from sklearn.linear_model import LogisticRegression

    def pixels(images: Images) -> np.ndarray:
        return np.stack([np.asarray(images.read(i)).ravel() / 255 for i in range(len(images.labels))])

    model = LogisticRegression(max_iter=1000).fit(pixels(train), train.labels)
    return float(model.score(pixels(validation), validation.labels))


def preprocess(images: Images, size: tuple[int, int] | None = None, channels: int | None = None) -> Preprocessing:
    """Computes size, channels, mean and standard deviation from up to 1000 of the images, evenly spaced.

    Args:
        size: height and width to which all images are scaled; None: the common size of all images.
        channels: 1 or 3; None: 1 if all images are gray, otherwise 3.

    Raises UserError if the images have different sizes and no size is set, an image cannot be decoded, or the images
    have colours but the model has one channel.
    """
    sampled = evenly_spaced(len(images.labels))
    totals, all_gray = np.zeros((2, 3)), True
    for number in sampled:  # one at a time, because a thousand large images do not fit in memory
        image = open_image(images, number, size)
        if number == sampled[0]:
            height, width = size or (image.height, image.width)
        if size is None and image.size != (width, height):
            raise UserError(_sizes_differ(images, number, image, (width, height), images.where(sampled[0])))
        if channels == 1 and image.mode != "L":  # AutoImageProcessor would not convert it to gray
            raise UserError(
                f"{images.where(number)}: has colours, but the model takes gray images; save them gray, or use a "
                "model with 3 channels"
            )
        all_gray = all_gray and image.mode == "L"
        colours = 1 if all_gray else 3  # the three channels of a gray image are equal
        pixels = to_array(image, height, width, colours).reshape(colours, -1) / 255
        totals += pixels.mean(1), np.square(pixels).mean(1)
    channels = channels or (1 if all_gray else 3)
    totals = totals[:, :channels]
    mean, square = totals / len(sampled)
    std = np.sqrt(np.maximum(square - mean * mean, 1e-6))  # avoids amplifying a constant channel
    return Preprocessing(height, width, tuple(mean.tolist()), tuple(std.tolist()), is_scaled=size is not None)


def preprocess_for(
    name_or_path: str, config: PreTrainedConfig, images: Images, size: tuple[int, int] | None = None
) -> Preprocessing:
    """Returns the result of `preprocess`, with the pretrained model's size, channels, mean and standard deviation.

    Raises UserError if the model requires a fixed image size that differs from `size`.
    """
    try:
        location, _ = locate_pretrained(name_or_path)
        settings, _ = ImageProcessingMixin.get_image_processor_dict(**location)
    except OSError:  # the model has no preprocessor_config.json
        settings = {}
    sides = getattr(config, "image_size", None) or settings.get("size")
    if isinstance(sides, dict):
        sides = sides.get("height") or sides.get("shortest_edge"), sides.get("width") or sides.get("shortest_edge")
    own_size: Any = (sides, sides) if isinstance(sides, int) else sides and tuple(sides)
    if size and size != own_size and getattr(config, "image_size", None):
        raise UserError(
            f"--image_size {size[0]}: --model_name_or_path {name_or_path} takes images of {own_size[1]} x "
            f"{own_size[0]}; remove it"
        )
    channels = getattr(config, "num_channels", 3)
    takes_rgb = channels == 3 or getattr(config, "turns_rgb_gray", False)
    own = replace(preprocess(images, size or own_size, channels), takes_rgb=takes_rgb)
    mean, std = (values and values[:channels] for values in (settings.get("image_mean"), settings.get("image_std")))
    if not settings.get("do_normalize", True):
        mean, std = (0.0,) * len(own.mean), (1.0,) * len(own.mean)
    return replace(own, mean=tuple(mean), std=tuple(std)) if mean and std else own


def _sizes_differ(images: Images, number: int, image: Image.Image, size: tuple[int, int], first: str) -> str:
    return (
        f"{images.name}: images of different sizes, {images.where(number)} of {image.width} x {image.height} and "
        f"{first} of {size[0]} x {size[1]}; give --image_size N, to which all are scaled"
    )


def scaled(image: Image.Image, height: int, width: int) -> Image.Image:
    """Returns the image scaled bilinearly to a size; its aspect ratio may change."""
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)


def to_array(image: Image.Image, height: int, width: int, channels: int) -> np.ndarray:
    """Returns the image as uint8 (channels, height, width)."""
    return channels_first(scaled(image, height, width).convert("L" if channels == 1 else "RGB"))


def channels_first(image: Image.Image) -> np.ndarray:
    """Returns the pixels of an image of mode L or RGB, uint8 (1 or 3, height, width)."""
    pixels = np.asarray(image)
    return pixels[None] if image.mode == "L" else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def to_image(pixels: np.ndarray) -> Image.Image:
    """Returns the image with these pixels, uint8 (1 or 3, height, width): the inverse of `channels_first`."""
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def check_augmentations(names: Iterable[str]) -> Iterator[str]:
    """Yields one line if `none` is combined with others, and one line if torchvision is needed but missing."""
    names = list(names)
    if "none" in names and len(names) > 1:
        yield f"--augment {' '.join(names)}: none cannot be combined with others; remove none or the others"
    if needs := [name for name in names if name in ("crop", "rand")]:
        try:
            import torchvision.transforms  # noqa: F401
        except Exception as error:  # missing, or built for a different torch
            yield f"--augment {' '.join(needs)} needs torchvision ({one_line(error)}); pip install it, or use shift"


class ImageSamples:
    """Images, a `common.training.batching.Samples`: an item is (uint8 pixels (C, H, W), label).

    Args:
        augment: names of `AUGMENTATIONS`, applied in their order; empty for evaluation.
    """

    unit = "images"
    max_length = 1

    def __init__(self, images: Images, preprocessing: Preprocessing, augment: Iterable[str] = (), seed: int = 0):
        self.images, self.seed, self.is_scaled = images, seed, preprocessing.is_scaled
        self.augment = tuple(name for name in augment if name != "none")
        self.epoch = 0
        self.shape = (len(preprocessing.mean), preprocessing.height, preprocessing.width)
        self.num_target_tokens = len(images.labels)
        self.decoded = DecodedImages(len(images.labels), self.shape)  # shared by all epochs

    @property
    def labels(self) -> np.ndarray:
        """The class numbers."""
        return self.images.labels

    @property
    def fingerprint(self) -> str:
        """A hash that is equal if all images and labels are equal; it covers only the first bytes of some files."""
        return fingerprint_of([self.images.fingerprint, self.images.classes, self.shape]) + self.images.contents()

    def of_epoch(self, epoch: int) -> "ImageSamples":
        """Returns the same images with the augmentation of an epoch."""
        samples = copy.copy(self)
        samples.epoch = epoch
        return samples

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        channels, height, width = self.shape
        index = int(index)
        pixels = self.decoded.get(index)
        if pixels is None:
            pixels = self._decode(index)
            self.decoded.put(index, pixels)
        if self.augment:
            pixels = augmented(pixels, self.augment, f"{self.seed}/{self.epoch}/{index}", height, width)
        if len(pixels) != channels:  # a gray image among colours, or a colour image for a model that takes gray images
            pixels = np.repeat(pixels, 3, axis=0) if channels == 3 else to_array(to_image(pixels), height, width, 1)
        return pixels, int(self.images.labels[index])

    def _decode(self, index: int) -> np.ndarray:
        """Returns an image before its augmentation, uint8 (1 or 3, H, W); of its own size if "crop" scales a part."""
        _, height, width = self.shape
        image = open_image(self.images, index)
        if not self.is_scaled and image.size != (width, height):
            raise UserError(_sizes_differ(self.images, index, image, (width, height), "others"))
        return channels_first(image if "crop" in self.augment else scaled(image, height, width))

    def dummy_sample(self) -> tuple[np.ndarray, int]:
        """Returns a black image with the label -1, so that it has no target."""
        return np.zeros(self.shape, np.uint8), -1

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns 1 for each image, int64."""
        return np.ones(len(ids), np.int64)

    num_targets = lengths

    def describe(self) -> str:
        """Returns the description of the images for the run summary."""
        channels, height, width = self.shape
        line = f"{self.images.name}: {len(self):,} images, {width} x {height} {'gray' if channels == 1 else 'RGB'}"
        line += f", {len(self.images.classes)} classes"
        line += f", augmented: {', '.join(self.augment)}" if self.augment else ""
        return line + (f"; {self.images.unused}" if self.images.unused else "")


def augmented(pixels: np.ndarray, names: Iterable[str], key: str, height: int, width: int) -> np.ndarray:
    """Returns an image, uint8 (1 or 3, H, W), after some of `AUGMENTATIONS`, whose random numbers follow from `key`."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
    draws = random.Random(seed)
    with _own_torch_stream(seed) if {"crop", "rand"} & set(names) else nullcontext():
        for name in names:
            if name == "flip":
                pixels = pixels[:, :, ::-1] if draws.random() < 0.5 else pixels
            elif name == "shift":
                pixels = _shifted(pixels, draws)
            else:
                from torchvision import transforms  # optional, and its import takes seconds

                transform = (
                    transforms.RandomResizedCrop((height, width)) if name == "crop" else transforms.RandAugment()
                )
                pixels = channels_first(transform(to_image(pixels)))
    return pixels


@contextmanager
def _own_torch_stream(seed: int) -> Iterator[None]:
    """Context with torch's RNG seeded, for torchvision; restores its state, because dropout uses the same RNG."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs
        yield


def _shifted(pixels: np.ndarray, draws: random.Random) -> np.ndarray:
    _, height, width = pixels.shape
    down, right = (draws.randint(-(side // 8), side // 8) for side in (height, width))
    if down:
        pixels = pixels[:, np.clip(np.arange(height) - down, 0, height - 1)]
    return pixels[:, :, np.clip(np.arange(width) - right, 0, width - 1)] if right else pixels


def collate_images(samples: list[tuple[np.ndarray, int]], preprocessing: Preprocessing) -> dict[str, torch.Tensor]:
    """Returns `pixel_values` (B, C, H, W), normalised; `targets` (N,); `target_rows` (N,), the row of each target."""
    pixels = torch.from_numpy(np.stack([pixels for pixels, _ in samples])).to(torch.get_default_dtype())
    mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    labels = np.array([label for _, label in samples], np.int64)
    rows = np.flatnonzero(labels >= 0)  # a dummy sample has no target
    return {
        "pixel_values": pixels.div_(255).sub_(mean).div_(std),  # in place, because photos fill hundreds of MB
        "targets": torch.from_numpy(labels[rows]),
        "target_rows": torch.from_numpy(rows),
    }
