"""Loads the tokenizer of a pretrained model."""

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common.data.hub import locate_pretrained
from common.errors import UserError, one_line


def load(name_or_path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a local directory or the hub; raises UserError, one line, if that fails."""
    where, problem = locate_pretrained(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)
    except Exception as error:  # a dozen types, which depend on the missing file
        reason = problem or f"cannot be loaded; save it there (tokenizer.save_pretrained): {one_line(error)}"
        raise UserError(f"tokenizer {name_or_path}: {reason}") from error
    # If its files are missing, the library returns an empty tokenizer.
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        raise UserError(f"tokenizer {name_or_path}: its files are missing; save it there (tokenizer.save_pretrained)")
    return tokenizer
