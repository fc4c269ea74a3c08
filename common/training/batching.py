"""Selects the samples of update k, and each rank's share of them.

Position is arithmetic: the samples of update k are a pure function of (seed, number of samples, global batch size, k),
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

from common.training.handover import hand_over, raise_file_limit, start_worker
from common.training.micro_batch_partition import cut_global_batch, longest_of, row_work
from common.training.process_grid import Degrees
from common.training.recipe_traits import Traits


class Samples(Protocol):
    """A data set as the recipes use it, such as `data.text.Samples`. What a sample is, only `collate` knows.

    Where samples differ by epoch (augmentation), `of_epoch(epoch)` returns the data set of that epoch. Of mixed data
    (`data.mixed.Mixed`) `parts` are the sources, by name, and `mixing` says in which order they are trained on.

    Where a sample is several sequences, padded alike, its length is what they take together, with that padding. Then
    `sequence_lengths(ids)` are theirs without it, and `num_predicted(ids)` counts the tokens that each sample predicts.
    """

    unit: str  # of a length: "tokens", "images"
    fingerprint: str  # equal where every sample is equal
    num_target_tokens: int  # targets of all samples
    max_length: int

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...
    def dummy_sample(self) -> Any: ...  # a sample of the least work, without a target
    def lengths(self, ids: np.ndarray) -> np.ndarray: ...  # int64, of each sample; (n, 2) if it has two sequences
    def num_targets(self, ids: np.ndarray) -> np.ndarray: ...  # int64, of each sample
    def describe(self) -> str: ...


# Makes one micro-batch of a list of samples: named tensors; `targets` holds the real targets, and no padding. One that
# pads may take `multiple_of` too: then it pads to a multiple of it.
Collate = Callable[..., dict[str, torch.Tensor]]


class GlobalBatch(NamedTuple):
    """One rank's share of one update, with the counts of the whole global batch (all micro-batches on all ranks)."""

    update: int
    micro_batches: list[dict[str, torch.Tensor]]  # this rank's, in order; every rank has the same number
    num_samples: int  # over all ranks
    num_targets: int  # over all ranks: what the global batch's loss is divided by
    num_tokens: int  # input tokens without padding, over all ranks
    num_processed: int  # input tokens with padding, over all ranks
    rank_work: torch.Tensor  # float64, of each that has samples of its own, what it computes (`cutting.row_work`)
    sample_digest: str  # hash of the sorted sample ids: equal where the samples are equal
    lengths: torch.Tensor  # int64, of each sample without padding, over all ranks; (n, 2) if it has two sequences
    source: str = ""  # of all its samples, where each source is measured apart
    num_predicted: int | None = None  # tokens, over all ranks, where these are not the targets


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """The images of `index` (int64, any shape, values in [0, size)) under a pseudo-random permutation of range(size).

    A Feistel network over the smallest power of four that holds `size`, walked along its cycle until the value falls
    into the range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no table, so a data set
    of any size is shuffled in constant memory, and the result depends on no library's random stream.
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
    """The images of `index` under the permutation of range(size) that `order` names, such as a seed and an epoch.

    Hashed, so that seeds and epochs that lie side by side give unrelated permutations.
    """
    key = hashlib.blake2b(":".join(map(str, order)).encode(), digest_size=8).digest()
    return permute(index, size, key=int.from_bytes(key, "little"))


def updates_per_epoch(num_samples: int, global_batch_size: int, drop_last_window: bool = False) -> int:
    """Global batches in one pass over the data; a remainder makes a shorter last one, unless dropped."""
    return num_samples // global_batch_size if drop_last_window else -(-num_samples // global_batch_size)


def sample_ids_of(
    update: int, num_samples: int, global_batch_size: int, seed: int | None, drop_last_window: bool = False
) -> np.ndarray:
    """Ids (int64) of the samples that update `update` (0-based) consumes; every epoch has its own permutation.

    `seed=None` keeps the data's own order (evaluation). The last global batch of an epoch holds the rest and is
    shorter.
    """
    epoch, number = divmod(update, updates_per_epoch(num_samples, global_batch_size, drop_last_window))
    start = number * global_batch_size
    ids = np.arange(start, min(start + global_batch_size, num_samples))
    return ids if seed is None else shuffled(ids, num_samples, seed, epoch)


def longest_samples(samples: Samples, number: int) -> np.ndarray:
    """The ids (number,) of the longest samples, the longest first; again from the first one where there are too few."""
    lengths = samples.lengths(np.arange(len(samples)))
    order = np.argsort(-lengths.reshape(len(lengths), -1).sum(1), kind="stable")
    return np.resize(order[:number], number)


def round_up(lengths: Any, multiple_of: int) -> Any:
    """The least multiple that holds a length, an int or an array of them."""
    return -(-lengths // multiple_of) * multiple_of


def pad_rows(rows: list[torch.Tensor], multiple_of: int, padding_value: int = 0) -> torch.Tensor:
    """(B, L) of B rows, padded on the right; L is a multiple of `multiple_of`."""
    padded = pad_sequence(rows, batch_first=True, padding_value=padding_value)
    length = padded.shape[1]
    return F.pad(padded, (0, round_up(length, multiple_of) - length), value=padding_value)


def collate_tokens(
    samples: list[tuple[np.ndarray, np.ndarray, np.ndarray]], pad_token_id: int, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads samples on the right into one micro-batch: `input_ids` (B, L), `targets` (N,), `target_rows` (N,), int64.

    `target_rows[i]` is the position in the flattened input that predicts `targets[i]`; a sample is the same three, of
    its own row. There is no mask of targets: to index by one on a GPU makes the host wait at every micro-batch. And no
    attention mask: in a causal model no real token attends to padding on the right, which is no target either.
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
    """One of `num_parts` equal parts of a micro-batch's columns, with the targets that they predict.

    `input_ids` (B, L) becomes (B, ceil(L / num_parts)), `position_ids` of the same shape say where in the sequence they
    are. What fills up the last part is padding: no target, and no real token attends to it.
    """
    input_ids, rows = micro_batch["input_ids"], micro_batch["target_rows"]
    num_rows, length = input_ids.shape
    size = -(-length // num_parts)
    columns = torch.arange(part * size, (part + 1) * size)
    position_ids = columns.clamp(max=length - 1)  # a model has no position beyond the longest row
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

    Exactly one of `micro_batch_size` and `micro_batch_tokens` is given. `seed=None` keeps the data's order.
    """

    samples: Samples
    collate: Collate
    _: KW_ONLY
    global_batch_size: int
    micro_batch_size: int | None
    micro_batch_tokens: int | None
    rank: int  # among those that have samples of their own
    world_size: int
    seed: int | None
    drop_last_window: bool = False
    attention_length: float = math.inf  # a row's length at which attention costs as much as all else
    multiple_of: int = 1  # of which lengths with their padding are a multiple
    part: int = 0  # which of the parts of each micro-batch's tokens is this rank's
    num_parts: int = 1

    def __len__(self) -> int:
        """Global batches in an epoch; items beyond it are the next epochs'."""
        sizes = map(len, self._parts.values())
        return sum(updates_per_epoch(size, self.global_batch_size, self.drop_last_window) for size in sizes)

    @property
    def _parts(self) -> dict[str, Samples]:
        """What is gone through one after the other."""
        return getattr(self.samples, "parts", {"": self.samples})

    @property
    def mixing(self) -> Any:
        """The `mixing.Mixing` of the sources that are trained on; None where there is one, or in an evaluation."""
        return getattr(self.samples, "mixing", None) if self.seed is not None else None

    def _sample_ids(self, update: int) -> tuple[str, np.ndarray]:
        """The source that is measured, if each is measured apart, and the ids of its samples."""
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
        """What takes most memory: as many of the longest samples as a micro-batch holds; the same on all ranks."""
        assert self.micro_batch_tokens is not None
        share = -(-self.global_batch_size // self.world_size)
        rows = min(share, self.micro_batch_tokens // round_up(self.samples.max_length, self.multiple_of))
        chosen = [self.samples[number] for number in longest_samples(self.samples, max(1, rows))]
        number = 1 if rows == share else 2  # the second one where gradients are there already
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
        # Augmented samples differ from epoch to epoch.
        samples = self.samples.of_epoch(update // len(self)) if hasattr(self.samples, "of_epoch") else self.samples
        collate = self.collate if self.multiple_of == 1 else partial(self.collate, multiple_of=self.multiple_of)
        micro_batches = []
        for positions in assigned[self.rank]:
            # Where nothing is left for this rank it computes a dummy sample, so that it joins the step's collectives.
            chosen = [samples[ids[p]] for p in positions] if len(positions) else [samples.dummy_sample()]
            whole = collate(chosen)
            micro_batches.append(shard_tokens(whole, self.part, self.num_parts) if self.num_parts > 1 else whole)
        runs = [positions for steps in assigned for positions in steps]
        counts = np.array([len(positions) for positions in runs])
        longest = longest_of(lengths[np.concatenate(runs)].reshape(len(ids), -1), counts)
        dummy = self.multiple_of  # a token, padded
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


EVALUATED_TOKENS = 1 << 20  # that are sorted and cut together, over all ranks; 24 MiB of them on a host, at most


def _evaluation_batch(
    args: argparse.Namespace, traits: Traits, samples: Samples, is_cpu: bool
) -> dict[str, int | None]:
    """How the held-out samples are cut: in any groups and micro-batches, as no update depends on it.

    Sorted in larger groups than an update's, samples of all lengths have little padding. And without a graph, a
    micro-batch of twice the size takes less memory than training; with --activation_checkpointing it might not, nor on
    a CPU, where what training has freed lies in pieces that larger tensors do not fit.
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


# oneDNN compiles a product in bf16 anew for each number of rows: up to 3 ms, and 1 MB that it keeps.
FEW_LENGTHS = 32


def _multiple_of(
    args: argparse.Namespace,
    accelerator: Accelerator,
    traits: Traits,
    collate: Collate,
    samples: Samples,
    num_parts: int,
) -> int:
    """What lengths are padded to a multiple of: more than 1 in bf16 on a CPU, so that there are few of them.

    No row gets longer than its flag says, which the model has positions for, and no micro-batch larger.
    """
    is_bf16_on_cpu = accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16"
    lengths_vary = traits.lengths_vary and "multiple_of" in inspect.signature(collate).parameters
    if not is_bf16_on_cpu or not lengths_vary:
        return 1
    limits = [getattr(args, name) for name in traits.size_flags]
    multiple = math.gcd(FEW_LENGTHS, *limits)
    longest = round_up(samples.max_length, multiple) + multiple * (len(limits) - 1)  # each part of a sample is padded
    return 1 if args.micro_batch_tokens and longest > args.micro_batch_tokens * num_parts else multiple


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
    """Loads this rank's share of the training updates `updates`; without them, of all samples in order (evaluation).

    attention_length: the length at which attention costs as much as all else, by which the ranks get equal work.
    """
    if args.num_workers:
        raise_file_limit()
    rank = accelerator.process_index
    size = {
        "global_batch_size": args.global_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "micro_batch_tokens": args.micro_batch_tokens if traits.lengths_vary else None,
    }
    if updates is None:
        size = _evaluation_batch(args, traits, samples, accelerator.device.type == "cpu")
    if size["micro_batch_tokens"]:  # of a rank, which has one of so many parts
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
        batch_size=None,  # an item is a whole global batch
        num_workers=args.num_workers,
        pin_memory=accelerator.device.type == "cuda",
        collate_fn=hand_over,
        worker_init_fn=start_worker,  # a signal to all processes stops the run, which then stops its workers
        generator=torch.Generator().manual_seed(args.seed),  # else each iterator draws from the model's random stream
    )
