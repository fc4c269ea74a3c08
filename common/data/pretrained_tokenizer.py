"""Loads the tokenizer of a pretrained model."""

import math
import string
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.data.hub import locate_pretrained
from common.errors import UserError, one_line
from common.reading import reading

MAX_GROWTH = 100  # factor by which a normalizer may lengthen a text; those of known tokenizers: at most 18


def load(name_or_path: str, trust_remote_code: bool, needs_end_of_text: bool) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a local directory or the hub; if it has no pad token, sets it to the end-of-text token.

    Args:
        needs_end_of_text: False for an encoder, which needs no end-of-text token if it has a pad token.

    Raises UserError, one line, if the tokenizer is not found, cannot be loaded, or has no end-of-text token.
    """
    where, problem = locate_pretrained(name_or_path)
    try:
        with _panics_as_errors():
            tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)
    except Exception as error:  # one of a dozen types, depending on the missing file
        reason = problem or f"cannot be loaded; save it there (tokenizer.save_pretrained): {one_line(error)}"
        raise UserError(f"tokenizer {name_or_path}: {reason}") from error
    files = f"tokenizer {name_or_path}: one of its files"
    with reading(files, "save it there again (tokenizer.save_pretrained)"), _panics_as_errors():
        if not isinstance(tokenizer.chat_template, str | dict | None):
            raise TypeError(f"chat_template is a {type(tokenizer.chat_template).__name__}")
        if not 0 < tokenizer.model_max_length < math.inf:
            raise ValueError(f"model_max_length is {tokenizer.model_max_length}")
        if tokenizer.is_fast and tokenizer.backend_tokenizer.normalizer:
            _normalize(tokenizer.backend_tokenizer.normalizer, string.printable)
        tokenizer([string.printable + "\ufffd"], truncation=True, max_length=8)
    # If the tokenizer's files are missing, transformers returns an empty tokenizer.
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        raise UserError(f"tokenizer {name_or_path}: its files are missing; save it there (tokenizer.save_pretrained)")
    if tokenizer.eos_token_id is None and (needs_end_of_text or tokenizer.pad_token_id is None):
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no eos token to end a document or to pad with; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Context manager that raises a panic of `tokenizers`, which is not an Exception, as a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(one_line(error)) from error


def _normalize(normalizer: Any, text: str) -> str:
    """Returns a text after a normalizer; raises ValueError if a step makes it more than MAX_GROWTH times longer."""
    if isinstance(normalizer, normalizers.Sequence):
        for number in range(len(normalizer)):
            text = _normalize(normalizer[number], text)
        return text
    if len(result := normalizer.normalize_str(text)) > MAX_GROWTH * len(string.printable):
        raise ValueError(f"its normalizer makes a text more than {MAX_GROWTH} times longer")
    return result
