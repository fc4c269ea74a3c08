"""The metadata and notes saved with a tokenised corpus, and the tokens that end its texts."""

from collections import Counter
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.data.column_selection import unused_columns
from common.data.source_types import Corpus
from common.errors import UserError

Encoded = tuple[list[int], list[bool], str]  # a sample's tokens, a mask of possible targets, its text


def with_end_of_text(ids: list[int], eos: int) -> list[int]:
    """Returns the ids with the eos token at the end; some tokenizers already add it."""
    return ids if ids[-1:] == [eos] else [*ids, eos]


def _chat_notes(counts: Counter) -> list[str]:
    """Returns a line for each kind of message content without targets."""
    unwritten = sorted((key[1:], n) for key, n in counts.items() if isinstance(key, tuple) and n)
    notes = []
    if unwritten:
        told = ", ".join(f"{key} ({n:,} {unit})" for (key, unit), n in unwritten)
        notes.append(f"the chat template does not write {told}: the model does not see them")
    if counts["lost"]:
        notes.append(
            f"{counts['lost']:,} of {counts['answers']:,} answers have no target of their own: the chat template "
            "leaves them out, or does not mark them with {% generation %}; nothing is learned of them but their ends"
        )
    if counts["partly"]:
        notes.append(
            f"{counts['partly']:,} of {counts['answers']:,} answers are targets in part only: the chat template "
            "leaves more than half of them out, or does not mark it"
        )
    if counts["learned in vain"]:
        notes.append(
            f"{counts['learned in vain']:,} messages of others have weight 1: only the assistant's are learned"
        )
    if counts["nulls"]:
        notes.append(
            f"{counts['nulls']:,} nulls inside of messages and tools left out: Arrow adds the keys of other rows"
        )
    return notes


def corpus_facts(
    corpus: Corpus, columns: tuple[str, ...], counts: Counter, tokenizer: PreTrainedTokenizerBase, *notes: str
) -> dict[str, Any]:
    """Returns the metadata to save with the tokens of a corpus.

    Raises UserError, one line, if no answer contains a target.
    """
    if counts["lost"] and counts["lost"] >= counts["answers"]:
        raise UserError(
            f"{corpus.name}: none of its {counts['answers']:,} answers has a target of its own; mend the chat "
            "template, which leaves them out or does not mark them with {% generation %}, or name one with "
            "--chat_template"
        )
    ends = [token for token, _ in counts.most_common() if isinstance(token, int)]
    return {
        "name": corpus.name,
        "columns": columns,
        "notes": [*_chat_notes(counts), *filter(None, [*notes, unused_columns(corpus)])],
        "end_tokens": ends if counts["chats"] else [tokenizer.eos_token_id],
    }
