"""Data of every kind are read, once, in flat memory, and what is broken is named with its place."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import multiprocessing
import os
import pickle
import subprocess
import sys
import sysconfig
import time
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from conftest import ROOT, TEXTS, source_of, write_jsonl

from common.arguments import text_sources
from common.data import cache as cache_module
from common.data import readers
from common.data import text as text_module
from common.data.python_functions import python_functions
from common.data.source_types import Source
from common.data.sources import check_sources, open_source
from common.data.standard_library import embedded_files
from common.data.text import Samples, tokenize
from common.errors import UserError
from common.training.recipe_traits import Arguments

# --- the embedded corpus ---


def test_the_split_is_by_name_disjoint_and_the_same_in_every_process():
    train, validation = embedded_files("train"), embedded_files("validation")
    assert not set(train) & set(validation)
    assert 0.01 < len(validation) / len(train) < 0.12
    names = [name for name, _ in train + validation]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not any("test" in Path(name).parts or "site-packages" in name for name in names)
    # fixed by the name alone: these are what another machine computes, too
    assert "argparse.py" in dict(validation) and "calendar.py" in dict(train)
    module = "common.data.standard_library"
    command = f"from {module} import embedded_files as f; print(len(f('validation')), f('validation')[0][0])"
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    seen = subprocess.run([sys.executable, "-c", command], env=env, capture_output=True, text=True, check=True).stdout
    assert seen.split() == [str(len(validation)), validation[0][0]]


def test_written_as_files_the_corpus_is_the_same_text(tmp_path):
    """In the same order, whole: the way in which a run goes on under another version of Python."""
    subprocess.run([sys.executable, "-m", "common.data.standard_library", tmp_path], cwd=ROOT, check=True, timeout=100)
    for part in ("train", "validation"):
        source = Source(files=(str(tmp_path / part / "**/*.txt"),))
        own, files = (open_source(one).rows(("text",), True) for one in (Source(embedded=part), source))
        assert [row[1:3] for row in own if row.values["text"]] == [row[1:3] for row in files]


def test_functions_are_the_outermost_ones_with_decorators():
    text = "import x\n@x\ndef f():\n    def g(): pass\n    return g\n\x0c\n"
    text += "class A:\n    async def m(self):\n        return '\x0c'\n"
    first, second = python_functions(text)
    assert first == "@x\ndef f():\n    def g(): pass\n    return g\n"
    assert second == "async def m(self):\n    return '\x0c'\n"
    argparse = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    assert sum(1 for _ in python_functions(argparse)) > 100
    for function in itertools.islice(python_functions(argparse), 20):
        compile(function, "function", "exec")


# --- files and datasets ---

SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0" + bytes(4)  # a frame without contents, which other programs put in
COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: zstandard.ZstdCompressor().compress(content) + SKIPPED,
}


def test_all_kinds_of_files_give_the_same_samples(tokenizer, tmp_path, cache):
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    jsonl = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = io.StringIO(newline="")
    csv.writer(table).writerows([("id", "text"), *((row["id"], row["text"]) for row in rows)])
    tabs = io.StringIO(newline="")
    csv.writer(tabs, delimiter="\t").writerows([("id", "text"), *((row["id"], row["text"]) for row in rows)])
    contents = {"jsonl": jsonl, "json": json.dumps(rows, indent=1).encode(), "csv": table.getvalue().encode()}
    contents["tsv"] = tabs.getvalue().encode()
    for name, content in contents.items():
        (tmp_path / f"a.{name}").write_bytes(content)
        for extension, compress in COMPRESS.items():
            (tmp_path / f"a.{name}.{extension}").write_bytes(compress(content))
            # Parts that were compressed apart, as parallel programs and appending do it; one of them is empty.
            parts = [content[:9], b"", content[9:20], content[20:]]
            (tmp_path / f"parts.{name}.{extension}").write_bytes(b"".join(map(compress, parts)))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl)
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=table.select([0]), test=table).save_to_disk(tmp_path / "both")
    for name, part in (("train", rows[:1]), ("test", rows)):
        (tmp_path / "folder").mkdir(exist_ok=True)
        write_jsonl(tmp_path / "folder" / f"{name}.jsonl", part)
    halves = [tmp_path / "half1.jsonl", tmp_path / "half2.jsonl"]
    for half, part in zip(halves, (rows[:2], rows[2:]), strict=True):
        write_jsonl(half, part)
    sources = {path.name: Source(files=(str(path),)) for path in tmp_path.glob("*.*") if path not in halves}
    assert len(sources) == 4 + 2 * 4 * 4 + 2
    sources["several"] = Source(files=tuple(map(str, halves)))
    sources["glob"] = Source(files=(str(tmp_path / "half*.jsonl"), str(halves[0])))  # none is read twice
    sources["saved"] = Source(dataset_name=str(tmp_path / "saved"))
    sources["both"] = Source(dataset_name=str(tmp_path / "both"), split="test")
    sources["folder"] = Source(dataset_name=str(tmp_path / "folder"), split="test")

    def targets(source):
        samples = tokenize(source, tokenizer, 9, None, cache)
        return [samples[i][1].tolist() for i in range(len(samples))]

    expected = targets(sources["a.jsonl"])
    for name, source in sources.items():
        assert targets(source) == expected, name
    for name in ("both", "folder"):
        assert targets(Source(dataset_name=str(tmp_path / name))) != expected  # the control: the other split
        with pytest.raises(UserError, match="no split dev; there are: .*te"):
            open_source(Source(dataset_name=str(tmp_path / name), split="dev"))
        args = Arguments(frozenset({"text_column", "prompt_column", "completion_column"}), train_file=[])
        args.dataset_name, args.dataset_config = str(tmp_path / name), None
        args.text_column, args.validation_file, args.prompt_column, args.completion_column = "text", [], None, None
        assert text_sources(args)[1].split == "test"  # held out, as there is no validation split
    (tmp_path / "inside").mkdir()
    write_jsonl(tmp_path / "inside/a.jsonl", rows)
    for pattern in ("a.jsonl", "../inside/a.jsonl", str(halves[0])):
        readme = f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {pattern}\n---\n"
        (tmp_path / "inside/README.md").write_text(readme)
        if pattern != str(halves[0]):  # a path back into the folder too
            assert targets(Source(dataset_name=str(tmp_path / "inside"))) == expected
            continue
        with pytest.raises(UserError, match="inside: its README.md names .*half1.jsonl, which is outside"):
            open_source(Source(dataset_name=str(tmp_path / "inside")))
        args.validation_file = [str(halves[0])]
        assert text_sources(args)[1].files == (str(halves[0]),)


def test_text_that_looks_like_something_else_stays_text(tmp_path):
    texts = ["2020-01-01", "003", "NA", "", "null", "nan", "1e400"]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"{text},1\n" for text in texts))
    (tmp_path / "index.csv").write_text(",text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(texts)))
    for name in ("a.jsonl", "a.csv", "index.csv"):
        rows = open_source(Source(files=(str(tmp_path / name),))).rows(("text",), False)
        assert [row.values["text"] for row in rows] == texts
    # the control: what the library's reader makes of it
    read = datasets.load_dataset(
        "csv", data_files=str(tmp_path / "a.csv"), split="train", cache_dir=str(tmp_path / "hf")
    )
    assert read["text"] != texts


# --- bad input ---

LINE = b'{"text": "hello"}\n'
BROKEN = {
    "empty.jsonl": (b"", "empty.jsonl: the file is empty"),
    "blank.jsonl": (b"\n\n", "blank.jsonl: the file holds no row"),
    "data.xyz": (b"x", r"data.xyz: unknown extension; use .txt"),
    "latin.txt": (b"x = 1\n" * 10 + b"caf\xe9\n", r"latin.txt: not UTF-8 at byte offset 63 \(0xe9"),
    "far.txt": (b"\xc3\xa4bc\n" * 200_000 + b"\xff", r"far.txt: not UTF-8 at byte offset 1000000 "),
    "cut.txt": (b"abc\xc3", r"cut.txt: not UTF-8 at byte offset 3 "),
    "latin.jsonl": (LINE * 2 + b'{"text": "\xe9"}\n', r"latin.jsonl: not UTF-8 at byte offset 46 "),
    "latin.csv": (b"text,n\nhello,1\n\xe9,2\n", r"latin.csv: not UTF-8 at byte offset 15 "),
    "bad.jsonl": (LINE * 3 + b'{"text": "never clo\n' + LINE, r"bad.jsonl, line 4: malformed JSON"),
    "list.jsonl": (LINE + b"\n[1]\n", r"list.jsonl, line 3: is a list, not an object"),
    "bad.json": (b'[{"text": "a"},', r"bad.json, item 2: malformed JSON"),
    "number.jsonl": (LINE + b'{"text": 3}\n', r"number.jsonl, line 2: column text is of type int, not a string"),
    "null.jsonl": (LINE + b'{"text": null}\n', r"null.jsonl, line 2: column text is null"),
    "half.jsonl": (LINE + b'{"text": "\\ud800"}\n', r"half.jsonl, line 2: half a surrogate pair \(U\+D800\)"),
    "pair.jsonl": (b'{"prompt": "a", "completion": "\\ud800"}\n', r"pair.jsonl, line 1: half a surrogate pair"),
    "later.jsonl": (LINE + b'{"body": "x"}\n', r"later.jsonl, line 2: no column text; there are: body"),
    "columns.jsonl": (b'{"body": "x", "title": "y"}\n', r"columns.jsonl: no column text; there are: body, title"),
    "columns.csv": (b"body,title\nx,y\n", r"columns.csv: no column text; there are: body, title"),
    "wide.csv": (b"text,n\nhello,2\na,b,c\n", r"wide.csv, line 3: the row does not have 2 fields"),
    "narrow.csv": (b"n,text\n1\n", r"narrow.csv, line 2: the row does not have 2 fields"),
    "quote.csv": (b'text,n\nhello,2\n"abc,4\n', r"quote.csv, in the row after line 2: malformed CSV"),
    "cut.txt.gz": (gzip.compress(os.urandom(9999).hex().encode())[:-99], r"cut.txt.gz: cannot be used "),
    "no.txt.gz": (b"plain", r"no.txt.gz: cannot be used "),
    "no.txt.xz": (b"plain", r"no.txt.xz: cannot be used "),
    "no.txt.zst": (b"plain", r"no.txt.zst: cannot be used "),
    "cut.txt.zst": (COMPRESS["zst"](os.urandom(300_000).hex().encode())[:-99], r"cut.txt.zst: cannot be used "),
    "cut.txt.bz2": (bz2.compress(os.urandom(9999).hex().encode())[:-99], r"cut.txt.bz2: cannot be used "),
    "cut.txt.xz": (lzma.compress(os.urandom(9999).hex().encode())[:-99], r"cut.txt.xz: cannot be used "),
    "twice.csv": (b"text,n,text\na,1,b\n", r"twice.csv: the header has the column text twice; rename"),
    "twice.tsv": (b"text\tn\ttext\na\t1\tb\n", r"twice.tsv: the header has the column text twice; rename"),
    "nameless.csv": (b"text,,n\na,1,b\n", r"nameless.csv: column 2 has no name in the header"),
    "wide.tsv": (b"text\tn\nhello\t2\na\tb\tc\n", r"wide.tsv, line 3: the row does not have 2 fields .* check tabs"),
    "twice.jsonl": (LINE + b'{"text": "a", "text": "b"}\n', r"twice.jsonl, line 2: .* has the key 'text' twice"),
    "twice.json": (b'[{"text": "a", "text": "b"}]', r"twice.json, item 1: .* has the key 'text' twice"),
    "inside.jsonl": (b'{"text": "a", "more": [{"role": 1, "role": 2}]}', r"has the key 'role' twice"),
    "nothing.txt.gz": (gzip.compress(b""), r"nothing.txt.gz: the file holds no row"),
    "no.parquet": (b"plain", r"no.parquet: cannot be read as Parquet"),
    "a.parquet.gz": (b"x", r"a.parquet.gz: a Parquet file .* unpack it"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named_with_the_place(tokenizer, tmp_path, cache, name):
    content, pattern = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=pattern) as error:
        tokenize(Source(files=(str(tmp_path / name),)), tokenizer, 50, None, cache)
    assert len(str(error.value).splitlines()) == 1
    assert not [path for path in cache.glob("*") if path.suffix != ".lock"]  # complete or absent


def test_broken_rows_of_parquet_and_datasets(tokenizer, tmp_path, cache):
    table = datasets.Dataset.from_dict({"text": ["a", None], "body": ["b", "c"], "n": [1, 2]})
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    for source in (Source(files=(str(tmp_path / "a.parquet"),)), Source(dataset_name=str(tmp_path / "saved"))):
        place = r"a.parquet, row 2" if source.files else r"saved\[train\]\[1\]"
        with pytest.raises(UserError, match=place + ": column text is null"):
            tokenize(source, tokenizer, 50, None, cache)
        other = Source(files=source.files, dataset_name=source.dataset_name, text_column="n")
        with pytest.raises(UserError, match="column n is of type int, not a string"):
            tokenize(other, tokenizer, 50, None, cache)
        missing = Source(files=source.files, dataset_name=source.dataset_name, text_column="story")
        with pytest.raises(UserError, match="no column story; there are: text, body, n"):
            tokenize(missing, tokenizer, 50, None, cache)
        good = Source(files=source.files, dataset_name=source.dataset_name, text_column="body")
        assert tokenize(good, tokenizer, 50, None, cache).meta["documents"] == 2
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match="twice.parquet: the header has the column text twice"):
        tokenize(Source(files=(str(tmp_path / "twice.parquet"),)), tokenizer, 50, None, cache)


def test_all_problems_are_told_together(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "good[1].txt").write_text("x")  # brackets in a name are no pattern
    train = Source(files=tuple(str(tmp_path / name) for name in ("no.txt", "*.csv", "empty.txt", "good[1].txt")))
    with pytest.raises(UserError) as error:
        check_sources(train, Source(files=("nowhere.jsonl",)), None)
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    for line, words in zip(lines, ("no.txt: no such", "no file matches", "is empty", "nowhere.jsonl"), strict=True):
        assert words in line
    check_sources(Source(files=(str(tmp_path / "good[1].txt"),)), Source(embedded="train"))


# --- the cache ---


def test_a_source_is_tokenised_once_until_something_changes(tokenizer, tmp_path, cache, work):
    source = source_of(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    first = tokenize(source, tokenizer, 8, None, cache)
    tokenizer(TEXTS, padding=True)  # leaves settings in the tokenizer that change nothing here
    assert tokenize(source, tokenizer, 8, "blocks", cache).fingerprint == first.fingerprint
    assert tokenize(source, tokenizer, 9, None, cache).fingerprint != first.fingerprint
    assert len(work) == 1
    tokenize(source, tokenizer, 8, "examples", cache)
    tokenize(source, tokenizer, 9, "examples", cache)
    assert len(work) == 3
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS[::-1]])  # as long as before
    changed = tokenize(source, tokenizer, 8, None, cache)
    assert len(work) == 4 and changed.fingerprint != first.fingerprint


def test_samples_are_mapped_again_in_a_worker_process(tokenizer, tmp_path, cache):
    source = source_of(tmp_path / "a.jsonl", [{"text": text * 200} for text in TEXTS])
    for shape in ("blocks", "examples"):
        samples = tokenize(source, tokenizer, 8, shape, cache)
        pickled = pickle.dumps(samples)
        assert len(pickled) < 500  # a path, not the data
        copy = pickle.loads(pickled)
        assert isinstance(copy, Samples) and copy[1][1].tolist() == samples[1][1].tolist()


def _tokenize_in_process(source, tokenizer, cache, log, barrier, locked):
    write = text_module._write_samples

    def slow_write(*args):
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        write(*args)

    text_module._write_samples = slow_write
    if not locked:
        cache_module.only_one = lambda directory: nullcontext(directory.parent.mkdir(exist_ok=True))
    barrier.wait()
    tokenize(source, tokenizer, 8, None, cache)


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "control: no lock"])
def test_of_two_processes_one_tokenises(tokenizer, tmp_path, cache, locked):
    source, log = source_of(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), tmp_path / "log"
    context = multiprocessing.get_context("fork")
    arguments = (source, tokenizer, cache, log, context.Barrier(2), locked)
    processes = [context.Process(target=_tokenize_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    # Without the lock both write; or one fails, where the other's files come into being under its feet.
    exits = [process.exitcode for process in processes]
    assert (exits == [0, 0] and len(log.read_text().split()) == 1) == locked
    if locked:
        assert len([path for path in cache.iterdir() if path.suffix != ".lock"]) == 1


def test_an_unwritable_cache_is_one_line(tokenizer, tmp_path):
    (tmp_path / "file").write_text("a file where the cache's directory should be")
    source = source_of(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(UserError, match="cache .*cannot be written"):
        tokenize(source, tokenizer, 8, None, tmp_path / "file")


PEAK = """
import os, resource, sys
from common.data import encoding_threads, row_texts, text, reading_progress
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
for name, batch in (("small", None), ("large", None), ("large", 1 << 40)):
    if (child := os.fork()) == 0:  # a fresh peak for each, and the libraries are imported once
        row_texts.BATCH_CHARACTERS = batch or row_texts.BATCH_CHARACTERS
        source = text.Source(files=(f"{sys.argv[2]}/{name}.jsonl",))
        text.tokenize(source, tokenizer, 512, "blocks", f"{sys.argv[2]}/cache-{batch}")
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_memory_does_not_grow_with_the_file(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    row = json.dumps({"text": "def f(x): return x + hello hello hello\n" * 40}) + "\n"
    for name, megabytes in (("small", 1), ("large", 8)):
        (tmp_path / f"{name}.jsonl").write_text(row * (megabytes * 1_000_000 // len(row)))
    command = [sys.executable, "-c", PEAK, str(tmp_path / "tokenizer"), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    small, large, all_at_once = map(int, output.split())
    assert large - small < 30, output  # MB
    assert all_at_once - small > 100, output  # the control: the whole file in one batch


def test_reading_a_large_file_keeps_no_more_than_a_piece(tmp_path):
    with open(tmp_path / "a.txt", "w") as file:
        for _ in range(20):
            file.write("x" * 1_000_000)  # one line of 20 MB
    tracemalloc.start()
    for _ in open_source(Source(files=(str(tmp_path / "a.txt"),))).rows(("text",), True):
        pass
    assert tracemalloc.get_traced_memory()[1] < 5e6
    for _ in readers.decode(str(tmp_path / "a.txt"), 64 << 20):  # the control: by lines
        pass
    assert tracemalloc.get_traced_memory()[1] > 20e6
    tracemalloc.stop()
