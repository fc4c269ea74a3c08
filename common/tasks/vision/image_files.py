"""Where do images and their classes come from? Folders, data sets of the hub, scikit-learn's digits."""

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
NUM_LOOKED_AT = 1000  # images that are decoded before the run: for size, channels, mean, and to find broken ones
NUM_HELD_OUT_DIGITS = 360  # a fifth, the last ones: by other writers than the first ones


@dataclass(frozen=True)
class Images:
    """Images that were found and not yet decoded, with their classes."""

    name: str  # for messages
    fingerprint: str  # equal where all images and labels are
    classes: tuple[str, ...]
    labels: np.ndarray  # int64, of each image, into `classes`
    read: Callable[[int], Any]  # what PIL opens (a path, a file in memory), or an image
    where: Callable[[int], str]  # the image's name for messages
    contents: Callable[[], str] = str  # of files: makes what the fingerprint ends with, by how they begin
    unused: str = ""  # names what the source holds besides


def find(args: argparse.Namespace) -> tuple[Images, Images | None]:
    """Training and held-out images, as the recipe's flags say; without any, scikit-learn's digits.

    Raises UserError: they are not there, or make no classes to learn; a line each.
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

    Not `imagefolder` of datasets: it takes a class named "test" for a split and drops the other classes without a word,
    gives a copy of the folder another fingerprint, and takes 8 s for 3,000 images at every start, where this takes 0.3.

    Raises UserError: a line for each class without an image, or what else makes it no data set.
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
    """Returns the paths that are files, relative to the root, without hidden ones and those in hidden folders."""
    names = (path.relative_to(root) for path in sorted(paths) if path.is_file())
    return [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]


def _hash_beginnings(paths: list[str]) -> str:
    """A hyphen and a hash of how a thousand of the files begin: to read a large data set takes longer than many a run.

    A copy of the data set has the same.
    """
    digest = hashlib.blake2b(digest_size=8)
    for number in evenly_spaced(len(paths)):
        with suppress(OSError), open(paths[number], "rb") as file:  # decoding names it
            digest.update(file.read(1 << 16))
    return f"-{digest.hexdigest()}"


def hub(name: str, config: str | None, split: str, label_column: str | None = None) -> Images:
    """A split of a data set of the hub, or of a directory that `save_to_disk` of `datasets` wrote.

    The images are in its first column of that kind; the classes in `label_column`, or the first ClassLabel. Labels that
    are hidden stay -1.

    Raises UserError: it is not there, or has no such columns; one line.
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
    # Its file without itself (`sklearn.datasets.load_digits`), which takes a second to import.
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
    """The held-out images with the training classes' numbers.

    Raises UserError: the training data have one class only, or the held-out ones a class that they have not.
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


def evenly_spaced(count: int) -> list[int]:
    """The numbers, below `count`, of the images that are looked at before a run: up to 1000."""
    return np.unique(np.linspace(0, count - 1, NUM_LOOKED_AT).astype(int)).tolist()


def fingerprint_of(facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def open_image(images: Images, index: int, size: tuple[int, int] | None = None) -> Image.Image:
    """An image of mode L (gray) or RGB, decoded, turned as its EXIF says; what is transparent lies on white.

    size: height and width that it will be scaled to. A JPEG is then decoded at a half, a quarter or an eighth of its
    size, of at least twice this one: in little time and memory, with nearly the same pixels.

    Raises UserError: it cannot be read or decoded, or has more than 8 bits a channel.
    """
    source = images.read(index)
    try:
        if isinstance(source, Image.Image):
            image = source
        else:
            image = Image.open(source)
            if size:
                image.draft(None, (2 * max(size), 2 * max(size)))  # it may lie on its side
            image = ImageOps.exif_transpose(image)
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
