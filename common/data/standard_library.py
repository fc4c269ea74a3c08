"""Which text is there without a file and without network? The source code of Python's standard library."""

import ast
import hashlib
import sysconfig
import textwrap
import tokenize as python_tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from common.data.rows import Corpus, Row, Source
from common.errors import UserError

VALIDATION_SHARE = 20  # one file in this many of the embedded corpus is held out
# Not in the embedded corpus: tests, other people's packages, and files written by a program (tables of character codes,
# the help topics as one dictionary, build variables): a model learns the tables by heart and nothing from them.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled", "lib-dynload"}
GENERATED = ("encodings", "pydoc_data", "_sysconfigdata", "config-")


def open_embedded(source: Source) -> Corpus:
    files = embedded_files(source.embedded)
    if not files:
        raise UserError("this Python has no source files of its standard library; give --train_file instead")
    digest = hashlib.blake2b(digest_size=16)
    for name, path in files:
        digest.update(name.encode() + b"\0" + path.read_bytes())

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for name, path in files:
            try:
                with python_tokenize.open(path) as file:  # obeys the file's coding line
                    text = file.read()
                samples = [text] if whole_files else list(python_functions(text))
            except (SyntaxError, UnicodeDecodeError):  # a few files are in odd encodings or templates on purpose
                continue
            for sample in samples:
                yield Row(name, {source.text_column: sample})

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
