"""Types of the benchmarks' flags: they reject a wrong value before anything is measured."""

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """Returns an integer > 0."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer > 0")
    return int(text)


def not_negative(text: str) -> int:
    """Returns an integer >= 0."""
    return int(text) and positive(text)


def output_dir(text: str) -> Path:
    """Returns the path of a directory, which is created if it does not exist."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be created: {error.strerror}") from error
    return Path(text)


def output_file(text: str) -> Path:
    """Returns the path of a file, whose directory is created if it does not exist."""
    output_dir(str(Path(text).parent))
    return Path(text)
