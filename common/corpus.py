"""Where text comes from: files, datasets of the hub or of a local directory, and the corpus that every Python carries.

    corpus = open_source(Source(files=("books/*.txt.gz",)))
    for row in corpus.rows(("text",), True): ...

Everything is read as a stream: the memory needed does not grow with the size of a file. JSON Lines and CSV are read
with the standard library and not with `datasets.load_dataset`, which guesses types (the string "2020-01-01" arrives as
a datetime, the CSV field "003" as 3 and "NA" as None) and names neither the file nor the line of what it cannot read.
"""

import ast
import codecs
import csv
import glob
import hashlib
import json
import logging
import lzma
import sysconfig
import textwrap
import tokenize as python_tokenize
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow
import pyarrow.parquet
from fsspec.compression import available_compressions, compr

from common.errors import UserError, one_line
from common.hub import is_saved, load_from_hub, load_saved

logger = logging.getLogger(__name__)

FILE_TYPES = (".txt", ".jsonl", ".json", ".parquet", ".csv")
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
PIECE_BYTES = 1 << 18  # a document in a .txt file is handed on in pieces of this size, each cut at a line's end
MAX_JSON_ARRAY_BYTES = 256 << 20  # the standard library cannot stream a JSON array: it is held in memory
MAX_CSV_FIELD_BYTES = 64 << 20  # csv's own 128 KiB is too little for a document; an unclosed quote must still end
VALIDATION_SHARE = 20  # one file in this many of the embedded corpus is held out

# Not in the embedded corpus: tests, other people's packages, and files written by a program (tables of character codes,
# the help topics as one dictionary, build variables): a model learns the tables by heart and nothing from them.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled", "lib-dynload"}
GENERATED = ("encodings", "pydoc_data", "_sysconfigdata", "config-")


@dataclass(frozen=True)
class Source:
    """Where text comes from: exactly one of `files`, `dataset_name` and `embedded`.

    files: paths or globs of .txt, .jsonl, .json, .parquet, .csv; all but .parquet also with .gz, .bz2, .xz or .zst.
    dataset_name: a name on the hub (`dataset_config` is its configuration), or a directory: what `save_to_disk` wrote,
        or a folder of files. `split` is the split of any of these.
    embedded: "train" or "validation": the source files of the running Python's standard library.
    text_column: the column that holds the text (.txt files and the embedded corpus have only this one).
    prompt_column, completion_column: of rows that have these two in its place, where they are not called so.
    """

    files: tuple[str, ...] = ()
    dataset_name: str | None = None
    dataset_config: str | None = None
    split: str = "train"
    embedded: str | None = None
    text_column: str = "text"
    prompt_column: str | None = None
    completion_column: str | None = None


class Row(NamedTuple):
    """One row. `where` is for messages ("a.jsonl, line 3"). `continues`: the document goes on in the next row."""

    where: str
    values: dict[str, Any]
    continues: bool = False


@dataclass(frozen=True)
class Corpus:
    """A source that was found: its name for messages, what identifies its contents, its columns, and its rows.

    classes: by the column that `datasets` calls a ClassLabel, its names in their order. A row holds the name in the
    place of the number, and None in the place of -1, a label that is hidden.


    rows(wanted, whole_files) yields Rows; a wanted column that a row does not hold is for the caller to report.
    whole_files: a .txt file is one document and so is a file of the embedded corpus; otherwise each line that is not
    blank, or each function, is a row.
    """

    name: str
    identity: list[Any]
    columns: tuple[str, ...]
    rows: Callable[[tuple[str, ...], bool], Iterator[Row]]
    classes: dict[str, list[str]] = field(default_factory=dict)


def check_sources(*sources: Source | None) -> None:
    """Raise one UserError, one line a problem, with every problem of all sources that shows without reading a file."""
    problems = [problem for source in sources if source is not None for problem in _problems(source)]
    if problems:
        raise UserError("\n".join(problems))


def open_source(source: Source) -> Corpus:
    """Find the source and look at its first row. Raises UserError for whatever does not let it be read."""
    check_sources(source)
    if source.embedded:
        return _open_embedded(source)
    if source.files:
        return _open_files([path for pattern in source.files for path in _expand(pattern)], source)
    return _open_dataset(source)


# --- files -----------------------------------------------------------------------------------------------------------


def _problems(source: Source) -> Iterator[str]:
    given = [name for name in ("files", "dataset_name", "embedded") if getattr(source, name)]
    if len(given) != 1:
        yield f"give exactly one of files, a dataset and the embedded corpus (given: {', '.join(given) or 'none'})"
    if source.embedded not in (None, "train", "validation"):
        yield f"the embedded corpus has no part {source.embedded!r}; there are: train, validation"
    for pattern in source.files:
        paths = _expand(pattern)
        if not paths and glob.has_magic(pattern):
            yield f"{pattern}: no file matches; correct the pattern (it is relative to {Path.cwd()})"
        elif not paths:
            yield f"{pattern}: no such file; correct the path (it is relative to {Path.cwd()})"
        for path in paths:
            if problem := _file_problem(path):
                yield problem


def _expand(pattern: str) -> list[str]:
    """The files of a path or glob, sorted, so that their order does not depend on the file system."""
    path = Path(pattern).expanduser()
    if path.exists():  # before globbing: a name may hold brackets
        return [str(path)]
    return sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())


def _file_type(path: str) -> tuple[str, str | None]:
    """(extension, compression): "a.txt.gz" -> (".txt", "gzip")."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        return (suffixes[-2] if len(suffixes) > 1 else "", COMPRESSIONS[suffixes[-1]])
    return (suffixes[-1] if suffixes else "", None)


def _file_problem(path: str) -> str | None:
    extension, compression = _file_type(path)
    if Path(path).is_dir():
        return f"{path}: is a directory; give its files ({path}/*.txt), or give it as a dataset's name"
    if extension not in FILE_TYPES:
        return f"{path}: unknown extension; there are {' '.join(FILE_TYPES)}, and {' '.join(COMPRESSIONS)} behind these"
    if extension == ".parquet" and compression:
        return f"{path}: a Parquet file is read from its end and is compressed inside; unpack it"
    if compression and compression not in available_compressions():
        return f"{path}: this Python cannot unpack {Path(path).suffix}; pip install zstandard, or unpack the file"
    if Path(path).stat().st_size == 0:
        return f"{path}: the file is empty; leave it out or fill it"
    return None


def _open_files(paths: list[str], source: Source) -> Corpus:
    paths = list(dict.fromkeys(paths))  # two globs may overlap
    # Path, size and time, not the contents: hashing 1 TB takes longer than many a training run.
    stats = [(str(Path(path).resolve()), Path(path).stat()) for path in paths]
    identity = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    name = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    columns = tuple(next(_read_file(paths[0], source.text_column, None, True)).values)

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for path in paths:
            yield from _read_file(path, source.text_column, wanted, whole_files)

    classes = _parquet_classes(pyarrow.parquet.read_schema(paths[0])) if _file_type(paths[0])[0] == ".parquet" else {}
    return Corpus(name, identity, columns, rows, classes)


def _read_file(path: str, text_column: str, wanted: tuple[str, ...] | None, whole_files: bool) -> Iterator[Row]:
    """The rows of one file; wanted = None means all columns. Raises UserError, also where the file holds no row."""
    extension, _ = _file_type(path)
    if extension == ".txt":
        reader = _read_pieces(path, text_column) if whole_files else _read_lines(path, text_column)
    elif extension == ".parquet":
        reader = _read_parquet(path, wanted)
    elif extension == ".csv":
        reader = _read_csv(path)
    else:
        reader = _read_json(path)
    row = None
    try:
        for row in reader:
            yield row
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read or unpacked ({one_line(error)}); replace it") from error
    if row is None:
        raise UserError(f"{path}: the file holds no row; leave it out or fill it")


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    with open(path, "rb") as raw, compr[_file_type(path)[1]](raw, mode="rb") as file:
        yield file


def _not_utf8(path: str, offset: int, error: UnicodeDecodeError) -> UserError:
    byte = f"0x{error.object[error.start]:02x}, {error.reason}"
    return UserError(f"{path}: not UTF-8 at byte offset {offset} ({byte}); save the file as UTF-8")


def _decoded(path: str, size: int) -> Iterator[str]:
    """The text of a file in pieces that end with a line, as long as lines are shorter than `size` bytes."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # it drops the byte order mark that Windows editors put first
    position = 0
    with _open(path) as file:
        while True:
            raw = file.read(size)
            raw += file.readline(size)
            position += len(raw)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:  # error.object: the rest of the piece before, and this one
                raise _not_utf8(path, position - len(error.object) + error.start, error) from error
            if text:
                yield text
            if not raw:
                return


def _decoded_lines(path: str) -> Iterator[str]:
    """Lines with their ends. Only b"\\n" ends a line: str.splitlines would also cut at U+2028 or a form feed."""
    position = 0
    with _open(path) as file:
        for raw in file:
            try:
                yield raw.decode("utf-8-sig" if position == 0 else "utf-8")
            except UnicodeDecodeError as error:
                offset = position + len(raw) - len(error.object) + error.start
                raise _not_utf8(path, offset, error) from error
            position += len(raw)


def _read_pieces(path: str, text_column: str) -> Iterator[Row]:
    previous = None
    for text in _decoded(path, PIECE_BYTES):
        if previous is not None:
            yield Row(path, {text_column: previous}, continues=True)
        previous = text
    if previous is not None:
        yield Row(path, {text_column: previous})


def _read_lines(path: str, text_column: str) -> Iterator[Row]:
    for number, line in enumerate(_decoded_lines(path), 1):
        if line.strip():
            yield Row(f"{path}, line {number}", {text_column: line.rstrip("\r\n")})


def _read_json(path: str) -> Iterator[Row]:
    """JSON Lines, or one array of objects."""
    with _open(path) as file:
        is_array = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    if is_array and _file_type(path)[0] == ".json":
        yield from _read_json_array(path)
        return
    for number, line in enumerate(_decoded_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: malformed JSON ({one_line(error)}); each line is one object") from error
        yield Row(where, _object(values, where))


def _read_json_array(path: str) -> Iterator[Row]:
    parts, size = [], 0
    for part in _decoded(path, PIECE_BYTES):
        parts.append(part)
        size += len(part)
        if size > MAX_JSON_ARRAY_BYTES:
            raise UserError(f"{path}: an array over {MAX_JSON_ARRAY_BYTES >> 20} MiB; write it as JSON Lines (.jsonl)")
    try:
        items = json.loads("".join(parts))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: malformed JSON ({one_line(error)}); correct it or write JSON Lines") from error
    for number, values in enumerate(items, 1):
        where = f"{path}, item {number}"
        yield Row(where, _object(values, where))


def _object(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f'{where}: is a {type(values).__name__}, not an object; write {{"column": value, ...}}')
    return values


def _read_csv(path: str) -> Iterator[Row]:
    csv.field_size_limit(MAX_CSV_FIELD_BYTES)
    reader = csv.DictReader(_decoded_lines(path), strict=True)
    try:
        for values in reader:
            where = f"{path}, line {reader.line_num}"
            if None in values or None in values.values():
                fields = len(reader.fieldnames or ())
                raise UserError(f"{where}: the row has not {fields} fields as the header has; check commas and quotes")
            yield Row(where, values)
    except csv.Error as error:
        where = f"{path}, in the row after line {reader.line_num}"
        raise UserError(f"{where}: malformed CSV ({error}); check the quotes") from error


def _read_parquet(path: str, wanted: tuple[str, ...] | None) -> Iterator[Row]:
    number = 0
    try:
        # pre_buffer would read whole row groups ahead, and some writers make a file one row group
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            if missing := [name for name in wanted or () if name not in names]:
                raise UserError(missing_column(path, missing, names))
            classes = _parquet_classes(file.schema_arrow)
            for batch in file.iter_batches(batch_size=64, columns=list(wanted or names)):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", _with_class_names(values, classes))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, after row {number}: text that is not UTF-8 ({error.reason}); mend it") from error
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as Parquet ({one_line(error)}); check the file") from error


def _parquet_classes(schema: pyarrow.Schema) -> dict[str, list[str]]:
    """Names of each ClassLabel, from what `datasets` writes beside a Parquet file's schema."""
    facts = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (facts.get("info") or {}).get("features") or {}
    return {
        column: feature["names"]
        for column, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def _with_class_names(values: dict[str, Any], classes: dict[str, list[str]]) -> dict[str, Any]:
    named = {column: values[column] for column in classes.keys() & values.keys()}
    return values | {
        column: None if number is None or number < 0 else classes[column][number] for column, number in named.items()
    }


def missing_column(where: str, missing: list[str], columns: list[str] | tuple[str, ...]) -> str:
    """The message for columns that are not there."""
    return (
        f"{where}: no column {', '.join(missing)}; there are: {', '.join(columns) or 'none'}; name or add the right one"
    )


# --- datasets --------------------------------------------------------------------------------------------------------


def _open_dataset(source: Source) -> Corpus:
    from datasets import ClassLabel

    name, path = source.dataset_name or "", Path(source.dataset_name or "").expanduser()
    if not path.is_dir():
        dataset = load_from_hub(name, source.dataset_config, source.split)
    elif is_saved(path):
        dataset = load_saved(name, source.split)
    else:
        return _open_files(_folder_files(path, source), source)
    if not len(dataset):
        raise UserError(f"{name}[{source.split}]: the dataset holds no row; choose another split")
    where = f"{name}[{source.split}]"
    classes = {column: kind.names for column, kind in dataset.features.items() if isinstance(kind, ClassLabel)}

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        columns = dataset.select_columns(list(wanted))  # leave images and the like on the disk
        for start in range(0, len(columns), 64):
            batch = columns[start : start + 64]
            for offset, values in enumerate(zip(*batch.values(), strict=True)):
                row = dict(zip(batch, values, strict=True))
                yield Row(f"{where}[{start + offset}]", _with_class_names(row, classes))

    return Corpus(where, [where, dataset._fingerprint, len(dataset)], tuple(dataset.column_names), rows, classes)


def _folder_files(path: Path, source: Source) -> list[str]:
    """The files of a split, found by `datasets` (names such as train.jsonl, data/test-*.parquet, a README's list)."""
    from datasets import load_dataset_builder

    try:
        files = load_dataset_builder(str(path), source.dataset_config).config.data_files or {}
    except Exception as error:
        raise UserError(f"{path}: no data files found in this directory ({one_line(error)})") from error
    if source.split not in files:
        raise UserError(f"{path}: no split {source.split}; there are: {', '.join(map(str, files))}; name one of them")
    used = {Path(name).resolve() for names in files.values() for name in names}
    unused = [p for p in sorted(path.rglob("*")) if _file_type(str(p))[0] in FILE_TYPES and p.resolve() not in used]
    if unused:  # datasets takes the commonest type of a folder and says nothing about the others
        logger.warning("%s: %d files are in no split and are not read, such as %s", path, len(unused), unused[0].name)
    check_sources(Source(files=tuple(files[source.split])))
    return sorted(files[source.split])


# --- the embedded corpus ---------------------------------------------------------------------------------------------


def _open_embedded(source: Source) -> Corpus:
    files = embedded_files(source.embedded or "")
    if not files:
        raise UserError("this Python has no source files of its standard library; give --train_file instead")
    digest = hashlib.blake2b(digest_size=16)
    for name, path in files:
        digest.update(name.encode() + b"\0" + path.read_bytes())
    rows = partial(_read_embedded, files, source.text_column)
    return Corpus(f"embedded corpus ({source.embedded})", [digest.hexdigest()], (source.text_column,), rows)


def embedded_files(part: str) -> list[tuple[str, Path]]:
    """(relative name, path) of the standard library's source files in one part, "train" or "validation", sorted.

    The part of a file depends on its name alone (blake2b, since hash() differs between processes), so it is the same on
    every machine. Needs no network: every Python has it. About 10 MB.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if EXCLUDED.intersection(relative.parts) or relative.parts[0].startswith(GENERATED):
            continue
        digest = hashlib.blake2b(relative.as_posix().encode(), digest_size=8).digest()
        held_out = int.from_bytes(digest, "big") % VALIDATION_SHARE == 0
        if held_out == (part == "validation"):
            files.append((relative.as_posix(), path))
    return sorted(files)


def _read_embedded(
    files: list[tuple[str, Path]], text_column: str, wanted: tuple[str, ...], whole_files: bool
) -> Iterator[Row]:
    for name, path in files:
        try:
            with python_tokenize.open(path) as file:  # obeys the file's coding line
                text = file.read()
            samples = [text] if whole_files else list(python_functions(text))
        except (SyntaxError, UnicodeDecodeError):  # a few files are in odd encodings or templates on purpose
            continue
        for sample in samples:
            yield Row(name, {text_column: sample})


def python_functions(text: str) -> Iterator[str]:
    """The source of each function and method of a Python file, with decorators, not indented; the outermost only.

    Raises SyntaxError. Lines are sliced: ast.get_source_segment splits the whole file again for every function.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in somebody else's strings
        tree = ast.parse(text)
    lines = text.split("\n")  # str.splitlines would also cut at form feeds, which the line numbers do not count

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                yield textwrap.dedent("\n".join(lines[first - 1 : child.end_lineno])) + "\n"
            elif not isinstance(child, ast.expr):
                yield from visit(child)

    yield from visit(tree)
