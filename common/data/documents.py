"""Blocks whose documents do not attend to each other: cut from a stream of documents, or packed with whole examples.

A sample is (input_ids, targets, target_rows, position_ids), each int64. Positions restart at each document, and from
them `models.document_masks` derives the attention mask. The first token of a document is never a target, because the
only tokens before it belong to a different document.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached
from common.data.token_store import split_targets
from common.data.tokenizer import special_tokens_around
from common.errors import UserError

Document = tuple[np.ndarray, ...]  # input_ids, targets, target_rows, position_ids


def choose(kind: str, shape: str | None, document_mask: bool | None, name: str) -> tuple[str, type["Separate"]]:
    """Returns the shape of the token store, and the class that wraps its `text.Samples`.

    kind: "blocks" or "examples", as the columns imply. shape, document_mask: the flags. name: the source, for messages.
    Raises UserError: the rows are examples and are not packed, or are packed without a mask.
    """
    if shape == "packed":
        if document_mask is False:
            raise UserError("--no-document_mask and --shape packed are mutually exclusive; pass only one")
        return "examples", PackedExamples
    if kind != "blocks":
        raise UserError(
            f"--document_mask: {name} has one example per row, which attends only to itself; remove the flag, or pack "
            "the examples with --shape packed"
        )
    return "documents", DocumentBlocks


def mark_documents(
    pieces: Iterable[tuple[Any, str]], directory: Path, tokenizer: PreTrainedTokenizerBase, counts: Counter
) -> Iterator[tuple[list[int], str]]:
    """Yields the (tokens, text) pieces of a document stream with each document as `tokenizer(document)`, then eos.

    The first token of each is replaced by its complement. Writes the column `starts`, the positions of these tokens;
    `counts` gets their number. pieces: those of a plain stream, which has a single eos between two documents.
    """
    is_shared = special_tokens_around(tokenizer)[0][:1] == [tokenizer.eos_token_id]
    prefix, num_tokens, num_complete = [tokenizer.eos_token_id] if is_shared else [], 0, -1
    with open(directory / "starts.bin", "wb") as column:
        for tokens, text in pieces:
            if num_complete < 0 and not text and tokens == [tokenizer.eos_token_id]:  # before the first document
                continue
            if counts["documents"] != num_complete:  # the previous piece has completed a document
                tokens, num_complete = prefix + tokens, counts["documents"]
                tokens[0] = ~tokens[0]
                column.write(np.int64(num_tokens).tobytes())
                counts["starts"] += 1
            num_tokens += len(tokens)
            yield tokens, text


class Separate:
    """Implements `batching.Samples` for blocks of documents; wraps the `text.Samples` of the store, `samples`."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self.samples, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.samples,)

    def dummy_sample(self) -> Document:
        """Returns a sample of one token without a target."""
        return *self.samples.dummy_sample(), np.zeros(1, np.int64)


class DocumentBlocks(Separate):
    """Blocks of a stream of documents. A document that continues from the previous block begins at position 0 again.

    Blocks without a target, which consist of documents of one token, are left out.
    """

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        samples.note = ", each of which attends only to itself"
        self._starts = samples.column("starts")  # of the documents in the stream, ascending
        counts = self._count(np.arange(len(samples)))
        self._kept = None if counts.all() else np.flatnonzero(counts)  # the blocks with a target; None: all blocks

    def __len__(self) -> int:
        return len(self.samples) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        stored = self.samples.row(self._blocks(index))["tokens"]
        ids, targets, target_rows = split_targets(stored)
        index_in_block = np.arange(len(ids) - 1)
        starts = np.maximum.accumulate(np.where(stored[:-1] < 0, index_in_block, 0))
        return ids[:-1], targets, target_rows, index_in_block - starts

    def _blocks(self, ids: Any) -> np.ndarray:
        ids = np.asarray(ids, np.int64)
        return ids if self._kept is None else self._kept[ids]

    def _count(self, blocks: np.ndarray) -> np.ndarray:
        """Returns the number of targets of each block of the stream: its tokens after the first that start none."""
        first = blocks * self.samples.block_length + 1
        last = first + self.samples.lengths(blocks)
        return last - first - (np.searchsorted(self._starts, last) - np.searchsorted(self._starts, first))

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of input tokens of each block, int64."""
        return self.samples.lengths(self._blocks(ids))

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of targets of each block, int64; reads no tokens."""
        return self._count(self._blocks(ids))


class PackedExamples(Separate):
    """Blocks of at most `sequence_length` input tokens, each with whole examples; see `pack`."""

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        packing = cached("packing", [samples.fingerprint], self._write_packing, Path(samples.directory).parent)
        names = ("members", "ends", "lengths", "targets")
        self._members, self._ends, self._lengths, self._targets = (
            np.asarray(np.memmap(packing / f"{name}.bin", np.int64, "r")) for name in names
        )
        self.max_length, self.fingerprint = int(self._lengths.max()), f"{samples.fingerprint}-packed"

    def _write_packing(self, directory: Path) -> None:
        every = np.arange(len(self.samples))
        lengths, targets = self.samples.lengths(every), self.samples.num_targets(every)
        block_of = pack(lengths, self.samples.sequence_length)
        columns = {
            "members": np.argsort(block_of, kind="stable"),
            "ends": np.cumsum(np.bincount(block_of)),
            "lengths": np.bincount(block_of, lengths),
            "targets": np.bincount(block_of, targets),
        }
        for name, values in columns.items():
            values.astype(np.int64).tofile(directory / f"{name}.bin")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        members = self._members[self._ends[index - 1] if index else 0 : self._ends[index]]
        ids, targets, rows = zip(*(self.samples[int(member)] for member in members), strict=True)
        starts = np.cumsum([0, *map(len, ids)])
        target_rows = [start + row for start, row in zip(starts, rows, strict=False)]
        positions = [np.arange(len(tokens)) for tokens in ids]
        return tuple(map(np.concatenate, (ids, targets, target_rows, positions)))

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of input tokens of each block, int64; reads no tokens."""
        return self._lengths[np.asarray(ids, np.int64)]

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of targets of each block, int64; reads no tokens."""
        return self._targets[np.asarray(ids, np.int64)]

    def describe(self) -> str:
        """Returns the description of the samples for the run summary."""
        length, filled = self.samples.sequence_length, self.samples.num_tokens / len(self)
        line = f"packed into {len(self):,} blocks of {length} tokens ({filled / length:.1%} filled)"
        return f"{self.samples.describe()}\n{'':12}{line}; an example attends only to itself"


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the block of each example, int64 (n,), by best-fit decreasing: O(n log n), the same for equal lengths.

    The longest example comes first (equal lengths in the order of the data). Each goes to the block with the least
    free space that holds it, of several to the newest one, or to a new block. lengths: at most `capacity` each.
    """
    block_of, num_blocks = np.empty(len(lengths), np.int64), 0
    spaces: list[int] = []  # ascending: the numbers of free tokens that occur, and the blocks with this free space
    blocks: dict[int, list[int]] = {}
    for example in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[example])
        position = bisect_left(spaces, length)
        if position < len(spaces):
            space = spaces[position]
            block = blocks[space].pop()
            if not blocks[space]:
                del blocks[space], spaces[position]
        else:
            space, block, num_blocks = capacity, num_blocks, num_blocks + 1
        block_of[example] = block
        if space > length:
            if space - length not in blocks:
                insort(spaces, space - length)
            blocks.setdefault(space - length, []).append(block)
    return block_of
