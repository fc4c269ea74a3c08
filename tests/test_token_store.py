"""What is appended to a token store is what is read from it; a store that was not finished is none."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from conftest import ROOT, TEXTS, source_of

from common.data.cache import cached
from common.data.examples import mark_targets
from common.data.text import tokenize
from common.data.token_store import TokenStore, TokenWriter, split_targets
from common.tasks.dpo.preferences import tokenize_preferences
from common.tasks.seq2seq.pairs import tokenize_pairs

NAMES = ("source", "target")


def random_rows(seed, number=200):
    """Rows of two sequences, many of them empty, and a number beside each."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 40, (number, 2)) * rng.integers(0, 2, (number, 2))
    return [([rng.integers(-70_000, 70_000, n) for n in row], rng.integers(0, 1 << 40, 2).tolist()) for row in lengths]


def write(directory, rows, names=NAMES):
    directory.mkdir()
    with TokenWriter(directory, weights=[]) as writer:
        for sequences, weights in rows:
            writer.append(*sequences, weights=weights)
        writer.finish(Counter({"rows": len(rows), 7: 1}), name="made")
    return TokenStore(directory, names)


def same(store, rows):
    """Whether a store has these rows: tokens, lengths, numbers and their count."""
    found = [list(store.row(index).values()) for index in range(len(store))]
    flat = [(sequence.tolist(), len(sequence)) for row in found for sequence in row]
    lengths = store.lengths(np.arange(len(store)))
    return (
        flat == [(sequence.tolist(), len(sequence)) for sequences, _ in rows for sequence in sequences]
        and lengths.shape == (len(store), len(store.names))
        and lengths.ravel().tolist() == [length for _, length in flat]
        and store.column("weights").tolist() == [number for _, numbers in rows for number in numbers]
    )


@pytest.mark.parametrize("seed", range(5))
def test_rows_come_back_as_they_were_appended(seed, tmp_path):
    rows = random_rows(seed)
    store = write(tmp_path / "store", rows)
    assert same(store, rows) and len(store) == len(rows)
    assert any(len(sequence) == 0 for sequences, _ in rows for sequence in sequences)
    assert store.row(3).keys() == set(NAMES) and store.row(3)["source"].dtype == np.int32
    chosen = np.random.default_rng(seed).permutation(len(rows))[:50]
    assert store.lengths(chosen).tolist() == [[len(one) for one in rows[index][0]] for index in chosen]
    assert store.lengths(5).tolist() == store.lengths([5])[0].tolist()
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            store.row(index)
    for index in (0, len(rows) - 1):  # the controls: one other token, an order, a number
        (first, second), numbers = rows[index]
        others = [([np.append(first, 1), second], numbers), ([second, np.append(first, 1)], numbers)]
        for other in [*others, ([first, second], [numbers[0], -1])]:
            assert not same(store, [*rows[:index], other, *rows[index + 1 :]])


@pytest.mark.parametrize("rows", [[], [([np.array([], int)] * 2, [1, 2])]], ids=["no row", "no token"])
def test_a_store_can_be_empty(rows, tmp_path):
    store = write(tmp_path / "store", rows)
    assert same(store, rows) and len(store) == len(rows) and store.meta["tokens"] == 0
    assert store.lengths(np.arange(len(rows))).tolist() == [[0, 0]] * len(rows)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 16, 17, 18])
def test_a_stream_is_read_in_blocks_that_share_a_token(num_tokens, tmp_path):
    stream = np.arange(num_tokens)
    with TokenWriter(tmp_path, is_stream=True) as writer:
        for piece in np.split(stream, [num_tokens // 3]):  # where a sequence ends is not kept
            writer.append(piece)
        writer.finish(Counter())
    for size in (1, 4, 8):
        store = TokenStore(tmp_path, block_length=size)
        rows = [stream[start : start + size + 1].tolist() for start in range(0, max(0, num_tokens - 1), size)]
        assert [store.row(index)["tokens"].tolist() for index in range(len(store))] == rows
        assert store.lengths(np.arange(len(rows)))[:, 0].tolist() == [len(row) for row in rows]


def test_counts_facts_and_the_digest_are_kept(tmp_path):
    rows = random_rows(0)
    first, again, other = (
        write(tmp_path / name, given) for name, given in {"a": rows, "b": rows, "c": rows[1:]}.items()
    )
    assert first.meta["rows"] == 200 and first.meta["name"] == "made" and "7" not in first.meta
    assert first.meta["tokens"] == len(first.tokens)
    assert first.meta["content"] == again.meta["content"] != other.meta["content"]


def digest_of(*files):
    """As checkpoints know the data: files in the order of their names, int32 tokens last, the others int64."""
    digest = hashlib.blake2b(digest_size=10)
    for number, values in enumerate(files, 1):
        values = np.array(values, "<i4" if number == len(files) else "<i8")
        digest.update(hashlib.sha256(values.tobytes()).digest())
    return digest.hexdigest()


def test_runs_that_began_before_know_their_data(tokenizer, tmp_path, cache):
    """Their checkpoints have the digests of these bytes, and no other ones, or --resume would reject them."""
    eos = tokenizer.eos_token_id
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    texts = source_of(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    stream = [~eos, *(token for ids in plain for token in [*ids, eos])]
    assert tokenize(texts, tokenizer, 9, "blocks", cache).fingerprint == f"{digest_of(stream)}-9"
    examples = [[~eos, *ids, eos][:10] for ids in plain if ids]
    ends, targets = (np.cumsum([0, *(len(one) - n for one in examples)]) for n in (0, 1))
    expected = digest_of(ends, targets, np.concatenate(examples))
    assert tokenize(texts, tokenizer, 9, "examples", cache).fingerprint == f"{expected}-9"

    rows = source_of(tmp_path / "pairs.jsonl", [{"source": "a b", "target": "c"}, {"source": "d", "target": "hello"}])
    words = [[eos, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in ("a b", "c", "d", "hello")]
    words = [ids + [eos] * (number % 2) for number, ids in enumerate(words)]
    pairs = tokenize_pairs(rows, ("source", "target"), tokenizer, 20, 20, cache)
    ends = np.cumsum([0, *map(len, words)])
    assert pairs.fingerprint == digest_of(ends, np.concatenate(words)) != digest_of(ends + 1, np.concatenate(words))

    rows = source_of(tmp_path / "answers.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c d"}])
    prompt, chosen, rejected = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "b", "c d"))
    answers = [[*(~token for token in [eos, *prompt]), *answer, eos] for answer in (chosen, rejected)]
    counts = [len(answer) - 1 - len(prompt) for answer in answers]
    expected = digest_of(np.cumsum([0, *map(len, answers)]), counts, np.concatenate(answers))
    assert tokenize_preferences(rows, tokenizer, 20, "", cache).fingerprint == f"{expected}-20"


def test_a_row_must_have_a_value_for_every_column(tmp_path):
    with TokenWriter(tmp_path, weights=[]) as writer, pytest.raises(KeyError, match="weights"):
        writer.append([1])


def test_a_sequence_is_cut_and_keeps_its_targets(tmp_path):
    ids, is_target = list(range(10)), [True, False] * 5
    stored = mark_targets(ids, is_target, 6)
    assert stored.tolist() == [~0, ~1, 2, ~3, 4, ~5, 6]  # the first is no target: nothing comes before it
    tokens, targets, rows = split_targets(stored)
    assert tokens.tolist() == ids[:7] and targets.tolist() == [2, 4, 6] and rows.tolist() == [1, 3, 5]
    assert [tokens[row + 1] for row in rows] == targets.tolist()
    assert len(mark_targets(ids, is_target, 50)) == 10


def test_pickled_it_is_a_path(tmp_path):
    rows = random_rows(1)
    store = write(tmp_path / "store", rows)
    pickled = pickle.dumps(store)
    assert len(pickled) < 300 < len(pickle.dumps(np.array(store.tokens)))
    assert same(pickle.loads(pickled), rows)


def _same_in_process(store, rows):
    return os.getpid(), same(store, rows)


def test_processes_read_one_store_together(tmp_path):
    rows, others = random_rows(2), random_rows(3)
    store = write(tmp_path / "store", rows)
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(_same_in_process, [store] * 6, [rows, others] * 3))
    assert [is_same for _, is_same in found] == [True, False] * 3  # the control: other rows are not the same
    assert os.getpid() not in {process for process, _ in found}


# Appends rows until it is killed, or finishes the store if it is to write only some.
WRITER = """
import itertools, sys
from collections import Counter
from pathlib import Path
from common.data.cache import cached
from common.data.token_store import TokenWriter

def write(directory):
    with TokenWriter(directory) as writer:
        for number in itertools.count() if sys.argv[2] == "for ever" else range(1000):
            writer.append([number] * 1000)
            if number == 500:
                print("appended", flush=True)
        writer.finish(Counter())

print(cached("made", [], write, Path(sys.argv[1])))
"""


def start_writer(cache, how):
    command = [sys.executable, "-c", WRITER, str(cache), how]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path):
    """Control: one that ends leaves a store, and the next process does not write it again."""
    process = start_writer(tmp_path, "for ever")
    assert process.stdout.readline() == "appended\n"
    (partial,) = (path for path in tmp_path.iterdir() if path.is_dir())
    deadline = time.monotonic() + 60
    while not (partial / "tokens.bin").stat().st_size:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    with pytest.raises(FileNotFoundError):
        TokenStore(partial)
    finished = start_writer(tmp_path, "some")
    printed, _ = finished.communicate(timeout=60)
    store = TokenStore(printed.split()[-1])
    assert finished.returncode == 0 and len(store) == 1000 and store.row(999)["tokens"].tolist() == [999] * 1000
    assert not partial.exists()
    assert start_writer(tmp_path, "some").communicate(timeout=60)[0].split() == printed.split()[-1:]


def test_a_writer_that_fails_leaves_no_store(tmp_path):
    def write(directory):
        with TokenWriter(directory) as writer:
            writer.append([1, 2])
            if is_wrong:
                raise ValueError("a row that cannot be read")
            writer.finish(Counter())

    is_wrong = True
    with pytest.raises(ValueError, match="cannot be read"):
        cached("made", [], write, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    is_wrong = False  # the control
    directory = cached("made", [], write, tmp_path)
    assert len(TokenStore(directory)) == 1 and json.loads((directory / "meta.json").read_text())["tokens"] == 2
