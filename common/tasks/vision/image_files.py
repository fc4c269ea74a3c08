"""Finds images and their classes: in folders, in datasets of the hub, and in scikit-learn's digits."""

import argparse
import hashlib
import importlib.util
import io
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from common.data.hub import held_out_splits, load_split
from common.errors import UserError, one_line, raise_errors, shorten
from common.internals.datasets import content_hash
from common.reading import reading

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
# Formats of these suffixes. Pillow would otherwise use the contents: for an .eps named .png, it starts Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
DIGITS = "scikit-learn's digits"
MAX_PIXELS = 1 << 27  # per image, 400 MB decoded; a small file can describe an image larger than memory
NUM_SAMPLED = 1000  # images decoded before the run, to find size, channels, mean and corrupted images
NUM_HELD_OUT_DIGITS = 360  # a fifth: the last images, by different writers than the first images


@dataclass(frozen=True)
class Images:
    """Images that are not decoded yet, with their classes."""

    name: str  # for messages
    fingerprint: str  # equal if all images and labels are equal
    classes: tuple[str, ...]
    labels: np.ndarray  # int64, index into `classes` of each image
    read: Callable[[int], Any]  # returns a PIL image, or an input of PIL.Image.open (a path, a file in memory)
    where: Callable[[int], str]  # returns the image's name for messages
    contents: Callable[[], str] = str  # returns a suffix of the fingerprint: for files, a hash of their first bytes
    unused: str = ""  # text on unused files or columns of the source


def find(args: argparse.Namespace) -> tuple[Images, Images | None]:
    """Returns the training and held-out images that the flags select; the default is scikit-learn's digits."""
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

    Raises UserError: one line per problem.
    """
    root = Path(os.path.expanduser(directory))
    if not root.is_dir():
        raise UserError(f"{directory}: no such directory; it should have one subfolder per class")
    others = list(root.iterdir())
    classes = sorted(path.name for path in others if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise UserError(f"{directory}: has no subfolder; put the images of each class into a subfolder")
    images: list[Path] = []
    labels: list[int] = []
    problems = []
    for label, name in enumerate(classes):
        files = sorted((root / name).rglob("*"))
        found = [path for path in files if path.suffix.lower() in SUFFIXES]
        if not found:
            problems.append(f"{root / name}: the class has no image ({' '.join(SUFFIXES)}); add images or remove it")
        images += found
        labels += [label] * len(found)
        others += [path for path in files if path.suffix.lower() not in SUFFIXES]
    irregular = [str(path) for path in images if not path.is_file()]
    if irregular:
        problems.append(f"{shorten(irregular, 3)}: not a file, or a link without a file; replace or remove it")
    raise_errors(problems)
    fingerprint = fingerprint_of([[path.relative_to(root).as_posix(), path.stat().st_size] for path in images])
    names = [str(path) for path in images]
    relative = [path.relative_to(root) for path in sorted(others) if path.is_file()]
    visible = [path.as_posix() for path in relative if not any(part.startswith(".") for part in path.parts)]
    return Images(
        directory,
        fingerprint,
        tuple(classes),
        np.array(labels, np.int64),
        names.__getitem__,
        names.__getitem__,
        partial(_hash_beginnings, names),
        f"files not used: {shorten(visible)}" if visible else "",
    )


def _hash_beginnings(paths: list[str]) -> str:
    """Returns a hyphen and a hash of the first 64 KiB of up to 1000 files, because reading all would take too long."""
    digest = hashlib.blake2b(digest_size=8)
    for number in evenly_spaced(len(paths)):
        with suppress(OSError), open(paths[number], "rb") as file:  # decoding the image reports the error
            digest.update(file.read(1 << 16))
    return f"-{digest.hexdigest()}"


def hub(name: str, config: str | None, split: str, label_column: str | None = None) -> Images:
    """Returns a split of a dataset on the hub, or of a directory that `save_to_disk` of `datasets` wrote.

    Images are read from the first image column, classes from `label_column` (default: the first ClassLabel column).
    Hidden labels stay -1. Raises UserError if the dataset or one of these columns is missing, or a label is null.
    """
    from common.packages import find_missing

    raise_errors(find_missing("--dataset_name", "datasets"))
    import datasets

    title = f"{name}[{split}]"
    data = load_split(name, config, split)
    features = data.features
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    labels = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not images:
        raise UserError(f"{title}: no column has images; there are: {', '.join(features)}; use a different dataset")
    if label_column is None and not labels:
        raise UserError(f"{title}: no column has classes; pass --label_column; there are: {', '.join(features)}")
    column = label_column or labels[0]
    if column not in features:
        raise UserError(f"{title}: no column {column}; there are: {', '.join(features)}; name one of them")
    kind = features[column]
    if not getattr(kind, "dtype", "").startswith(("string", "large_string", "int", "uint", "bool")):
        raise UserError(
            f"{title}: column {column} has no classes (names or integers); pass a different --label_column; "
            f"there are: {', '.join(features)}"
        )
    with reading(title, "fix or replace the dataset"):
        values = list(data[column])
    if None in values:
        raise UserError(f"{title}, row {values.index(None)}: column {column} is null; fix or remove the row")
    if column in labels:
        if wrong := [row for row, number in enumerate(values) if not -1 <= number < len(kind.names)]:
            raise UserError(
                f"{title}, row {wrong[0]}: column {column} is {values[wrong[0]]}, not a class number < "
                f"{len(kind.names)}; fix or remove the row"
            )
        classes, numbers = tuple(kind.names), np.array(values, np.int64)
    else:
        classes = tuple(sorted({str(value) for value in values}))
        indices = {name: index for index, name in enumerate(classes)}
        numbers = np.array([indices[str(value)] for value in values], np.int64)
    others = sorted(features.keys() - {images[0], column})
    encoded = data.select_columns([images[0]]).cast_column(images[0], datasets.Image(decode=False))

    def read(index: int) -> Any:
        image = encoded[index][images[0]]
        return io.BytesIO(image["bytes"]) if image["bytes"] is not None else image["path"]

    unused = f"columns not used: {shorten(others)}" if others else ""
    fingerprint = fingerprint_of([content_hash(data), column])
    return Images(title, fingerprint, classes, numbers, read, lambda index: f"{title}, row {index}", unused=unused)


def held_out(name: str, config: str | None, label_column: str | None = None) -> Images | None:
    """Returns the split for evaluation: validation, else test, else None; splits without labels are skipped."""
    for split in held_out_splits(name, config):
        images = hub(name, config, split, label_column)
        if (images.labels >= 0).any():
            check_labels(images)
            return images
    return None


def check_labels(images: Images) -> None:
    """Raises UserError if a label is hidden."""
    if (images.labels < 0).any():
        first = int((images.labels < 0).argmax())
        raise UserError(
            f"{images.where(first)}: its label is hidden (-1); remove such rows, or use a different dataset"
        )


def digits(part: str) -> Images:
    """Returns the digits of 8 x 8 pixels that scikit-learn includes, 1,797 in total; part: "train" or "validation"."""
    # Reads the data file directly, because importing scikit-learn (`sklearn.datasets.load_digits`) takes a second.
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.origin is not None, "scikit-learn is installed"
    rows = np.loadtxt(Path(spec.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    rows = rows[:-NUM_HELD_OUT_DIGITS] if part == "train" else rows[-NUM_HELD_OUT_DIGITS:]
    pixels = np.round(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = rows[:, -1].astype(np.int64)
    name = f"{DIGITS}, {part}"
    classes = tuple("0123456789")
    fingerprint = hashlib.blake2b(pixels.tobytes() + labels.tobytes(), digest_size=8).hexdigest()
    read = lambda i: Image.fromarray(pixels[i])  # noqa: E731
    return Images(name, fingerprint, classes, labels, read, lambda i: f"{name}, image {i}")


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
            f"{validation.name}: class {', '.join(unknown)} does not occur in {train.name}, which has "
            f"{', '.join(train.classes[:20])}; rename or remove it"
        )
    return with_classes(validation, train.classes)


def with_classes(images: Images, classes: tuple[str, ...]) -> Images:
    """Returns the images with the class numbers of `classes`, which contains the class of every image."""
    numbers = np.array([classes.index(name) if name in classes else -1 for name in images.classes], np.int64)
    return replace(images, classes=classes, labels=numbers[images.labels])


def evenly_spaced(count: int) -> list[int]:
    """Returns up to 1000 evenly spaced indices below `count`."""
    return np.unique(np.linspace(0, count - 1, NUM_SAMPLED).astype(int)).tolist()


def fingerprint_of(facts: Any) -> str:
    """Returns a hash of JSON values."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def open_image(images: Images, index: int, size: tuple[int, int] | None = None) -> Image.Image:
    """Returns a decoded image of mode L (gray) or RGB, rotated according to its EXIF data, with transparency on white.

    Args:
        size: height and width to which the caller scales the image. To save time and memory, a JPEG is then decoded at
            a fraction of its size, but at least at twice `size`; after scaling, the pixels are nearly the same.

    Raises UserError if the image cannot be read or decoded, or has more than 8 bits per channel.
    """
    try:
        source = images.read(index)
        if isinstance(source, Image.Image):
            image = source
        else:
            image = Image.open(source, formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
            if size:
                image.draft(None, (2 * max(size), 2 * max(size)))  # max, because EXIF may swap the sides
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
