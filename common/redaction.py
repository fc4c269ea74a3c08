"""Removes tokens, keys and passwords from the files and the output of a run."""

import os
import re
from typing import Any

HIDDEN = "(not shown)"
NAMES = ("TOKEN", "KEY", "PASSWORD", "PASSWD", "SECRET", "CREDENTIALS")  # suffixes of the names of secrets
PATTERNS = {
    # user:password@ and token@ in an address, or in a path derived from it; a password may contain @ and /
    r"(:/{1,2})(?:[^\s/@:]*:\S*|[^\s/@]+)@": rf"\1{HIDDEN}@",
    # the token formats of the Hugging Face hub, GitHub, OpenAI and Amazon
    r"\b(?:(?:hf|gh[pousr])_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16}\b)": HIDDEN,
    # ?token=..., --api_key ..., HF_TOKEN=...
    r"(?i)((?:[?&]|--)(?![\w-]*per_token)[\w-]*"
    r"(?:token|key|password|passwd|secret|credentials|signature)[= ])[^\s&'\"]+?(?=:?(?:[\s&'\"]|$))": rf"\1{HIDDEN}",
    rf"\b([A-Z_]*(?:{'|'.join(NAMES)})=)[^\s'\"]+?(?=:?(?:[\s'\"]|$))": rf"\1{HIDDEN}",
}


def is_secret(name: str) -> bool:
    """Returns whether a setting or a variable with this name contains a secret."""
    return name.upper().endswith(NAMES)


def redact(value: Any, known: list[str] | None = None) -> Any:
    """Returns a text, list or dict with its secrets replaced: known formats, and values of secret variables (known)."""
    if known is None:  # values shorter than 8 characters would match ordinary words
        known = [secret for name, secret in os.environ.items() if is_secret(name) and len(secret) >= 8]
    if isinstance(value, dict):
        return {
            name: HIDDEN if item and not isinstance(item, int | float) and is_secret(str(name)) else redact(item, known)
            for name, item in value.items()  # numbers are not secrets, such as experts_per_token
        }
    if isinstance(value, list | tuple):
        # In a command, the word after --hf_token is a secret.
        hidden = [re.match(r"--(?!.*per_token)[^= ]+$", str(flag)) and is_secret(str(flag)) for flag in value]
        return [HIDDEN if hide else redact(item, known) for hide, item in zip([False, *hidden], value, strict=False)]
    if not isinstance(value, str):
        return value
    for secret in known:
        value = value.replace(secret, HIDDEN)
    for pattern, replacement in PATTERNS.items():
        value = re.sub(pattern, replacement, value)
    return value
