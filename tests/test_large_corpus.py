"""A large corpus is encoded in threads, with the tokens of a small one, and its progress has a time left."""

import copy
import gzip
import io
import json
import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import TEXTS, source_of

from common.data import encoding_threads, reading_progress, row_texts, source_types, tokenizer_training
from common.data.source_types import Source
from common.data.sources import open_source
from common.data.text import tokenize
from common.data.tokenizer import encode_plain
from common.errors import UserError

MANY = [f"{text} {'ü🥊' * (number % 3)} {number}" for number in range(100) for text in TEXTS]
MANY += ["", " ", "a <|endoftext|> inside", "ein Satz. " * 2000]


def set_large_bytes(monkeypatch, number):
    monkeypatch.setattr(source_types, "LARGE_BYTES", number)


@pytest.fixture
def large(monkeypatch):
    """Makes any file a large corpus of many batches; returns the texts of each call of the backend."""
    calls, encode = [], encoding_threads.encode_ids
    set_large_bytes(monkeypatch, 1)
    monkeypatch.setattr(row_texts, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(encoding_threads, "encode_ids", lambda *args: (calls.append(args[0]), encode(*args))[1])
    return calls


@pytest.mark.parametrize("kind", ["blocks", "examples", "pairs", "documents"])
def test_a_large_corpus_has_the_tokens_of_a_small_one(tokenizer, tmp_path, monkeypatch, large, kind):
    rows = [{"text": text} for text in MANY]
    if kind == "pairs":
        rows = [{"prompt": text, "completion": text[:7] + "!"} for text in MANY]
    source = source_of(tmp_path / "a.jsonl", rows)
    if kind == "documents":
        source = Source(files=source.files, document_mask=True)
    shape = kind if kind in ("blocks", "examples") else None
    samples = tokenize(source, tokenizer, 30, shape, tmp_path / "large")
    assert len(large) > 10  # the control: they were encoded in batches
    del large[:]
    set_large_bytes(monkeypatch, 10**9)
    small = tokenize(source, tokenizer, 30, shape, tmp_path / "small")
    assert not large and samples.meta == small.meta
    assert np.array_equal(samples.tokens, small.tokens) and len(small.tokens) > 1000


@pytest.mark.parametrize(
    "options", [{"truncation": True, "max_length": 2}, {"padding": "max_length", "max_length": 90}]
)
def test_settings_that_an_earlier_call_left_do_not_count(tokenizer, options):
    own = copy.deepcopy(tokenizer)
    own(TEXTS, **options)
    is_set = own.backend_tokenizer.truncation or own.backend_tokenizer.padding
    assert (
        is_set and encoding_threads.encode_ids(TEXTS, own, encode_plain) == encode_plain(tokenizer, TEXTS)["input_ids"]
    )


def test_special_tokens_in_a_text_are_split_as_the_tokenizer_says(tokenizer):
    own, text = copy.deepcopy(tokenizer), ["a <|endoftext|> b"]
    assert tokenizer.eos_token_id in encoding_threads.encode_ids(text, own, encode_plain)[0]
    own.split_special_tokens = True
    assert tokenizer.eos_token_id not in encoding_threads.encode_ids(text, own, encode_plain)[0]


def test_an_error_of_a_row_has_its_line(tokenizer, tmp_path, cache, large):
    rows = [{"text": text} for text in MANY]
    rows[200]["text"] = "\ud800"
    with pytest.raises(UserError, match="a.jsonl, line 201: half a surrogate pair"):
        tokenize(source_of(tmp_path / "a.jsonl", rows), tokenizer, 30, None, cache)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
@pytest.mark.parametrize("whole_files", [True, False])
def test_the_sizes_of_the_rows_are_that_of_the_file(tmp_path, name, whole_files):
    lines = [json.dumps({"text": text, "other": [1, "ü"]}, ensure_ascii=False) for text in MANY]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    source = Source(files=(str(tmp_path / "a.jsonl"),))
    if name == "a.txt":
        (tmp_path / name).write_text("".join(f"ü {number}\r\n" for number in range(80_000)), newline="")
        source = Source(files=(str(tmp_path / name),))
    header = "ü,text\n" if name == "a.csv" else ""
    if header:
        (tmp_path / name).write_text(header + "".join(f'ü,"{number}\n"\n' for number in range(800)))
        source = Source(files=(str(tmp_path / name),))
    corpus = open_source(source)
    sizes = [row.num_bytes for row in corpus.rows(("text",), whole_files)]
    assert sum(sizes) + len(header.encode()) == corpus.num_bytes == (tmp_path / name).stat().st_size and len(sizes) > 1
    unknown = open_source(Source(embedded="validation"))
    assert unknown.num_bytes == 0


@pytest.mark.parametrize("name", ["a.json", "b.json", "a.parquet", "a.jsonl.gz"])
def test_the_sizes_of_the_rows_of_other_files(tmp_path, name):
    """Of an array all but the brackets and what separates the rows; of Parquet the rows' share of the compressed file.

    The size of a compressed file says nothing about its rows.
    """
    rows, path = [{"text": text} for text in MANY], tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": MANY, "other": MANY}), path, row_group_size=100, compression="zstd")
    elif name == "a.jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    else:
        path.write_text(json.dumps(rows, ensure_ascii=name == "a.json"))
    corpus = open_source(Source(files=(str(path),)))
    sizes = [row.num_bytes for row in corpus.rows(("text",), True)]
    assert len(sizes) == len(rows)
    if name == "a.jsonl.gz":
        assert corpus.num_bytes == 0
        return
    assert corpus.num_bytes == path.stat().st_size
    assert sum(sizes) + (2 * len(rows) if name != "a.parquet" else 0) == corpus.num_bytes


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(("most", "size"), [(10**9, "46.4k"), (20_000, "20.0k")], ids=["whole", "beginning"])
def test_training_a_tokenizer_has_progress_too(tmp_path, monkeypatch, large, most, size):
    """Of a file that is larger than what it reads, up to the end of that."""
    source, seen = source_of(tmp_path / "a.jsonl", [{"text": text} for text in MANY]), Stream(True)
    monkeypatch.setattr(tokenizer_training, "TOKENIZER_BYTES", most)
    monkeypatch.setattr(sys, "stderr", seen)
    tokenizer_training.train_bpe([(open_source(source), ("text",))], 300, ["<|endoftext|>"])
    assert re.search(rf"training a tokenizer on .*a.jsonl: +\d+%.*/{size} \[", seen.getvalue()), seen.getvalue()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_progress_ends_at_the_part_that_a_tokenizer_is_trained_on(tmp_path, monkeypatch, large, name):
    """Also of a file that is compressed: not its bytes count then, but those of the texts."""
    path, seen, texts = tmp_path / name, Stream(True), [f"{number} " * 30 for number in range(4000)]
    if name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), path, compression="zstd")
        source = Source(files=(str(path),))
    else:
        source = source_of(path, [{"text": text} for text in texts])
    most = path.stat().st_size // 2
    monkeypatch.setattr(tokenizer_training, "TOKENIZER_BYTES", most)
    monkeypatch.setattr(sys, "stderr", seen)
    tokenizer_training.train_bpe([(open_source(source), ("text",))], 300, ["<|endoftext|>"])
    shares = [int(share) for share in re.findall(r" +(\d+)%", seen.getvalue())]
    assert 95 <= shares[-1] <= 101, seen.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_has_a_time_left(tokenizer, tmp_path, cache, monkeypatch, large, is_terminal):
    """In a log as lines, and none before LOG_SECONDS."""
    source, seen = source_of(tmp_path / "a.jsonl", [{"text": text} for text in MANY]), Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", seen)
    if not is_terminal:
        tokenize(source, tokenizer, 30, None, tmp_path / "other")
        assert not seen.getvalue()
        monkeypatch.setattr(reading_progress, "LOG_SECONDS", 1e-9)
    tokenize(source, tokenizer, 30, None, cache)
    lines = seen.getvalue().split("\r" if is_terminal else "\n")
    assert ("\r" in seen.getvalue()) == is_terminal
    assert any(re.search(r"tokenising .*a.jsonl: +\d+%.*\[\d\d:\d\d<\d\d:\d\d, ", line) for line in lines), lines
