"""Opens text sources: files, datasets (hub or local), and the standard-library corpus of every Python.

    corpus = open_source(Source(files=("books/*.txt.gz",)))
    for row in corpus.rows(("text",), True): ...

Everything is read as a stream: memory use does not grow with the file size. JSON Lines and CSV are read with the
standard library instead of `datasets.load_dataset`, for two reasons. That function guesses types: the string
"2020-01-01" becomes a datetime, the CSV field "003" becomes 3 and "NA" None. It reports neither the file nor the line
of unreadable input.
"""

import glob
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from common.data.readers import file_classes, read_file, with_class_names
from common.data.source_types import COMPRESSIONS, FILE_TYPES, Corpus, Row, Source, file_type
from common.errors import UserError, one_line, refuse, shorten
from common.internals.datasets import content_hash

logger = logging.getLogger(__name__)


def check_sources(*sources: Source | None) -> None:
    """Raises one UserError, one line per problem, with all problems that can be found without reading a file."""
    given = [part for source in sources if source is not None for part in source.parts or (source,)]
    refuse(problem for source in given for problem in _problems(source))


def have_no_columns(*sources: Source | None) -> bool:
    """Returns whether all sources are .txt files or the embedded corpus, whose rows contain only a text."""
    given = [part for source in sources if source is not None for part in source.parts or (source,)]
    paths = [path for source in given for pattern in source.files for path in expand(pattern)]
    is_plain = all(file_type(path)[0] == ".txt" for path in paths)
    return is_plain and not any(source.dataset_name for source in given)


def open_source(source: Source) -> Corpus:
    """Opens a source and reads its first row.

    Raises UserError if the source cannot be read.
    """
    check_sources(source)
    if source.embedded:
        from common.data.standard_library import open_embedded

        return open_embedded(source)
    if source.files:
        return _open_files([path for pattern in source.files for path in expand(pattern)], source)
    return _open_dataset(source)


def _problems(source: Source) -> Iterator[str]:
    """Yields a line for each problem of a source's files; paths with the same problem share a line."""
    problems: dict[str, list[str]] = {}
    for pattern in source.files:
        paths = expand(pattern)
        if not paths and glob.has_magic(pattern):
            yield f"{pattern}: no file matches; correct the pattern (it is relative to {Path.cwd()})"
        elif not paths:
            yield f"{pattern}: no such file; correct the path (it is relative to {Path.cwd()})"
        for path in paths:
            if problem := _file_problem(path):
                problems.setdefault(problem, []).append(path)
    for problem, paths in problems.items():  # A folder of images would repeat the same problem thousands of times.
        yield f"{shorten(paths, 3)}: {problem}"


def expand(pattern: str) -> list[str]:
    """Returns the files of a path or glob, sorted, so that their order does not depend on the file system."""
    path = Path(pattern).expanduser()
    if path.exists():  # before globbing, because a name may contain brackets
        return [str(path)]
    return sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())


def _file_problem(path: str) -> str | None:
    """Returns the reason why a file cannot be read, or None."""
    extension, compression = file_type(path)
    if Path(path).is_dir():
        return f"is a directory; give its files ({path}/*.txt), or give it as a dataset's name"
    if extension not in FILE_TYPES:
        return f"unknown extension; there are {' '.join(FILE_TYPES)}, and {' '.join(COMPRESSIONS)} behind these"
    if extension == ".parquet" and compression:
        return "a Parquet file is read from its end and is compressed inside; unpack it"
    from common.data.compressed import can_unpack

    if compression and not can_unpack(compression):
        return f"this Python cannot unpack {Path(path).suffix}; pip install zstandard, or unpack the file"
    if Path(path).stat().st_size == 0:
        return "the file is empty; leave it out or fill it"
    return None


def _open_files(paths: list[str], source: Source) -> Corpus:
    paths = list(dict.fromkeys(paths))  # two globs may overlap
    # Path, size and time instead of the contents: hashing 1 TB takes longer than many training runs.
    stats = [(str(Path(path).resolve()), Path(path).stat()) for path in paths]
    identity = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    name = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    columns, unused = tuple(next(read_file(paths[0], source.text_column, None, True)).values), Counter()

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for path in paths:
            yield from read_file(path, source.text_column, _present(path, wanted, unused), whole_files)

    return Corpus(name, identity, columns, rows, file_classes(paths[0]), unused)


def _present(path: str, wanted: tuple[str, ...], unused: Counter[str]) -> tuple[str, ...]:
    """Returns the wanted columns that a Parquet file contains, or all wanted columns if it contains none of them.

    `unused` counts the columns that are never read. For other files, all wanted columns are returned.
    """
    if file_type(path)[0] != ".parquet":
        return wanted
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
    except (OSError, pyarrow.ArrowException):  # reported by the reader
        return wanted
    unused.update(dict.fromkeys(set(names) - set(wanted), 1))
    return tuple(name for name in wanted if name in names) or wanted


def _open_dataset(source: Source) -> Corpus:
    from datasets import ClassLabel

    from common.data.hub import is_saved, load_split

    name, path = source.dataset_name, Path(source.dataset_name).expanduser()
    if path.is_dir() and not is_saved(path):
        return _open_files(_folder_files(path, source), source)
    dataset = load_split(name, source.dataset_config, source.split)
    where = f"{name}[{source.split}]"
    classes = {column: kind.names for column, kind in dataset.features.items() if isinstance(kind, ClassLabel)}

    unused: Counter[str] = Counter()

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        unused.update(dict.fromkeys(set(dataset.column_names) - set(wanted), 1))
        columns = dataset.select_columns(
            [name for name in wanted if name in dataset.column_names]
        )  # leaves images and other large columns on the disk
        for start in range(0, len(columns), 64):
            batch = columns[start : start + 64]
            for offset, values in enumerate(zip(*batch.values(), strict=True)):
                row = dict(zip(batch, values, strict=True))
                yield Row(f"{where}[{start + offset}]", with_class_names(row, classes))

    identity = [where, content_hash(dataset), len(dataset)]
    return Corpus(where, identity, tuple(dataset.column_names), rows, classes, unused)


def _folder_files(path: Path, source: Source) -> list[str]:
    """Returns the files of a split as found by `datasets`.

    It recognises names such as train.jsonl or data/test-*.parquet, and a list in a README.

    Raises UserError if there are no data files or the split does not exist.
    """
    from datasets import load_dataset_builder

    try:
        files = load_dataset_builder(str(path), source.dataset_config).config.data_files or {}
    except Exception as error:
        raise UserError(f"{path}: no data files found in this directory ({one_line(error)})") from error
    if source.split not in files:
        raise UserError(f"{path}: no split {source.split}; there are: {', '.join(map(str, files))}; name one of them")
    used = {Path(name).resolve() for names in files.values() for name in names}
    unused = [p for p in sorted(path.rglob("*")) if file_type(str(p))[0] in FILE_TYPES and p.resolve() not in used]
    if unused:  # `datasets` uses the most common type of a folder and silently ignores the others.
        logger.warning("%s: %d files are in no split and are not read, such as %s", path, len(unused), unused[0].name)
    check_sources(Source(files=tuple(files[source.split])))
    return sorted(files[source.split])
