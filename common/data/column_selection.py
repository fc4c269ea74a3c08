"""Selects the columns that contain the text of a row."""

from common.data.source_types import Corpus, Source
from common.errors import UserError, missing_column

PAIR = ("prompt", "completion")


def names_decide(source: Source, shape: str | None) -> bool:
    """Returns whether the column names determine the kind of sample: neither blocks nor a column were requested."""
    return shape != "blocks" and source.text_column == "text" and not (source.prompt_column or source.completion_column)


def choose_columns(corpus: Corpus, source: Source, shape: str | None) -> tuple[str, tuple[str, ...]]:
    """Returns (shape, columns): messages, else prompt and completion, else text, unless something else was requested.

    Raises UserError if a required column is missing.
    """
    pair = (source.prompt_column or PAIR[0], source.completion_column or PAIR[1])
    if source.prompt_column or source.completion_column:
        check_columns(corpus, pair, "--prompt_column, --completion_column")
        return "examples", pair
    if names_decide(source, shape):
        for columns in (("messages",), pair):
            if set(columns) <= set(corpus.columns):
                return "examples", columns
    if source.text_column not in corpus.columns:
        from common.data.column_checks import pair_hint

        check_columns(corpus, (source.text_column,), f"--text_column{pair_hint(corpus.columns)}")
    return shape or "blocks", (source.text_column,)


def check_columns(corpus: Corpus, wanted: tuple[str, ...], flags: str = "") -> None:
    """Raises UserError, one line that names the `flags` to set, if a required column is missing."""
    if missing := [column for column in wanted if column not in corpus.columns]:
        raise UserError(missing_column(corpus.name, missing, corpus.columns) + (f" ({flags})" if flags else ""))
