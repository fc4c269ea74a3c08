"""The samples of an update are arithmetic, and cutting and assigning them loses none, pads little, shares equally."""

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import stdlib_functions

from common.training.batching import (
    GlobalBatches,
    collate_tokens,
    make_loader,
    permute,
    sample_ids_of,
    updates_per_epoch,
)
from common.training.micro_batch_partition import split_global_batch
from common.training.padding import longest_of, row_work
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Traits


class ListSamples:
    """Samples in memory, of given lengths; the last token of each input has no target if `masked`."""

    def __init__(self, lengths, masked=False):
        self.all_lengths = np.array(lengths)
        self.masked = masked

    def __len__(self):
        return len(self.all_lengths)

    def __getitem__(self, index):
        ids = np.arange(self.all_lengths[index]) + 1000 * index
        rows = np.arange(len(ids) - self.masked)
        return ids, ids[rows] + 1, rows

    def dummy_sample(self):
        return np.array([0]), np.zeros(0, np.int64), np.zeros(0, np.int64)

    def lengths(self, ids):
        return self.all_lengths[ids]

    def num_targets(self, ids):
        return self.all_lengths[ids] - self.masked


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4096, 65537])
def test_permute_is_a_permutation(size):
    assert sorted(permute(np.arange(size), size, key=7)) == list(range(size))


def test_permute_is_the_same_for_a_part_of_the_indices_and_differs_by_key():
    whole = permute(np.arange(1000), 1000, key=1)
    assert (permute(np.array([3, 999]), 1000, key=1) == whole[[3, 999]]).all()
    assert (permute(np.arange(1000), 1000, key=2) != whole).mean() > 0.95


def test_permute_leaves_no_order_behind():
    """Neighbours, fixed points and the mean position of the first tenth are those of a random order."""
    size = 100_000
    image = permute(np.arange(size), size, key=3)
    assert (image == np.arange(size)).sum() < 10  # one is expected
    assert (np.abs(np.diff(image)) == 1).sum() < 20  # two are expected
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.02
    assert abs(image[: size // 10].mean() / size - 0.5) < 0.01


def test_permute_holds_a_data_set_of_any_size():
    """No table: a trillion samples cost the same memory as ten."""
    image = permute(np.arange(5), 10**12, key=0)
    assert len(set(image)) == 5 and (image < 10**12).all()


@pytest.mark.parametrize("drop_last_window", [False, True])
def test_each_epoch_uses_each_sample_once(drop_last_window):
    per_epoch = updates_per_epoch(103, 10, drop_last_window)
    assert per_epoch == (10 if drop_last_window else 11)
    orders = []
    for epoch in range(3):
        global_batches = [sample_ids_of(epoch * per_epoch + w, 103, 10, 5, drop_last_window) for w in range(per_epoch)]
        assert all(len(global_batch) == 10 for global_batch in global_batches[:10])
        ids = np.concatenate(global_batches)
        assert len(set(ids)) == len(ids) == (100 if drop_last_window else 103)
        orders.append(tuple(ids))
    assert len(set(orders)) == 3, "epochs must have orders of their own"


def test_position_needs_no_history():
    """Control against an iterator: update 1000 asked for alone is update 1000 of the sequence."""
    alone = sample_ids_of(1000, 103, 10, seed=1)
    assert (alone == [sample_ids_of(k, 103, 10, seed=1) for k in range(1001)][1000]).all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("how", [{"micro_batch_size": 4}, {"micro_batch_tokens": 300}, {"micro_batch_size": 1}])
@pytest.mark.parametrize("num_samples", [1, 7, 32, 128])
def test_cutting_loses_nothing_and_every_rank_takes_as_many_steps(world_size, how, num_samples):
    lengths = np.random.default_rng(num_samples).integers(1, 300, num_samples)
    assigned = split_global_batch(lengths, world_size, **how)
    assert len(assigned) == world_size and len({len(steps) for steps in assigned}) == 1
    positions = [p for steps in assigned for batch in steps for p in batch]
    assert sorted(positions) == list(range(num_samples))
    for batch in (batch for steps in assigned for batch in steps if len(batch)):
        if "micro_batch_size" in how:
            assert len(batch) <= how["micro_batch_size"]
        else:
            assert len(batch) * lengths[batch].max() <= how["micro_batch_tokens"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_budget_holds_for_samples_of_two_sequences(world_size):
    """Source and target are padded apart. Control: cut by their sum alone, micro-batches exceed the budget."""
    generator = np.random.default_rng(0)
    lengths = np.stack([generator.integers(1, 200, 400), generator.integers(1, 90, 400)], 1)

    def sizes(lengths_to_cut):
        assigned = split_global_batch(lengths_to_cut, world_size, micro_batch_tokens=900)
        assert sorted(p for steps in assigned for batch in steps for p in batch) == list(range(400))
        return [len(batch) * lengths[batch].max(0).sum() for steps in assigned for batch in steps if len(batch)]

    assert max(sizes(lengths)) <= 900 < max(sizes(lengths.sum(1)))


@functools.cache
def stdlib_function_lengths():
    """Lengths, in words, of the functions of Python's standard library: real, with a long tail."""
    return np.array([min(512, max(1, len(text) // 3)) for text in stdlib_functions(10**6)])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("how", [{"micro_batch_tokens": 1024}, {"micro_batch_size": 8}])
def test_sorted_global_batches_pad_little_and_share_equally(world_size, how):
    """Global batches of 128 functions: at most 12 % padding over an epoch, and at most 5 % between the ranks."""
    lengths = stdlib_function_lengths()
    padded, work = measure(lengths, world_size, how, split_global_batch)
    padding, difference = 1 - lengths.sum() / padded, work.max() / work.min() - 1
    print(f"{how}, {world_size} ranks: padding {padding:.1%}, ranks differ by {difference:.2%}")
    assert padding <= 0.12 and difference <= 0.05

    def unsorted(lengths, world_size, micro_batch_size=8, micro_batch_tokens=None):
        positions = np.arange(len(lengths)).reshape(world_size, -1, micro_batch_size)
        return [list(steps) for steps in positions]

    padded, _ = measure(lengths, world_size, how, unsorted)
    assert 1 - lengths.sum() / padded > 0.4, "the control pads as little: this test cannot fail"


def measure(lengths, world_size, how, cut):
    """Tokens with padding of all full global batches of 128, in all and by rank."""
    work = np.zeros(world_size)
    lengths = lengths[: len(lengths) // 128 * 128]
    for update in range(len(lengths) // 128):
        global_batch = lengths[sample_ids_of(update, len(lengths), 128, seed=0)]
        for rank, steps in enumerate(cut(global_batch, world_size, **how)):
            work[rank] += sum(len(batch) * global_batch[batch].max() for batch in steps if len(batch))
    return work.sum(), work


# --- a plan for any number of ranks -----------------------------------------------------------------------------------

# Lengths of n samples, none above the budget t.
LENGTHS = {
    "lognormal": lambda g, n, t: g.lognormal(np.log(t / 32), 0.8, n),
    "long tail": lambda g, n, t: g.lognormal(np.log(t / 40), 1.3, n),
    "uniform": lambda g, n, t: g.integers(1, t + 1, n),
    "constant": lambda g, n, t: np.full(n, t // 3 + 1),
    "two kinds": lambda g, n, t: np.where(g.random(n) < 0.1, g.integers(t // 2, t, n), g.integers(1, t // 20, n)),
    "one very long": lambda g, n, t: np.append(g.integers(1, t // 50 + 2, n - 1), t),
    "all whole budgets": lambda g, n, t: np.full(n, t),
    "pairs": lambda g, n, t: g.lognormal(np.log(t / 64), 0.8, (n, 2)).clip(1, t // 2),
}


def draw(name, num_samples, budget, seed=0):
    return LENGTHS[name](np.random.default_rng(seed), num_samples, budget).astype(np.int64).clip(1, budget)


def measured(lengths, plan, attention_length=np.inf):
    """Padding over tokens; the busiest rank's work over what is possible; the micro-steps of a rank."""
    lengths = lengths.reshape(len(lengths), -1)
    counts = np.array([[len(positions) for positions in steps] for steps in plan])
    longest = longest_of(lengths[np.concatenate([p for steps in plan for p in steps])], counts.ravel())
    work = (counts * row_work(longest, attention_length).reshape(counts.shape)).sum(1)
    alone = row_work(lengths, attention_length)
    padding = (counts.ravel() * longest.sum(1)).sum() / lengths.sum() - 1
    return padding, work.max() / max(alone.sum() / len(plan), alone.max()) - 1, counts.shape[1]


@pytest.mark.parametrize("name", LENGTHS)
def test_any_plan_is_whole_and_within_its_budget(name):
    """Every sample once, no micro-batch over its budget, as many micro-steps on every rank: any lengths, any world."""
    for num_samples, world_size, budget in itertools.product((1, 2, 5, 40, 333), (1, 2, 3, 7, 64), (64, 1000)):
        lengths = draw(name, num_samples, budget, seed=num_samples)
        for attention_length, size in ((np.inf, None), (100, None), (np.inf, 3)):
            how = {"micro_batch_size": size} if size else {"micro_batch_tokens": budget}
            plan = split_global_batch(lengths, world_size, **how, attention_length=attention_length)
            assert len(plan) == world_size and len({len(steps) for steps in plan}) == 1
            runs = [positions for steps in plan for positions in steps]
            assert sorted(np.concatenate(runs)) == list(range(num_samples))
            for positions in filter(len, runs):
                tokens = len(positions) * lengths[positions].reshape(len(positions), -1).max(0).sum()
                assert len(positions) <= size if size else tokens <= budget


WORLDS = [(4096, 64, 16384), (8192, 256, 16384), (16384, 1024, 16384), (65536, 1024, 32768), (1024, 16, 4096)]


@pytest.mark.parametrize("attention_length", [np.inf, 3000])
@pytest.mark.parametrize("num_samples, world_size, budget", WORLDS)
@pytest.mark.parametrize("name", ["lognormal", "long tail"])
def test_ranks_share_equally_and_pad_little_in_any_world(name, num_samples, world_size, budget, attention_length):
    """The busiest rank at most 3 % above what is possible. Padding at most 5 %, of 64 samples a rank and more 2 %.

    Control: with as many samples on every rank, taken in turn from the sorted ones, the busiest is far above that.
    """
    lengths = draw(name, num_samples, budget).clip(1, budget // 2)
    plan = split_global_batch(lengths, world_size, micro_batch_tokens=budget, attention_length=attention_length)
    padding, busiest, num_steps = measured(lengths, plan, attention_length)
    print(f"padding {padding:.2%}, busiest {busiest:.2%} above what is possible, {num_steps} micro-steps")
    assert busiest <= 0.03 and padding <= (0.02 if num_samples >= 64 * world_size else 0.05)
    order = np.argsort(-lengths)
    in_turn = [np.array_split(order[rank::world_size], num_steps) for rank in range(world_size)]
    assert measured(lengths, in_turn, attention_length)[1] > 0.06


def test_work_counts_attention_and_not_tokens_alone():
    """Ranks with equal work where attention costs. Control: the plan by tokens leaves them unequal."""
    lengths = draw("long tail", 512, 16384).clip(1, 8192)
    by_work, by_tokens = (
        split_global_batch(lengths, 8, micro_batch_tokens=16384, attention_length=length) for length in (1000, np.inf)
    )
    assert measured(lengths, by_work, 1000)[1] <= 0.03 < 0.04 < measured(lengths, by_tokens, 1000)[1]


def test_the_work_of_a_row():
    """Twice as much at the length where attention costs as much as all else; a target attends to its source too."""
    assert row_work(np.array([[100], [50]]), 100).tolist() == [200, 75]
    assert row_work(np.array([[30, 20]]), 100).tolist() == [50 + (900 + 400 + 600) / 100]
    assert row_work(np.array([[30, 20]])).tolist() == [50]


@pytest.mark.parametrize("name", LENGTHS)
def test_more_ranks_cost_no_more_padding_and_few_more_steps(name):
    """Two to eight ranks beside one: padding at most 8 points higher, and not twice as many micro-batches in all."""
    for num_samples, world_size in ((128, 2), (128, 4), (512, 8)):
        lengths = draw(name, num_samples, 1024)
        (alone, _, num_alone), (padding, _, num_steps) = (
            measured(lengths, split_global_batch(lengths, world, micro_batch_tokens=1024)) for world in (1, world_size)
        )
        assert padding <= alone + 0.08 and num_steps * world_size <= 2 * num_alone + world_size, (padding, alone)


def test_of_micro_batches_of_a_fixed_size_the_largest_are_spread():
    """As many samples in each; the busiest rank within 2 % of the mean, or of the longest with the shortest."""
    for world_size, size, steps in ((2, 4, 8), (4, 8, 8), (64, 8, 4), (256, 2, 16)):
        lengths = draw("lognormal", world_size * size * steps, 4096)
        plan = split_global_batch(lengths, world_size, micro_batch_size=size)
        assert {len(positions) for ranks in plan for positions in ranks} == {size}
        work = np.sort([[size * lengths[positions].max() for positions in ranks] for ranks in plan])
        flat = np.sort(work.ravel())
        possible = max(work.sum() / world_size, flat[-1] + flat[: steps - 1].sum())
        assert work.sum(1).max() <= 1.02 * possible
        in_order = -np.sort(-lengths).reshape(world_size, steps, size)  # control: the longest all on one rank
        assert size * in_order.max(2).sum(1).max() > 1.1 * possible


def test_a_collated_batch_predicts_each_next_token():
    samples = ListSamples([3, 1, 2])
    batch = collate_tokens([samples[i] for i in (0, 1, 2)], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[0, 1, 2], [1000, 9, 9], [2000, 2001, 9]]
    assert batch["target_rows"].tolist() == [0, 1, 2, 3, 6, 7]
    assert batch["targets"].tolist() == [1, 2, 3, 1001, 2001, 2002]


def shares(samples, world_size, update):
    """What each rank gets of an update of 8 samples, two at once."""
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "micro_batch_tokens": None, "seed": 0}
    collate = functools.partial(collate_tokens, pad_token_id=0)
    return [GlobalBatches(samples, collate, rank=r, world_size=world_size, **sizes)[update] for r in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_global_batch_counts_what_its_ranks_hold(world_size):
    """The divisor, the token count and the digest of a global batch are those of all its micro-batches on all ranks."""
    samples = ListSamples(np.random.default_rng(0).integers(1, 50, 30), masked=True)
    for update in range(8):
        batches = shares(samples, world_size, update)
        assert len({(b.num_targets, b.num_tokens, b.sample_digest, len(b.micro_batches)) for b in batches}) == 1
        micro_batches = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
        assert sum(len(micro_batch["targets"]) for micro_batch in micro_batches) == batches[0].num_targets
        assert sum(micro_batch["input_ids"].numel() for micro_batch in micro_batches) == batches[0].num_processed


def stand_in(rank, world_size, mixed_precision="no"):
    """What a loader asks of an Accelerator."""
    about = {"device": torch.device("cpu"), "mixed_precision": mixed_precision}
    return SimpleNamespace(process_index=rank, num_processes=world_size, **about)


@pytest.mark.parametrize(
    ("mixed_precision", "sequence_length", "budget", "multiple"),
    [
        ("bf16", 512, 1024, 32),
        ("no", 512, 1024, 1),
        ("bf16", 200, 1024, 8),
        ("bf16", 512, 199, 1),
        ("bf16", 201, 300, 1),
    ],
)
def test_in_bf16_on_a_cpu_lengths_are_few(mixed_precision, sequence_length, budget, multiple):
    """Multiples of 32, or of what divides --sequence_length, in micro-batches no larger; the targets are the same."""
    samples = ListSamples(np.random.default_rng(0).integers(1, 200, 64))
    samples.max_length = int(samples.lengths(np.arange(64)).max())
    args = SimpleNamespace(
        global_batch_size=16, micro_batch_size=None, micro_batch_tokens=budget, num_workers=0, seed=0
    )
    args.drop_last_window, args.sequence_length = False, sequence_length
    collate = functools.partial(collate_tokens, pad_token_id=0)
    batches = [
        next(
            iter(
                make_loader(
                    args,
                    stand_in(rank, 2, mixed_precision),
                    Traits(),
                    ProcessGrid(2),
                    collate,
                    math.inf,
                    samples,
                    range(1),
                )
            )
        )
        for rank in (0, 1)
    ]
    micro_batches = [one for batch in batches for one in batch.micro_batches]
    sizes = [one["input_ids"].shape for one in micro_batches]
    assert math.gcd(*[length for _, length in sizes]) == multiple
    assert max(rows * length for rows, length in sizes) <= budget
    assert max(length for _, length in sizes) <= max(sequence_length, samples.max_length)
    targets = [one["targets"] for one in micro_batches]
    ids = sample_ids_of(0, 64, 16, 0)
    assert sorted(torch.cat(targets).tolist()) == sorted(np.concatenate([samples[i][1] for i in ids]).tolist())
    assert batches[0].num_tokens == samples.lengths(ids).sum()
    assert sum(rows * length for rows, length in sizes) == batches[0].num_processed


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_held_out_samples_are_counted_once_and_hardly_padded(world_size):
    """Control: cut as an update is, they are padded more. To save memory, and on a CPU, they are as in training."""
    lengths = stdlib_function_lengths()[:400]
    samples = ListSamples(lengths)
    samples.max_length = int(lengths.max())
    args = SimpleNamespace(global_batch_size=8, micro_batch_size=None, micro_batch_tokens=1024, num_workers=0, seed=0)
    args.drop_last_window = False

    def evaluated(updates=None, activation_checkpointing="none", device="cuda"):
        args.activation_checkpointing = activation_checkpointing
        for rank in range(world_size):
            accelerator = stand_in(rank, world_size)
            accelerator.device = torch.device(device)
            collate = functools.partial(collate_tokens, pad_token_id=0)
            for batch in make_loader(
                args, accelerator, Traits(), ProcessGrid(world_size), collate, math.inf, samples, updates
            ):
                yield from batch.micro_batches

    once = [target for index in range(len(lengths)) for target in (samples[index][1]).tolist()]
    as_an_update, whole, frugal, on_cpu = (
        list(evaluated(*how)) for how in ((range(-(-len(lengths) // 8)),), (), (None, "full"), (None, "none", "cpu"))
    )
    for micro_batches in (whole, frugal, on_cpu):
        assert sorted(target for one in micro_batches for target in one["targets"].tolist()) == sorted(once)
    sizes, *small = ([one["input_ids"].numel() for one in cut] for cut in (whole, frugal, on_cpu))
    assert 1024 < max(sizes) <= 2048 and max(map(max, small)) <= 1024
    most = sum(one["input_ids"].numel() for one in as_an_update)
    assert sum(sizes) < min(most, 1.035 * sum(lengths))  # the functions differ between versions of Python


def test_a_rank_without_samples_gets_a_dummy_without_targets():
    (batch,) = shares(ListSamples([5]), 4, 0)[1].micro_batches
    assert batch["input_ids"].shape == (1, 1) and len(batch["targets"]) == 0 and batch["targets"].dtype == torch.int64
