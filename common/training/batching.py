"""Selects the samples of update k, and each rank's share of them.

The samples of update k are a pure function of seed, number of samples, global batch size and k, and for mixed data also
of the weights (`data_mixing`). So a run can start at any update without reading earlier samples, and the samples do not
depend on the number of ranks.

A *global batch* contains all samples of one update, on all ranks. Its samples are sorted by length before they are
split, because the order inside a global batch does not change the update. This gives little padding and equal work.
"""

import argparse
import hashlib
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from common.training.micro_batch_partition import split_global_batch
from common.training.padding import longest_of, round_up, row_work
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Traits


class Samples(Protocol):
    """A dataset as the recipes use it, such as `data.text.Samples`. Only `collate` knows the content of a sample.

    Optional members: `of_epoch(epoch)` returns the dataset of an epoch, if samples differ by epoch (augmentation).
    `of_batch(ids)` returns (dataset, its ids) of these samples' texts, if ranks share texts instead of samples. `parts`
    contains mixed sources by name, `mixing` their order (`data.mixed.Mixed`). If a sample has several sequences, its
    length includes their padding to equal length, `sequence_lengths(ids)` does not; `num_predicted(ids)` is by sample.
    """

    unit: str  # unit of a length: "tokens", "images"
    fingerprint: str  # equal if all samples are equal
    num_target_tokens: int  # number of targets of all samples
    max_length: int

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...
    def dummy_sample(self) -> Any: ...  # sample with the least work, without a target
    def lengths(self, ids: np.ndarray) -> np.ndarray: ...  # int64, per sample; (n, 2) for two sequences
    def num_targets(self, ids: np.ndarray) -> np.ndarray: ...  # int64, of each sample
    def describe(self) -> str: ...


# Builds a micro-batch, a dict of tensors, from a list of samples; `targets` contains only the targets, without padding.
# With an optional argument `multiple_of`, it pads lengths to a multiple of this number.
Collate = Callable[..., dict[str, torch.Tensor]]


class GlobalBatch(NamedTuple):
    """One rank's share of one update, with the counts of the full global batch (all micro-batches on all ranks)."""

    update: int
    micro_batches: list[dict[str, torch.Tensor]]  # of this rank, in order; every rank has the same number
    num_samples: int
    num_targets: int  # the divisor of the global batch's loss
    num_tokens: int  # input tokens without padding
    num_processed: int  # input tokens with padding
    rank_work: torch.Tensor  # float64, work of each group with its own samples (`padding.row_work`)
    sample_digest: str  # hash of the sorted sample ids: equal if the samples are equal
    lengths: torch.Tensor  # int64, per sample without padding; (n, 2) for two sequences
    source: str = ""  # source of all its samples, if sources are evaluated separately
    num_predicted: int | None = None  # predicted tokens, if these are not the targets


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Returns the images of `index` (int64, values in [0, size)) under a pseudo-random permutation of range(size).

    A Feistel network over the smallest power of four >= `size`, applied again until the value is in the range (cycle
    walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no table and no library's RNG.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    digests = [hashlib.blake2b(f"{key}/{r}".encode(), digest_size=8).digest() for r in range(6)]
    round_keys = np.frombuffer(b"".join(digests), "<u8")

    def encrypt(value: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & mask
        for round_key in round_keys:
            mixed = (right ^ round_key) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64's finaliser, wrapping on purpose
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        return (left << half) | right

    value = encrypt(np.asarray(index).astype(np.uint64))
    while (outside := value >= size).any():
        value[outside] = encrypt(value[outside])
    return value.astype(np.int64)


def shuffled(index: np.ndarray, size: int, *order: int) -> np.ndarray:
    """Returns the images of `index` under the permutation of range(size) for `order`, such as a seed and an epoch.

    `order` is hashed, so that neighbouring seeds and epochs give unrelated permutations.
    """
    key = hashlib.blake2b(":".join(map(str, order)).encode(), digest_size=8).digest()
    return permute(index, size, key=int.from_bytes(key, "little"))


def updates_per_epoch(num_samples: int, global_batch_size: int, drop_last_window: bool = False) -> int:
    """Returns the number of global batches per epoch; remaining samples form a shorter last batch, or are dropped."""
    return num_samples // global_batch_size if drop_last_window else -(-num_samples // global_batch_size)


def sample_ids_of(
    update: int, num_samples: int, global_batch_size: int, seed: int | None, drop_last_window: bool = False
) -> np.ndarray:
    """Returns the ids (int64) of the samples of update `update` (0-based); every epoch has its own permutation.

    `seed=None` keeps the order of the data (evaluation).
    """
    epoch, number = divmod(update, updates_per_epoch(num_samples, global_batch_size, drop_last_window))
    ids = np.arange(number * global_batch_size, min((number + 1) * global_batch_size, num_samples))
    if seed is None:
        return ids
    return _epoch(num_samples, seed, epoch)[ids] if num_samples <= 2**16 else shuffled(ids, num_samples, seed, epoch)


@lru_cache(maxsize=4)  # because a permutation of few ids takes as long as one of thousands
def _epoch(num_samples: int, *order: int) -> np.ndarray:
    return shuffled(np.arange(num_samples), num_samples, *order)


def collate_tokens(
    samples: list[tuple[np.ndarray, ...]], pad_token_id: int, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads samples on the right into one micro-batch: `input_ids` (B, L), `targets` (N,), `target_rows` (N,), int64.

    `target_rows[i]` is the position in the flattened input that predicts `targets[i]`. A sample is a tuple of the same
    three arrays for a single row; with documents that do not attend to each other (`data.documents`), `position_ids`
    (B, L) follow. Indexing with a mask would make the host wait for a GPU in every micro-batch. There
    is no attention mask: in a causal model no real token attends to padding on the right, and padding is not a target.
    """
    length = round_up(max(len(ids) for ids, *_ in samples), multiple_of)
    input_ids = np.full((len(samples), length), pad_token_id, np.int64)
    for row, (ids, *_) in enumerate(samples):
        input_ids[row, : len(ids)] = ids
    rows = [row * length + target_rows for row, (_, _, target_rows, *_) in enumerate(samples)]
    micro_batch = {
        "input_ids": torch.from_numpy(input_ids),
        "targets": torch.from_numpy(np.concatenate([targets for _, targets, *_ in samples])),
        "target_rows": torch.from_numpy(np.concatenate(rows)),
    }
    if len(samples[0]) > 3:  # positions that restart at each document
        from common.training.token_rows import pad_rows

        micro_batch["position_ids"] = pad_rows([torch.from_numpy(x) for *_, x in samples], multiple_of)
    return micro_batch


@dataclass(eq=False)
class GlobalBatches(torch.utils.data.Dataset):
    """Item k is this rank's share of update k: `DataLoader(dataset, sampler=range(k, n), batch_size=None)` starts at k.

    Either `micro_batch_size` or `micro_batch_tokens` is set. `seed=None` keeps the order of the data.
    """

    samples: Samples
    collate: Collate
    _: KW_ONLY
    global_batch_size: int
    micro_batch_size: int | None
    micro_batch_tokens: int | None
    rank: int  # index of this rank's group (`process_grid`)
    world_size: int  # number of groups
    seed: int | None
    drop_last_window: bool = False
    attention_length: float = math.inf  # row length at which attention costs as much as all other work
    multiple_of: int = 1  # padded lengths are a multiple of this
    part: int = 0  # index of this rank's part of each micro-batch's tokens
    num_parts: int = 1

    def __len__(self) -> int:
        """Returns the number of global batches per epoch; items beyond it belong to the next epochs."""
        return sum(map(self._updates_per_epoch, self._parts.values()))

    def _updates_per_epoch(self, part: Samples) -> int:
        return updates_per_epoch(len(part), self.global_batch_size, self.drop_last_window)

    @property
    def _parts(self) -> dict[str, Samples]:
        """The sources by name, in the order of an evaluation; the name is empty if there is only one source."""
        return getattr(self.samples, "parts", {"": self.samples})

    @property
    def mixing(self) -> Any:
        """The `data_mixing.Mixing` of the training sources; None for a single source and in an evaluation."""
        return getattr(self.samples, "mixing", None) if self.seed is not None else None

    def _sample_ids(self, update: int) -> tuple[str, np.ndarray]:
        """Returns the source ("" unless sources are evaluated separately), and the ids of the update's samples."""
        if self.mixing is not None:
            return "", self.mixing.sample_ids_of(update, self.global_batch_size, self.seed)
        start = 0
        for source, part in self._parts.items():
            number = self._updates_per_epoch(part)
            if update < number or len(self._parts) == 1:
                ids = sample_ids_of(update, len(part), self.global_batch_size, self.seed, self.drop_last_window)
                return source, start + ids
            start, update = start + len(part), update - number
        raise IndexError("beyond the last global batch of the last source")

    def __getitem__(self, update: int) -> GlobalBatch:
        source, drawn = self._sample_ids(update)
        samples = self.samples.of_epoch(update // len(self)) if hasattr(self.samples, "of_epoch") else self.samples
        samples, ids = samples.of_batch(drawn) if hasattr(samples, "of_batch") else (samples, drawn)
        own_lengths = samples.lengths(ids)
        lengths = round_up(round_up(own_lengths, self.multiple_of), self.num_parts)
        limits = self.micro_batch_size, self.micro_batch_tokens
        assigned = split_global_batch(lengths, self.world_size, *limits, self.attention_length)
        on_all_ranks = [positions for steps in assigned for positions in steps]
        counts = np.array([len(positions) for positions in on_all_ranks])
        longest = longest_of(lengths[np.concatenate(on_all_ranks)].reshape(len(ids), -1), counts)
        dummy = self.multiple_of  # length of a single padded token
        work = (counts * row_work(longest, self.attention_length)).clip(min=dummy)
        sequence_lengths = samples.sequence_lengths(ids) if hasattr(samples, "sequence_lengths") else own_lengths
        return GlobalBatch(
            update=update,
            micro_batches=self._micro_batches(samples, ids, assigned[self.rank]),
            num_samples=len(drawn),
            num_targets=int(samples.num_targets(ids).sum()),
            num_tokens=int(sequence_lengths.sum()),
            num_processed=int((counts * longest.sum(1)).clip(min=dummy).sum()),
            rank_work=torch.from_numpy(work.reshape(self.world_size, -1).sum(1)),
            sample_digest=hashlib.blake2b(np.sort(drawn).astype("<i8").tobytes(), digest_size=8).hexdigest(),
            lengths=torch.from_numpy(sequence_lengths),
            source=source,
            num_predicted=int(samples.num_predicted(ids).sum()) if hasattr(samples, "num_predicted") else None,
        )

    def _micro_batches(self, samples: Any, ids: np.ndarray, steps: list[np.ndarray]) -> list[dict[str, torch.Tensor]]:
        """Returns this rank's micro-batches. steps: positions in `ids` of each micro-batch's samples."""
        collate = self.collate if self.multiple_of == 1 else partial(self.collate, multiple_of=self.multiple_of)
        # A rank without samples computes a dummy sample, so that it joins the collectives of the step.
        micro_batches = [
            collate([samples[ids[position]] for position in positions] if len(positions) else [samples.dummy_sample()])
            for positions in steps
        ]
        if self.num_parts == 1:
            return micro_batches
        from common.training.token_rows import shard_tokens

        return [shard_tokens(micro_batch, self.part, self.num_parts) for micro_batch in micro_batches]


def make_loader(
    args: argparse.Namespace,
    accelerator: Accelerator,
    traits: Traits,
    grid: ProcessGrid,
    collate: Collate,
    attention_length: float,
    samples: Samples,
    updates: range | None = None,
) -> Any:
    """Returns the `DataLoader` of this rank's share of `updates`; None: all samples in order (evaluation).

    Its `dataset` is a `GlobalBatches`. attention_length: row length at which attention costs as much as all other work.
    """
    is_cpu, rank = accelerator.device.type == "cpu", accelerator.process_index
    global_batch_size, micro_batch_size = args.global_batch_size, args.micro_batch_size
    micro_batch_tokens = args.micro_batch_tokens if traits.lengths_vary else None
    multiple_of = 1
    if updates is None:
        from common.training.loader_sizes import evaluation_sizes

        sizes = evaluation_sizes(args, traits, samples.max_length, is_cpu)
        global_batch_size, micro_batch_size, micro_batch_tokens = sizes
    if is_cpu and accelerator.mixed_precision == "bf16":
        from common.training.loader_sizes import bf16_multiple

        multiple_of = bf16_multiple(args, traits, collate, samples.max_length, grid.sequence)
    dataset = GlobalBatches(
        samples,
        collate,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        # The flag is per rank, and a rank of a sequence group has only a part of each sequence.
        micro_batch_tokens=micro_batch_tokens and micro_batch_tokens * grid.sequence,
        rank=grid.data_rank(rank),
        world_size=grid.data_parallel,
        seed=None if updates is None else args.seed,
        drop_last_window=args.drop_last_window and updates is not None,
        attention_length=attention_length,
        multiple_of=multiple_of,
        part=grid.sequence_rank(rank),
        num_parts=grid.sequence,
    )
    workers: dict[str, Any] = {"collate_fn": lambda batch: batch}
    if args.num_workers:
        from common.training import handover

        handover.raise_file_limit()
        # Workers ignore signals: the run handles them, then stops its workers.
        workers = {"collate_fn": handover.pack_batch, "worker_init_fn": handover.start_worker}
    return DataLoader(
        dataset,
        sampler=range(len(dataset)) if updates is None else updates,
        batch_size=None,  # an item is a global batch
        num_workers=args.num_workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator().manual_seed(args.seed),  # otherwise each iterator draws from the model's RNG
        **workers,
    )
