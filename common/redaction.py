"""Removes secrets (tokens, keys, passwords) and control characters from the files and the output of a run."""

import os
import re
from functools import lru_cache
from typing import Any
from urllib.parse import quote

HIDDEN = "(not shown)"
# Ends of names of secrets. Tokens of a tokenizer (pad_token) and numbers of tokens (experts_per_token) are not secrets.
NAME = r"(?<!per[_-])(?<!pad_)(?<!bos_)(?<!eos_)(?<!unk_)(?<!cls_)(?<!sep_)(?<!mask_)(?<!stop_)token"
NAME = rf"(?:{NAME}|key|password|passwd|passphrase|secret|credentials?|signature|(?<![a-z0-9])(?:pwd|pat|auth|sig))"
VARIABLE = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|ACCESS_KEY")  # in the name of an environment variable
ORDINARY = "true false none null default auto enabled disabled offline online".split()  # values that are no secrets
VALUE = rf"(?!{re.escape(HIDDEN)})[^\s&'\",;]+?(?=:?(?:[\s&'\",;]|$))"
PATTERNS = {
    # user:password@ and token@ in an address, or in a path derived from it; a password may contain @ and /
    r"(:/{1,2})(?:[^\s/@:]{,200}:\S{,500}|[^\s/@]{1,500})@": rf"\1{HIDDEN}@",
    # token formats of the Hugging Face hub, GitHub, GitLab, OpenAI, Amazon, Google, Slack, npm, PyPI and others; JWT
    r"\b(?:(?:hf|gh[pousr]|api_org|npm|glpat|r8|gsk|[rs]k_live)[_-]\w{20,}|github_pat_\w{20,}"
    r"|(?:sk|nvapi|pypi|xai)-[\w-]{20,}|A[KS]IA[A-Z0-9]{16}\b|AIza[\w-]{30,}|ya29\.[\w-]{20,}|xox[a-z]-[\w-]{10,}"
    r"|eyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]+)?)": HIDDEN,
    r"(hooks\.slack\.com/services/|/api/webhooks/)[^\s'\"]+": rf"\1{HIDDEN}",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*-----)?": HIDDEN,
    # Authorization: Basic ..., Bearer ...
    rf"(?i)\b(authorization['\"]?\s*[:=]\s*['\"]?(?:(?:basic|bearer|token|digest)\s+)?){VALUE}": rf"\1{HIDDEN}",
    rf"(?i)\b(bearer\s+){VALUE}": rf"\1{HIDDEN}",
    # ?token=..., --api_key ..., HF_TOKEN=..., AccountKey=..., "password": "..."; password: ... at the end of a line
    rf"(?i)((?:[?&;]|(?<!-)--)[\w.%-]*(?:{NAME}|(?<=[?&])code)['\"]?[= ,]+['\"]?){VALUE}": rf"\1{HIDDEN}",
    rf"(?i)(?<![\w.-])([\w.-]*(?!(?<=[=\s(,])key){NAME} ?= ?['\"]?){VALUE}": rf"\1{HIDDEN}",
    rf"(?i)(['\"][\w.-]*{NAME}['\"]\s*:\s*(['\"]))(?!\2|{re.escape(HIDDEN)})(?:(?!\2).)+": rf"\1{HIDDEN}",
    rf"(?im)(?<![\w.-])([\w.-]*(?!(?<=\s)key){NAME}:[ \t]+){VALUE}$": rf"\1{HIDDEN}",
}
COMPILED = [(re.compile(pattern), replacement) for pattern, replacement in PATTERNS.items()]
# All but tabs and ends of lines; terminals interpret them, and some of them reverse or hide text.
CONTROL = re.compile("[\0-\b\v-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


@lru_cache(maxsize=1024)  # metrics.jsonl asks for each variable of the environment at each update
@lru_cache(maxsize=4096)  # every update asks for the same names
def is_secret(name: str) -> bool:
    """Returns whether a setting or a variable with this name contains a secret."""
    is_named = re.search(NAME + "$", name, re.IGNORECASE) is not None
    return is_named or (name.isupper() and VARIABLE.search(name) is not None)


def escape(text: str) -> str:
    """Returns a text with its control characters as escape sequences, so that a terminal does not interpret them."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def cleaned(text: str) -> str:
    """Returns a text as it may be printed: without secrets, and with control characters escaped."""
    return escape(redact(text))


def on_one_line(text: str) -> str:
    """Returns a text on one line, with control characters escaped; secrets remain."""
    return escape(text).replace("\n", "\\n")


def redact(value: Any) -> Any:
    """Returns a text, list or dict with its secrets replaced: known formats, and values of secret variables."""
    return _redact(value, tuple(secret for name, secret in os.environ.items() if is_secret(name)))


def _redact(value: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {_redact(name, secrets): _redact_item(name, item, secrets) for name, item in value.items()}
    if isinstance(value, list | tuple):
        # In a command, the word after --hf_token is a secret.
        hidden = [re.match(r"--[^= ]+$", str(flag)) and is_secret(str(flag)) for flag in value]
        return [HIDDEN if hide else _redact(item, secrets) for hide, item in zip([False, *hidden], value, strict=False)]
    return _redact_text(value, secrets) if isinstance(value, str) and value.strip() else value


def _redact_item(name: Any, item: Any, secrets: tuple[str, ...]) -> Any:
    """Returns the value of a setting without secrets; numbers are not secrets, such as experts_per_token."""
    is_hidden = item and not isinstance(item, int | float) and is_secret(str(name))
    return HIDDEN if is_hidden else _redact(item, secrets)


@lru_cache(maxsize=256)
def _redact_text(text: str, secrets: tuple[str, ...]) -> str:
    if (known := _known_secrets(secrets)) is not None:
        text = known.sub(HIDDEN, text)
    for pattern, replacement in COMPILED:
        text = pattern.sub(replacement, text)
    return text


@lru_cache(maxsize=1)
def _known_secrets(values: tuple[str, ...]) -> re.Pattern[str] | None:
    """Returns the pattern of values that are secrets; numbers, ordinary words and existing paths are not.

    Values of fewer than 8 characters count only as whole words, and of fewer than 5 not at all.
    """
    parts = []
    for value in sorted(values, key=len, reverse=True):
        is_ordinary = value.lower() in ORDINARY or re.fullmatch(r"[\d.+-]{,12}", value) or os.path.exists(value)
        if len(value) >= 5 and not is_ordinary:
            forms = "|".join(re.escape(form) for form in dict.fromkeys([value, quote(value, safe="")]))
            parts.append(forms if len(value) >= 8 else rf"(?<!\w)(?:{forms})(?!\w)")
    return re.compile("|".join(parts)) if parts else None
