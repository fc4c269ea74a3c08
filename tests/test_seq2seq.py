"""The encoder-decoder recipe: the laws on two sequences a sample, its own data, what it writes, and its figures."""

import argparse
import functools
import json
import shutil
import sys
import textwrap

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import (
    assert_mistake,
    assert_same_update,
    launch,
    read_metrics,
    relative_difference,
    results_of,
    run_in_float64,
    run_recipe_alone,
    run_specs,
    stdlib_functions,
    write_jsonl,
)
from sacrebleu.metrics import CHRF
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    GPT2Config,
    MarianConfig,
    MBartConfig,
    T5Config,
)

from common.data.source_types import Source
from common.data.sources import open_source
from common.data.tokenizer import train_tokenizer
from common.errors import UserError
from common.models.load import build_model
from common.tasks.seq2seq.encoder_decoder import prepare_encoder_decoder, write_targets
from common.tasks.seq2seq.pairs import collate_pairs, docstring_corpus, split_docstring, tokenize_pairs
from recipes import seq2seq

RECIPE = "recipes/seq2seq.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """40 training pairs and 13 held-out ones, of the standard library: (train.jsonl, held_out.jsonl)."""
    path = tmp_path_factory.mktemp("pairs")
    pairs = [pair for text in stdlib_functions(400) if (pair := split_docstring(textwrap.dedent(text)))][:53]
    rows = [{"source": source, "target": target} for source, target in pairs]
    assert len(rows) == 53
    return write_jsonl(path / "train.jsonl", rows[:40]), write_jsonl(path / "held_out.jsonl", rows[40:])


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {"d_model": 32, "max_position_embeddings": 96, "init_std": 0.3}
for _stack in ("encoder", "decoder"):
    BART |= {f"{_stack}_layers": 2, f"{_stack}_ffn_dim": 64, f"{_stack}_attention_heads": 4}


def make_model(config_class, tokenizer):
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if config_class is T5Config:
        dropouts = {"dropout_rate": 0.0}
    else:
        dropouts = {"dropout": 0.0, "decoder_start_token_id": tokenizer.eos_token_id, "forced_eos_token_id": None}
    torch.manual_seed(0)
    config = config_class(vocab_size=384, **(T5 if config_class is T5Config else BART), **ids, **dropouts)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float64).eval()
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()  # Marian's are not zero, and are a part of its logits
    return model


@pytest.fixture(scope="module")
def tokenizer(files):
    tokenizer = train_tokenizer(Source(files=(str(files[0]),)), 384, columns=("source", "target"))
    eos = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
    return tokenizer


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory, tokenizer):
    """Small models with their tokenizer, as `save_pretrained` leaves them."""
    root = tmp_path_factory.mktemp("models")
    for name, config_class in {"t5": T5Config, "bart": BartConfig, "mbart": MBartConfig}.items():
        make_model(config_class, tokenizer).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def flags(files, out, model, *more, updates=3):
    given = ["--train_file", files[0], "--validation_file", files[1], "--model_name_or_path", model]
    given += ["--sequence_length", 64, "--target_length", 24, "--num_updates", updates, "--global_batch_size", 16]
    given += ["--learning_rate", 1e-3, "--warmup_updates", 0, "--output_dir", out, *more]
    return [str(part) for part in given]


# --- samples ---------------------------------------------------------------------------------------------------------


def test_a_docstring_is_taken_out_of_its_function():
    function = 'def f(x):\n    r"""\n    Adds one.\n\n    Slowly.\n    """\n    return x + 1\n'
    assert split_docstring(function) == ("def f(x):\n    return x + 1\n", "Adds one.")
    for without in (
        "def f(x):\n    return x\n",
        'def f(x):\n    """All there is."""\n',
        'def f(x): "One"; return x\n',
        "def f(",
    ):
        assert split_docstring(without) is None


def test_the_standard_librarys_docstrings_are_in_no_source():
    """The default data, of its held-out files: the answer is not in the question. Control: in the function it is."""
    corpus = open_source(Source(embedded="validation"))
    rows = [row.values for row in docstring_corpus(corpus, "text", ("source", "target")).rows((), False)]
    assert len(rows) > 50
    assert sum(row["target"] in row["source"] for row in rows if len(row["target"]) > 20) <= 0.02 * len(rows)
    functions = {row.values["text"] for row in corpus.rows(("text",), False)}
    assert sum(any(row["target"] in function for function in functions) for row in rows) > 0.9 * len(rows)


def test_samples_are_what_the_tokenizer_makes_of_the_columns(files, tokenizer):
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    pairs = tokenize_pairs(Source(files=(str(files[0]),)), ("source", "target"), tokenizer, 64, 24)
    eos = tokenizer.eos_token_id
    for index, row in enumerate(rows):
        for ids, text, length in zip(pairs[index], (row["source"], row["target"]), (64, 24), strict=True):
            whole = tokenizer(text)["input_ids"]
            assert whole[-1] == eos
            assert ids.tolist() == (whole if len(whole) <= length else [*whole[: length - 1], eos])
    lengths = np.array([[len(source), len(target)] for source, target in pairs])
    assert (pairs.lengths(np.arange(40)) == lengths).all() and pairs.max_length == lengths.sum(1).max()
    assert (pairs.num_targets(np.arange(40)) == lengths[:, 1]).all() and pairs.num_target_tokens == lengths[:, 1].sum()
    sources_cut = sum(len(tokenizer(row["source"])["input_ids"]) > 64 for row in rows)
    assert sources_cut and f"{sources_cut} sources truncated at 64" in pairs.describe()


def test_a_tokenizer_that_ends_no_target_gets_its_eos_there(files):
    tokenizer = train_tokenizer(Source(files=(str(files[0]),)), 384, columns=("source", "target"))
    pairs = tokenize_pairs(Source(files=(str(files[0]),)), ("source", "target"), tokenizer, 64, 24)
    assert all(target[-1] == tokenizer.eos_token_id and len(target) <= 24 for _, target in pairs)


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_class", [T5Config, BartConfig, MarianConfig])
def test_padding_does_not_change_the_loss_which_is_the_models_own(config_class, files, tokenizer):
    """The sum over a padded micro-batch is that of each pair by itself through transformers. Control: no mask."""
    model = make_model(config_class, tokenizer)
    pairs = tokenize_pairs(Source(files=(str(files[0]),)), ("source", "target"), tokenizer, 64, 24)
    start = model.config.decoder_start_token_id
    expected = 0
    for index in (0, 3, 7, 12):
        source, labels = (torch.from_numpy(ids).unsqueeze(0) for ids in pairs[index])
        expected += model(input_ids=source, labels=labels).loss.item() * labels.numel()
    micro_batch = collate_pairs([pairs[index] for index in (0, 3, 7, 12)], tokenizer.pad_token_id, start)
    labels = torch.full_like(micro_batch["decoder_input_ids"], -100)
    labels.view(-1)[micro_batch["target_rows"]] = micro_batch["targets"]
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert torch.equal(shifted[labels != -100], micro_batch["decoder_input_ids"][labels != -100])
    assert (micro_batch["attention_mask"] == 0).any() and (labels == -100).any()
    assert seq2seq.sum_losses(model, micro_batch).item() == pytest.approx(expected, rel=1e-6)
    unmasked = micro_batch | {"attention_mask": torch.ones_like(micro_batch["attention_mask"])}
    assert seq2seq.sum_losses(model, unmasked).item() != pytest.approx(expected, rel=1e-4)


def test_a_dummy_sample_has_no_loss_and_gives_every_parameter_a_gradient(files, tokenizer):
    """A rank with nothing left joins the step's collectives with it."""
    model = make_model(T5Config, tokenizer)
    pairs = tokenize_pairs(Source(files=(str(files[0]),)), ("source", "target"), tokenizer, 64, 24)
    loss = seq2seq.sum_losses(model, collate_pairs([pairs.dummy_sample()], tokenizer.pad_token_id, 0))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in model.parameters())


@pytest.mark.parametrize("config_class", [T5Config, BartConfig])
def test_one_weight_is_one_module_and_one_that_is_kept_apart_stays_apart(config_class, tokenizer, tmp_path):
    """As where a checkpoint has an encoder's embedding of its own: the model computes the same before and after."""
    model = make_model(config_class, tokenizer)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for is_apart in (False, True):
        own = next(name for name in weights if name.endswith("encoder.embed_tokens.weight"))
        weights[own] = torch.randn_like(weights[own]) if is_apart else weights[own]
        model.config.save_pretrained(tmp_path)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model = build_model(model.config, str(tmp_path), model_class=AutoModelForSeq2SeqLM).eval()
        ids = torch.arange(2, 8).unsqueeze(0)
        before = model(input_ids=ids, decoder_input_ids=ids).logits
        prepare_encoder_decoder(model)
        assert torch.equal(model(input_ids=ids, decoder_input_ids=ids).logits, before)
        encoder, decoder = model.get_encoder().embed_tokens, model.get_decoder().embed_tokens
        assert decoder is model.get_input_embeddings() and (encoder is decoder) != is_apart


# How a global batch of 16 pairs is cut: processes, and pairs or tokens at once.
CUTS = [(1, "size", 16), (1, "size", 4), (1, "tokens", 400), (2, "size", 4), (2, "tokens", 200)]


def test_the_update_is_the_same_however_the_global_batch_is_cut(files, model_dirs, tmp_path):
    """Law 1, where both lengths vary: gradients, losses, the held-out loss and what is written in the end.

    With BART, as T5's norms are always float32. Control: the mean of the micro-batches' means is another update.
    """
    cuts = {}
    for processes, kind, number in CUTS:
        more = [f"--micro_batch_{kind}", number, "--generate", 5, "--save_every", 0]
        cuts[f"{processes}-{kind}-{number}"] = (processes, flags(files, tmp_path, model_dirs / "bart", *more), {})
    first, *others = cuts
    _, given, _ = cuts["1-size-4"]
    runs = run_in_float64("seq2seq", cuts | {"means": (1, given, {"mean_of_means": 1})}, tmp_path)
    assert_same_update(runs, first, *others)
    expected = results_of(tmp_path / first)
    for name in others:
        figures = results_of(tmp_path / name)
        assert figures["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-12)
        assert figures["examples"] == expected["examples"] and figures["num_generated"] == 5
    assert relative_difference(runs["means"][0], runs[first][0]) > 0.01


@pytest.mark.parametrize("config_class", [T5Config, BartConfig])
def test_targets_are_written_in_large_batches_with_a_cache(config_class, files, tokenizer):
    """They equal those of transformers for one source at a time, although the model's files set no cache."""
    model = make_model(config_class, tokenizer)
    model.config.use_cache = model.generation_config.use_cache = False
    pairs = tokenize_pairs(Source(files=(str(files[1]),)), ("source", "target"), tokenizer, 64, 24)
    expected = {}
    for index in range(13):
        source = torch.from_numpy(pairs[index][0]).unsqueeze(0)
        expected[index] = model.generate(source, max_new_tokens=24, do_sample=False)[0].tolist()
    start, shapes = model.config.decoder_start_token_id, []
    model.get_decoder().register_forward_pre_hook(
        lambda _, args, inputs: shapes.append(tuple((args or (inputs["input_ids"],))[0].shape)), with_kwargs=True
    )
    collate = functools.partial(collate_pairs, pad_token_id=tokenizer.pad_token_id, decoder_start_token_id=start)
    args = argparse.Namespace(generate=13, target_length=24, activation_checkpointing="none")
    for limits in ({"micro_batch_size": 1, "micro_batch_tokens": None}, {"micro_batch_size": None}):
        vars(args).update({"micro_batch_tokens": 64 + 24} | limits)
        shapes.clear()
        written = write_targets(args, model, pairs, collate, Accelerator(cpu=True), tokenizer)
        assert {length for _, length in shapes} == {1} and max(rows for rows, _ in shapes) == 8
        for index, ids in expected.items():
            assert written[index][: len(ids)] == ids and not set(written[index][len(ids) :]) - {tokenizer.pad_token_id}


# --- figures, resume -------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_an_independent_computation(files, model_dirs, tmp_path):
    """transformers' own loss and generation, a sample at a time, on the exported model; sacrebleu on the texts."""
    out = tmp_path / "run"
    printed = launch(*flags(files, out, model_dirs / "t5"), script=RECIPE).stdout
    model = AutoModelForSeq2SeqLM.from_pretrained(out / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    loss_sum, num_targets, written, targets, copies = 0, 0, [], [], []
    train = [json.loads(line)["target"] for line in files[0].read_text().splitlines()]
    train = [tokenizer(text, truncation=True, max_length=24)["input_ids"] for text in train]
    num_copied = sum(map(len, train)) // len(train)
    most_frequent = max(map(tuple, train), key=[tuple(ids) for ids in train].count)
    frequent = 13 * [tokenizer.decode(most_frequent, skip_special_tokens=True).strip()]
    for line in files[1].read_text().splitlines():
        row = json.loads(line)
        source = tokenizer(row["source"], truncation=True, max_length=64, return_tensors="pt")["input_ids"]
        labels = tokenizer(row["target"], truncation=True, max_length=24, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            loss_sum += model(input_ids=source, labels=labels).loss.item() * labels.numel()
            ids = model.generate(source, attention_mask=torch.ones_like(source), max_new_tokens=24, do_sample=False)
        num_targets += labels.numel()
        written.append(tokenizer.decode(ids[0], skip_special_tokens=True).strip())
        targets.append(tokenizer.decode(labels[0], skip_special_tokens=True).strip())
        copies.append(tokenizer.decode(source[0][:num_copied], skip_special_tokens=True).strip())
    figures = results_of(out)
    assert figures["validation_loss"] == pytest.approx(loss_sum / num_targets, rel=1e-5)
    assert figures["chrf"] == pytest.approx(CHRF().corpus_score(written, [targets]).score)
    assert figures["exact"] == sum(map(str.__eq__, written, targets)) / 13
    assert figures["chrf_of_copied_source"] == pytest.approx(CHRF().corpus_score(copies, [targets]).score)
    assert figures["examples"][-1] == {"target": targets[-1], "written": written[-1]}
    assert figures["chrf_of_most_frequent_target"] == pytest.approx(CHRF().corpus_score(frequent, [targets]).score)
    for part in (f"{figures['chrf']:.1f}", f"padding {figures['padding_share']:.1%}", "AutoModelForSeq2SeqLM"):
        assert part in printed


def test_bytes_are_tokens_that_are_resumed_saved_and_loaded_by_transformers(files, tmp_path):
    """From scratch; resumed from update 3 of 6 bit for bit; saved, and fine-tuned. A run of BPE is refused there."""
    scratch = ["--train_file", files[0], "--validation_file", files[1], "--save_every", 3, "--global_batch_size", 8]
    scratch += ["--generate", 5, "--target_length", 24, "--micro_batch_tokens", 512, "--num_updates", 6]
    of_bytes = [*scratch, "--tokenizer", "bytes"]
    whole, resumed, tuned = (tmp_path / name for name in ("whole", "resumed", "tuned"))
    again = {"copy_run": [str(whole), str(resumed), 3]}
    runs = [
        ([*of_bytes, "--output_dir", whole], {}),
        ([*of_bytes, "--output_dir", resumed, "--resume"], again),
        ([*scratch, "--output_dir", tuned, "--model_name_or_path", whole / "model"], {}),
    ]
    assert "after update 3" in run_specs("seq2seq", runs, tmp_path).stdout
    lines = {path: [(line["loss"], line["grad_norm"]) for line in read_metrics(path)] for path in (whole, resumed)}
    assert lines[resumed] == lines[whole] and len(lines[whole]) == 6

    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    text = "a b\tnaïve 😀\n123+45"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) + 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == 257 and set(ids[:-1]) <= set(range(257)) - {tokenizer.eos_token_id}
    model = AutoModelForSeq2SeqLM.from_pretrained(whole / "model").eval()
    assert model.config.vocab_size == 257
    row = json.loads(files[1].read_text().splitlines()[-1])
    source = tokenizer(row["source"], truncation=True, max_length=128, return_tensors="pt")
    written = tokenizer.decode(
        model.generate(**source, max_new_tokens=24, do_sample=False)[0], skip_special_tokens=True
    )
    assert results_of(whole)["examples"][-1]["written"] == written.strip()
    assert read_metrics(tuned)[0]["loss"] < read_metrics(whole)[0]["loss"]  # it begins where the other ended

    result = run_recipe_alone("seq2seq.py", *scratch, "--output_dir", whole, "--resume")
    assert_mistake(result, "its vocab_size is 4096, the checkpoint's is 257", "the tokenizer differs", lines=2)
    result = run_recipe_alone("seq2seq.py", *of_bytes, "--model_name_or_path", whole / "model", "--dry_run")
    assert_mistake(result, "--tokenizer is for models from scratch.*remove it")


# --- mistakes --------------------------------------------------------------------------------------------------------

ROWS = {
    "empty": (
        [{"source": "", "target": "b"}, {"source": "c", "target": " "}],
        r"no row with source and target \(2 have an empty text\)",
    ),
    "null": ([{"source": None, "target": "b"}], "line 1: column source is null, not a string"),
    "columns": ([{"de": "a", "en": "b"}], "no column source, target; there are: de, en; .*--source_column"),
    "later": ([{"source": "a", "target": "b"}, {"source": "a"}], "line 2: no column target"),
    "none": ([], "is empty; leave it out or fill it"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_no_pairs_are_named_with_their_place(name, tokenizer, tmp_path):
    rows, pattern = ROWS[name]
    path = write_jsonl(tmp_path / f"{name}.jsonl", rows)
    with pytest.raises(UserError, match=pattern) as caught:
        tokenize_pairs(Source(files=(str(path),)), ("source", "target"), tokenizer, 64, 24)
    assert f"{name}.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_pairs_with_an_empty_text_are_left_out_and_counted(tokenizer, tmp_path):
    """Also where a batch has no other pair. Control: without them, the same pairs, and no word of it."""
    whole = [{"source": f"a {n}", "target": f"b {n}"} for n in range(3)]
    empty = [{"source": "c", "target": ""}, {"source": "\n", "target": "d"}]
    rows = [*empty * 2048, whole[0], *empty, *whole[1:]]
    pairs, others = (
        tokenize_pairs(Source(files=(str(path),)), ("source", "target"), tokenizer, 64, 24)
        for path in (write_jsonl(tmp_path / "rows.jsonl", rows), write_jsonl(tmp_path / "whole.jsonl", whole))
    )
    assert len(pairs) == len(others) == 3
    assert all(np.array_equal(a, b) for n in range(3) for a, b in zip(pairs[n], others[n], strict=True))
    assert "; 4,098 pairs with an empty text left out" in pairs.describe() and "left out" not in others.describe()


@pytest.fixture(scope="module")
def odd_models(model_dirs, tokenizer, tmp_path_factory):
    """A causal model, and a T5 that does not say how its targets begin."""
    root = tmp_path_factory.mktemp("odd")
    GPT2Config(vocab_size=384, n_embd=32, n_layer=1, n_head=4).save_pretrained(root / "gpt2")
    tokenizer.save_pretrained(root / "gpt2")
    shutil.copytree(model_dirs / "t5", root / "no_start")
    settings = json.loads((root / "no_start/config.json").read_text())
    del settings["decoder_start_token_id"]
    (root / "no_start/config.json").write_text(json.dumps(settings))
    return {"gpt2": root / "gpt2", "no_start": root / "no_start", "bart": model_dirs / "bart"}


MODEL_MISTAKES = {
    ("gpt2", ""): "gpt2 has no encoder-decoder in transformers; use a model of a different type",
    ("no_start", ""): "no decoder_start_token_id",
    ("bart", "--sequence_length 97"): "--sequence_length 97 is beyond the model's 96 positions",
    ("bart", "--target_length 97"): "--target_length 97 exceeds the model's 96 positions",
    ("bart", "--sequence_length 1"): "--sequence_length 1 is too short for text and special tokens; use at least 2",
    ("bart", "--target_length 1"): "--target_length 1 is too short for text and special tokens; use at least 2",
    ("bart", "--source_column text"): "no column text; there are: source, target",
}


@pytest.mark.parametrize(("model", "more"), MODEL_MISTAKES)
def test_models_and_lengths_that_cannot_be(model, more, odd_models, files, tmp_path, monkeypatch):
    given = flags(files, tmp_path / "run", odd_models[model], *more.split())
    monkeypatch.setattr(sys, "argv", ["seq2seq.py", *given])
    args = seq2seq.parse_arguments()
    with pytest.raises(UserError, match=MODEL_MISTAKES[model, more]):
        seq2seq.load_data(args)


def test_targets_that_begin_in_another_way_end_the_recipe_in_one_line(files, model_dirs, tmp_path):
    """Seen only when the model is there; nothing is written."""
    result = run_recipe_alone("seq2seq.py", *flags(files, tmp_path / "run", model_dirs / "mbart"))
    assert_mistake(result, "MBartForConditionalGeneration does not begin all targets with")
    assert not (tmp_path / "run").exists()
