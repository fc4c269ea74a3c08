"""Small files that would fill the memory or never end are refused in one line: templates, rows, Parquet, YAML."""

import bz2
import datetime
import gzip
import json
import lzma
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
import zstandard
from conftest import ROOT, assert_mistake, run, run_recipe_alone, source_of, write_jsonl
from PIL import EpsImagePlugin, Image

from common.data import chats, limited_process
from common.data.limited_process import LimitedProcess
from common.data.source_types import Source
from common.data.sources import open_source
from common.data.text import tokenize
from common.errors import UserError
from common.process import this_process
from common.tasks.vision import image_files

BOMBS = {
    "memory": "{{ 'a' * 10**10 }}",
    "small steps": "{% set n = namespace(y='a') %}{% for i in range(40) %}{% set n.y = n.y + n.y %}{% endfor %}",
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "output": "{{ 'a' * (80 * 2**20) }}",
}
PROBLEMS = {
    "memory": r"needs more than 512 MiB of memory",
    "small steps": r"needs more than 512 MiB of memory",
    "time": r"needs more than 1 s",
    "output": r"writes more than 64 MiB",
}


def peak_mib(reset=False):
    """Largest memory of this process since the last reset. Unlike ru_maxrss, it has nothing of a parent process."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def refusal(path, **options):
    """The line with which a file is refused, or the number of its rows."""
    try:
        corpus = open_source(Source(files=(str(path),), **options))
        return sum(1 for _ in corpus.rows(corpus.columns, False))
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


# Beginning and end of a row, between which a long text is put.
ROWS = {
    "jsonl": (b'{"text": "', b'"}\n'),
    "json": (b'[{"text": "', b'"}]'),
    "txt": (b"", b"\n"),
    "csv": (b'text\n"', b'"\n'),
}
PLACES = {"json": "item 1", "csv": "line 2"}
PACKED = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda text: zstandard.ZstdCompressor().compress(text),
}
# Reads a file in a process of its own, and prints the error and how much larger the process became, in MiB.
READING = """
import re, sys
from common.data.source_types import Source
from common.data.sources import open_source
from common.errors import UserError
for suffix in sys.argv[2:]:  # imports the readers
    next(open_source(Source(files=(sys.argv[1] + "small." + suffix,))).rows(("text",), False))
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
for suffix in sys.argv[2:]:
    try:
        list(open_source(Source(files=(sys.argv[1] + "large." + suffix,))).rows(("text",), False))
    except UserError as error:
        print(error)
print((peak() - before) >> 10)
"""


@pytest.mark.parametrize("extension", ROWS)
def test_a_row_of_500_mb_in_a_small_file_is_not_read_to_its_end(extension, tmp_path):
    """In any compression. Control: the file with a short text is read (by the same process, before)."""
    begin, end = ROWS[extension]
    suffixes = [f"{extension}.{packed}" for packed in (PACKED if extension == "jsonl" else ["gz"])]
    for suffix in suffixes:
        pack = PACKED[suffix.rpartition(".")[2]]
        (tmp_path / f"small.{suffix}").write_bytes(pack(begin + b"a" + end))
        long = b"a" * (500 << 20 if suffix.endswith("gz") else 100 << 20)
        (tmp_path / f"large.{suffix}").write_bytes(pack(begin + long + end))
    result = run([sys.executable, "-c", READING, f"{tmp_path}/", *suffixes])
    *lines, growth = result.stdout.splitlines()
    assert len(lines) == len(suffixes), result.stderr
    for line, suffix in zip(lines, suffixes, strict=True):
        place = PLACES.get(extension, "line 1")
        assert f"large.{suffix}, {place}: the row has more than 67,108,864 bytes; split it, or raise" in line
    assert int(growth) < 400  # the limit as bytes and text, and the text of JSON twice, of an array three times


def test_the_limit_of_a_row_is_a_flag(tmp_path):
    """Control: a larger limit."""
    rows = [{"text": "def f():\n" + "    return 1\n" * 100}] * 40
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    flags = ["--train_file", path, "--output_dir", tmp_path / "run", "--max_row_bytes", 1000]
    assert_mistake(run_recipe_alone("lm.py", *flags), r"a.jsonl, line 1: the row has more than 1,000 bytes")
    assert not (tmp_path / "run").exists()
    assert refusal(path, max_row_bytes=2000) == 40


COLUMNS = {f"c{number}": 1 for number in range(100_001)}
ODD = {
    "blank.jsonl": (b'{"a": 1}\n' + (b" " * 1023 + b"\n") * 1025, "line 1026: more than 1 MiB of blank lines"),
    "blank.json": (b" \n" * (1 << 19) + b" []", "blank.json: more than 1 MiB of blank lines; remove them"),
    "blank.txt": (b"a\n" + b"\n" * ((1 << 20) + 1), "line 1048578: more than 1 MiB of blank lines; remove them"),
    "pretty.jsonl": (b'{\n "a": 1\n}\n', "line 1: malformed JSON .*the object does not end on its line; write each"),
    "pretty.json": (b'{"a":\n 1\n}\n', "line 1: malformed JSON .*the object does not end on its line; write each"),
    "cr.jsonl": (b'{"a": 1}\r{"a": 2}\r', r"line 1: malformed JSON .*; lines end with CR \(old Mac\); convert"),
    "cr.csv": (b"a,b\r1,2\r", r"cr.csv, .*malformed CSV .*; lines end with CR \(old Mac\); convert the file to LF"),
    "cr.txt": (b"a\rb\r", r"line 1: lines end with CR \(old Mac\); convert the file to LF line ends"),
    "digits.jsonl": (b'{"a": ' + b"1" * 5000 + b"}", "line 1: .*an integer of more than 4,300 digits, which must be a"),
    "digits.json": (b'[{"a": ' + b"1" * 5000 + b"}]", "item 1: .*an integer of more than 4,300 digits, which must be"),
    "wide.jsonl": (json.dumps(COLUMNS).encode(), "line 1 has 100,001 columns, more than 100,000; keep only those"),
    "wide.json": (json.dumps([COLUMNS]).encode(), "item 1 has 100,001 columns, more than 100,000; keep only those"),
    "wide.csv": (",".join(COLUMNS).encode() + b"\n1", "the header has 100,001 columns, more than 100,000; keep only"),
    "deep.jsonl": (b'{"a":' * 100_000 + b"\n", r"line 1: malformed JSON \(nested too deeply\)"),
    "deep.json": (b"[" * 100_000, r"item 1: malformed JSON \(nested too deeply\)"),
    "comma.json": (b'[{"a": 1}, {"a": 2},]', r"item 3: malformed JSON \(Expecting value\); correct it"),
    "no_comma.json": (b'[{"a": 1} {"a": 2}]', r"item 1: malformed JSON \(no comma follows the object\)"),
    "after.json": (b'[{"a": 1}]\n[]', r"after.json: malformed JSON \(text follows the array\)"),
    "colon.json": (b'[{"a": 1}, {"a" 2}]' + b" " * 99_999, r"item 2: malformed JSON \(Expecting ':' delimiter\)"),
    "unclosed.csv": (b'a,b\n1,"' + b"2,3\n" * (1 << 20), r"in the row after line 1: the row has more than .*quotes"),
    "window.jsonl.xz": (
        lzma.compress(b'{"a": 1}\n', filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 28}]),
        "Memory usage limit exceeded; write it with xz -9 at most",
    ),
    "window.jsonl.zst": (
        b"\x28\xb5\x2f\xfd\x00\xa0\x51\x00\x00" + b'{"a": 1}\n\n',  # its header requests 1 GiB
        "Frame requires too much memory for decoding; write it with zstd --long=27 at most",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_refused_with_the_right_line(name, tmp_path):
    content, pattern = ODD[name]
    (tmp_path / name).write_bytes(content)
    assert re.search(pattern, str(refusal(tmp_path / name, max_row_bytes=1 << 22)))


# What differs from the files above by what makes them odd.
USUAL = {
    "blank.jsonl": (b'{"a": 1}\n' + (b" " * 1023 + b"\n") * 1023 + b'{"a": 1}\n', 2),
    "blank.json": (b" \n" * (1 << 18) + b'[{"a": 1}]', 1),
    "crlf.jsonl": (b'{"a": 1}\r\n{"a": 2}\r\n', 2),
    "crlf.csv": (b"a,b\r\n1,2\r\n", 1),
    "crlf.txt": (b"a\r\nb\r\n", 2),
    "cr.json": (b'[{"a": 1},\r{"a": 2}\r]\r', 2),
    "digits.json": (b'[{"a": ' + b"1" * 4000 + b"}]", 1),
    "bom.json": (b'\xef\xbb\xbf[{"a": 1} , {"a": "\xc3\xa9"}]', 2),
    "large.json": (json.dumps([{"a": "\xe9" * 10**size} for size in range(7)], ensure_ascii=False).encode(), 7),
    "quoted.csv": (b'a,b\n1,"2\n' + b"3\n" * 9999 + b'4"\n', 1),
    "window.jsonl.xz": (lzma.compress(b'{"a": 1}\n', preset=9), 1),
    "window.jsonl.zst": (b"\x28\xb5\x2f\xfd\x00\x88\x49\x00\x00" + b'{"a": 1}\n', 1),  # 128 MiB
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_files_like_these_are_read(name, tmp_path):
    content, rows = USUAL[name]
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path / name) == rows


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_chat_template_that_needs_too_much_is_refused_at_its_row(bomb, tokenizer, tmp_path, monkeypatch):
    """Control: the same template without that row is used."""
    seconds = 1 if bomb == "time" else 9
    monkeypatch.setattr(chats, "start_rendering", lambda: LimitedProcess("common.data.chat_rendering", seconds=seconds))
    loop = "{% for m in messages %}{{ m.role }}: {{ m.content }}</>"
    loop += "{% if m.content == 'bomb' %}" + BOMBS[bomb] + "{% endif %}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", loop)
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]}
        for content in ("b", "bomb", "c")
    ]
    before = peak_mib(reset=True)
    with pytest.raises(UserError, match=rf"bombs.jsonl, line 2: the chat template {PROBLEMS[bomb]}; use") as error:
        tokenize(source_of(tmp_path / "bombs.jsonl", rows), tokenizer, 64, None, tmp_path)
    assert "\n" not in str(error.value) and peak_mib() < before + 100
    assert len(tokenize(source_of(tmp_path / "rest.jsonl", rows[::2]), tokenizer, 64, None, tmp_path)) == 2


def test_a_bomb_in_a_template_file_is_refused_before_the_run(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    path = tmp_path / "bomb.jinja"
    flags = ["--train_file", write_jsonl(tmp_path / "a.jsonl", rows), "--chat_template", path]
    path.write_text(BOMBS["memory"])
    result = run_recipe_alone("lm.py", *flags, "--output_dir", tmp_path / "run")
    assert_mistake(result, r"--chat_template .*bomb.jinja: the template needs more than 512 MiB of memory; fix it")
    assert not (tmp_path / "run").exists()


def test_a_template_is_a_regular_file_of_at_most_a_mebibyte(tmp_path):
    """Control: one byte less is read."""
    loop = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = tmp_path / "a.jinja"
    path.write_text(loop.ljust(1 << 20))
    assert chats.read_chat_template(str(path)).startswith(loop)
    os.mkfifo(tmp_path / "fifo.jinja")
    path.write_text(loop.ljust((1 << 20) + 1))
    for name in ("a.jinja", "fifo.jinja"):
        with pytest.raises(UserError, match=f"{name}: not a regular file of at most 1 MiB"):
            chats.read_chat_template(str(tmp_path / name))


def test_the_process_has_limits_and_neither_torch_nor_secrets(monkeypatch):
    """It is one process for all requests, also of the next block with the same limits."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    request = {"probe": "{{ messages[0].content }}"}
    with chats.start_rendering() as process:
        assert [*process.ask(request)] == [["abc", 0, ""]]
        child = psutil.Process(process.process.pid)
        assert [*process.ask(request)] == [["abc", 0, ""]] and process.process.pid == child.pid
        assert child.ppid() == os.getpid() and "HF_TOKEN" not in child.environ()
        assert not [mapping.path for mapping in child.memory_maps() if "/torch/" in mapping.path]
        limits = {kind: child.rlimit(getattr(psutil, f"RLIMIT_{kind}"))[0] for kind in ("FSIZE", "NPROC", "CORE")}
        assert limits == dict.fromkeys(limits, 0)
        assert child.rlimit(psutil.RLIMIT_NOFILE)[0] == 32 and child.rlimit(psutil.RLIMIT_CPU)[0] < 30
    for seconds, is_same in ((limited_process.SECONDS, True), (9, False)):
        with chats.start_rendering(seconds=seconds) as process:
            assert [*process.ask(request)] == [["abc", 0, ""]]
            assert (process.process.pid == child.pid) == is_same


def test_a_process_without_requests_ends_and_is_replaced():
    """Between blocks, and within one. One whose answers are not all read ends with the block."""
    request, found = {"probe": "{{ messages[0].content }}"}, []
    for _ in range(2):
        with chats.start_rendering(idle_seconds=1) as process:
            for _ in range(2):
                assert [*process.ask(request)] == [["abc", 0, ""]]
                found.append(process.process)
                assert process.process.wait(timeout=30) == limited_process.IDLE_STATUS
    assert len({child.pid for child in found}) == 4
    with chats.start_rendering(idle_seconds=1) as process:
        answers = process.ask(request)
        assert next(answers) == ["abc", 0, ""]
        child = process.process
    assert child.poll() == -signal.SIGKILL


ENDLESS = """
import sys
from common.data import chats
with chats.start_rendering() as process:
    print(list(process.ask({"probe": "a"})), process.process.pid, flush=True)
    list(process.ask({"probe": sys.argv[1]}))
"""


def test_the_process_ends_when_the_training_process_is_killed():
    """Amid a template that never ends. Control: until then it runs."""
    command = [sys.executable, "-c", ENDLESS, BOMBS["time"]]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline().split()[-1]))
    time.sleep(1)
    assert child.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert not psutil.wait_procs([child], timeout=5)[1]


def list_of(values, lengths):
    """A table with a list in each row, one after the other from these values."""
    offsets = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    return pyarrow.table({"a": pyarrow.ListArray.from_arrays(pyarrow.array(offsets, pyarrow.int32()), values)})


NULLS = 2_000_000
TABLES = {
    "nulls": lambda: list_of(pyarrow.nulls(NULLS, pyarrow.int8()), [NULLS]),
    "uneven": lambda: list_of(pyarrow.nulls(NULLS, pyarrow.int8()), [0] * 99 + [NULLS]),
    "repeated": lambda: list_of(
        pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_000, pyarrow.int8()), ["a" * 100_000]), [100_000]
    ),
}
REFUSALS = {
    "nulls": "a.parquet, a row of row group 1 of 1 rows: the row has more than 1,048,576 bytes; split it, or raise",
    "uneven": "a.parquet, after row 99: decoding writes more than 1 MiB; split the rows, or raise --max_row_bytes",
    "repeated": "a.parquet: decoding needs more than 1032 MiB of memory; split the rows, or raise --max_row_bytes",
}


@pytest.mark.parametrize("name", TABLES)
def test_a_small_parquet_file_with_a_large_row_is_refused(name, tmp_path):
    """Without more memory here. Control: a larger limit, but for the last file of 10 GB."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(TABLES[name](), path, write_statistics=False)
    assert path.stat().st_size < 10_000
    before = peak_mib(reset=True)
    assert re.search(REFUSALS[name], str(refusal(path, max_row_bytes=1 << 20)))
    assert peak_mib() < before + 100
    if name != "repeated":
        assert refusal(path) == (1 if name == "nulls" else 100)


def test_one_process_decodes_many_parquet_files(tmp_path, monkeypatch):
    """Also for the columns. Values that JSON does not have keep their type."""
    started, start = [], LimitedProcess._start
    monkeypatch.setattr(this_process(), "waiting", {})
    monkeypatch.setattr(LimitedProcess, "_start", lambda self: started.append(start(self)) or started[-1])
    day = datetime.date(2026, 1, 2)
    for number in range(20):
        rows = [{"a": "\u00e9\n" * number, "b": day, "c": [{"d": b"x", "e": 2**60}], "f": math.inf}] * 3
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{number:02}.parquet")
    corpus = open_source(Source(files=(str(tmp_path / "*.parquet"),)))
    assert corpus.columns == ("a", "b", "c", "f") and len(started) == 1
    found = [row for row in corpus.rows(corpus.columns, False)]
    assert len(found) == 60 and len(started) == 1
    assert found[-1].where == f"{tmp_path}/19.parquet, row 3" and found[-1].values["a"] == "\u00e9\n" * 19
    types = [type(value).__name__ for value in (found[0].values["b"], found[0].values["c"][0]["d"])]
    assert types == ["date", "bytes"] and found[0].values["c"][0]["e"] == 2**60 and found[0].values["f"] == math.inf


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_yaml_of_a_folder_with_aliases_or_above_a_mebibyte_is_refused(name, tmp_path):
    """Before it is parsed. Control: the same list without an alias is used; text behind the YAML may have signs."""
    write_jsonl(tmp_path / "some.jsonl", [{"a": 1}])
    source = Source(dataset_name=str(tmp_path))
    lists = "configs:\n- config_name: default\n  data_files: some.jsonl\nmore: [{}]\n"
    frame = "---\n{}---\n&a *a\n" if name == "README.md" else "{}"

    def use(text):
        (tmp_path / name).write_text(frame.format(text))
        corpus = open_source(source)
        return [row.values for row in corpus.rows(("a",), False)]

    assert use(lists.format("b, b")) == [{"a": 1}]
    for value, problem in (("&b c", r"an anchor \(&\) b"), ("*b", r"an alias \(\*\) b")):
        with pytest.raises(UserError, match=rf"{name}: its YAML has {problem}; write the value itself"):
            use(lists.format(value))
    with pytest.raises(UserError, match=f"{name}: not a regular file of at most 1 MiB"):
        use(lists.format("b" * (1 << 20)))
    with pytest.raises(UserError, match=f"{name}: malformed YAML"):
        use(lists.format("'b"))


def test_an_eps_named_png_does_not_start_ghostscript(tmp_path, monkeypatch):
    """Control: without the list of formats, its program is started; a PNG named .jpg is still read."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for kind in ("a", "b"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "images" / kind / "a.jpg", format="PNG")
    eps = tmp_path / "images/b/b.png"
    Image.new("L", (8, 8)).save(eps, format="EPS")
    images = image_files.folder(str(tmp_path / "images"))
    assert image_files.open_image(images, 0).size == (8, 8)
    with pytest.raises(UserError, match="b.png: cannot be read as an image"):
        image_files.open_image(images, 2)
    assert not (tmp_path / "started").exists()
    with suppress(OSError):
        Image.open(eps).load()
    assert (tmp_path / "started").exists()


READ = """
import sys
from PIL import Image
from common.tasks.vision.image_files import FORMATS

with Image.open(sys.argv[1], formats=FORMATS) as image:
    assert abs(image.convert("L").getpixel((0, 0)) - 200) < 3
"""


def test_each_suffix_has_its_format(tmp_path):
    """Also JPEGs with several pictures (MPO), as cameras write them."""
    pixels = Image.new("L", (8, 8), 200)
    for suffix in image_files.SUFFIXES:
        pixels.save(tmp_path / f"image{suffix}")
    pixels.convert("RGB").save(tmp_path / "image.jpg", format="MPO", save_all=True, append_images=[pixels])
    for suffix in image_files.SUFFIXES:  # a process for each, because the first image may load all plugins
        assert run([sys.executable, "-c", READ, tmp_path / f"image{suffix}"], PYTHONPATH=ROOT).returncode == 0, suffix
