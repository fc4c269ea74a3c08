"""The classification recipe: its updates, figures, checkpoints and mistakes, run as a user runs it."""

import argparse
import csv
import functools
import json
import math
import re
import shutil
import types

import datasets
import numpy as np
import pytest
import torch
from conftest import (
    BIN,
    assert_mistake,
    assert_same_update,
    launch,
    launch_command,
    make_model_dir,
    read_metrics,
    relative_difference,
    results_of,
    run,
    run_in_float64,
    run_recipe_alone,
    stdlib_functions,
)
from safetensors.torch import load_file
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    ByT5Tokenizer,
    CanineConfig,
    CanineModel,
    CanineTokenizer,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
    XLNetConfig,
)

from common.checkpoint.differences import differences
from common.data.source_types import Source
from common.data.tokenizer import train_tokenizer
from common.errors import UserError
from common.models import classifiers
from common.models.load import check_model
from common.report.chance import ChanceCheck, constant_loss
from common.report.predictions import draw_confusion
from common.tasks.classify import labels, scores, text_baseline, text_classifier
from common.training.fine_tuning_rate import default_rate
from common.training.recipe_traits import Arguments

SCRIPT = "recipes/classify.py"
recipe = functools.partial(run_recipe_alone, "classify.py")


@pytest.fixture(scope="module")
def rows():
    """(text, label, score): functions by what they do, and a number that is not whole for each."""
    labels = ["raises", "returns", "does"]
    texts = stdlib_functions(61)
    kinds = ["raise " in text and "raises" or "return " in text and "returns" or "does" for text in texts]
    assert set(kinds) == set(labels)
    return [(text, kind, len(text) / 400) for text, kind in zip(texts, kinds, strict=True)]


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    """train.jsonl of 48 rows, and held_out.csv of 13, which no number of processes divides."""
    path = tmp_path_factory.mktemp("labelled")
    with open(path / "train.jsonl", "w") as file:
        for number, (text, label, score) in enumerate(rows[:48]):
            second = rows[number // 2][0][:200]
            file.write(json.dumps({"text": text, "second": second, "label": label, "score": score}) + "\n")
    with open(path / "held_out.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "score"])
        writer.writerows(rows[48:])
    return path


@pytest.fixture(scope="module")
def encoder(files, tmp_path_factory):
    """A BERT without a head and without dropout, and its tokenizer."""
    path = tmp_path_factory.mktemp("encoder")
    tokenizer = train_tokenizer(Source(files=(str(files / "train.jsonl"),)), 384)
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})
    specials = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=specials
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    BertModel(small_config(BertConfig, len(tokenizer))).save_pretrained(path)
    return path


def small_config(kind, vocab_size=384, **settings):
    config = kind(vocab_size=vocab_size, num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    for name, value in {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "d_inner": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **settings,
    }.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def flags(files, model, out, *more):
    """Updates with accumulation, and with clipping and weight decay that count."""
    base = ["--train_file", files / "train.jsonl", "--validation_file", files / "held_out.csv"]
    base += ["--model_name_or_path", model, "--sequence_length", 64, "--global_batch_size", 16, "--num_updates", 5]
    base += ["--learning_rate", 1e-3, "--weight_decay", 1.0, "--max_grad_norm", 0.5, "--output_dir", out]
    return [str(part) for part in [*base, *more]]


# --- law 1 and resuming ----------------------------------------------------------------------------------------------

# What is learned, and how a global batch of 16 texts is cut: processes, and texts or tokens at once.
TASKS = {
    "classes": [(1, "size", 16), (1, "size", 2), (1, "tokens", 100), (2, "size", 4), (2, "tokens", 300)],
    "decoder": [(1, "size", 16), (1, "tokens", 100), (2, "tokens", 200)],
    "numbers": [(1, "size", 16), (1, "size", 2), (2, "tokens", 100)],
    "pairs": [(1, "size", 16), (1, "tokens", 100)],
}
NAMES = {task: ["-".join(map(str, (task, *cut))) for cut in cuts] for task, cuts in TASKS.items()}


@pytest.fixture(scope="module")
def float64_runs(files, encoder, tmp_path_factory):
    """Two updates of each task and cut, and one of the mean of means."""
    out = tmp_path_factory.mktemp("float64")
    models = {"decoder": make_model_dir(out / "decoder", files / "train.jsonl")}
    more = {
        "numbers": ["--label_column", "score"],
        "pairs": ["--pair_column", "second", "--validation_file", files / "train.jsonl"],
    }
    cuts = {}
    for task in TASKS:
        for name, (processes, kind, number) in zip(NAMES[task], TASKS[task], strict=True):
            own = [*more.get(task, []), "--num_updates", 2, "--warmup_updates", 0, f"--micro_batch_{kind}", number]
            cuts[name] = (processes, flags(files, models.get(task, encoder), out, *own), {})
    _, given, _ = cuts["classes-1-tokens-100"]
    return run_in_float64("classify", cuts | {"mean of means": (1, given, {"mean_of_means": 1})}, out)


def test_the_update_is_the_same_however_the_global_batch_is_cut(float64_runs):
    """Law 1; it depends on padding that no model looks at, as the cuts pad the same text differently.

    Control: the mean of the micro-batches' means is another update.
    """
    for first, *others in NAMES.values():
        assert [line["target_tokens"] for line in float64_runs[first][1]] == [16, 16]  # texts, not tokens
        assert_same_update(float64_runs, first, *others)
    assert relative_difference(float64_runs["mean of means"][0], float64_runs["classes-1-size-16"][0]) > 0.01


def test_held_out_texts_are_counted_once_on_any_number_of_processes(float64_runs):
    """13 of them, in global batches of 16, assigned to one process and to two."""
    for task in ("classes", "numbers"):
        results = [results_of(float64_runs[name][2]) for name in NAMES[task]]
        figures = ("accuracy", "macro_f1") if task == "classes" else ("r2", "pearson")
        for other in results[1:]:
            assert other["validation_loss"] == pytest.approx(results[0]["validation_loss"], rel=1e-12)
            assert [other[name] for name in figures] == pytest.approx([results[0][name] for name in figures], rel=1e-5)


# --- the shipped configs and what a run leaves -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process(files, encoder, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    return out, launch(*flags(files, encoder, out), script=SCRIPT)


def test_the_model_that_a_run_leaves_gives_the_figures_that_it_printed(one_process, rows):
    """Each held-out text by itself, without padding, and the figures by their definitions."""
    out, result = one_process
    model = AutoModelForSequenceClassification.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert model.config.label2id == {"does": 0, "raises": 1, "returns": 2}
    losses, predicted, true = [], [], [label for _, label, _ in rows[48:]]
    for text, label, _ in rows[48:]:
        with torch.no_grad():
            logits = model(**tokenizer(text, truncation=True, max_length=64, return_tensors="pt")).logits[0]
        losses.append(-torch.log_softmax(logits, 0)[model.config.label2id[label]].item())
        predicted.append(model.config.id2label[logits.argmax().item()])
    f1 = []
    for label in {*true, *predicted}:
        both = sum(p == t == label for p, t in zip(predicted, true, strict=True))
        f1.append(2 * both / (predicted.count(label) + true.count(label)))
    results = results_of(out)
    assert results["validation_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert results["accuracy"] == np.mean([p == t for p, t in zip(predicted, true, strict=True)])
    assert results["macro_f1"] == pytest.approx(np.mean(f1))
    assert results["majority_share"] == max(map(true.count, true)) / 13
    tokens = functools.partial(tokenizer, truncation=True, max_length=64)
    vectorizer = TfidfVectorizer(analyzer=lambda text: tokens(text).input_ids, sublinear_tf=True)
    baseline = make_pipeline(vectorizer, LogisticRegression(C=10))
    baseline.fit([text for text, *_ in rows[:48]], [label for _, label, _ in rows[:48]])
    assert results["tfidf_accuracy"] == baseline.score([text for text, *_ in rows[48:]], true)
    for part in (
        f"TF-IDF and logistic regression on 48 texts: {results['tfidf_accuracy']:.1%} of 13",
        "new head  classifier.bias, classifier.weight start at random, learning rate 0.01",
        f"accuracy {results['accuracy']:.1%}",
        "3: does, raises, ret",
    ):
        assert part in result.stdout, part
    assert (out / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_the_figures_of_a_regression(float64_runs):
    """By their definitions, on numbers; and the run has them."""
    predictions, targets = np.array([0.5, 2.0, 1.0, 3.5]), np.array([1.0, 1.5, 0.5, 4.0])
    rest, deviation = predictions - targets, targets - targets.mean()
    figures = scores.score({}, predictions, targets)
    assert figures["r2"] == pytest.approx(1 - (rest @ rest) / (deviation @ deviation))
    spread = predictions - predictions.mean()
    assert figures["pearson"] == pytest.approx(
        spread @ deviation / math.sqrt((spread @ spread) * (deviation @ deviation))
    )
    assert math.isnan(scores.score({}, np.array([np.nan, 1.0]), targets[:2])["r2"])
    results = results_of(float64_runs["numbers-1-size-16"][2])
    assert {"validation_loss", "r2", "pearson"} <= results.keys() and "accuracy" not in results


def test_the_confusion_matrix_has_a_row_for_each_true_label(monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    shown = []
    monkeypatch.setattr(Axes, "text", lambda self, column, row, count, **_: shown.append((row, column, count)))
    assert "2,001 classes" in draw_confusion(np.arange(2), np.arange(2), ["a"] * 2001, tmp_path)  # 32 MB and more
    draw_confusion(np.array([0, 1, 1]), np.array([0, 0, 1]), ["a", "b"], tmp_path)
    assert shown == [(0, 0, "1"), (0, 1, "1"), (1, 1, "1")]
    assert (tmp_path / "confusion.png").stat().st_size > 1000


def test_labels_that_no_font_has_are_one_line(tmp_path, recwarn, caplog):
    draw_confusion(np.arange(2), np.arange(2), ["\u6b63\u9762", "\u8ca0"], tmp_path)
    assert not [one for one in recwarn if "Glyph" in str(one.message)] and len(caplog.messages) < 2
    assert (tmp_path / "confusion.png").stat().st_size > 1000


def test_whole_files_are_held_out():
    train, held_out = labels.read_packages()
    assert not {example.where for example in train} & {example.where for example in held_out}
    assert {example.label for example in train} == {example.label for example in held_out}
    assert 0.1 < len(held_out) / len(train) < 0.3


# --- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BertConfig, RobertaConfig, GPT2Config, LlamaConfig, XLNetConfig])
def test_padding_does_not_change_an_answer(kind, files, encoder):
    """Or the model is refused: XLNet reads its answer at the last position. Control: BERT without its mask."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    _, examples, _ = labels.read_examples(Source(files=(str(files / "train.jsonl"),)), None, "label")
    names = labels.label_names(examples)
    targets = labels.encode_labels(examples, names)
    samples = labels.LabelledTexts("", examples, targets, tokenizer, 64)
    config = small_config(kind, len(tokenizer), **({"type_vocab_size": 1} if kind is RobertaConfig else {}))
    classifiers.set_labels(config, names, "label", tokenizer.pad_token_id)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    inputs = classifiers.find_inputs(model)
    accelerator = types.SimpleNamespace(device="cpu", mixed_precision="no", unwrap_model=lambda model: model)

    def check(*inputs):
        given = {"pad_token_id": config.pad_token_id, "inputs": inputs, "target_dtype": torch.int64}
        collate = functools.partial(labels.collate_texts, **given)
        classifiers.check_padding(model, collate, samples, accelerator)

    if kind is XLNetConfig:
        assert not list(check_model(config, tokenizer, 512))  # its -1 positions are no limit
        with pytest.raises(UserError, match="xlnet: padding on the right changes"):
            check(*inputs)
        return
    check(*inputs)
    assert "attention_mask" in inputs and ("token_type_ids" in inputs) == (kind is BertConfig)
    if kind is BertConfig:
        with pytest.raises(UserError, match="padding"):
            check("token_type_ids")
    next(model.parameters()).data.fill_(math.nan)  # no number differs from it
    with pytest.raises(UserError, match="padding"):
        check(*inputs)


def test_two_texts_are_told_apart(files, encoder):
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    _, examples, _ = labels.read_examples(Source(files=(str(files / "train.jsonl"),)), "second", "label")
    samples = labels.LabelledTexts("", examples, np.zeros(48, np.int64), tokenizer, 64)
    ids, types_, _ = samples[5]
    decoded = [tokenizer.decode(ids[types_ == number]) for number in (0, 1)]
    assert decoded[0].startswith("[CLS]") and examples[5].texts[0].startswith(decoded[0][5:-5])
    assert examples[5].texts[1].startswith(decoded[1][:-5])
    assert samples.max_length == 64 and "truncated at 64" in samples.describe()


def test_cut_texts_are_counted_with_a_tokenizer_in_python_too():
    examples = [labels.Example("", (text,), "") for text in ("four", "seven77", "eight888", "n" * 30)]
    samples = labels.LabelledTexts("", examples, np.zeros(4, np.int64), ByT5Tokenizer(), 8)  # 7 and the end
    assert samples.max_length == 8 and samples.num_truncated == 2


def test_a_model_without_a_vocabulary(files, tmp_path):
    """CANINE hashes characters, and has several embeddings of them."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    CanineModel(CanineConfig(**sizes, num_hash_buckets=512)).save_pretrained(tmp_path / "canine")
    CanineTokenizer().save_pretrained(tmp_path / "canine")
    result = recipe(*flags(files, tmp_path / "canine", tmp_path / "run", "--dry_run"))
    assert result.returncode == 0 and "CanineForSequenceClassification" in result.stdout, result.stderr


# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_class_names_of_a_data_set_are_the_labels(kind, tmp_path):
    """In the order of a head that has no names; a label that is hidden (-1) is none."""
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["pos", "neg"]))
    for name, numbers in {"good": [0, 1, 0], "hidden": [0, -1, 1]}.items():
        rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": numbers}, features=features)
        if kind == "saved":
            rows.save_to_disk(tmp_path / name)
            source = Source(dataset_name=str(tmp_path / name))
        else:
            rows.to_parquet(tmp_path / f"{name}.parquet")
            source = Source(files=(str(tmp_path / f"{name}.parquet"),))
        if name == "good":
            _, examples, classes = labels.read_examples(source, None, "label")
        else:
            with pytest.raises(UserError, match=r"(row 2|\[1\]): column label is null"):
                labels.read_examples(source, None, "label")
    names = labels.label_names(examples)
    assert [example.label for example in examples] == ["pos", "neg", "pos"] and names == ["neg", "pos"]
    unnamed = BertConfig(num_labels=2, architectures=["BertForSequenceClassification"])
    assert classifiers.choose_labels(unnamed, names, False, classes) == ["pos", "neg"]
    with pytest.raises(UserError, match="LABEL_0"):
        classifiers.choose_labels(unnamed, names, False)


def write_labels(path, values):
    """A file of texts with these labels, of the kind that its name says; returns it as a source."""
    rows = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(len(values))], "label": values})
    if path.suffix == ".parquet":
        rows.to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        rows.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",", na_rep="nan")
    return Source(files=(str(path),))


KINDS = ("jsonl", "csv", "tsv", "parquet")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [[1, 0, -1], [10, 2, -10, -2], [10.0, 2.0, -1.0], [2.5, -1.5, 10.5]], ids=str)
def test_numbers_are_classes_in_their_order(values, kind, tmp_path):
    _, examples, _ = labels.read_examples(write_labels(tmp_path / f"a.{kind}", values * 2), None, "label")
    assert [float(name) for name in labels.label_names(examples)] == sorted(values)
    assert labels.encode_labels(examples, labels.label_names(examples)).max() == len(values) - 1


def test_numbers_come_before_names_that_are_sorted_as_text(tmp_path):
    source = write_labels(tmp_path / "a.jsonl", ["b", "10", "nan", "9" * 400, "a", "-2", "2"] * 2)
    _, examples, _ = labels.read_examples(source, None, "label")
    expected = ["-2", "2", "10", "9" * 400, "a", "b", "nan"]  # as a language's code, nan is a name
    assert labels.label_names(examples) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("values", [[0.0, 1.0], [0.5, 1.5]], ids=["classes", "numbers"])
def test_a_label_that_is_no_finite_number_is_named(values, missing, kind, tmp_path):
    source = write_labels(tmp_path / f"a.{kind}", [*values * 5, missing])
    with pytest.raises(UserError, match=r"a.\w+, (line|row) 1[12]: .*label.* (nan|inf|'-?nan'|-?inf|'-?inf').*; fix"):
        _, examples, _ = labels.read_examples(source, None, "label")
        labels.encode_labels(examples, None if labels.is_regression(examples) else labels.label_names(examples))
    source = write_labels(tmp_path / f"a.{kind}", values * 5)  # the control
    assert len(labels.read_examples(source, None, "label")[1]) == 10


def test_a_number_beyond_float32_is_named(tmp_path):
    _, examples, _ = labels.read_examples(write_labels(tmp_path / "a.jsonl", [0.5, 1e300]), None, "label")
    with pytest.raises(UserError, match=r"line 2: the label 1e\+300 is not a finite number"):
        labels.encode_labels(examples, None)


# --- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "no_label": ('{"text": "a", "kind": "x"}\n', ["no column label; there are: text, kind"]),
    "no_text": ('{"body": "a", "label": "x"}\n', ["no column text; there are: body, label"]),
    "null": ('{"text": "a", "label": "x"}\n{"text": "b", "label": null}\n', ["line 2: column label is null"]),
    "nan": ('{"text": "a", "label": 1}\n{"text": "b", "label": NaN}\n', ["line 2: column label is nan"]),
    "list": ('{"text": "a", "label": ["x"]}\n', ["line 1: column label is of type list"]),
    "one": ('{"text": "a", "label": "x"}\n' * 3, ["all 3 rows have the label 'x'"]),
    "own": ("".join(f'{{"text": "a", "label": {n}}}\n' for n in range(9)), ["each of the 9 rows", "--task regression"]),
    "unlearned": (
        '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n' * 20,
        [r"held_out.csv, line \d+: the label '\w+' does not occur in the training data \(x, y\)"],
    ),
    "numbers": (
        '{"text": "a", "label": 0.5}\n{"text": "b", "label": "n/a"}\n',
        ["line 2: the label 'n/a' is not a fin"],
    ),
    "one_other": (
        '{"text": "a", "label": 0.5}\n{"text": "b", "label": 2}\n' * 10 + '{"text": "c", "label": "0,5"}\n',
        ["line 21: the label '0,5' is not a finite number; .* --task classification"],
    ),
    "blank": ('{"text": "  ", "label": "y"}\n', [r"no row with text \(1 have an empty text\); use different data"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_labels_that_cannot_be_learned(name, files, encoder, tmp_path):
    text, patterns = MISTAKES[name]
    (tmp_path / "train.jsonl").write_text(text)
    more = ["--train_file", tmp_path / "train.jsonl", *(["--task", "regression"] if name == "numbers" else [])]
    result = recipe(*flags(files, encoder, tmp_path / "run", *more))
    assert_mistake(result, *patterns)
    assert not (tmp_path / "run").exists()


def test_a_head_for_other_labels(one_process, files, tmp_path):
    """Refused, or replaced where that is asked for; and kept where it has all labels."""
    model = one_process[0] / "model"
    more = ["--label_column", "score", "--model_name_or_path", model]
    arguments = flags(files, model, tmp_path / "run", *more)
    assert_mistake(recipe(*arguments), r"head \(does, raises, returns\) are not the data's \(numbers\)", "--new_head")
    result = recipe(*arguments, "--new_head", "--dry_run")
    assert result.returncode == 0 and "new head  classifier.bias, classifier.weight start at random" in result.stdout
    other = (files / "train.jsonl").read_text().replace('"label": "does"', '"label": "acts"')
    (tmp_path / "other.jsonl").write_text(other)
    own = ["--train_file", tmp_path / "other.jsonl", "--validation_file", tmp_path / "other.jsonl", "--new_head"]
    own += ["--num_updates", 20, "--learning_rate", 1e-30]
    result = recipe(*flags(files, model, tmp_path / "run", *own))
    assert result.stdout.count("update 20: the training loss is still at chance") == 1
    assert "new head  classifier.bias, classifier.weight start at random" in result.stdout
    weights = [load_file(path / "model/model.safetensors") for path in (one_process[0], tmp_path / "run")]
    assert not torch.equal(*(one["classifier.weight"] for one in weights))
    rows = [line for line in (files / "train.jsonl").read_text().splitlines() if '"label": "does"' not in line]
    (tmp_path / "two.jsonl").write_text("\n".join(rows))
    result = recipe(*flags(files, model, tmp_path / "two", "--train_file", tmp_path / "two.jsonl", "--dry_run"))
    assert result.returncode == 0 and "3: does, raises, returns" in result.stdout and "new head" not in result.stdout
    assert_mistake(
        recipe(*flags(files, model, tmp_path / "no", "--head_learning_rate", 1e-3)),
        "--head_learning_rate has no effect",
    )


@pytest.mark.parametrize("config", ["fsdp2", "zero3"])
def test_a_new_head_keeps_its_rate_in_every_mode(config, one_process, files, encoder, tmp_path):
    """Control: the head at the rate of the others is a different run."""
    command = launch_command(config, "--mixed_precision", "no")
    assert run([*command, SCRIPT, *flags(files, encoder, tmp_path / "run")]).returncode == 0
    losses = [[line["loss"] for line in read_metrics(out)] for out in (one_process[0], tmp_path / "run")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    if config == "fsdp2":
        recipe(*flags(files, encoder, tmp_path / "equal", "--head_learning_rate", 1e-3))
        assert read_metrics(tmp_path / "equal")[-1]["loss"] != pytest.approx(losses[0][-1], rel=1e-2)


def test_an_older_checkpoint_of_a_new_head_is_continued_at_its_rate_or_refused():
    """Its head was trained at the rate of all weights."""
    settings = {"learning_rate": 1e-3, "lr_schedule": "cosine"}
    saved = {"model": {}, "tokenizer": "", "dataset": "", "settings": settings}
    args = argparse.Namespace(allow_changed=[])
    for rate, expected in ((1e-3, []), (None, []), (1e-2, ["--head_learning_rate is 0.01, the checkpoint's is 0.001"])):
        now = saved | {"validation": None, "settings": settings | {"head_learning_rate": rate}}
        lines = list(differences(saved, now, args))
        assert [line.partition(";")[0] for line in lines] == expected


@pytest.mark.parametrize("width, rate", [(32, 3e-4), (384, 2e-4), (768, 5e-5), (1024, 3e-5), (4096, 2e-5)])
def test_the_default_rate_falls_with_the_width(width, rate, tmp_path):
    BertConfig(hidden_size=width, num_attention_heads=4).save_pretrained(tmp_path)
    args = Arguments(
        frozenset({"lora_rank"}), model_name_or_path=str(tmp_path), trust_remote_code=False, lora_rank=None
    )
    assert text_classifier.fine_tuning_rate(args) == default_rate(args, text_classifier.fine_tuning_rate) == rate
    args.learning_rate = rate
    assert text_classifier.describe_rate(args)["rate"].startswith(f"{rate:g} by default: 5e-05 x (768 / width)^2")
    args.lora_rank = 8
    assert default_rate(args, text_classifier.fine_tuning_rate) == 10 * rate
    assert text_classifier.describe_rate(args) == {}  # it is not the default of an adapter


def test_a_loss_at_chance_is_reported_once():
    """Control: a loss that has fallen is not."""
    samples = types.SimpleNamespace(labels=np.array([0] * 30 + [1] * 10))
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert constant_loss(samples) == pytest.approx(entropy)
    mixed = types.SimpleNamespace(parts={"a": samples, "b": types.SimpleNamespace(labels=np.array([1]))})
    mixed.mixing = types.SimpleNamespace(weights=(2, 1))
    assert constant_loss(mixed) == pytest.approx(np.log(2))
    assert constant_loss(types.SimpleNamespace(labels=np.array([1.0, 3.0]))) == 1.0
    assert constant_loss(object()) is None
    for level, expected in ((1.02, [100]), (0.9, [])):
        check = ChanceCheck(samples, 1000)
        reported = [update for update in range(1, 301) if check.note(update, level * entropy)]
        assert reported == expected


def test_the_baseline_is_bounded(monkeypatch):
    """A random part of many texts, the same for a seed, and the run's random streams are left alone."""
    texts = [(np.array([number % 7, 7 + number % 2]), None, number % 2) for number in range(400)]
    monkeypatch.setattr(text_baseline, "MOST_ANSWERS", 100)
    before = np.random.get_state()[1].tolist()
    measured = [text_baseline.measure(texts, texts[:30], 2, seed=seed) for seed in (0, 0)]
    assert measured[0] == measured[1] == {"tfidf_accuracy": 1.0, "tfidf_texts": 50, "tfidf_held_out_texts": 30}
    assert np.random.get_state()[1].tolist() == before
    assert text_baseline.measure(texts[:1], texts[:1], 2, seed=0) == {}


@pytest.mark.parametrize("new_head", [False, True])
def test_an_adapter_with_a_head_is_loaded_as_it_says_and_merged(new_head, one_process, encoder, files, rows, tmp_path):
    """Its base has no head, or one of other labels. Control: without its configuration the head does not fit."""
    (tmp_path / "two.jsonl").write_text("".join(
        line for line in (files / "train.jsonl").read_text().splitlines(True) if '"label": "does"' not in line
    ))  # fmt: skip
    base, out, more = tmp_path / "base", tmp_path / "run", ["--lora_rank", 4, "--save_every", 5]
    shutil.copytree(one_process[0] / "model" if new_head else encoder, base)
    if not new_head:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "id2label": None, "label2id": None}))
    else:
        two = tmp_path / "two.jsonl"
        more += ["--new_head", "--train_file", two, "--validation_file", two]
    config = "fsdp2" if new_head else "cpu_bf16"  # an encoder's first norm is in no layer that FSDP2 shards by itself
    result = launch(*flags(files, base, out, *more), config=config, script=SCRIPT)
    call = re.search(r"MB; load with (AutoModel.*)\)", result.stdout)[1]
    assert call.replace(str(out / "model"), "PATH") in (out / "model/README.md").read_text()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1.0}))  # which is not the run's
    export = [BIN / "python", "-m", "tools.checkpoint", "export", next((out / "checkpoints").iterdir())]
    for name, merge in (("adapter", []), ("merged", ["--merge"])):
        assert run([*export, tmp_path / name, *merge]).returncode == 0
    given = {"AutoModelForSequenceClassification": AutoModelForSequenceClassification, "AutoConfig": AutoConfig}
    calls = (call, call.replace(str(out / "model"), str(tmp_path / "adapter")))
    models = [eval(one, given) for one in calls]  # noqa: S307  as a user types it
    models.append(AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged"))
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    names = ["raises", "returns"] if new_head else ["does", "raises", "returns"]
    text = tokenizer(rows[0][0], truncation=True, max_length=64, return_tensors="pt")
    logits = [model(**text).logits for model in models]
    assert all(list(model.config.label2id) == names for model in models)
    assert logits[0].shape[1] == len(names) and torch.equal(*logits[:2])
    assert torch.allclose(logits[0], logits[2], rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForSequenceClassification.from_pretrained(out / "model")


@pytest.mark.parametrize(
    "own, pattern",
    [
        (["--new_head"], "--new_head has no effect on a model"),
        (["--sequence_length", 1], "--sequence_length 1 is too short for text and 2 special tokens"),
        (["--sequence_length", 513], "beyond the model's 512 positions"),
    ],
)
def test_flags_that_do_not_fit_the_model(own, pattern, files, encoder, tmp_path):
    assert_mistake(recipe(*flags(files, encoder, tmp_path / "run", *own)), pattern)


def test_the_first_evaluation_of_a_process_draws_no_random_number():
    """That of a resumed run comes after its states were restored. Control: what it imports does draw one."""
    program = """
import random
import numpy as np
from common.tasks.classify.scores import score
before = random.getstate()
score({}, *[np.array([0, 1])] * 2)
print(before == random.getstate())
"""
    control = "import random; before = random.getstate(); import sklearn.metrics; print(before == random.getstate())"
    told = [run([BIN / "python", "-c", one]).stdout.split()[-1:] for one in (program, control)]
    assert told == [["True"], ["False"]]
