"""Checks the YAML next to the files of a dataset, because a small file with aliases can fill the memory."""

from pathlib import Path

import yaml

from common.errors import UserError, one_line

MAX_BYTES = 1 << 20
NAMES = ("README.md", ".huggingface.yaml")  # those that `datasets` reads


def check_cards(directory: Path) -> None:
    """Raises UserError if a file with YAML in a directory is above 1 MiB, or has anchors or aliases; parses nothing."""
    for path in (directory / name for name in NAMES):
        if not path.exists():
            continue
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: not a regular file of at most 1 MiB; shorten or remove it")
        text = path.read_text("utf-8", errors="replace")
        if path.suffix == ".md":  # the YAML is between the first two lines of hyphens
            start, *rest = text.split("\n---")
            text = start.removeprefix("---") if start.startswith("---") and rest else ""
        try:
            for token in yaml.scan(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
                if isinstance(token, yaml.AliasToken | yaml.AnchorToken):
                    sign = "an alias (*)" if isinstance(token, yaml.AliasToken) else "an anchor (&)"
                    raise UserError(f"{path}: its YAML has {sign} {token.value}; write the value itself")
        except yaml.YAMLError as error:
            raise UserError(f"{path}: malformed YAML ({one_line(error)}); fix or remove it") from error
