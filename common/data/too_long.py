"""Rows above the maximum length: truncated, left out or an error (--on_too_long), and their counts."""

from collections import Counter

from common.errors import UserError

CHOICES = ("truncate", "drop", "error")


def is_left_out(choice: str | None, where: str, part: str, length: int, flag: str, most: int) -> bool:
    """Returns whether a row with more than `most` tokens is left out instead of truncated.

    Args:
        choice: one of `CHOICES`; None: truncate.
        where: location of the row.
        part: the sequence that is too long, such as "prompt with chosen"; "" for the only sequence of the row.
        length: its tokens.
        flag, most: the flag that sets the maximum, and its value.

    Raises UserError with both lengths if the choice is "error".
    """
    if choice == "error":
        raise UserError(
            f"{where}: {part + ' has ' if part else ''}{length:,} tokens, more than --{flag} {most}; shorten or remove "
            f"the row, raise --{flag}, or pass --on_too_long truncate or drop"
        )
    return choice == "drop"


def describe_losses(counts: Counter, length: int, unit: str = "") -> str:
    """Returns the end of a corpus's description: the rows that are truncated, left out or empty, or "".

    Args:
        counts: `truncated` and kept; `without_targets`: left out, because truncation removes all targets; `too_long`:
            left out with --on_too_long drop; `dropped`: left out without a target, including `without_targets`;
            `empty`: kept with an empty completion or answer; `chats`, and a count per special token that ends one.
        length: maximum number of tokens of a sequence.
        unit: what is truncated, such as "answers".
    """
    others = counts["dropped"] - counts["without_targets"]
    parts = {
        f"{unit} truncated at {length}".strip(): counts["truncated"],
        f"left out, because all their targets are beyond {length} tokens": counts["without_targets"],
        f"of more than {length} tokens left out": counts["too_long"],
        "empty or without a target left out": others,
    }
    line = "".join(f"; {number:,} {text}" for text, number in parts.items() if number)
    if counts["empty"]:
        are_empty = f"{unit} are empty" if unit else "rows have an empty completion"
        line += f"\n{'':12}{counts['empty']:,} {are_empty}: only the end token is a target"
    if counts["chats"] and not any(isinstance(key, int) for key in counts):
        line += f"\n{'':12}no answer ends with a special token: the model does not learn where to stop"
    return line
