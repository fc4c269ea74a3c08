"""Checks the rows of preference pairs before they are tokenised."""

from itertools import zip_longest
from typing import Any

from common.data.messages import TRAINING_KEYS, is_wanted, messages_of
from common.data.source_types import Row
from common.errors import UserError

ANSWERS = ("chosen", "rejected")
CONTEXT = ("system", "history", "tools")  # columns with the context of messages
PROMPTS = ("instruction", "question", "query", "problem", "input")  # names of the prompt column in other datasets


def check_row(row: Row, columns: tuple[str, ...]) -> None:
    """Raises UserError unless the row has two answers to the same prompt, both as texts or both as messages."""
    if missing := [name for name in ANSWERS if name not in row.values]:
        from common.data.column_errors import missing_column

        raise UserError(missing_column(row.where, missing, tuple(row.values)))
    values: dict[str, Any] = {name: row.values.get(name) for name in columns}
    lists, texts = ([name for name in columns if isinstance(values[name], list) is kind] for kind in (True, False))
    if not lists and row.values.get("prompt") and "prompt" not in columns:
        raise UserError(f"{row.where}: has a prompt, but the first row has none; give all rows a prompt, or none")
    if not lists:
        if given := [name for name in CONTEXT if row.values.get(name)]:  # these columns require messages
            raise UserError(
                f"{row.where}: {', '.join(given)}: needs a prompt of messages, but the prompt is a text; write prompt, "
                'chosen and rejected as messages, [{"role": "user", "content": ...}]'
            )
        return
    if set(ANSWERS) & set(texts):
        raise UserError(
            f"{row.where}: {', '.join(lists)} {'has' if len(lists) == 1 else 'have'} messages, and {', '.join(texts)} "
            f"{'has' if len(texts) == 1 else 'have'} not; write all as messages"
        )
    answers = [messages_of(row, name) for name in ANSWERS]
    for name, messages in zip(ANSWERS, answers, strict=True):
        if not messages or messages[-1]["role"] != "assistant":
            raise UserError(f"{row.where}: {name} does not end with a message of the assistant; fix or remove the row")
        questions = [str(message.get("content")).strip() for message in messages if message["role"] == "user"]
        if isinstance(values.get("prompt"), str) and values["prompt"].strip() not in questions:
            raise UserError(
                f"{row.where}: {name} has no user message with the text of prompt; write prompt as messages, "
                'such as [{"role": "user", "content": ...}]'
            )
    first, differing = next(((n, both) for n, both in enumerate(zip_longest(*answers)) if both[0] != both[1]), (0, ()))
    if any(message is None or message["role"] != "assistant" for message in differing):
        raise UserError(
            f"{row.where}: chosen and rejected differ before an answer of the assistant; give both the same prompt, or "
            "remove the row"
        )
    for name, messages in zip(ANSWERS, answers, strict=True):
        if any(is_wanted(message, f"{row.where}: column {name}") is False for message in messages[first:]):
            raise UserError(
                f"{row.where}: {name} has an answer of weight 0, but all of an answer is compared; remove its "
                f"{' or '.join(key for key in TRAINING_KEYS if any(key in message for message in messages))}"
            )


def find_missing_prompts(row: Row, columns: tuple[str, ...]) -> list[str]:
    """Returns the columns of `PROMPTS` whose text `chosen` does not contain; [] if there is a column `prompt`."""
    chosen = row.values[ANSWERS[0]]
    is_chat = isinstance(chosen, list)
    content = "\n".join(str(message.get("content")) for message in chosen) if is_chat else str(chosen)
    texts = {name: row.values.get(name) for name in PROMPTS if "prompt" not in columns}
    missing = [name for name, text in texts.items() if isinstance(text, str) and text.strip() not in content]
    if missing and not (is_chat and any(message["role"] == "user" for message in chosen)):
        raise UserError(
            f"{row.where}: there is no prompt, and chosen does not contain the text of column {missing[0]}; name that "
            "column prompt, or write its text in chosen and rejected"
        )
    return missing
