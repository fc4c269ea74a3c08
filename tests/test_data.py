"""Text becomes the right samples, once, in flat memory, and broken text is named with its place."""

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
import types
from contextlib import nullcontext
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from common.arguments import text_sources
from common.data import cache as cache_module
from common.data import readers
from common.data import text as text_module
from common.data.rows import Source
from common.data.sources import check_sources, open_source
from common.data.standard_library import embedded_files, python_functions
from common.data.text import Samples, tokenize
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import UserError

TEXTS = [
    "def f(x):\n    return x\n",
    "hello",
    "zwölf Boxkämpfer 🥊 – jagen\u2028 Viktor\r\n",
    "a b c d e f g h i j k l m",
]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "a.txt"
    path.write_text("\n".join(TEXTS) * 20)
    return train_tokenizer(Source(files=(str(path),)), 300, path.parent / "cache")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(files=(str(path),))


def stream_of(samples):
    """The tokens that blocks read, put together, and those that they predict."""
    ids, targets, _ = zip(*(samples[i] for i in range(len(samples))), strict=True)
    return np.concatenate(ids), np.concatenate(targets)


def targets_as_text(tokenizer, sample):
    return tokenizer.decode(sample[1])


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


# --- the tokenizer ---


def test_every_character_survives_the_tokenizer(tokenizer):
    every = "".join(chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000) + "🥊\U0010ffff"
    for text in [every, "", " ", "\r\n\t \x00", "  a  b ", *TEXTS]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    used = {i for i in tokenizer(every)["input_ids"]}
    assert len(used) > 150  # and not one unknown token for all of them
    bare = Tokenizer(models.BPE())  # the control: without the alphabet of bytes, what was not seen is lost
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    assert bare.decode(bare.encode("ü").ids) == ""


def test_the_same_text_gives_the_same_tokenizer(tmp_path):
    sources = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        sources.append(write_jsonl(tmp_path / name / "a.jsonl", [{"text": text * 5} for text in TEXTS]))
    one, two = (train_tokenizer(source, 290, tmp_path / "cache").backend_tokenizer.to_str() for source in sources)
    assert one == two and len(list((tmp_path / "cache").glob("tokenizer-*[0-9a-f]"))) == 2
    assert one != train_tokenizer(sources[0], 280, tmp_path / "cache").backend_tokenizer.to_str()


def test_a_saved_tokenizer_loads_and_gets_a_pad_token(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for dropped, pad in (("pad_token", tokenizer.eos_token), ("eos_token", None)):
        del settings[dropped]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        if pad:
            assert load_tokenizer(str(tmp_path)).pad_token == pad
        else:
            with pytest.raises(UserError, match="no eos token.*set eos_token"):
                load_tokenizer(str(tmp_path))


def test_a_name_that_is_nowhere_ends_soon_in_one_line(monkeypatch, cache):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    start = time.monotonic()
    with pytest.raises(UserError, match="no/such-model.*") as error:
        load_tokenizer("no/such-model")
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(UserError, match="no/such-data.*") as error:
        open_source(Source(dataset_name="no/such-data"))
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(UserError, match="neither a directory here nor a valid name"):
        load_tokenizer("./nothing/at/all")
    assert time.monotonic() - start < 10  # the libraries' own patience is 20 to 50 s


# --- blocks ---


@pytest.mark.parametrize("sequence_length", [1, 7, 1000])
def test_blocks_predict_every_token_of_the_stream_once(tokenizer, tmp_path, cache, sequence_length):
    samples = tokenize(
        write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS]), tokenizer, sequence_length, None, cache
    )
    eos = tokenizer.eos_token_id
    stream = [token for text in TEXTS for token in tokenizer(text)["input_ids"]] + [eos]
    assert stream.count(eos) == len(TEXTS) + 1  # the tokenizer puts it before each
    inputs, targets = stream_of(samples)
    assert inputs.tolist() == stream[:-1] and targets.tolist() == stream[1:]
    ids = np.arange(len(samples))
    assert samples.lengths(ids).tolist() == [len(samples[i][0]) for i in ids] == samples.num_targets(ids).tolist()
    assert samples.num_tokens == samples.num_target_tokens == len(stream) - 1 == samples.lengths(ids).sum()
    assert samples.max_length == max(samples.lengths(ids)) and samples[0][0].dtype == np.int64
    assert samples.num_bytes == sum(len(text.encode()) for text in TEXTS)
    with pytest.raises(IndexError):
        samples[len(samples)]
    assert inputs.tolist() != stream[1:]  # the control: shifted by one, it is seen


@pytest.mark.parametrize(
    ("template", "before", "end"),
    [
        ("<s> $A", ["<s>"], []),
        ("$A", [], []),
        ("<|endoftext|> $A", ["<|endoftext|>"], []),
        ("<s> $A <|endoftext|>", ["<s>"], ["<|endoftext|>"]),
        ("<s> <t> $A", ["<s>", "<t>"], []),
    ],
)
def test_the_tokenizer_says_what_stands_around_a_text(tokenizer, tmp_path, cache, work, template, before, end):
    """And eos, which ends what is learned, once. That it has a bos token does not say that it uses it."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    own = load_tokenizer(str(tmp_path / "tokenizer"))
    own.add_special_tokens({"bos_token": "<s>", "extra_special_tokens": ["<t>"]})
    numbers = {name: own.convert_tokens_to_ids(name) for name in ("<s>", "<t>", "<|endoftext|>")}
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=list(numbers.items()))
    before, end, eos = [numbers[name] for name in before], [numbers[name] for name in end], own.eos_token_id
    hello, ab = (own(text, add_special_tokens=False)["input_ids"] for text in ("hello", "a b"))
    assert own("hello")["input_ids"] == before + hello + end
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}, {"text": ""}, {"text": "a b"}])
    samples = tokenize(source, own, 100, "blocks", cache)
    stream = samples[0][0].tolist() + [int(samples[0][1][-1])]
    if before and before != [eos]:
        assert stream == [*before, *hello, eos, *before, *ab, eos]
    else:  # the end of one document is the beginning of the next
        assert stream == [eos, *hello, eos, *ab, eos]
    assert samples.meta["dropped"] == 1
    ids, targets, rows = tokenize(source, own, 100, "examples", cache)[1]
    assert ids.tolist() == [*before, *ab] and targets.tolist()[-len(ab) :] == [*ab[1:], eos]
    assert rows.tolist() == list(range(max(0, len(before) - 1), len(ids)))
    pairs = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "hello", "completion": "a b"}])
    ids, targets, rows = tokenize(pairs, own, 100, None, cache)[0]
    given = own("hello")["input_ids"]
    assert ids.tolist() == given + ab and targets.tolist() == [*ab, eos]
    assert rows.tolist() == list(range(len(given) - 1, len(ids)))
    own.backend_tokenizer.post_processor = processors.TemplateProcessing("$A <t>", special_tokens=list(numbers.items()))
    again = tokenize(pairs, own, 100, None, cache)[0][0]  # what the cache has was made by another rule
    assert again.tolist() == [*hello, numbers["<t>"], *ab] and len(work) == 4


def test_a_large_txt_file_is_one_document_read_in_pieces(tokenizer, tmp_path, cache):
    text = "".join(f"line {i} ünï\n" for i in range(60_000))
    (tmp_path / "a.txt").write_text(text)
    source = Source(files=(str(tmp_path / "a.txt"),))
    pieces = list(open_source(source).rows(("text",), True))
    assert len(pieces) > 2 and "".join(piece.values["text"] for piece in pieces) == text
    assert [piece.continues for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    samples = tokenize(source, tokenizer, 512, None, cache)
    targets = stream_of(samples)[1]
    assert (targets == tokenizer.eos_token_id).sum() == 1 and samples.meta["documents"] == 1
    assert tokenizer.decode(targets[:-1]) == text
    (tmp_path / "b.txt").write_text("é" * 900_000)  # one line: cut at a character
    long_line = open_source(Source(files=(str(tmp_path / "b.txt"),))).rows(("text",), True)
    assert "".join(piece.values["text"] for piece in long_line) == "é" * 900_000


def test_compressed_sizes_are_those_of_gzip_and_xz(tokenizer, tmp_path, cache):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text * 50} for text in TEXTS])
    everything = "".join(text * 50 for text in TEXTS).encode()
    samples = tokenize(source, tokenizer, 10, None, cache, measure_compression=True)
    assert samples.gzip_bytes == len(gzip.compress(everything, 9))
    assert samples.xz_bytes == len(lzma.compress(everything, preset=9))
    assert tokenize(source, tokenizer, 10, None, cache).gzip_bytes is None


# --- examples ---


def test_only_the_completion_is_predicted(tokenizer, tmp_path, cache):
    token = max((tokenizer.decode([i]) for i in range(1, 300)), key=len)
    rows = [{"prompt": "a b c ", "completion": "hello x"}, {"prompt": token[:1], "completion": token[1:]}]
    samples = tokenize(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, 100, None, cache)
    eos = tokenizer.eos_token_id
    for row, (ids, targets, target_rows) in zip(rows, [samples[0], samples[1]], strict=True):
        completion = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], eos]
        prompt = tokenizer(row["prompt"])["input_ids"]
        assert ids.tolist() == prompt + completion[:-1]
        assert targets.tolist() == completion and target_rows.tolist() == list(range(len(prompt) - 1, len(ids)))
    assert samples.num_targets([0, 1]).tolist() == [len(samples[i][1]) for i in (0, 1)]
    assert samples.num_bytes is None  # the prompts are not paid for
    # the control: tokenised as one, the boundary is gone
    assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1
    assert token not in tokenizer.decode([samples[1][0][1]])
    whole = tokenize(write_jsonl(tmp_path / "b.jsonl", [{"text": "hello"}]), tokenizer, 100, "examples", cache)
    assert len(whole[0][1]) == len(whole[0][0])  # and with a text column nothing is left out


def test_cut_and_empty_rows_are_counted(tokenizer, tmp_path, cache):
    rows = [{"prompt": "a b c d", "completion": text} for text in ("hello " * 9, "x")]
    rows += [{"prompt": "a b " * 20, "completion": "lost"}, {"prompt": "", "completion": ""}]
    samples = tokenize(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, 12, None, cache)
    assert len(samples) == 2 and samples.max_length == 12 and samples.lengths([0, 1]).max() == 12
    assert (samples.meta["truncated"], samples.meta["dropped"]) == (1, 2)
    assert "1 cut at 12" in samples.describe() and "2 empty" in samples.describe()
    with pytest.raises(UserError, match="no sample with a target.*raise --sequence_length"):
        tokenize(write_jsonl(tmp_path / "b.jsonl", rows[2:]), tokenizer, 12, None, cache)
    assert not list(cache.glob("*.partial"))


def test_rows_with_nothing_to_say_are_told(tokenizer, tmp_path, cache, monkeypatch):
    rows = [{"prompt": "a", "completion": text} for text in ("", "x", "")] + [{"prompt": "", "completion": ""}]
    samples = tokenize(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, 12, None, cache)
    assert samples.meta["empty"] == 2 and samples.meta["dropped"] == 1
    assert samples[0][1][-1] == tokenizer.eos_token_id  # nothing but its end
    assert samples.describe().splitlines()[1].strip().startswith("2 rows have an empty completion")
    monkeypatch.setattr(tokenizer, "chat_template", PLAIN)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    chats = [CHAT, [CHAT[0], {"role": "assistant", "content": ""}], [CHAT[0], call]]
    samples = tokenize(write_jsonl(tmp_path / "b.jsonl", [{"messages": c} for c in chats]), tokenizer, 90, None, cache)
    assert samples.meta["empty"] == 1


def test_the_token_that_ends_an_answer_is_found(tokenizer, tmp_path, cache, monkeypatch):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    own = load_tokenizer(str(tmp_path / "tokenizer"))
    own.add_tokens(["<end>"], special_tokens=True)
    end, source = own.convert_tokens_to_ids("<end>"), write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    for template, found in ((PLAIN, [end]), (TAGGED, [end]), (PLAIN.replace("</>", "."), [])):
        own.chat_template = template.replace("</>", "<end>")
        samples = tokenize(source, own, 500, None, cache)
        assert samples.end_tokens == found
        assert ("will not know where to stop" in samples.describe()) == (not found)
    assert tokenize(write_jsonl(tmp_path / "b.jsonl", [{"text": "a"}]), own, 9, None, cache).end_tokens == [0]


NAMELESS = {
    "instruction, output": "for examples --prompt_column instruction --completion_column output",
    "id, Question, answer": "for examples --prompt_column Question --completion_column answer",
    "prompt, response": "for examples --prompt_column prompt --completion_column response",
    "conversations": "conversations are messages here: rename the column, and in it `from` to `role`",
    "body, title": r"\(--text_column\)",
}


@pytest.mark.parametrize("columns", NAMELESS)
def test_columns_of_other_names_are_told_how_to_name(tokenizer, tmp_path, cache, columns):
    row = dict.fromkeys(columns.split(", "), "a")
    if columns == "conversations":
        row = {columns: [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    source = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(UserError, match=NAMELESS[columns]) as error:
        tokenize(source, tokenizer, 9, None, cache)
    assert len(str(error.value).splitlines()) == 1 and f"there are: {columns}" in str(error.value)
    if "output" in columns:
        named = Source(files=source.files, prompt_column="instruction", completion_column="output")
        assert tokenize(named, tokenizer, 9, None, cache).meta["columns"] == ["instruction", "output"]
        wrong = Source(files=source.files, prompt_column="instruction")
        with pytest.raises(UserError, match=r"no column completion; .*\(--prompt_column, --completion_column\)"):
            tokenize(wrong, tokenizer, 9, None, cache)


PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</>\n"
    "{% endgeneration %}{% else %}{{ m.content }}</>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hello ö"},
    {"role": "assistant", "content": "zwölf 🥊"},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "def f(x):"},
]


@pytest.mark.parametrize("template", [PLAIN, TAGGED], ids=["prefixes", "generation tags"])
def test_only_the_assistant_is_predicted(tokenizer, tmp_path, cache, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    samples = tokenize(write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}] * 2), tokenizer, 500, None, cache)
    assert targets_as_text(tokenizer, samples[1]) == "zwölf 🥊</>\ndef f(x):</>\n"
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert samples[0][0].tolist() == whole["input_ids"][:-1]
    if template == TAGGED:  # what transformers computes itself
        assert samples[0][2].tolist() == np.flatnonzero(whole["assistant_masks"][1:]).tolist()
    # the control: without the spans everything would be a target
    everything = write_jsonl(tmp_path / "b.jsonl", [{"text": tokenizer.decode(whole["input_ids"])}])
    assert "hello" in targets_as_text(tokenizer, tokenize(everything, tokenizer, 500, "examples", cache)[0])


def test_messages_from_parquet_have_no_keys_of_other_messages(tokenizer, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(
        tokenizer, "chat_template", PLAIN.replace("</>", "{% if 'name' in m %}{{ m.name }}{% endif %}</>")
    )
    rows = [{"messages": [*CHAT[:2]]}, {"messages": [CHAT[0] | {"name": "Ann"}, CHAT[1]]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    samples = tokenize(Source(files=(str(tmp_path / "a.parquet"),)), tokenizer, 500, None, cache)
    first, second = (tokenizer.decode(samples[i][0]) for i in (0, 1))
    assert "None" not in first and "Ann" in second


@pytest.mark.parametrize(
    ("template", "chat", "pattern"),
    [
        (None, CHAT, r"a.jsonl, line 1.*chat template"),
        ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", CHAT, r"line 1.*generation"),
        ("{{ raise_exception('roles must alternate') }}", CHAT, r"a.jsonl, line 1: .*roles must alternate"),
        (PLAIN, "hello", r"a.jsonl, line 1: column messages is not a list"),
        (PLAIN, [{"content": "x"}], r"a.jsonl, line 1: column messages is not a list"),
        (PLAIN, [{"role": "user", "content": "\ud800"}], r"a.jsonl, line 1: half a surrogate pair"),
    ],
)
def test_chats_that_cannot_be_masked(tokenizer, tmp_path, cache, monkeypatch, template, chat, pattern):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=pattern) as error:
        tokenize(write_jsonl(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer, 500, None, cache)
    assert len(str(error.value).splitlines()) == 1


# --- files and datasets ---


def test_all_kinds_of_files_give_the_same_samples(tokenizer, tmp_path, cache):
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    jsonl = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = io.StringIO(newline="")
    csv.writer(table).writerows([("id", "text"), *((row["id"], row["text"]) for row in rows)])
    contents = {"jsonl": jsonl, "json": json.dumps(rows, indent=1).encode(), "csv": table.getvalue().encode()}
    for name, content in contents.items():
        (tmp_path / f"a.{name}").write_bytes(content)
        (tmp_path / f"a.{name}.gz").write_bytes(gzip.compress(content))
        (tmp_path / f"a.{name}.bz2").write_bytes(bz2.compress(content))
        (tmp_path / f"a.{name}.xz").write_bytes(lzma.compress(content))
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
    assert len(sources) == 14
    sources["several"] = Source(files=tuple(map(str, halves)))
    sources["glob"] = Source(files=(str(tmp_path / "half*.jsonl"), str(halves[0])))  # none is read twice
    sources["saved"] = Source(dataset_name=str(tmp_path / "saved"))
    sources["both"] = Source(dataset_name=str(tmp_path / "both"), split="test")
    sources["folder"] = Source(dataset_name=str(tmp_path / "folder"), split="test")
    expected = stream_of(tokenize(sources["a.jsonl"], tokenizer, 9, None, cache))[1]
    for name, source in sources.items():
        samples = tokenize(source, tokenizer, 9, None, cache)
        assert stream_of(samples)[1].tolist() == expected.tolist(), name
    for name in ("both", "folder"):
        other = tokenize(Source(dataset_name=str(tmp_path / name)), tokenizer, 9, None, cache)
        assert other.num_tokens < len(expected)  # the control: the other split is seen to be different
        with pytest.raises(UserError, match="no split dev; there are: .*te"):
            open_source(Source(dataset_name=str(tmp_path / name), split="dev"))
        args = types.SimpleNamespace(dataset_name=str(tmp_path / name), dataset_config=None, train_file=[])
        args.text_column, args.validation_file, args.prompt_column, args.completion_column = "text", [], None, None
        assert text_sources(args)[1].split == "test"  # held out, as there is no validation split
        args.validation_file = [str(halves[0])]
        assert text_sources(args)[1].files == (str(halves[0]),)


def test_text_that_looks_like_something_else_stays_text(tmp_path):
    texts = ["2020-01-01", "003", "NA", "", "null"]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"{text},1\n" for text in texts))
    for name in ("a.jsonl", "a.csv"):
        rows = open_source(Source(files=(str(tmp_path / name),))).rows(("text",), False)
        assert [row.values["text"] for row in rows] == texts
    # the control: what the library's reader makes of it
    read = datasets.load_dataset(
        "csv", data_files=str(tmp_path / "a.csv"), split="train", cache_dir=str(tmp_path / "hf")
    )
    assert read["text"] != texts


def test_lines_of_a_txt_file_are_examples(tokenizer, tmp_path, cache):
    (tmp_path / "a.txt").write_bytes(b"hello\r\n\n  \na\xe2\x80\xa8b\n")
    samples = tokenize(Source(files=(str(tmp_path / "a.txt"),)), tokenizer, 50, "examples", cache)
    assert [targets_as_text(tokenizer, samples[i]) for i in range(len(samples))] == [
        "hello<|endoftext|>",
        "a\u2028b<|endoftext|>",
    ]


# --- bad input ---

LINE = b'{"text": "hello"}\n'
BROKEN = {
    "empty.jsonl": (b"", "empty.jsonl: the file is empty"),
    "blank.jsonl": (b"\n\n", "blank.jsonl: the file holds no row"),
    "data.xyz": (b"x", r"data.xyz: unknown extension; there are .txt"),
    "latin.txt": (b"x = 1\n" * 10 + b"caf\xe9\n", r"latin.txt: not UTF-8 at byte offset 63 \(0xe9"),
    "far.txt": (b"\xc3\xa4bc\n" * 200_000 + b"\xff", r"far.txt: not UTF-8 at byte offset 1000000 "),
    "cut.txt": (b"abc\xc3", r"cut.txt: not UTF-8 at byte offset 3 "),
    "latin.jsonl": (LINE * 2 + b'{"text": "\xe9"}\n', r"latin.jsonl: not UTF-8 at byte offset 46 "),
    "latin.csv": (b"text,n\nhello,1\n\xe9,2\n", r"latin.csv: not UTF-8 at byte offset 15 "),
    "bad.jsonl": (LINE * 3 + b'{"text": "never clo\n' + LINE, r"bad.jsonl, line 4: malformed JSON"),
    "list.jsonl": (LINE + b"\n[1]\n", r"list.jsonl, line 3: is a list, not an object"),
    "bad.json": (b'[{"text": "a"},', r"bad.json: malformed JSON"),
    "number.jsonl": (LINE + b'{"text": 3}\n', r"number.jsonl, line 2: column text is of type int, not a string"),
    "null.jsonl": (LINE + b'{"text": null}\n', r"null.jsonl, line 2: column text is null"),
    "half.jsonl": (LINE + b'{"text": "\\ud800"}\n', r"half.jsonl, line 2: half a surrogate pair \(U\+D800\)"),
    "pair.jsonl": (b'{"prompt": "a", "completion": "\\ud800"}\n', r"pair.jsonl, line 1: half a surrogate pair"),
    "later.jsonl": (LINE + b'{"body": "x"}\n', r"later.jsonl, line 2: no column text; there are: body"),
    "columns.jsonl": (b'{"body": "x", "title": "y"}\n', r"columns.jsonl: no column text; there are: body, title"),
    "columns.csv": (b"body,title\nx,y\n", r"columns.csv: no column text; there are: body, title"),
    "wide.csv": (b"text,n\nhello,2\na,b,c\n", r"wide.csv, line 3: the row has not 2 fields"),
    "narrow.csv": (b"n,text\n1\n", r"narrow.csv, line 2: the row has not 2 fields"),
    "quote.csv": (b'text,n\nhello,2\n"abc,4\n', r"quote.csv, in the row after line 2: malformed CSV"),
    "cut.txt.gz": (gzip.compress(os.urandom(9999).hex().encode())[:-99], r"cut.txt.gz: cannot be read or unpacked"),
    "no.txt.gz": (b"plain", r"no.txt.gz: cannot be read or unpacked"),
    "no.txt.xz": (b"plain", r"no.txt.xz: cannot be read or unpacked"),
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


@pytest.fixture
def work(monkeypatch):
    """A list that grows by one each time that a source is really tokenised."""
    done, write = [], text_module._write_samples
    monkeypatch.setattr(text_module, "_write_samples", lambda *args: (done.append(args[0]), write(*args))[1])
    return done


def test_a_source_is_tokenised_once_until_something_changes(tokenizer, tmp_path, cache, work):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
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
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text * 200} for text in TEXTS])
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
        cache_module._only_one = lambda directory: nullcontext(directory.parent.mkdir(exist_ok=True))
    barrier.wait()
    tokenize(source, tokenizer, 8, None, cache)


@pytest.mark.parametrize("locked", [True, False], ids=["locked", "control: no lock"])
def test_of_two_processes_one_tokenises(tokenizer, tmp_path, cache, locked):
    source, log = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), tmp_path / "log"
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
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(UserError, match="cache .*cannot be written"):
        tokenize(source, tokenizer, 8, None, tmp_path / "file")


PEAK = """
import os, resource, sys
from common.data import columns, text
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
for name, batch in (("small", None), ("large", None), ("large", 1 << 40)):
    if (child := os.fork()) == 0:  # a fresh peak for each, and the libraries are imported once
        columns.BATCH_CHARACTERS = batch or columns.BATCH_CHARACTERS
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
    for _ in readers._decoded(str(tmp_path / "a.txt")):  # the control: by lines
        pass
    assert tracemalloc.get_traced_memory()[1] > 20e6
    tracemalloc.stop()
