"""Images and their classes: folders, data sets of the hub, scikit-learn's digits; decoding, augmenting, normalising.

    train = folder("photos/train")                       # one subfolder a class
    preprocessing = preprocess(train)                    # size, channels, mean and standard deviation
    samples = ImageSamples(train, preprocessing, augment=("shift",), seed=0)
    collate = partial(collate_images, preprocessing=preprocessing)

An image is decoded when its window is made, on the DataLoader's workers where there are any. How it is augmented is a
function of (seed, epoch, number of the image): the update depends neither on the layout nor on where a run resumed.
"""

import argparse
import copy
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import PreTrainedConfig
from transformers.image_processing_base import ImageProcessingMixin

from common.errors import UserError, one_line
from common.hub import held_out_splits, is_saved, load_from_hub, load_saved, locate_pretrained
from common.image_models import ConvNetConfig, NormResNetConfig

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
NUM_LOOKED_AT = 1000  # images that are decoded before the run: for size, channels, mean, and to find broken ones
DIGITS = "scikit-learn's digits"
NUM_HELD_OUT_DIGITS = 360  # a fifth, the last ones: by other writers than the first ones

AUGMENTATIONS = {
    "none": "the images as they are",
    "shift": "moved by up to an eighth of its size, its edge repeated; the default",
    "flip": "mirrored, left to right, every other time: not for digits or letters",
    "crop": "RandomResizedCrop of torchvision",
    "rand": "RandAugment of torchvision",
}
NEEDS_TORCHVISION = ("crop", "rand")


@dataclass(frozen=True)
class Images:
    """Images that were found and not yet decoded, with their classes."""

    name: str  # for messages
    fingerprint: str  # equal where all images and labels are
    classes: tuple[str, ...]
    labels: np.ndarray  # int64, of each image, into `classes`
    read: Callable[[int], Any]  # what PIL opens (a path, a file in memory), or an image
    where: Callable[[int], str]  # the image's name for messages


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become what the model takes: (pixel / 255 - mean) / std, of images of one size."""

    height: int
    width: int
    mean: tuple[float, ...]  # of each channel: one or three
    std: tuple[float, ...]
    is_scaled: bool = True  # an image of another size is scaled; else it is a UserError that names it
    takes_rgb: bool = True  # as pipelines give it; False: a pretrained model of one channel takes gray images only

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes what `AutoImageProcessor.from_pretrained` reads, so that the saved model is fed the same pixels."""
        copies = 3 // len(self.mean) if self.takes_rgb else 1  # our own models make one channel of three
        settings = {
            "image_processor_type": "ViTImageProcessor",  # the plain one: resize, rescale, normalise
            "do_convert_rgb": self.takes_rgb,
            "do_resize": True,
            "size": {"height": self.height, "width": self.width},
            "resample": int(Image.Resampling.BILINEAR),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean) * copies,
            "image_std": list(self.std) * copies,
        }
        Path(directory, "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


# --- where images come from ------------------------------------------------------------------------------------------


def find(args: argparse.Namespace) -> tuple[Images, Images | None]:
    """Training and held-out images, as the recipe's flags say; without any, scikit-learn's digits.

    Raises:
        UserError: they are not there, or make no classes to learn; a line each.
    """
    if not (args.train_dir or args.dataset_name):
        return digits("train"), digits("validation")
    validation = folder(args.validation_dir) if args.validation_dir else None
    if args.train_dir:
        train = folder(args.train_dir)
    else:
        train = hub(args.dataset_name, args.dataset_config, "train", args.label_column)
        check_labels(train)
        validation = validation or held_out(args.dataset_name, args.dataset_config, args.label_column)
    return train, check_classes(train, validation)


def folder(directory: str) -> Images:
    """A folder with one subfolder a class, searched to any depth. No image is opened.

    Raises:
        UserError: a line for each class without an image, or what else makes it no data set.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise UserError(f"{directory}: no such directory; it should have one subfolder a class")
    classes = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise UserError(f"{directory}: has no subfolder; put the images of each class into one of its own")
    paths, labels, problems = [], [], []
    for label, name in enumerate(classes):
        found = sorted(path for path in (root / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not found:
            problems.append(
                f"{root / name}: the class has no image ({' '.join(SUFFIXES)}); fill the folder or remove it"
            )
        paths += found
        labels += [label] * len(found)
    if problems:
        raise UserError("\n".join(problems))
    stats = [(path.relative_to(root).as_posix(), path.stat()) for path in paths]
    # The size, not the contents: hashing a large data set takes longer than many a run. A copy has the same.
    fingerprint = _hash([[name, stat.st_size] for name, stat in stats])
    names = [str(path) for path in paths]
    return Images(
        directory, fingerprint, tuple(classes), np.array(labels, np.int64), names.__getitem__, names.__getitem__
    )


def hub(name: str, config: str | None, split: str, label_column: str | None = None) -> Images:
    """A split of a data set of the hub, or of a directory that `save_to_disk` of `datasets` wrote.

    The images are in its first column of that kind; the classes in `label_column`, or the first ClassLabel. Labels that
    are hidden stay -1.

    Raises:
        UserError: it is not there, or has no such columns; one line.
    """
    import datasets

    where = f"{name}[{split}]"
    data = load_saved(name, split) if is_saved(Path(name).expanduser()) else load_from_hub(name, config, split)
    if not len(data):
        raise UserError(f"{where}: the data set holds no row; take another one")
    features = data.features
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    labels = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not images:
        raise UserError(f"{where}: no column holds images; there are: {', '.join(features)}; take another one")
    if label_column is None and not labels:
        raise UserError(f"{where}: no column of classes; name it with --label_column; there are: {', '.join(features)}")
    column = label_column or labels[0]
    if column not in features:
        raise UserError(f"{where}: no column {column}; there are: {', '.join(features)}; name one of them")
    kind = features[column]
    if not getattr(kind, "dtype", "").startswith(("string", "large_string", "int", "uint", "bool")):
        raise UserError(
            f"{where}: column {column} holds no classes (names or whole numbers); name another --label_column; "
            f"there are: {', '.join(features)}"
        )
    values = list(data[column])
    if None in values:
        raise UserError(f"{where}, row {values.index(None)}: column {column} is null; mend or remove the row")
    if column in labels:
        classes, numbers = tuple(kind.names), np.array(values, np.int64)
    else:
        classes = tuple(sorted({str(value) for value in values}))
        numbers = np.array([classes.index(str(value)) for value in values], np.int64)
    encoded = data.select_columns([images[0]]).cast_column(images[0], datasets.Image(decode=False))

    def read(index: int) -> Any:
        image = encoded[index][images[0]]
        return io.BytesIO(image["bytes"]) if image["bytes"] is not None else image["path"]

    return Images(
        where, _hash([data._fingerprint, column]), classes, numbers, read, lambda index: f"{where}, row {index}"
    )


def held_out(name: str, config: str | None, label_column: str | None = None) -> Images | None:
    """The split of a data set to measure on: its validation split, else test, else none; not one of hidden labels."""
    for split in held_out_splits(name, config):
        images = hub(name, config, split, label_column)
        if (images.labels >= 0).any():
            check_labels(images)
            return images
    return None


def check_labels(images: Images) -> None:
    """Raises UserError, one line, where a label is hidden."""
    if (images.labels < 0).any():
        first = int((images.labels < 0).argmax())
        raise UserError(f"{images.where(first)}: its label is hidden (-1); remove such rows, or name another data set")


def digits(part: str) -> Images:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, which it carries; `part` is "train" or "validation"."""
    from sklearn.datasets import load_digits  # here because it takes seconds

    data = load_digits()
    chosen = slice(-NUM_HELD_OUT_DIGITS) if part == "train" else slice(-NUM_HELD_OUT_DIGITS, None)
    pixels = np.round(data.images[chosen] * (255 / 16)).astype(np.uint8)
    labels = data.target[chosen].astype(np.int64)
    name = f"{DIGITS}, {part}"
    classes = tuple(str(digit) for digit in range(10))
    fingerprint = hashlib.blake2b(pixels.tobytes() + labels.tobytes(), digest_size=8).hexdigest()
    return Images(
        name, fingerprint, classes, labels, lambda i: Image.fromarray(pixels[i]), lambda i: f"{name}, image {i}"
    )


def check_classes(train: Images, validation: Images | None) -> Images | None:
    """The held-out images with the training classes' numbers.

    Raises:
        UserError: the training data have one class only, or the held-out ones a class that they have not.
    """
    if len(set(train.labels.tolist())) < 2:
        raise UserError(f"{train.name}: all images are of one class, {train.classes[train.labels[0]]}; add another")
    if validation is None or validation.classes == train.classes:
        return validation
    used = [validation.classes[label] for label in sorted(set(validation.labels.tolist()))]
    if unknown := [name for name in used if name not in train.classes]:
        raise UserError(
            f"{validation.name}: class {', '.join(unknown)} is not in {train.name}, which has "
            f"{', '.join(train.classes[:20])}; rename or remove it"
        )
    return with_classes(validation, train.classes)


def with_classes(images: Images, classes: tuple[str, ...]) -> Images:
    """The images with other classes' numbers; each class that an image has is one of them."""
    numbers = np.array([classes.index(name) if name in classes else -1 for name in images.classes], np.int64)
    return replace(images, classes=classes, labels=numbers[images.labels])


def choose_classes(config: PreTrainedConfig, classes: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """The data's classes in the order of a pretrained model's head, and whether it needs a new head for them.

    It keeps its own where that is for the same names. LABEL_0, LABEL_1, ... are no names: they stand for numbers.
    """
    own = tuple(config.id2label[number] for number in range(config.num_labels))
    if own == tuple(f"LABEL_{number}" for number in range(len(own))):
        own = tuple(str(number) for number in range(len(own)))
    return (own, False) if sorted(own) == sorted(classes) else (classes, True)


def _hash(facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def linear_accuracy(train: Images, validation: Images) -> float | None:
    """Held-out accuracy of logistic regression on the digits' pixels, in a second; None for other data."""
    if not train.name.startswith(DIGITS):
        return None
    from sklearn.linear_model import LogisticRegression

    x, held_out = (
        np.stack([np.asarray(one.read(i)).ravel() / 255 for i in range(len(one.labels))]) for one in (train, validation)
    )
    return float(LogisticRegression(max_iter=1000).fit(x, train.labels).score(held_out, validation.labels))


# --- pixels ----------------------------------------------------------------------------------------------------------


def open_image(images: Images, index: int) -> Image.Image:
    """An image of mode L (gray) or RGB, decoded, turned as its EXIF says; what is transparent lies on white.

    Raises:
        UserError: it cannot be read or decoded, or has more than 8 bits a channel.
    """
    source = images.read(index)
    try:
        if isinstance(source, Image.Image):
            image = source
        else:
            image = ImageOps.exif_transpose(Image.open(source))
            image.load()
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error, ...: by the format
        raise UserError(
            f"{images.where(index)}: cannot be read as an image ({one_line(error)}); replace or remove it"
        ) from error
    if image.mode.startswith(("I", "F")):
        raise UserError(f"{images.where(index)}: its pixels ({image.mode}) have more than 8 bits; save it with 8")
    if image.mode in ("1", "L"):
        return image.convert("L")
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def look_at(images: Images) -> list[tuple[int, Image.Image]]:
    """Up to 1000 images with their numbers, evenly spaced over all of them, decoded: broken ones are found here."""
    numbers = np.unique(np.linspace(0, len(images.labels) - 1, NUM_LOOKED_AT).astype(int))
    return [(int(number), open_image(images, int(number))) for number in numbers]


def preprocess(images: Images, size: tuple[int, int] | None = None, channels: int | None = None) -> Preprocessing:
    """Size, channels, mean and standard deviation from up to 1000 of the images.

    Args:
        size: height and width, to which all images are scaled; None: those that all of them have.
        channels: 1 or 3; None: 1 where all of them are gray.

    Raises:
        UserError: they have different sizes, and none was given; or they have colours, and the model has one channel;
            or one cannot be decoded.
    """
    looked_at = look_at(images)
    first_number, first = looked_at[0]
    height, width = size or (first.height, first.width)
    for number, image in looked_at:
        if size is None and image.size != first.size:
            raise UserError(_sizes_differ(images, number, image, (width, height), images.where(first_number)))
        if channels == 1 and image.mode != "L":  # AutoImageProcessor would not make it gray
            raise UserError(
                f"{images.where(number)}: has colours, but the model takes gray images; save them gray, or take a "
                "model of 3 channels"
            )
    channels = channels or (1 if all(image.mode == "L" for _, image in looked_at) else 3)
    totals = np.zeros((2, channels))
    for _, image in looked_at:
        pixels = to_array(image, height, width, channels).reshape(channels, -1) / 255
        totals += pixels.mean(1), np.square(pixels).mean(1)
    mean, square = totals / len(looked_at)
    std = np.sqrt(np.maximum(square - mean * mean, 1e-6))  # a channel that never changes is not blown up
    return Preprocessing(height, width, tuple(mean.tolist()), tuple(std.tolist()), is_scaled=size is not None)


def preprocess_for(
    name_or_path: str, config: PreTrainedConfig, images: Images, size: tuple[int, int] | None = None
) -> Preprocessing:
    """As `preprocess`, with size, channels, mean and standard deviation of a pretrained model, where it tells them.

    Raises:
        UserError: the model takes images of one size, and `size` is another.
    """
    try:
        where, _ = locate_pretrained(name_or_path)
        settings, _ = ImageProcessingMixin.get_image_processor_dict(**where)
    except OSError:  # it brings none
        settings = {}
    sides = getattr(config, "image_size", None) or settings.get("size")
    if isinstance(sides, dict):
        sides = sides.get("height") or sides.get("shortest_edge"), sides.get("width") or sides.get("shortest_edge")
    sides = (sides, sides) if isinstance(sides, int) else sides and tuple(sides)
    if size and size != sides and getattr(config, "image_size", None):
        raise UserError(
            f"--image_size {size[0]}: --model_name_or_path {name_or_path} takes images of {sides[1]} x {sides[0]}; "
            "leave it out"
        )
    channels = getattr(config, "num_channels", 3)
    takes_rgb = channels == 3 or isinstance(config, ConvNetConfig | NormResNetConfig)
    own = replace(preprocess(images, size or sides, channels), takes_rgb=takes_rgb)
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
    """The image in another size, bilinearly, without regard to its proportions."""
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)


def to_array(image: Image.Image, height: int, width: int, channels: int) -> np.ndarray:
    """uint8 (channels, height, width)."""
    pixels = np.asarray(scaled(image, height, width).convert("L" if channels == 1 else "RGB"))
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def check_augmentations(names: Iterable[str]) -> list[str]:
    """One line for each augmentation that cannot be done here."""
    names, problems = list(names), []
    if "none" in names and len(names) > 1:
        problems.append(f"--augment {' '.join(names)}: none, and others; take out one or the other")
    if needs := [name for name in names if name in NEEDS_TORCHVISION]:
        try:
            import torchvision.transforms  # noqa: F401
        except Exception as error:  # not there, or of another torch
            problems.append(
                f"--augment {' '.join(needs)} needs torchvision ({one_line(error)}); pip install it, or use shift"
            )
    return problems


class ImageSamples:
    """Images as `common.batching.Samples`: an item is (uint8 pixels (C, H, W), label).

    Args:
        augment: names of `AUGMENTATIONS`, applied in their order; empty to evaluate.
    """

    unit = "images"
    max_length = 1

    def __init__(self, images: Images, preprocessing: Preprocessing, augment: Iterable[str] = (), seed: int = 0):
        self.images, self.seed, self.is_scaled = images, seed, preprocessing.is_scaled
        self.augment = tuple(name for name in augment if name != "none")
        self.epoch = 0
        self.shape = (len(preprocessing.mean), preprocessing.height, preprocessing.width)
        self.num_target_tokens = len(images.labels)
        self.fingerprint = _hash([images.fingerprint, images.classes, self.shape])

    def of_epoch(self, epoch: int) -> "ImageSamples":
        """The same images, augmented as an epoch sees them."""
        samples = copy.copy(self)
        samples.epoch = epoch
        return samples

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        channels, height, width = self.shape
        index = int(index)
        image = open_image(self.images, index)
        if not self.is_scaled and image.size != (width, height):
            raise UserError(_sizes_differ(self.images, index, image, (width, height), "others"))
        if self.augment:
            if "crop" not in self.augment:  # which takes its part of the whole image, and scales that
                image = scaled(image, height, width)
            with _own_random_stream(f"{self.seed}/{self.epoch}/{index}"):
                for name in self.augment:
                    image = augmented(image, name, height, width)
        return to_array(image, height, width, channels), int(self.images.labels[index])

    def filler(self) -> tuple[np.ndarray, int]:
        return np.zeros(self.shape, np.uint8), -1

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), np.int64)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids), np.int64)

    def describe(self) -> str:
        channels, height, width = self.shape
        colours = "gray" if channels == 1 else "RGB"
        num_classes = len(self.images.classes)
        augmented = f", augmented: {', '.join(self.augment)}" if self.augment else ""
        return (
            f"{self.images.name}: {len(self):,} images, {width} x {height} {colours}, {num_classes} classes{augmented}"
        )


@contextmanager
def _own_random_stream(key: str) -> Iterator[None]:
    """Python's and torch's random streams begin at `key`, then go on where they were: dropout is not shifted."""
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
    before, before_torch = random.getstate(), torch.get_rng_state()
    random.seed(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed would seed the GPUs' streams too
    try:
        yield
    finally:
        random.setstate(before)
        torch.set_rng_state(before_torch)


def augmented(image: Image.Image, name: str, height: int, width: int) -> Image.Image:
    """One of `AUGMENTATIONS`; draws from Python's and torch's random streams."""
    if name == "flip":
        return ImageOps.mirror(image) if random.random() < 0.5 else image
    if name == "shift":
        down, right = (random.randint(-(side // 8), side // 8) for side in (image.height, image.width))
        rows = np.clip(np.arange(image.height) - down, 0, image.height - 1)
        columns = np.clip(np.arange(image.width) - right, 0, image.width - 1)
        return Image.fromarray(np.asarray(image)[rows][:, columns])
    from torchvision import transforms  # optional, and takes seconds

    transform = transforms.RandomResizedCrop((height, width)) if name == "crop" else transforms.RandAugment()
    return transform(image)


def collate_images(samples: list[tuple[np.ndarray, int]], preprocessing: Preprocessing) -> dict[str, torch.Tensor]:
    """One micro-batch: `pixel_values` (B, C, H, W), `targets` (N,) and `target_rows` (N,), the rows they belong to."""
    pixels = torch.from_numpy(np.stack([pixels for pixels, _ in samples])).to(torch.get_default_dtype())
    mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    labels = np.array([label for _, label in samples], np.int64)
    rows = np.flatnonzero(labels >= 0)  # a filler has no target
    return {
        "pixel_values": (pixels / 255 - mean) / std,
        "targets": torch.from_numpy(labels[rows]),
        "target_rows": torch.from_numpy(rows),
    }
