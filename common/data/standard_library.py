"""The source code of Python's standard library as a text corpus, which needs no data files and no network."""

import hashlib
import json
import os
import sys
import sysconfig
import tokenize as python_tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from common.data.cache import cached
from common.data.source_types import Corpus, Row, Source
from common.errors import UserError

VALIDATION_SHARE = 20  # one in VALIDATION_SHARE files is held out, on average
# Excluded from the embedded corpus: tests, third-party packages, and generated files (tables of character codes, the
# help topics as one dictionary, build variables), because a model only memorises such tables.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled", "lib-dynload"}
GENERATED = ("encodings", "pydoc_data", "_sysconfigdata", "config-")


def open_embedded(source: Source) -> Corpus:
    """Opens a part of the embedded corpus; its functions are extracted once into the cache.

    Raises UserError if this Python has no source files.
    """
    files = embedded_files(source.embedded)
    if not files:
        raise UserError("this Python has no source files of its standard library; give --train_file instead")
    identity = [_hash_contents(source.embedded)]

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        if whole_files:
            yield from (Row(name, {source.text_column: text}) for name, text in _read_texts(files))
            return
        from common.data.python_functions import write_functions

        directory = cached("functions", identity, lambda partial: write_functions(partial, _read_texts(files)))
        with open(directory / "functions.jsonl", encoding="utf-8") as file:
            for name, function in map(json.loads, file):
                yield Row(name, {source.text_column: function})

    return Corpus(f"embedded corpus ({source.embedded})", identity, (source.text_column,), rows)


def _read_texts(files: tuple[tuple[str, Path], ...]) -> Iterator[tuple[str, str]]:
    """Yields (relative name, text) of each file, except a few that deliberately have unusual encodings."""
    for name, path in files:
        try:
            with python_tokenize.open(path) as file:  # uses the encoding in the file's coding line
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield name, text


@cache
def _hash_contents(part: str) -> str:
    """Returns a hash of the names and contents of the files of a part, "train" or "validation"."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in embedded_files(part):
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def embedded_files(part: str) -> tuple[tuple[str, Path], ...]:
    """Returns (relative name, path) of the standard library's source files in a part, "train" or "validation", sorted.

    The part of a file depends only on its name (blake2b, because hash() differs between processes), so it is the same
    on every machine. This needs no network, because every Python includes these files (about 10 MB).
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - EXCLUDED  # does not descend: third-party packages have many files
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            relative = path.relative_to(root)
            if relative.parts[0].startswith(GENERATED):
                continue
            digest = hashlib.blake2b(relative.as_posix().encode(), digest_size=8).digest()
            held_out = int.from_bytes(digest, "big") % VALIDATION_SHARE == 0
            if held_out == (part == "validation"):
                files.append((relative.as_posix(), path))
    return tuple(sorted(files))


def write_files(directory: str) -> None:
    """Writes the corpus as .txt files to train/ and validation/, so that any Python version can use the same text."""
    for part in ("train", "validation"):
        for name, text in _read_texts(embedded_files(part)):
            if text:  # empty files are rejected by a run and have no targets
                path = Path(directory, part, f"{name}.txt")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m common.data.standard_library DIRECTORY")
    write_files(sys.argv[1])
