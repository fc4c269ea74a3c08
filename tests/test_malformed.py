"""Malformed input of any kind is used, or refused in one line: mutants of valid files, and single values."""

import csv
import io
import itertools
import json
import math
import os
import random
import re
import shutil
from contextlib import suppress

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import make_model_dir
from fuzzing import mutants, mutate_bytes, mutate_value
from PIL import Image
from transformers import AutoModelForCausalLM

from common.checkpoint.format import hash_of
from common.checkpoint.read import find_damage, list_checkpoints, read_manifest
from common.data import hub
from common.data.chats import CHATML
from common.data.source_types import Source
from common.data.text import tokenize
from common.data.tokenizer import load_tokenizer, tokenizer_identity, train_tokenizer
from common.errors import UserError, raise_errors
from common.models.load import build_model, check_model, describe_use, load_config
from common.tasks.classify.labels import LabelledTexts, encode_labels, is_regression, label_names, read_examples
from common.tasks.dpo.preferences import tokenize_preferences
from common.tasks.seq2seq.pairs import tokenize_pairs
from common.tasks.vision import image_files, images
from tools.compare import page
from tools.compare.runs import read_runs


def refused(use, *arguments):
    """The line with which malformed input is refused, or None if it is used. Any other error fails the test."""
    try:
        use(*arguments)
    except UserError as error:
        assert str(error) and "\n" not in str(error).strip(), error
        return str(error)
    return None


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer with a chat template."""
    directory = tmp_path_factory.mktemp("words")
    (directory / "text.txt").write_text("the cat sat on the mat and the dog said hello to you\n" * 50)
    tokenizer = train_tokenizer(Source(files=(str(directory / "text.txt"),)), 300, directory)
    tokenizer.chat_template = CHATML.read_text()
    return tokenizer


def as_csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0], "more"] if isinstance(rows[0], dict) else ["text"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(row for row in rows if isinstance(row, dict))
    return text.getvalue().encode("utf-8", "surrogatepass")


def as_parquet(rows):
    file = io.BytesIO()
    with suppress(Exception):  # not all mutants have a type in Parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


WRITERS = {".jsonl": None, ".json": lambda rows: json.dumps(rows).encode(), ".csv": as_csv, ".parquet": as_parquet}
WRITERS[".txt"] = lambda rows: "\n".join(json.dumps(row) for row in rows).encode()


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"function": {"name": "f", "arguments": {"a": 1}}}
PARTS = [{"type": "text", "text": "ab"}]
CHAT = [said("user", "hi"), said("assistant", "yes", tool_calls=[CALL], weight=1), said("user", PARTS)]
ROWS = {
    "text": {"text": "hello you"},
    "messages": {"messages": [*CHAT, said("assistant", "ok")], "tools": [{"name": "f"}], "system": "s"},
    "conversations": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a"}]},
    "instructions": {"instruction": "do", "input": "x", "output": "y", "history": [["a", "b"]]},
    "examples": {"prompt": "do", "completion": "y"},
    "preferences": {"prompt": "do", "chosen": "yes", "rejected": "no"},
    "preferred messages": {
        "prompt": CHAT[:1], "chosen": [said("assistant", "yes")], "rejected": [said("assistant", "no", weight=1)],
        "tools": [{"name": "f"}], "system": "q", "history": [["a", "b"]],
    },
    "pairs": {"source": "do", "target": "yes"},
    "labels": {"text": "do", "label": "a"},
    "numbers": {"text": "do", "label": 0.5},
}  # fmt: skip


def use_rows(kind, tokenizer, cache, path):
    """What a recipe does with a file of rows."""
    source = Source(files=(str(path),))
    if kind in ("labels", "numbers"):
        name, examples, _ = read_examples(source, None, "label")
        names = None if is_regression(examples) else label_names(examples)
        return LabelledTexts(name, examples, encode_labels(examples, names), tokenizer, 16).describe()
    if kind == "pairs":
        samples = tokenize_pairs(source, ("source", "target"), tokenizer, 16, 16, cache)
    elif kind.startswith("prefer"):
        samples = tokenize_preferences(source, tokenizer, 64, cache_dir=cache)
    else:
        train_tokenizer(source, 300, cache)
        samples = tokenize(source, tokenizer, 64, cache_dir=cache)
    samples[len(samples) - 1]
    return samples.describe()


@pytest.mark.parametrize("kind", ROWS)
def test_mutated_rows_are_used_or_refused_in_a_line(kind, words, tmp_path):
    outcomes = set()
    for extension, write in WRITERS.items():
        valid = [ROWS[kind], ROWS[kind] | {"label": "b"} if kind == "labels" else ROWS[kind]]
        for number, data in enumerate(mutants(valid, 10, kind + extension, write)):
            path = tmp_path / f"{number}{extension}"
            path.write_bytes(data)
            outcomes.add(refused(use_rows, kind, words, tmp_path / "cache", path) is None)
    assert outcomes == {True, False} or kind in ("pairs", "preferred messages")


def deep(depth):
    return {"a": deep(depth - 1)} if depth else {}


# Each ended in a traceback, or was used.
ODD_ROWS = [
    ("conversations", {"conversations": [{"from": ["x"], "value": "hi"}, {"from": "gpt", "value": "a"}]}, "from"),
    ("messages", {"messages": [{"role": ["user"], "content": "hi"}, said("assistant", "ok")]}, "not a list"),
    (
        "messages",
        {"messages": [said("user", "hi"), said("assistant", "ok", tool_calls=[3.5])], "tools": 3},
        "column tools",
    ),
    ("preferences", {"prompt": "do", "rejected": "no"}, "no column chosen"),
    (
        "preferred messages",
        {"chosen": [{"role": None, "content": "a"}], "rejected": [said("assistant", "no")]},
        "not a l",
    ),
    ("messages", {"messages": [said("user", "hi"), said("assistant", "ok", tool_calls=[deep(480)])]}, "too deeply"),
    ("labels", {"text": "do", "label": "\ud800"}, "column label: half a surrogate pair"),
]


@pytest.mark.parametrize(("kind", "row", "pattern"), ODD_ROWS)
def test_a_row_of_other_types_is_named_with_its_line(kind, row, pattern, words, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[kind]) + "\n" + json.dumps(row) + "\n")
    line = refused(use_rows, kind, words, tmp_path / "cache", path)
    assert re.search(f"rows.jsonl, line 2: .*{pattern}", line)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "text.txt").write_text("the cat sat on the mat\n" * 50)
    return make_model_dir(directory / "model", directory / "text.txt")


def use_model(directory):
    """What a recipe does with a pretrained model, up to its first forward."""
    hub.locate.cache_clear()
    config, tokenizer = load_config(str(directory)), load_tokenizer(str(directory))
    raise_errors(check_model(config, tokenizer, 16))
    tokenizer_identity(tokenizer)
    loaded = build_model(config, str(directory))
    describe_use(loaded, config, tokenizer, [tokenizer.eos_token_id])
    loaded(input_ids=torch.tensor([tokenizer("the cat")["input_ids"][:16]]))


def with_json(directory, model, name, value):
    """A copy of a model with a different JSON file; `value` replaces entries, or is the contents as bytes."""
    shutil.copytree(model, directory)
    if not isinstance(value, bytes):
        value = json.dumps(json.loads((directory / name).read_bytes()) | value).encode()
    (directory / name).write_bytes(value)
    return directory


def test_mutated_files_of_a_model_are_used_or_refused_in_a_line(model, tmp_path):
    rng, outcomes = random.Random(0), set()
    for name, count in {
        "config.json": 12,
        "generation_config.json": 4,
        "tokenizer_config.json": 4,
        "tokenizer.json": 2,
    }.items():
        data = (model / name).read_bytes()
        for number in range(count):
            mutant = (
                mutate_bytes(data, rng) if number % 4 == 3 else json.dumps(mutate_value(json.loads(data), rng)).encode()
            )
            directory = with_json(tmp_path / f"{name}-{number}", model, name, mutant)
            outcomes.add(refused(use_model, directory) is None)
    assert outcomes == {True, False}


ODD_SETTINGS = [
    ("config.json", {"hidden_act": "none such"}, "cannot build the model .*none such"),
    ("config.json", {"rope_parameters": {"rope_type": "none such", "rope_theta": 1e4}}, "none such|rope"),
    ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "cannot build the model"),
    ("config.json", {"hidden_size": -32}, ""),
    ("config.json", {"pad_token_id": 384}, "pad_token_id 384, beyond its vocabulary of 384"),
    ("config.json", {"eos_token_id": [{}]}, "eos_token_id"),
    ("config.json", {"num_hidden_layers": 10**8}, "num_hidden_layers 100000000, above 10000"),
    ("config.json", {"vocab_size": 10**13}, "6.4e.14 parameters, too many to train"),
    ("config.json", {"num_hidden_layers": "2"}, "num_hidden_layers"),
    ("config.json", {"num_hidden_layers": -3}, "num_hidden_layers -3, not above 0"),
    ("config.json", {"attention_dropout": math.nan}, "attention_dropout nan, not a number"),
    ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta 0, not above 0"),
    ("config.json", {"quantization_config": {"load_in_4bit": True}}, "quantized by bitsandbytes and cannot be trained"),
    ("config.json", b"[]", "config.json"),
    ("generation_config.json", {"eos_token_id": {"a": 1}}, "eos_token_id .*not the id of a token"),
    ("generation_config.json", {"pad_token_id": "x"}, "pad_token_id 'x', not the id of a token"),
    ("generation_config.json", {"top_p": 0.6}, "its generation_config.json: .*do_sample"),
    ("generation_config.json", b"[" * 100_000, "generation_config.json.*RecursionError"),
    ("tokenizer_config.json", {"model_max_length": [3]}, "one of its files: .*model_max|cannot be"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template|cannot be"),
    ("tokenizer.json", {"model": []}, "cannot be loaded"),
    ("tokenizer.json", {"normalizer": {"type": "Prepend", "prepend": "x" * 1_000_000}}, "more than 100 times longer"),
    ("tokenizer.json", {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {}} | {
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}}, "no entry found for key"),
    ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"}, "Missing .UNK. token"),
]  # fmt: skip


def test_settings_of_a_model_that_cannot_be_are_named(model, tmp_path):
    """Control: the model itself is used."""
    assert refused(use_model, model) is None
    wide = with_json(tmp_path / "wide", model, "config.json", {"shared_expert_intermediate_size": 20_480})
    assert refused(use_model, wide) is None  # a width, as in Qwen2-57B-A14B, and not a number of experts
    inside, outside = (tmp_path / name for name in ("sharded", "outside"))
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(inside, max_shard_size="40KB")
    shutil.copytree(model, inside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    assert refused(use_model, inside) is None
    shutil.copytree(inside, outside)
    index = outside / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-00001', '"../sharded/model-00001'))
    assert re.search(r"its model.safetensors.index.json names \.\./sharded/model-00001", refused(use_model, outside))
    for number, (name, value, pattern) in enumerate(ODD_SETTINGS):
        line = refused(use_model, with_json(tmp_path / str(number), model, name, value))
        assert line and re.search(pattern, line), (name, value, line)


RUN = {
    "arguments": {"num_updates": 3, "x": [1, 2]}, "command": ["recipes/lm.py", "--a"], "status": "finished",
    "results": {"unit": "tokens", "updates": 3, "validation_loss": 1.0, "accuracy": 0.5, "sample": "abc", "x": 2},
    "model": {"a": {"b": 1}}, "versions": {"torch": "2"}, "mode": "x", "world_size": 1, "resumed_at": 1,
}  # fmt: skip
METRICS = {"loss": 2.0, "grad_norm": 1.0, "tokens_per_second": 9.0, "peak_memory_bytes": 9, "target_tokens": 9}


def use_record(directory):
    """What `python -m tools.compare` does with a run, without the 5 MB of the page's script."""
    (run,) = read_runs([directory])
    page.tables([run])
    page.draw([run])


def test_mutated_records_of_a_run_are_used_or_refused_in_a_line(tmp_path):
    rng, lines, outcomes = random.Random(0), [METRICS | {"update": update} for update in range(3)], set()
    lines[-1]["validation_loss"] = 1.0
    odd = [RUN | {"command": 3}, RUN | {"model": [1]}, RUN | {"results": 3}, RUN | {"status": None, "x": 10**400}]
    odd += [RUN | {"results": {"updates": 10**400, "validation_loss": "a"}}, RUN | {"resumed_at": "a"}]
    records = [json.dumps(value).encode() for value in [*odd, *(mutate_value(RUN, rng) for _ in range(8))]]
    records += [mutate_bytes(json.dumps(RUN).encode(), rng) for _ in range(6)]
    whole = mutants(lines, 2, 0)
    cases = [
        (record, next(mutants(lines, 1, 0, None)) and b"".join(json.dumps(x).encode() + b"\n" for x in lines))
        for record in records
    ]
    cases += [(json.dumps(RUN).encode(), data) for data in itertools.chain(whole, mutants(lines, 12, 1))]
    for odd_line in ({"update": "a"}, {"update": 10**400}, {"update": True, "loss": 10**400, "peak_memory_bytes": "x"}):
        cases.append(
            (json.dumps(RUN | {"status": "running"}).encode(), json.dumps(METRICS | odd_line).encode() + b"\n")
        )
    for number, (record, metrics) in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "run.json").write_bytes(record)
        (directory / "metrics.jsonl").write_bytes(metrics)
        outcomes.add(refused(use_record, directory) is None)
    assert outcomes == {True, False}
    wrong = {"command": 3, "model": [1], "results": 3, "status": None, "resumed_at": "a", "arguments": []}
    for name, value in wrong.items():
        (tmp_path / "0/run.json").write_text(json.dumps(RUN | {name: value}))
        assert f"{name} is a {type(value).__name__}" in refused(use_record, tmp_path / "0"), name


def test_labels_and_images_that_cannot_be_are_named(tmp_path):
    import datasets

    pixels = np.zeros((8, 8), np.uint8)
    for row, values in {"label": [0, 1, 7], "image": [0, 1, 1]}.items():
        names = datasets.ClassLabel(names=["a", "b", *"cdefgh"][: 8 if row == "label" else 2])
        pictures = [Image.fromarray(pixels)] * 2 + [None if row == "image" else Image.fromarray(pixels)]
        features = datasets.Features({"image": datasets.Image(), "label": names})
        data = datasets.Dataset.from_dict({"image": pictures, "label": values}, features)
        if row == "label":
            data.info.features["label"] = datasets.ClassLabel(names=["a", "b"])
        data.save_to_disk(str(tmp_path / row))

        def use(name=str(tmp_path / row)):
            found = image_files.hub(name, None, "train")
            images.preprocess(found)

        hub.locate.cache_clear()
        assert "row 2" in refused(use)
    for name in "ab":
        (tmp_path / "folder" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "folder" / name / "0.png")
    valid = (tmp_path / "folder/a/0.png").read_bytes()
    use_folder = lambda: images.preprocess(image_files.folder(str(tmp_path / "folder")))  # noqa: E731
    assert refused(use_folder) is None
    rng = random.Random(0)
    for _ in range(20):
        (tmp_path / "folder/a/0.png").write_bytes(mutate_bytes(valid, rng))
        refused(use_folder)
    Image.new("1", (15_000, 10_000)).save(tmp_path / "folder/a/0.png")
    assert "15000 x 10000 pixels, more than" in refused(use_folder)
    (tmp_path / "folder/a/0.png").write_bytes(valid)
    os.mkfifo(tmp_path / "folder/a/1.png")
    (tmp_path / "folder/b/2.png").symlink_to("nowhere")
    assert re.search("a/1.png, .*b/2.png: not a file, or a link", refused(use_folder))
    schema = pyarrow.schema([("text", pyarrow.string()), ("label", pyarrow.int64())])
    for names, label, pattern in (
        (["a", "b"], 2, "row 2: column label is 2"),
        (3, 1, "class names"),
        ({"a": 1}, 1, "class n"),
    ):
        facts = {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}
        table = pyarrow.Table.from_pylist([{"text": "a", "label": 0}, {"text": "b", "label": label}], schema)
        path = tmp_path / "labels.parquet"
        pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(facts)}), path)
        assert pattern in refused(read_examples, Source(files=(str(path),)), None, "label")


def test_forged_manifests_are_refused_in_a_line(tmp_path):
    position = {"update": 4, "samples": 8, "skipped_updates": 0, "skipped_in_a_row": 0, "best_validation_loss": 1.0}
    position |= {"validation_loss": None, "evaluations_since_best": 0, "validation_since": 0, "tracker_runs": {}}
    identity = {"model": {}, "settings": {}, "tokenizer": "a", "dataset": "b", "validation": None}
    manifest = {"format": 2, "update": 4, "world_size": 1, "mode": "NO", "architecture": "A", "files": {}}
    manifest |= {
        "position": position,
        "identity": identity,
        "scaler": {},
        "training": {"seconds": 1.0},
        "versions": {"a": "1"},
    }
    directory, rng = tmp_path / "checkpoints/update-000004", random.Random(0)
    directory.mkdir(parents=True)

    def use(facts):
        (directory / "manifest.json").write_text(json.dumps(facts | {"sha256": hash_of(facts)}))
        read_manifest(directory)

    assert refused(use, manifest) is None
    for name in ("evaluations_since_best", "skipped_updates", "samples", "validation_since"):
        for value in (-1, "3", 1.5, None, 10**30, [1]):
            assert refused(use, manifest | {"position": position | {name: value}}), (name, value)
    assert refused(use, manifest | {"versions": ["a"]})
    for _ in range(40):
        value = mutate_value(manifest, rng)
        if isinstance(value, dict):
            refused(use, value)
            found, _ = list_checkpoints(tmp_path)
            assert all(find_damage(*one) for one in found)
