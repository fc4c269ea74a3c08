"""Notes for the run summary on message parts that are not targets, or that are missing from the samples."""

from collections import Counter
from typing import Any

from common.errors import UserError


def count_at(counts: Counter, key: Any, number: int, where: str) -> None:
    """Adds a number to a count; the first row with such a number is kept too, under ("row", key, where)."""
    if number and not counts[key]:
        counts["row", key, where] = 1
    counts[key] += number


def chat_notes(name: str, counts: Counter) -> list[str]:
    """Returns one line for each kind of message part that is omitted or has no targets.

    Args:
        name: name of the corpus, for the error message.
        counts: the counts of `chats.encode_chats`.

    Raises UserError, one line, if no answer contains a target.
    """
    answers = f"{counts['answers']:,}"
    if counts["lost"] and counts["lost"] >= counts["answers"]:
        raise UserError(
            f"{name}: none of its {answers} answers has a target; fix the chat template, which leaves "
            "them out or does not mark them with {% generation %}, or name one with --chat_template"
        )
    notes = []
    rows = {key[1]: f"first: {key[2]}" for key in counts if isinstance(key, tuple) and key[0] == "row"}
    if unwritten := sorted((k, n) for k, n in counts.items() if isinstance(k, tuple) and k[0] == "unwritten" and n):
        parts = ", ".join(f"{key[1]} ({number:,} {key[2]}, {rows[key]})" for key, number in unwritten)
        notes.append(f"the chat template leaves out {parts}: the model does not see them")
    if counts["lost"]:
        notes.append(
            f"{counts['lost']:,} of {answers} answers have no targets except their end tokens: the chat template "
            f"leaves them out, or does not mark them with {{% generation %}} ({rows['lost']})"
        )
    if counts["partly"]:
        notes.append(
            f"{counts['partly']:,} of {answers} answers are only partly targets: the chat template "
            f"leaves more than half of them out, or does not mark it ({rows['partly']})"
        )
    if counts["learned in vain"]:
        notes.append(
            f"{counts['learned in vain']:,} messages of other roles have weight 1: only the assistant's are trained on"
        )
    if counts["nulls"]:
        notes.append(
            f"{counts['nulls']:,} nulls inside of messages and tools left out: Arrow adds the keys of other rows"
        )
    return notes
