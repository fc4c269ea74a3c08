"""Texts that a tokenizer has truncated, for recipes whose tokenizer truncates."""

from typing import Any

from transformers import PreTrainedTokenizerBase


def find_truncated(
    tokenizer: PreTrainedTokenizerBase, encoded: Any, length: int, *columns: list[str]
) -> dict[int, int]:
    """Returns {index of a text: its tokens without truncation} for the texts that were truncated to `length` tokens.

    encoded: the output of the tokenizer for these columns of texts (two columns: pairs of texts).
    """
    # Only such a text can have been truncated. Slow tokenizers do not report truncation.
    full = [number for number, ids in enumerate(encoded["input_ids"]) if len(ids) >= length]
    if encoded.encodings is not None:
        full = [number for number in full if encoded.encodings[number].overflowing]
    if not full:
        return {}
    texts = [[column[number] for number in full] for column in columns]
    ids = tokenizer(*texts, return_attention_mask=False, verbose=False)["input_ids"]
    return {number: len(tokens) for number, tokens in zip(full, ids, strict=True) if len(tokens) > length}
