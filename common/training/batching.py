"""Selects the samples of update k, and each rank's share of them.

Position is arithmetic. The samples of update k are a pure function of seed, number of samples, global batch size and k,
and for mixed data also of the weights (`data_mixing`). No data is replayed, so a run can start at any update at once,
and any number of ranks sees the same samples.

A *global batch* contains all samples of one update, on all ranks. Its samples are sorted by length before they are
split, because the order inside a global batch does not change the update. Neighbours then have similar lengths (little
padding), and the ranks get equal work at every micro-step.
"""

import argparse
import hashlib
import inspect
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from common.training.micro_batch_partition import cut_global_batch, longest_of, row_work
from common.training.process_grid import Degrees
from common.training.recipe_traits import Traits


class Samples(Protocol):
    """A dataset as the recipes use it, such as `data.text.Samples`. Only `collate` knows the content of a sample.

    If samples differ by epoch (augmentation), `of_epoch(epoch)` returns the dataset of that epoch. For mixed data
    (`data.mixed.Mixed`), `parts` contains the sources by name, and `mixing` defines their training order.

    If a sample has several sequences, padded to equal length, its length is their total including this padding. Then
    `sequence_lengths(ids)` excludes the padding, and `num_predicted(ids)` counts the predicted tokens of each sample.
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


# Builds a micro-batch from a list of samples: named tensors; `targets` contains the real targets, without padding. A
# function that pads may also accept `multiple_of`: then it pads to a multiple of it.
Collate = Callable[..., dict[str, torch.Tensor]]


class GlobalBatch(NamedTuple):
    """One rank's share of one update, with the counts of the full global batch (all micro-batches on all ranks)."""

    update: int
    micro_batches: list[dict[str, torch.Tensor]]  # of this rank, in order; every rank has the same number
    num_samples: int  # over all ranks
    num_targets: int  # over all ranks: the divisor of the global batch's loss
    num_tokens: int  # input tokens without padding, over all ranks
    num_processed: int  # input tokens with padding, over all ranks
    rank_work: torch.Tensor  # float64, work of each group with its own samples (`micro_batch_partition.row_work`)
    sample_digest: str  # hash of the sorted sample ids: equal if the samples are equal
    lengths: torch.Tensor  # int64, per sample without padding, over all ranks; (n, 2) for two sequences
    source: str = ""  # source of all its samples, if sources are evaluated separately
    num_predicted: int | None = None  # predicted tokens, over all ranks, if these are not the targets


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Returns the images of `index` under a pseudo-random permutation of range(size).

    `index` is int64 of any shape, with values in [0, size). The permutation is a Feistel network over the smallest
    power of four >= `size`. It walks along the cycle until the value is in the range (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). It needs no table, so a dataset of any size is shuffled in constant memory. The
    result does not depend on any library's RNG.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    round_keys = [
        np.frombuffer(hashlib.blake2b(f"{key}/{r}".encode(), digest_size=8).digest(), "<u8")[0] for r in range(6)
    ]

    def encrypt(value: np.ndarray) -> np.ndarray:
        left, right = value >> np.uint64(half_bits), value & mask
        for round_key in round_keys:
            mixed = (right ^ round_key) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64's finaliser, wrapping on purpose
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        return (left << np.uint64(half_bits)) | right

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

    `seed=None` keeps the order of the data (evaluation). The last global batch of an epoch contains the remaining
    samples, so it can be shorter.
    """
    epoch, number = divmod(update, updates_per_epoch(num_samples, global_batch_size, drop_last_window))
    start = number * global_batch_size
    ids = np.arange(start, min(start + global_batch_size, num_samples))
    return ids if seed is None else shuffled(ids, num_samples, seed, epoch)


def longest_samples(samples: Samples, number: int) -> np.ndarray:
    """Returns the ids (number,) of the longest samples, longest first; repeated from the first if there are too few."""
    lengths = samples.lengths(np.arange(len(samples)))
    order = np.argsort(-lengths.reshape(len(lengths), -1).sum(1), kind="stable")
    return np.resize(order[:number], number)


def round_up(lengths: Any, multiple_of: int) -> Any:
    """Returns the smallest multiple of `multiple_of` >= `lengths`, an int or an array."""
    return -(-lengths // multiple_of) * multiple_of


def pad_rows(rows: list[torch.Tensor], multiple_of: int, padding_value: int = 0) -> torch.Tensor:
    """Returns B rows as (B, L), padded on the right; L is a multiple of `multiple_of`."""
    padded = pad_sequence(rows, batch_first=True, padding_value=padding_value)
    length = padded.shape[1]
    return F.pad(padded, (0, round_up(length, multiple_of) - length), value=padding_value)


def collate_tokens(
    samples: list[tuple[np.ndarray, np.ndarray, np.ndarray]], pad_token_id: int, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads samples on the right into one micro-batch: `input_ids` (B, L), `targets` (N,), `target_rows` (N,), int64.

    `target_rows[i]` is the position in the flattened input that predicts `targets[i]`; a sample has the same three for
    its own row. There is no mask of targets, because indexing with a mask on a GPU makes the host wait at every
    micro-batch. There is no attention mask: in a causal model no real token attends to padding on the right, and
    padding is no target.
    """
    length = round_up(max(len(ids) for ids, *_ in samples), multiple_of)
    input_ids = np.full((len(samples), length), pad_token_id, np.int64)
    for row, (ids, *_) in enumerate(samples):
        input_ids[row, : len(ids)] = ids
    rows = [row * length + target_rows for row, (*_, target_rows) in enumerate(samples)]
    return {
        "input_ids": torch.from_numpy(input_ids),
        "targets": torch.from_numpy(np.concatenate([targets for _, targets, _ in samples])),
        "target_rows": torch.from_numpy(np.concatenate(rows)),
    }


def shard_tokens(micro_batch: dict[str, torch.Tensor], part: int, num_parts: int) -> dict[str, torch.Tensor]:
    """Returns one of `num_parts` equal parts of a micro-batch's columns, with the targets that they predict.

    `input_ids` (B, L) becomes (B, ceil(L / num_parts)). `position_ids` of the same shape are the positions in the
    sequence. The last part is filled with padding, which is not a target, and to which no real token attends.
    """
    input_ids, rows = micro_batch["input_ids"], micro_batch["target_rows"]
    num_rows, length = input_ids.shape
    size = -(-length // num_parts)
    columns = torch.arange(part * size, (part + 1) * size)
    position_ids = columns.clamp(max=length - 1)  # the model has no positions beyond the longest row
    kept = rows % length // size == part
    rows = rows[kept]
    return {
        "input_ids": input_ids[:, position_ids].contiguous(),
        "position_ids": position_ids.repeat(num_rows, 1),
        "targets": micro_batch["targets"][kept],
        "target_rows": rows // length * size + rows % length - part * size,
    }


@dataclass(eq=False)
class GlobalBatches(torch.utils.data.Dataset):
    """Item k is this rank's share of update k: `DataLoader(dataset, sampler=range(k, n), batch_size=None)` starts at k.

    Exactly one of `micro_batch_size` and `micro_batch_tokens` is set. `seed=None` keeps the order of the data.
    """

    samples: Samples
    collate: Collate
    _: KW_ONLY
    global_batch_size: int
    micro_batch_size: int | None
    micro_batch_tokens: int | None
    rank: int  # index among the groups with their own samples
    world_size: int
    seed: int | None
    drop_last_window: bool = False
    attention_length: float = math.inf  # row length at which attention costs as much as all else
    multiple_of: int = 1  # padded lengths are a multiple of it
    part: int = 0  # index of this rank's part of each micro-batch's tokens
    num_parts: int = 1

    def __len__(self) -> int:
        """Returns the number of global batches per epoch; items beyond it belong to the next epochs."""
        sizes = map(len, self._parts.values())
        return sum(updates_per_epoch(size, self.global_batch_size, self.drop_last_window) for size in sizes)

    @property
    def _parts(self) -> dict[str, Samples]:
        """Returns the sources by name, in the order of an evaluation; the name is empty if there is only one source."""
        return getattr(self.samples, "parts", {"": self.samples})

    @property
    def mixing(self) -> Any:
        """Returns the `data_mixing.Mixing` of the training sources; None for a single source and in an evaluation."""
        return getattr(self.samples, "mixing", None) if self.seed is not None else None

    def _sample_ids(self, update: int) -> tuple[str, np.ndarray]:
        """Returns the source that is evaluated, if sources are evaluated separately, and the ids of its samples."""
        if self.mixing is not None:
            return "", self.mixing.sample_ids_of(update, self.global_batch_size, self.seed)
        start, how = 0, (self.global_batch_size, self.seed, self.drop_last_window)
        for source, part in self._parts.items():
            number = updates_per_epoch(len(part), self.global_batch_size, self.drop_last_window)
            if update < number or len(self._parts) == 1:
                return source, start + sample_ids_of(update, len(part), *how)
            start, update = start + len(part), update - number
        raise IndexError("beyond the last global batch of the last source")

    def of_longest(self) -> GlobalBatch:
        """Returns the batch with the highest peak memory: micro-batches of the longest samples; equal on all ranks."""
        assert self.micro_batch_tokens is not None
        share = -(-self.global_batch_size // self.world_size)
        rows = min(share, self.micro_batch_tokens // round_up(self.samples.max_length, self.multiple_of))
        chosen = [self.samples[number] for number in longest_samples(self.samples, max(1, rows))]
        number = 1 if rows == share else 2  # the second runs while gradients are allocated
        micro_batch = self.collate(chosen)
        counts = number * len(chosen) * self.world_size, number * len(micro_batch["targets"]) * self.world_size
        nothing = torch.zeros(1), "", torch.zeros(1, dtype=torch.int64)
        return GlobalBatch(0, [micro_batch] * number, *counts, 0, 0, *nothing)

    def __getitem__(self, update: int) -> GlobalBatch:
        source, ids = self._sample_ids(update)
        own_lengths = self.samples.lengths(ids)
        lengths = round_up(round_up(own_lengths, self.multiple_of), self.num_parts)
        how = (self.micro_batch_size, self.micro_batch_tokens, self.attention_length)
        assigned = cut_global_batch(lengths, self.world_size, *how)
        # Augmented samples differ by epoch.
        samples = self.samples.of_epoch(update // len(self)) if hasattr(self.samples, "of_epoch") else self.samples
        collate = self.collate if self.multiple_of == 1 else partial(self.collate, multiple_of=self.multiple_of)
        micro_batches = []
        for positions in assigned[self.rank]:
            # A rank without samples computes a dummy sample, so that it joins the collectives of the step.
            chosen = [samples[ids[p]] for p in positions] if len(positions) else [samples.dummy_sample()]
            whole = collate(chosen)
            micro_batches.append(shard_tokens(whole, self.part, self.num_parts) if self.num_parts > 1 else whole)
        runs = [positions for steps in assigned for positions in steps]
        counts = np.array([len(positions) for positions in runs])
        longest = longest_of(lengths[np.concatenate(runs)].reshape(len(ids), -1), counts)
        dummy = self.multiple_of  # length of a single padded token
        sequence_lengths = getattr(self.samples, "sequence_lengths", lambda _: own_lengths)(ids)
        predicted = getattr(self.samples, "num_predicted", None)
        work = (counts * row_work(longest, self.attention_length)).clip(min=dummy)
        return GlobalBatch(
            update=update,
            micro_batches=micro_batches,
            num_samples=len(ids),
            num_targets=int(self.samples.num_targets(ids).sum()),
            num_tokens=int(sequence_lengths.sum()),
            num_processed=int((counts * longest.sum(1)).clip(min=dummy).sum()),
            rank_work=torch.from_numpy(work.reshape(self.world_size, -1).sum(1)),
            sample_digest=hashlib.blake2b(np.sort(ids).astype("<i8").tobytes(), digest_size=8).hexdigest(),
            lengths=torch.from_numpy(sequence_lengths),
            source=source,
            num_predicted=predicted and int(predicted(ids).sum()),
        )


EVALUATED_TOKENS = 1 << 20  # tokens sorted and split together, over all ranks; at most 24 MiB per host


def _evaluation_batch(
    args: argparse.Namespace, traits: Traits, samples: Samples, is_cpu: bool
) -> dict[str, int | None]:
    """Returns the batch sizes of the held-out set, which can be chosen freely because no update depends on them.

    Sorted in larger groups than an update's, samples of all lengths need little padding. Without a graph, a micro-batch
    of twice the size uses less memory than training. This may not hold with --activation_checkpointing. It may not hold
    on a CPU either, because memory that training has freed is too fragmented for larger tensors.
    """
    groups, micro_batch_tokens = 1, args.micro_batch_tokens if traits.lengths_vary else None
    if traits.lengths_vary:
        groups = max(1, EVALUATED_TOKENS // (args.global_batch_size * samples.max_length))
    larger = 2 if args.activation_checkpointing == "none" and not is_cpu else 1
    return {
        "global_batch_size": args.global_batch_size * groups,
        "micro_batch_size": args.micro_batch_size and args.micro_batch_size * larger,
        "micro_batch_tokens": micro_batch_tokens and micro_batch_tokens * larger,
    }


# oneDNN compiles a bf16 matmul again for each number of rows: up to 3 ms, and 1 MB that stays allocated.
FEW_LENGTHS = 32


def _multiple_of(
    args: argparse.Namespace,
    accelerator: Accelerator,
    traits: Traits,
    collate: Collate,
    samples: Samples,
    num_parts: int,
) -> int:
    """Returns the number to whose multiples lengths are padded; above 1 in bf16 on a CPU, for few different lengths.

    A padded row stays within its flag's limit, for which the model has positions, and a micro-batch within its own.
    """
    is_bf16_on_cpu = accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16"
    lengths_vary = traits.lengths_vary and "multiple_of" in inspect.signature(collate).parameters
    if not is_bf16_on_cpu or not lengths_vary:
        return 1
    limits = [getattr(args, name) for name in traits.size_flags]
    multiple = math.gcd(FEW_LENGTHS, *limits)
    longest = round_up(samples.max_length, multiple) + multiple * (len(limits) - 1)  # each sequence has padding
    return 1 if args.micro_batch_tokens and longest > args.micro_batch_tokens * num_parts else multiple


def _as_is(batch: GlobalBatch) -> GlobalBatch:
    return batch


def make_loader(
    args: argparse.Namespace,
    accelerator: Accelerator,
    traits: Traits,
    degrees: Degrees,
    collate: Collate,
    attention_length: float,
    samples: Samples,
    updates: range | None = None,
) -> DataLoader:
    """Returns the loader of this rank's share of the updates `updates`; None: of all samples in order (evaluation).

    Args:
        attention_length: row length at which attention costs as much as all else; the ranks get equal work by it.
    """
    transfer: dict[str, Any] = {"collate_fn": _as_is}
    if args.num_workers:
        from common.training import handover

        handover.raise_file_limit()
        # Workers ignore signals: the run handles them, then stops its workers.
        transfer = {"collate_fn": handover.hand_over, "worker_init_fn": handover.start_worker}
    rank = accelerator.process_index
    size = {
        "global_batch_size": args.global_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "micro_batch_tokens": args.micro_batch_tokens if traits.lengths_vary else None,
    }
    if updates is None:
        size = _evaluation_batch(args, traits, samples, accelerator.device.type == "cpu")
    if size["micro_batch_tokens"]:  # the flag is per rank, which has only a part of each sequence
        size["micro_batch_tokens"] *= degrees.sequence
    dataset = GlobalBatches(
        samples,
        collate,
        **size,
        rank=degrees.data_rank(rank),
        world_size=degrees.data,
        seed=None if updates is None else args.seed,
        drop_last_window=args.drop_last_window and updates is not None,
        attention_length=attention_length,
        multiple_of=_multiple_of(args, accelerator, traits, collate, samples, degrees.sequence),
        part=degrees.sequence_rank(rank),
        num_parts=degrees.sequence,
    )
    return DataLoader(
        dataset,
        sampler=range(len(dataset)) if updates is None else updates,
        batch_size=None,  # an item is a global batch
        num_workers=args.num_workers,
        pin_memory=accelerator.device.type == "cuda",
        **transfer,
        generator=torch.Generator().manual_seed(args.seed),  # otherwise each iterator draws from the model's RNG
    )
