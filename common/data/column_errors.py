"""Messages for missing columns, and hints on columns that may hold prompts and completions."""

from common.data.source_types import Row
from common.errors import shorten

# Common column names for prompts, and for completions, the most likely name first.
PAIRS_ELSEWHERE = (
    ("prompt", "instruction", "question", "query", "problem", "input", "user", "source"),
    ("completion", "output", "response", "answer", "solution", "chosen", "assistant", "target"),
)


def pair_hint(columns: tuple[str, ...]) -> str:
    """Returns a hint with the flags for columns whose names suggest prompts or completions; empty if there are none."""
    names = {column.lower(): column for column in columns}
    prompt, completion = (next((names[name] for name in known if name in names), None) for known in PAIRS_ELSEWHERE)
    if not (prompt or completion):
        return ""
    return f"; for examples --prompt_column {prompt or 'NAME'} --completion_column {completion or 'NAME'}"


def missing_column(location: str, missing: list[str], columns: list[str] | tuple[str, ...]) -> str:
    """Returns the message for missing columns."""
    present = shorten(list(columns), 100) or "none"
    return f"{location}: no column {', '.join(missing)}; there are: {present}; name or add the right one"


def wrong_columns(location: str, wanted: tuple[str, ...], columns: tuple[str, ...], flags: str) -> str:
    """Returns the message for required columns of which one is missing or has two uses; `flags` select them."""
    missing = [column for column in dict.fromkeys(wanted) if column not in columns]
    twice = next((column for column in wanted if wanted.count(column) > 1), None)
    if missing or twice is None:
        line = missing_column(location, missing, columns)
    else:
        line = f"{location}: column {twice} is selected twice; select a different column for each use"
    return line + (f" ({flags})" if flags else "")


def no_text(row: Row, column: str) -> str:
    """Returns the message for a row without a text in a column."""
    if column not in row.values:
        return missing_column(row.where, [column], tuple(row.values))
    value = row.values[column]
    kind = "null" if value is None else f"of type {type(value).__name__}"
    return f"{row.where}: column {column} is {kind}, not a string; fix or remove the row"
