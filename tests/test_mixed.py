"""Files with weights: each source has its exact share at every update, on any number of processes, after a resume."""

import hashlib
import importlib
import json
import shutil
import sys
from fractions import Fraction

import numpy as np
import pytest
from conftest import (
    assert_mistake,
    assert_same_losses,
    launch,
    read_metrics,
    results_of,
    run_recipe_alone,
    stdlib_functions,
    write_jsonl,
    write_rows,
)
from test_batching import ListSamples

from common.argument_checks import check_samples
from common.arguments import text_sources
from common.data.mixed import Mixed
from common.errors import UserError
from common.training.batching import GlobalBatches, permute, sample_ids_of
from common.training.data_mixing import MAX_LENGTH, Mixing, build_order, reduce_weights
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Traits

GLOBAL_BATCH = 8


# --- the rule of docs/data.md, once more


def order_by_rule(weights):
    """Places of sources: of the samples that may stand at a place, the one that is to end first."""
    total, order = sum(weights), []
    for place in range(total):
        ends = {}
        for source, weight in enumerate(weights):
            j = order.count(source)
            if j * total // weight <= place:
                ends[source] = ((j + 1) * total + weight - 1) // weight
        order.append(min(ends, key=ends.get))
    return order


def samples_by_rule(weights, sizes, seed, update, global_batch):
    """(source, id) of each sample of an update."""
    order, found = order_by_rule(weights), []
    for p in range(update * global_batch, (update + 1) * global_batch):
        q, r = divmod(p, sum(weights))
        s = order[r]
        e, i = divmod(q * weights[s] + order[:r].count(s), sizes[s])
        key = int.from_bytes(hashlib.blake2b(f"{seed}:{e}:{s}".encode(), digest_size=8).digest(), "little")
        found.append((s, sum(sizes[:s]) + int(permute(np.array([i]), sizes[s], key)[0])))
    return found


def digest_of(ids):
    return hashlib.blake2b(np.sort(np.array(ids)).astype("<i8").tobytes(), digest_size=8).hexdigest()


def off_the_share(order, weights):
    """The farthest that a source is ever away from its share, in samples, over two rounds of the order."""
    counts = np.cumsum(np.tile(order, 2)[:, None] == np.arange(len(weights)), 0)
    shares = np.arange(1, len(counts) + 1)[:, None] * np.array(weights) / sum(weights)
    return np.abs(counts - shares).max()


def test_a_source_is_never_a_whole_sample_away_from_its_share():
    """Of any weights; so it is exact wherever its share is whole. Control: the same samples shuffled are not."""
    generator = np.random.default_rng(0)
    drawn = [generator.integers(1, 60, generator.integers(1, 9)).tolist() for _ in range(200)]
    for weights in [*drawn, [1, 1], [1, 999], [1] * 50 + [450], [333, 333, 334]]:
        order = build_order(weights)
        assert np.bincount(order).tolist() == list(weights)
        assert off_the_share(order, weights) < 1 - 1e-9, weights
    assert off_the_share(generator.permutation(order), weights) > 1


@pytest.mark.parametrize("weights", [(7, 3), (1, 1, 1), (5, 3, 2, 1), (1, 9)])
def test_the_samples_of_an_update_are_the_rules_and_need_no_history(weights):
    """Each source whole in each of its epochs. Controls: another seed, another source, another epoch: another order."""
    sizes = (10, 6, 9, 23)[: len(weights)]
    mixing, total = Mixing(weights, sizes), 0
    taken = {source: [] for source in range(len(weights))}
    for update in range(40):
        ids = mixing.sample_ids_of(update, 7, seed=3)
        expected = samples_by_rule(weights, sizes, 3, update, 7)
        assert ids.tolist() == [one for _, one in expected]
        for source, one in expected:
            taken[source].append(one - sum(sizes[:source]))
        total += 7
        assert mixing.counts(total) == [len(ids) for ids in taken.values()]
    for source, size in enumerate(sizes):
        epochs = [taken[source][start : start + size] for start in range(0, len(taken[source]) - size + 1, size)]
        assert epochs and all(sorted(one) == list(range(size)) for one in epochs)
        assert len(epochs) == 1 or epochs[0] != epochs[1]
    assert (mixing.sample_ids_of(10**12, 7, 3) != mixing.sample_ids_of(10**12, 7, 4)).any()


def test_without_weights_nothing_changes():
    """One order of all samples in each epoch, by the seed's and the epoch's key, as it ever was."""
    for update in range(8):
        epoch, number = divmod(update, 4)
        key = int.from_bytes(hashlib.blake2b(f"5:{epoch}".encode(), digest_size=8).digest(), "little")
        expected = permute(np.arange(8 * number, min(8 * number + 8, 30)), 30, key)
        assert (sample_ids_of(update, 30, 8, seed=5) == expected).all()


def test_weights_are_read_exactly():
    """Control: in floats 0.1 and 0.3 are in no proportion of small numbers."""
    for texts, whole in [
        (("0.7", "0.3"), (7, 3)),
        (("70", "30"), (7, 3)),
        (("0.1", "0.3"), (1, 3)),
        (("1/3", "2/3"), (1, 2)),
        ((".5", "1/4", "2"), (2, 1, 8)),
    ]:
        assert reduce_weights([Fraction(text) for text in texts]) == whole
    assert reduce_weights([Fraction(0.1), Fraction(0.3)]) != (1, 3)


def test_held_out_sources_are_cut_apart_and_each_sample_is_counted_once():
    """A global batch is of one source, whatever the ranks. Control: of joined samples some are of both."""
    parts = {"a": ListSamples([3, 5, 9, 2, 4]), "b": ListSamples([7, 1, 1])}
    for part in parts.values():
        vars(part).update(unit="tokens", num_target_tokens=1, max_length=9, fingerprint="")
    for world_size in (1, 2, 4):
        seen = {"a": [], "b": []}
        for rank in range(world_size):
            sizes = {"global_batch_size": 4, "micro_batch_size": 1, "micro_batch_tokens": None, "seed": None}
            batches = GlobalBatches(Mixed(parts), lambda rows: rows, rank=rank, world_size=world_size, **sizes)
            assert [batches[k].source for k in range(len(batches))] == ["a", "a", "b"]
            with pytest.raises(IndexError):
                batches[len(batches)]
            for batch in map(batches.__getitem__, range(len(batches))):
                seen[batch.source] += [rows[0][1].tolist() for rows in batch.micro_batches if len(rows[0][1])]
        expected = {name: [part[i][1].tolist() for i in range(len(part))] for name, part in parts.items()}
        assert {name: sorted(one) for name, one in seen.items()} == {
            name: sorted(one) for name, one in expected.items()
        }


# --- real runs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two sources of which the second is short, and text that is held out of each."""
    place, functions = tmp_path_factory.mktemp("mixed"), stdlib_functions(160)
    write_rows(place / "code.jsonl", 60)
    (place / "books.txt").write_text("\n".join(functions[60:65]).upper())
    write_jsonl(place / "held_code.jsonl", [{"text": text} for text in functions[100:120]])
    (place / "held_books.txt").write_text("\n".join(functions[120:130]).upper())
    return place


def flags(place, model, out, *more, weights=("0.7", "0.3"), held_out=("held_code.jsonl", "held_books.txt")):
    base = [
        "--train_file",
        *(f"{place / name}:{w}" for name, w in zip(("code.jsonl", "books.txt"), weights, strict=True)),
    ]
    base += ["--validation_file", *(place / name for name in held_out), "--model_name_or_path", model]
    base += ["--sequence_length", 64, "--global_batch_size", GLOBAL_BATCH, "--num_updates", 12, "--learning_rate", 1e-3]
    return [*base, "--eval_every", 4, "--save_every", 4, "--keep_last", 9, "--output_dir", out, *more]


@pytest.fixture(scope="module")
def mixed(place, model_dir):
    """The output directory of a run, and what it printed."""
    return place / "run", launch(*flags(place, model_dir, place / "run")).stdout


def sources_of(out):
    return json.loads((out / "run.json").read_text())["sources"]


def losses(out):
    """All figures of an update that do not tell its speed."""
    return [
        {name: value for name, value in line.items() if "loss" in name or name in ("grad_norm", "sample_digest")}
        for line in read_metrics(out)
    ]


def test_a_runs_digests_are_those_of_the_shares(mixed):
    """As a stranger counts them, with run.json. Control: digests of other weights are others."""
    out, printed = mixed
    sources = sources_of(out)
    sizes = [one["samples"] for one in sources]
    digests = [line["sample_digest"] for line in read_metrics(out)]
    taken = [0, 0]
    for update, digest in enumerate(digests):
        samples = samples_by_rule((7, 3), sizes, 0, update, GLOBAL_BATCH)
        assert digest_of([one for _, one in samples]) == digest
        assert digest_of([one for _, one in samples_by_rule((3, 7), sizes, 0, update, GLOBAL_BATCH)]) != digest
        for source, _ in samples:
            taken[source] += 1
        done = (update + 1) * GLOBAL_BATCH
        assert abs(taken[0] - 0.7 * done) < 1 and (done % 10 or taken[0] == 7 * done // 10)
    assert [one["taken"] for one in sources] == taken and [one["share"] for one in sources] == ["7/10", "3/10"]
    assert [one["epochs"] for one in sources] == [count / size for count, size in zip(taken, sizes, strict=True)]
    assert sources[1]["epochs"] > 1 > sources[0]["epochs"] and sources[1]["first_id"] == sizes[0]
    told = ", ".join(f"{one['epochs']:.2f} of {one['source']}" for one in sources)
    assert f"updates  12, epochs: {told}\n" in printed
    assert "7/10 of the samples: " in printed and "3/10 of the samples: " in printed


def test_two_processes_make_the_same_updates_and_measure_the_same(mixed, place, model_dir):
    out = place / "two"
    launch(*flags(place, model_dir, out, "--micro_batch_size", 2, "--num_workers", 1), config="multi_cpu")
    assert_same_losses(out, mixed[0])
    for figures, expected in zip(losses(out), losses(mixed[0]), strict=True):
        assert figures.keys() == expected.keys()
        for name in (name for name in figures if name.startswith("validation_loss")):
            assert figures[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_resume_makes_the_same_updates_and_takes_no_other_weights(mixed, place, model_dir):
    """Bit for bit, from the middle of a round of the order. Control: of the first updates' samples it has none."""
    out = place / "resumed"
    shutil.copytree(mixed[0], out)
    for number in (8, 12):
        shutil.rmtree(out / f"checkpoints/update-{number:06}")
    refused = run_recipe_alone("lm.py", *flags(place, model_dir, out, "--resume", weights=(1, 1)))
    assert_mistake(refused, "the weights differ: --train_file is mixed 1:1, the checkpoint's was 7:3; pass the same")
    launch(*flags(place, model_dir, out, "--resume"))
    assert losses(out) == losses(mixed[0]) and 4 * GLOBAL_BATCH % 10
    assert losses(out)[4:] != losses(out)[:8]


def test_what_was_trained_on_stays_told_when_the_weights_change(mixed, place, model_dir):
    """A finished run keeps its record, and one that goes on has both. Control: the weights do change its updates."""
    out, allowed = place / "changed", ("--resume", "--allow_changed", "dataset", "num_updates")
    shutil.copytree(mixed[0], out)
    launch(*flags(place, model_dir, out, *allowed, weights=(1, 1)))
    assert sources_of(out) == sources_of(mixed[0])
    card = (out / "model/README.md").read_text()
    assert "7/10 of the samples" in card and "1/2 of the samples" not in card
    launch(*flags(place, model_dir, out, *allowed, "--num_updates", 16, weights=(1, 1)))
    card = (out / "model/README.md").read_text()
    assert card.index("until update 12") < card.index("7/10 of the samples") < card.index("1/2 of the samples")
    sizes, taken = [one["samples"] for one in sources_of(out)], [one["taken"] for one in sources_of(mixed[0])]
    for update, line in list(enumerate(read_metrics(out)))[12:]:
        samples = samples_by_rule((1, 1), sizes, 0, update, GLOBAL_BATCH)
        assert line["sample_digest"] == digest_of([one for _, one in samples])
        for source, _ in samples:
            taken[source] += 1
    assert [one["taken"] for one in sources_of(out)] == taken and sum(taken) == 16 * GLOBAL_BATCH


def test_each_source_is_measured_as_it_is_alone(mixed, place, model_dir):
    """And all together by their targets. Control: their losses differ, so that an equal mean is none."""
    out, printed = mixed
    results, alone = results_of(out), {}
    for name in ("held_code.jsonl", "held_books.txt"):
        again = place / f"again-{name}"
        shutil.copytree(out, again)
        launch(*flags(place, model_dir, again, "--resume", "--allow_changed", "validation", held_out=[name]))
        alone[name] = results_of(again)["validation_loss"]
        assert results[f"validation_loss/{place / name}"] == pytest.approx(alone[name], rel=1e-6)
        assert f"  {alone[name]:.4f} of {place / name}, which has " in printed
    shares = [float(Fraction(one["share"])) for one in json.loads((out / "run.json").read_text())["held_out_sources"]]
    together = sum(share * loss for share, loss in zip(shares, alone.values(), strict=True))
    assert results["validation_loss"] == pytest.approx(together, rel=1e-6) and sum(shares) == pytest.approx(1)
    assert results["validation_loss"] != pytest.approx(sum(alone.values()) / 2, rel=1e-3)
    measured = [line for line in read_metrics(out) if "validation_loss" in line]
    assert [line["update"] for line in measured] == [3, 7, 11]
    assert all(f"validation_loss/{place / name}" in line for line in measured for name in alone)


@pytest.mark.parametrize("recipe", ["classify", "seq2seq"])
def test_recipes_with_samples_of_their_own_mix_too(recipe, place, tmp_path):
    for number, name in enumerate(("a", "b", "c", "d")):
        rows = (place / "code.jsonl").read_text().splitlines(keepends=True)[12 * number : 12 * number + 12]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    own = ["--train_file", tmp_path / "a.jsonl:2", tmp_path / "b.jsonl:1", "--sequence_length", 32]
    own += ["--validation_file", tmp_path / "c.jsonl", tmp_path / "d.jsonl", "--num_updates", 3, "--eval_every", 3]
    own += ["--generate", 2] if recipe == "seq2seq" else []
    result = run_recipe_alone(f"{recipe}.py", *own, "--global_batch_size", 6, "--output_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    figures, (line,) = results_of(tmp_path / "run"), read_metrics(tmp_path / "run")[-1:]
    digest = digest_of([one for _, one in samples_by_rule((2, 1), (12, 12), 0, 2, 6)])
    assert line["sample_digest"] == digest and [one["taken"] for one in sources_of(tmp_path / "run")] == [12, 6]
    c, d = (figures[f"validation_loss/{tmp_path / name}.jsonl"] for name in "cd")
    assert min(c, d) < figures["validation_loss"] == line["validation_loss"] < max(c, d)


def parsed(recipe, monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *map(str, given)])
    module = importlib.import_module(f"recipes.{recipe}")
    return module, module.parse_arguments()


@pytest.mark.parametrize("recipe", ["moe", "pipeline", "long_sequence"])
def test_recipes_of_text_mix_it(recipe, place, monkeypatch):
    """Rows of examples beside blocks too; all in one tokenizer. Control: without weights there is one source."""
    names = [place / "code.jsonl", place / "books.txt"]
    module, args = parsed(recipe, monkeypatch, "--train_file", *(f"{name}:1" for name in names))
    _, _, train, _ = module.load_data(args)
    assert list(train.parts) == list(map(str, names)) and train.mixing.weights == (1, 1)
    module, args = parsed(recipe, monkeypatch, "--train_file", *names)
    assert not hasattr(module.load_data(args)[2], "mixing")


def test_a_source_of_which_a_run_takes_nothing_is_named(place, monkeypatch, caplog):
    """Control: a longer run takes a sample of it."""
    names = [f"{place / 'code.jsonl'}:1", f"{place / 'books.txt'}:9.9e1"]
    for number, warned in ((2, 1), (13, 0)):
        caplog.clear()
        module, args = parsed("lm", monkeypatch, "--train_file", *names, "--num_updates", number)
        args.global_batch_size, args.sequence_length = GLOBAL_BATCH, 32
        check_samples(args, Traits(), module.load_data(args)[2], None, ProcessGrid(1))
        assert [record.getMessage() for record in caplog.records] == warned * [
            f"--train_file {place / 'code.jsonl'}: none of the 16 samples of this run is of it: its weight is too "
            "small for one; raise it, or remove the file"
        ]


# --- mistakes


MISTAKES = {
    "code.jsonl:0.7 books.txt": "books.txt: no weight, as .*code.jsonl:0.7 has; give all files one, or none",
    "code.jsonl:0 books.txt:1": "code.jsonl:0: the weight is not a number above 0",
    "code.jsonl:0/3 books.txt:1": "code.jsonl:0/3: the weight is not a number above 0",
    "code.jsonl:-1 books.txt:1": "code.jsonl:-1: the weight is not a number above 0",
    "code.jsonl:half books.txt:1": "code.jsonl:half: the weight is not a number above 0, such as 0.7, 7 or 1/3",
    "code.jsonl: books.txt:1": "code.jsonl:: the weight is not a number above 0",
    "code.jsonl:1/0 books.txt:1": "code.jsonl:1/0: the weight is not a number above 0",
    "code.jsonl:1e-9 books.txt:1": "in the proportion 1:1000000000, whose sum is 1,000,000,001; round them",
    "code.jsonl:1e-999 books.txt:1": "code.jsonl:1e-999: the weight is not a number above 0",
    "code.jsonl:1": "a single source has no weight; remove :1, or pass more files",
    "code.jsonl:1 code.jsonl:2": "code.jsonl is in both sources; leave it in one",
    "code.jsonl:1 *.jsonl:2": "code.jsonl is in both sources; leave it in one",
    "code.jsonl:0.123457 books.txt:1": f"whose sum is 1,123,457; round them until it is {MAX_LENGTH:,} at most",
    "nothing.jsonl:1 books.txt:1": "nothing.jsonl: no such file; correct the path",
    "code.jsonl:1 books.txt:1 --num_epochs 2": "--num_epochs 2.0: mixed files have epochs of different lengths; use",
    "code.jsonl:1 books.txt:1 --eval_every 1epoch": "--eval_every 1epoch: mixed files have epochs of different lengths",
    "code.jsonl:1 books.txt:1 --save_every 1epoch": "--save_every 1epoch: mixed files have epochs of different lengths",
    "code.jsonl:1 books.txt:1 --drop_last_window": "--drop_last_window has no effect on mixed files",
    "code.jsonl --validation_file books.txt:1": "--validation_file .*: a weight is for the files of --train_file",
    "code.jsonl:1 books.txt:1 --validation_file held_books.txt held_books.txt": "held_books.txt is in both sources",
    "code.jsonl --dataset_name other:0.3": "--dataset_name other:0.3: a weight is for the files of --train_file",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_one_line(given, place, monkeypatch):
    monkeypatch.chdir(place)
    _, args = parsed("lm", monkeypatch, "--train_file", *given.split())
    with pytest.raises(UserError, match=MISTAKES[given]) as mistake:
        text_sources(args)
    assert "\n" not in str(mistake.value)


def test_a_mistake_writes_nothing_and_a_stream_is_refused(place, tmp_path):
    """Control: a file whose name has a colon is one without a weight."""
    out = ["--output_dir", tmp_path / "out"]
    assert_mistake(
        run_recipe_alone("lm.py", "--train_file", f"{place / 'code.jsonl'}:x", *out),
        "code.jsonl:x: a single source has no",
    )
    streamed = run_recipe_alone("lm.py", "--dataset_name", "some", "--streaming", *out)
    assert_mistake(streamed, r"--streaming: not here: the samples of an update depend on the dataset length")
    assert not (tmp_path / "out").exists()
    shutil.copy(place / "code.jsonl", tmp_path / "1:0.5.jsonl")
    dry = run_recipe_alone("lm.py", "--train_file", tmp_path / "1:0.5.jsonl", "--dry_run", "--sequence_length", 32)
    assert dry.returncode == 0 and "1:0.5.jsonl, column text: " in dry.stdout
