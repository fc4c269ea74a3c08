"""The source code of Python's standard library as a text corpus, available without files and network."""

import ast
import hashlib
import json
import os
import sys
import sysconfig
import textwrap
import tokenize as python_tokenize
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from common.data.cache import cached
from common.data.source_types import Corpus, Row, Source
from common.errors import UserError

VALIDATION_SHARE = 20  # one of this many files of the embedded corpus is held out
# Excluded from the embedded corpus: tests, third-party packages, and files written by a program (tables of character
# codes, the help topics as one dictionary, build variables). A model only memorises such tables.
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
        directory = cached("functions", identity, lambda partial: _write_functions(partial, files))
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


def _write_functions(directory: Path, files: tuple[tuple[str, Path], ...]) -> None:
    """Writes functions.jsonl with the file name and the source of each function; finding them takes seconds."""
    with open(directory / "functions.jsonl", "w", encoding="utf-8") as out:
        for name, text in _read_texts(files):
            try:
                functions = list(python_functions(text))
            except SyntaxError:  # a few files are templates, which do not parse
                continue
            out.writelines(json.dumps([name, function]) + "\n" for function in functions)


@cache
def _hash_contents(part: str) -> str:
    """Returns a hash of the names and contents of a part's files."""
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
        folders[:] = set(folders) - EXCLUDED  # third-party packages have many files
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            relative = path.relative_to(root)
            if relative.parts[0].startswith(GENERATED):
                continue
            digest = hashlib.blake2b(relative.as_posix().encode(), digest_size=8).digest()
            held_out = int.from_bytes(digest, "big") % VALIDATION_SHARE == 0
            if held_out == (part == "validation"):
                files.append((relative.as_posix(), path))
    return tuple(sorted(files))


def python_functions(text: str) -> Iterator[str]:
    """Yields the source of each outermost function and method of a Python file, with decorators, without indentation.

    Lines are sliced because ast.get_source_segment splits all lines of the file again for every function.

    Raises SyntaxError if the text is not valid Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides warnings on invalid escapes in third-party code
        tree = ast.parse(text)
    lines = text.split("\n")  # str.splitlines would also split at form feeds, which line numbers do not count

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                yield textwrap.dedent("\n".join(lines[first - 1 : child.end_lineno])) + "\n"
            elif not isinstance(child, ast.expr):
                yield from visit(child)

    yield from visit(tree)


def find_docstring(function: str) -> tuple[str, int, int] | None:
    """Returns (docstring, its first line, the line after it), with lines from 0; None if there is no docstring.

    It also returns None if no line of code follows the docstring, or the function cannot be parsed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides warnings on invalid escapes in third-party code
        try:
            node = ast.parse(function).body[0]
        except SyntaxError:  # indented text in a string prevented dedenting
            return None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    docstring, statements = ast.get_docstring(node, clean=False), node.body
    if not docstring or len(statements) == 1 or statements[0].end_lineno == statements[1].lineno:
        return None
    return docstring, statements[0].lineno - 1, statements[0].end_lineno or 0


def derived_corpus(
    corpus: Corpus, text_column: str, columns: tuple[str, ...], values_of: Callable[[str], tuple[str, ...] | None]
) -> Corpus:
    """Returns a corpus with these columns, whose values `values_of` derives from the source of each function.

    Functions for which `values_of` returns None are omitted.
    """

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for row in corpus.rows((text_column,), False):
            if values := values_of(row.values[text_column]):
                yield Row(row.where, dict(zip(columns, values, strict=True)))

    return replace(corpus, columns=columns, rows=rows)


def write_files(directory: str) -> None:
    """Writes the corpus as .txt files in train/ and validation/, to provide the same text to a different Python."""
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
