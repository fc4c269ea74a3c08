"""Parses `--train_file code.jsonl:0.7 books.txt:0.3`: files with weights become the parts of a mixed source."""

import re
from argparse import Namespace
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

from common.data.source_types import Source, expand
from common.errors import UserError, raise_errors

NUMBER = re.compile(r"(?:(?:[0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})(?:e[+-]?[0-9]{1,2})?|[0-9]{1,30}/[0-9]{1,30})")


def training_files(given: list[str], **columns: Any) -> Source:
    """Returns the files of --train_file as one source, or, with weights, as the parts of a mixed source.

    Raises UserError with one line per problem with the weights.
    """
    named = [_split_weight(path) for path in given]
    if all(weight is None for _, weight in named):
        return Source(files=tuple(given), **columns)
    raise_errors(_problems(named))
    from common.training.data_mixing import MAX_LENGTH, reduce_weights

    weights = reduce_weights([Fraction(weight) for _, weight in named if weight])
    if sum(weights) > MAX_LENGTH:
        raise UserError(
            f"--train_file: the weights are in the proportion {':'.join(map(str, weights))}, whose sum is "
            f"{sum(weights):,}; round them until it is {MAX_LENGTH:,} at most"
        )
    return _apart([file for file, _ in named], weights, **columns)


def held_out_files(files: list[str], is_mixed: bool, **columns: Any) -> Source:
    """Returns the files of --validation_file as one source, or as one source each if the training data is mixed.

    Raises UserError if a file has a weight or belongs to two sources.
    """
    raise_errors(needless_weights("--validation_file", files, "all held-out data is evaluated; remove the weights"))
    if not is_mixed or len(files) == 1:
        return Source(files=tuple(files), **columns)
    raise_errors(_given_twice("--validation_file", files))
    return _apart(files, (), **columns)


def _apart(files: list[str], weights: tuple[int, ...], **columns: Any) -> Source:
    return Source(parts=tuple(Source(files=(file,), **columns) for file in files), weights=weights, **columns)


def _split_weight(given: str) -> tuple[str, str | None]:
    """Returns (file or pattern, weight as text); the weight is None if it is absent or `given` is an existing file."""
    file, colon, weight = given.rpartition(":")
    if not (colon and file) or expand(given):
        return given, None
    return (file, weight) if NUMBER.fullmatch(weight) or expand(file) else (given, None)


def needless_weights(flag: str, given: list[str], why: str) -> Iterator[str]:
    """Yields a line for each file or dataset with a weight that has no effect."""
    for file, weight in map(_split_weight, given):
        if weight is not None:
            yield f"{flag} {file}:{weight}: a weight is for the files of --train_file; {why}"


def _problems(named: list[tuple[str, str | None]]) -> Iterator[str]:
    """Yields a line for each problem with the weights of --train_file."""
    if len(named) == 1:
        file, weight = named[0]
        yield f"--train_file {file}:{weight}: a single source has no weight; remove :{weight}, or pass more files"
        return
    without = [file for file, weight in named if weight is None]
    if without:
        some = next(f"{file}:{weight}" for file, weight in named if weight is not None)
        yield f"--train_file {' '.join(without)}: no weight, as {some} has; give all files one, or none"
    for file, weight in named:
        if weight is not None and not (NUMBER.fullmatch(weight) and _is_positive(weight)):
            yield f"--train_file {file}:{weight}: the weight is not a number above 0, such as 0.7, 7 or 1/3; correct it"
    yield from _given_twice("--train_file", [file for file, _ in named])


def _is_positive(number: str) -> bool:
    above, _, below = number.partition("/")
    return float(above) > 0 and (not below or int(below) > 0)


def _given_twice(flag: str, files: list[str]) -> Iterator[str]:
    """Yields a line for each pair of sources with a common file."""
    paths = [{Path(path).resolve() for path in expand(file)} or {Path(file)} for file in files]
    for (first, some), (second, others) in combinations(zip(files, paths, strict=True), 2):
        if both := sorted(some & others):
            yield f"{flag} {first} {second}: {both[0]} is in both sources; leave it in one"


def find_flag_problems(args: Namespace) -> Iterator[str]:
    """Yields a line for --drop_last_window and for each flag in epochs: the epoch length differs between sources."""
    for name in ("num_epochs", "eval_every", "save_every"):
        value = getattr(args, name)
        if isinstance(value, str) or (name == "num_epochs" and value is not None):
            instead = "--num_updates N" if name == "num_epochs" else f"--{name} N, of updates"
            yield f"--{name} {value}: mixed files have epochs of different lengths; use {instead}"
    if args.drop_last_window:
        yield "--drop_last_window has no effect on mixed files, whose global batches are all full; remove it"
