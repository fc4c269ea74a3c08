"""Notes for the run summary on message parts that are not targets, or that are missing from the samples."""

from collections import Counter

from common.errors import UserError, main_logger

logger = main_logger(__name__)


def warn_unused_template(name: str) -> None:
    """Prints that a corpus without messages does not use --chat_template."""
    logger.warning("%s: --chat_template has no effect on it, for its rows hold no messages", name)


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
    if unwritten := sorted((key[1:], n) for key, n in counts.items() if isinstance(key, tuple) and n):
        parts = ", ".join(f"{key} ({n:,} {unit})" for (key, unit), n in unwritten)
        notes.append(f"the chat template leaves out {parts}: the model does not see them")
    if counts["lost"]:
        notes.append(
            f"{counts['lost']:,} of {answers} answers have no targets except their end tokens: the chat template "
            "leaves them out, or does not mark them with {% generation %}"
        )
    if counts["partly"]:
        notes.append(
            f"{counts['partly']:,} of {answers} answers are only partly targets: the chat template "
            "leaves more than half of them out, or does not mark it"
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
