"""Writes the stores of tokens that `token_store` reads and describes."""

import json
from array import array
from collections import Counter
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from common.data.cache import hash_files


class TokenWriter(ExitStack):
    """Appends rows to a new store in an existing directory.

    Args:
        columns: initial values of each column, written before those of the first row.
    """

    def __init__(self, directory: Path, is_stream: bool = False, **columns: list[int]) -> None:
        super().__init__()
        self.directory, self.num_tokens = directory, 0
        columns = {} if is_stream else {"offsets": [0], **columns}
        self._tokens, *files = (
            self.enter_context(open(directory / f"{name}.bin", "wb")) for name in ("tokens", *columns)
        )
        self._columns = dict(zip(columns, files, strict=True))
        self._append(columns)

    def append(self, *sequences: Any, **columns: list[int]) -> None:
        """Appends a row: the token ids of each of its sequences, and values of every column."""
        _, *ends = accumulate(map(len, sequences), initial=self.num_tokens)
        self.num_tokens = ends[-1]
        for sequence in sequences:
            self._tokens.write(np.asarray(sequence, np.int32).tobytes())
        self._append({"offsets": ends, **columns})

    def _append(self, columns: dict[str, list[int]]) -> None:
        for name, file in self._columns.items():
            file.write(array("q", columns[name]).tobytes())

    def finish(self, counts: Counter, **facts: Any) -> None:
        """Completes the store and writes its metadata: these facts and the counts with a string key."""
        self.close()
        named = {name: number for name, number in counts.items() if isinstance(name, str)}
        meta = named | {"tokens": self.num_tokens, **facts, "content": hash_files(self.directory)}
        (self.directory / "meta.json").write_text(json.dumps(meta, indent=1))
