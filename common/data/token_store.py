"""Stores tokens on disk in flat files, which one process writes once and all processes memory-map.

    tokens.bin   int32, all sequences; a token that is not a target can be its bitwise complement ~token (negative)
    offsets.bin  int64, 0, then the end offset of each sequence; absent for a stream (all documents concatenated)
    NAME.bin     int64, a column: numbers per row; absent for a stream
    meta.json    metadata, including `content`, a digest of the files above; written last, so it marks a complete store

The files have no headers; checkpoints identify the data by the digest.
"""

import json
from array import array
from collections import Counter
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from common.data.cache import hash_files


class TokenWriter(ExitStack):
    """Appends rows to a new store in an existing directory."""

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
        """Completes the store and writes its metadata: `facts`, and the counts whose key is a string."""
        self.close()
        named = {name: number for name, number in counts.items() if isinstance(name, str)}
        meta = named | {"tokens": self.num_tokens, **facts, "content": hash_files(self.directory)}
        (self.directory / "meta.json").write_text(json.dumps(meta, indent=1))


class TokenStore:
    """A memory-mapped store.

    Args:
        names: the names of the sequences of a row, in stored order.
        block_length: for a stream, row b is stream[b * block_length : (b + 1) * block_length + 1]; the last is shorter.
    """

    def __init__(self, directory: str | Path, names: tuple[str, ...] = ("tokens",), block_length: int = 0) -> None:
        self.directory, self.names, self.block_length = Path(directory), names, block_length
        self.meta = json.loads((self.directory / "meta.json").read_text())
        self.tokens = self.column("tokens")
        self.is_stream = not (self.directory / "offsets.bin").exists()
        self._offsets = self.tokens if self.is_stream else self.column("offsets")
        self._per_row = block_length if self.is_stream else len(names)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.directory, self.names, self.block_length)  # each data worker maps the files itself

    def __len__(self) -> int:
        return -(-max(0, len(self._offsets) - 1) // self._per_row)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Returns the sequences of a row by name, int32, as read-only views of the file."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = int(index) * self._per_row
        if self.is_stream:
            return {self.names[0]: self.tokens[start : start + self.block_length + 1]}
        bounds = pairwise(self._offsets[start : start + len(self.names) + 1].tolist())
        return {name: self.tokens[start:end] for name, (start, end) in zip(self.names, bounds, strict=True)}

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each sequence of each row, int64 (n, sequences); reads only the offsets."""
        starts = np.asarray(ids, np.int64) * self._per_row
        if self.is_stream:
            return np.minimum(self.block_length + 1, len(self.tokens) - starts)[..., None]
        ends = [self._offsets[starts + number] for number in range(len(self.names) + 1)]
        return np.stack([end - start for start, end in pairwise(ends)], axis=-1)

    def column(self, name: str) -> np.ndarray:
        """Returns all values of a column, memory-mapped: int32 for tokens, otherwise int64."""
        path, dtype = self.directory / f"{name}.bin", np.int32 if name == "tokens" else np.int64
        return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.zeros(0, dtype)


def split_targets(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (tokens, targets, rows) of a stored sequence, int64; targets[j] follows tokens[rows[j]]."""
    stored = stored.astype(np.int64)
    rows = np.flatnonzero(stored[1:] >= 0)
    return np.where(stored < 0, ~stored, stored), stored[rows + 1], rows
