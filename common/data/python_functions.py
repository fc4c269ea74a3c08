"""Extracts the functions of Python files, and their docstrings."""

import ast
import inspect
import json
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from common.data.source_types import Corpus, Row


def write_functions(directory: Path, texts: Iterator[tuple[str, str]]) -> None:
    """Writes functions.jsonl: [file name, source] per function; cached, because parsing takes seconds."""
    with open(directory / "functions.jsonl", "w", encoding="utf-8") as out:
        for name, text in texts:
            try:
                functions = list(python_functions(text))
            except SyntaxError:  # a few files are templates, which do not parse
                continue
            out.writelines(json.dumps([name, function]) + "\n" for function in functions)


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


def first_line(docstring: str) -> str:
    """Returns the first line of a docstring that is indented as in its source."""
    return inspect.cleandoc(docstring).split("\n")[0].strip()


def find_docstring(function: str) -> tuple[str, int, int] | None:
    """Returns (docstring, its first line, the line after it), with 0-based lines; None if there is no docstring.

    Also None if no code follows on a separate line, or if the function cannot be parsed.
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
