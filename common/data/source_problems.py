"""Finds missing and unsupported files of a source, to report them together before any file is read."""

import glob
from collections.abc import Iterator
from pathlib import Path

from common.data.source_types import COMPRESSIONS, FILE_TYPES, Source, expand, file_type
from common.errors import shorten


def find_problems(source: Source) -> Iterator[str]:
    """Yields a line for each problem of a source's files; paths with the same problem share a line."""
    problems: dict[str, list[str]] = {}
    for pattern in source.files:
        paths = expand(pattern)
        if not paths and glob.has_magic(pattern):
            yield f"{pattern}: no file matches; correct the pattern (it is relative to {Path.cwd()})"
        elif not paths:
            name = pattern if pattern.strip() else repr(pattern)
            yield f"{name}: no such file; correct the path (it is relative to {Path.cwd()})"
        for path in paths:
            if problem := _file_problem(path):
                problems.setdefault(problem, []).append(path)
    for problem, paths in problems.items():  # A folder of images would repeat the same problem thousands of times.
        yield f"{shorten(paths, 3)}: {problem}"


def _file_problem(path: str) -> str | None:
    """Returns the reason why a file cannot be read, or None."""
    extension, compression = file_type(path)
    if Path(path).is_dir():
        names = sorted(glob.glob(f"{glob.escape(path)}/*"))
        name = next((name for name in names if file_type(name)[0] in FILE_TYPES), "a.txt")
        suffix = file_type(name)[0] + (Path(name).suffix if file_type(name)[1] else "")
        return f"is a directory; pass its files ({path}/*{suffix}), or --dataset_name {path}"
    if extension not in FILE_TYPES:
        return f"unknown extension; use {' '.join(FILE_TYPES)}, also compressed ({' '.join(COMPRESSIONS)})"
    if extension == ".parquet" and compression:
        return "a Parquet file is read from its end and is compressed inside; unpack it"
    if compression:
        from common.data.compressed import can_unpack

        if not can_unpack(compression):
            install = "pip install zstandard, or " if compression == "zstd" else ""  # others are part of Python
            return f"this Python cannot unpack {Path(path).suffix}; {install}unpack the file"
    if not Path(path).is_file():
        return "is not a regular file, such as a pipe or a device; write its content to one"
    if Path(path).stat().st_size == 0:
        return "the file is empty; leave it out or fill it"
    return None


def have_no_columns(*sources: Source | None) -> bool:
    """Returns whether all sources are .txt files or the embedded corpus, whose rows contain only a text."""
    given = [part for source in sources if source for part in source.parts or (source,)]
    paths = [path for source in given for pattern in source.files for path in expand(pattern)]
    is_text = all(file_type(path)[0] == ".txt" for path in paths)
    return is_text and not any(source.dataset_name for source in given)
