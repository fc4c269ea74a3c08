"""Finds images and their classes: in folders, in datasets of the hub, and in scikit-learn's digits."""

import argparse
import hashlib
import importlib.util
import io
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from common.data.hub import held_out_splits, load_split
from common.errors import UserError, one_line, refuse, shorten
from common.internals.datasets import content_hash

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
DIGITS = "scikit-learn's digits"
NUM_LOOKED_AT = 1000  # images decoded before the run, to find size, channels, mean and corrupted images
NUM_HELD_OUT_DIGITS = 360  # a fifth: the last images, by different writers than the first images


@dataclass(frozen=True)
class Images:
    """Images that have been found but not decoded, with their classes."""

    name: str  # for messages
    fingerprint: str  # equal if all images and labels are equal
    classes: tuple[str, ...]
    labels: np.ndarray  # int64, index into `classes` of each image
    read: Callable[[int], Any]  # returns an image, or an input of PIL.Image.open (a path, a file in memory)
    where: Callable[[int], str]  # returns the image's name for messages
    contents: Callable[[], str] = str  # for files: returns the end of the fingerprint, a hash of their beginnings
    unused: str = ""  # text on unused files or columns of the source


def find(args: argparse.Namespace) -> tuple[Images, Images | None]:
    """Returns training and held-out images as selected by the flags; without flags, scikit-learn's digits.

    Raises UserError, one line per problem, if the images are missing or do not form classes.
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
    """Returns the images of a folder with one subfolder per class, searched to any depth; no image is opened.

    `imagefolder` of datasets is not used for three reasons. It treats a class named "test" as a split and silently
    drops the other classes. A copy of the folder gets a different fingerprint. It takes 8 s for 3,000 images at every
    start, compared with 0.3 s here.

    Raises UserError with a line for each class without an image, or if the folder is not such a dataset.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise UserError(f"{directory}: no such directory; it should have one subfolder a class")
    others = list(root.iterdir())
    classes = sorted(path.name for path in others if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise UserError(f"{directory}: has no subfolder; put the images of each class into one of its own")
    paths, labels, problems = [], [], []
    for label, name in enumerate(classes):
        images, rest = [], []
        for path in sorted((root / name).rglob("*")):
            (images if path.suffix.lower() in SUFFIXES else rest).append(path)
        if not images:
            problems.append(
                f"{root / name}: the class has no image ({' '.join(SUFFIXES)}); fill the folder or remove it"
            )
        paths += images
        others += rest
        labels += [label] * len(images)
    refuse(problems)
    stats = [(path.relative_to(root).as_posix(), path.stat()) for path in paths]
    fingerprint = fingerprint_of([[name, stat.st_size] for name, stat in stats])
    names, labels = [str(path) for path in paths], np.array(labels, np.int64)
    contents, others = partial(_hash_beginnings, names), _visible_files(root, others)
    unused = f"files not used: {shorten(others)}" if others else ""
    return Images(
        directory, fingerprint, tuple(classes), labels, names.__getitem__, names.__getitem__, contents, unused
    )


def _visible_files(root: Path, paths: list[Path]) -> list[str]:
    """Returns the files among the paths, relative to the root, without hidden files and files in hidden folders."""
    names = (path.relative_to(root) for path in sorted(paths) if path.is_file())
    return [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]


def _hash_beginnings(paths: list[str]) -> str:
    """Returns a hyphen and a hash of the beginnings of up to a thousand files; a copy of the dataset has the same hash.

    Reading a large dataset in full takes longer than many runs.
    """
    digest = hashlib.blake2b(digest_size=8)
    for number in evenly_spaced(len(paths)):
        with suppress(OSError), open(paths[number], "rb") as file:  # decoding reports it
            digest.update(file.read(1 << 16))
    return f"-{digest.hexdigest()}"


def hub(name: str, config: str | None, split: str, label_column: str | None = None) -> Images:
    """Returns a split of a dataset on the hub, or of a directory that `save_to_disk` of `datasets` wrote.

    The images are in its first image column. The classes are in `label_column`, or by default in the first ClassLabel
    column. Hidden labels stay -1.

    Raises UserError, one line, if the dataset is missing or has no such columns.
    """
    import datasets

    where = f"{name}[{split}]"
    data = load_split(name, config, split)
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
    others = sorted(features.keys() - {images[0], column})
    encoded = data.select_columns([images[0]]).cast_column(images[0], datasets.Image(decode=False))

    def read(index: int) -> Any:
        image = encoded[index][images[0]]
        return io.BytesIO(image["bytes"]) if image["bytes"] is not None else image["path"]

    return Images(
        where,
        fingerprint_of([content_hash(data), column]),
        classes,
        numbers,
        read,
        lambda index: f"{where}, row {index}",
        unused=f"columns not used: {shorten(others)}" if others else "",
    )


def held_out(name: str, config: str | None, label_column: str | None = None) -> Images | None:
    """Returns the split of a dataset for evaluation: validation, else test, else None.

    A split with only hidden labels is skipped.
    """
    for split in held_out_splits(name, config):
        images = hub(name, config, split, label_column)
        if (images.labels >= 0).any():
            check_labels(images)
            return images
    return None


def check_labels(images: Images) -> None:
    """Raises UserError, one line, if a label is hidden."""
    if (images.labels < 0).any():
        first = int((images.labels < 0).argmax())
        raise UserError(f"{images.where(first)}: its label is hidden (-1); remove such rows, or name another data set")


def digits(part: str) -> Images:
    """Returns scikit-learn's 1,797 digits of 8 x 8 pixels, which it includes; `part` is "train" or "validation"."""
    # Reads the data file directly, because importing scikit-learn (`sklearn.datasets.load_digits`) takes a second.
    (package,) = importlib.util.find_spec("sklearn").submodule_search_locations
    rows = np.loadtxt(Path(package) / "datasets/data/digits.csv.gz", delimiter=",")
    rows = rows[:-NUM_HELD_OUT_DIGITS] if part == "train" else rows[-NUM_HELD_OUT_DIGITS:]
    pixels = np.round(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = rows[:, -1].astype(np.int64)
    name = f"{DIGITS}, {part}"
    classes = tuple(str(digit) for digit in range(10))
    fingerprint = hashlib.blake2b(pixels.tobytes() + labels.tobytes(), digest_size=8).hexdigest()
    return Images(
        name, fingerprint, classes, labels, lambda i: Image.fromarray(pixels[i]), lambda i: f"{name}, image {i}"
    )


def check_classes(train: Images, validation: Images | None) -> Images | None:
    """Returns the held-out images with the class numbers of the training images.

    Raises UserError if the training data has only one class, or the held-out images have other classes.
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
    """Returns the images with the class numbers of `classes`, which contains the class of every image."""
    numbers = np.array([classes.index(name) if name in classes else -1 for name in images.classes], np.int64)
    return replace(images, classes=classes, labels=numbers[images.labels])


def evenly_spaced(count: int) -> list[int]:
    """Returns the indices, below `count`, of up to 1000 evenly spaced images to read before a run."""
    return np.unique(np.linspace(0, count - 1, NUM_LOOKED_AT).astype(int)).tolist()


def fingerprint_of(facts: Any) -> str:
    """Returns a hash of JSON values."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def open_image(images: Images, index: int, size: tuple[int, int] | None = None) -> Image.Image:
    """Returns a decoded image of mode L (gray) or RGB, rotated according to its EXIF data, with transparency on white.

    Args:
        size: height and width to which it will be scaled. A JPEG is then decoded at a half, a quarter or an eighth of
            its size, but at least at twice this size. This needs little time and memory, and yields nearly the same
            pixels.

    Raises UserError if it cannot be read or decoded, or has more than 8 bits per channel.
    """
    source = images.read(index)
    try:
        if isinstance(source, Image.Image):
            image = source
        else:
            image = Image.open(source)
            if size:
                image.draft(None, (2 * max(size), 2 * max(size)))  # the maximum side, because EXIF may rotate it
            image = ImageOps.exif_transpose(image)
            image.load()
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error, ..., depending on the format
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
