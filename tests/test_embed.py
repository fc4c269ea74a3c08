"""Embeddings: the loss is the formula over the whole global batch, however it is cut, and model/ has its vectors."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    assert_mistake,
    assert_same_update,
    launch,
    relative_difference,
    results_of,
    run_in_float64,
    run_recipe_alone,
    run_specs,
    source_of,
    stdlib_functions,
    write_jsonl,
)
from transformers import AutoModel, AutoTokenizer, BertConfig, LlamaConfig, T5Config, T5EncoderModel

from common.data.source_types import Source
from common.errors import UserError
from common.tasks.embed import contrast, encoder, replay, retrieval
from common.tasks.embed.pairs import Columns, choose_columns, collate_texts, split_function, tokenize_pairs
from common.tasks.embed.retrieval import spearman
from recipes import embed
from tools.checkpoint.export import export
from tools.checkpoint.push import find_files

SIZES = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def models(model_dir, tmp_path_factory):
    """An encoder and a decoder without dropout, and one with; each with a tokenizer."""
    path, tokenizer = tmp_path_factory.mktemp("models"), AutoTokenizer.from_pretrained(model_dir)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    configs = {"bert": BertConfig(**SIZES, **quiet), "llama": LlamaConfig(**SIZES), "dropout": BertConfig(**SIZES)}
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModel.from_config(config, dtype=torch.float64).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    return path


def rows_of(texts, scored=False):
    """Pairs of a function's name and body; every third with negatives, or each with one of five scores."""
    rows = []
    for number, text in enumerate(texts):
        row = {"anchor": text[4 : 12 + number], "positive": text[20:120]}
        more = (
            {"score": number % 5 / 4}
            if scored
            else {"negative": [text[30:60], text[120:140]]}
            if number % 3 == 0
            else {}
        )
        rows.append(row | more)
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """18 pairs to train on, and 7 that are held out, two of which have the same positive each; also with scores."""
    path = tmp_path_factory.mktemp("pairs")
    texts = [text for text in stdlib_functions(80) if len(text) > 160][:25]
    rows = rows_of(texts)
    rows[1]["positive"] = rows[4]["positive"]
    rows[20]["positive"] = rows[23]["positive"]
    scored = rows_of(texts, scored=True)
    return {
        "pairs": (write_jsonl(path / "train.jsonl", rows[:18]), write_jsonl(path / "held_out.jsonl", rows[18:])),
        "scores": (write_jsonl(path / "s.jsonl", scored[:18]), write_jsonl(path / "s_held_out.jsonl", scored[18:])),
    }


def flags(files, model, *more, kind="pairs"):
    given = ["--train_file", files[kind][0], "--validation_file", files[kind][1], "--model_name_or_path", model]
    given += ["--sequence_length", 64, "--num_updates", 3, "--global_batch_size", 9, "--learning_rate", 1e-3]
    return [str(part) for part in [*given, "--max_grad_norm", 0.5, *more]]


# --- samples


def test_rows_become_texts_of_anchors_then_positives_then_negatives(tokenizer, cache, tmp_path):
    rows = [
        {"query": "a", "passage": "b c", "negative_2": "d", "negative_1": ["e f", "g"]},
        {"query": "h i", "passage": "j"},
        {"query": "k", "passage": "b c", "negative_1": "", "negative_2": None},
    ]
    source = source_of(tmp_path / "rows.jsonl", rows)
    args = SimpleNamespace(
        anchor_column=None, positive_column=None, negative_columns=None, score_column=None, loss=None
    )
    columns = choose_columns(args, source)
    assert columns == Columns("query", "passage", ("negative_1", "negative_2"))
    pairs = tokenize_pairs(source, columns, tokenizer, 16, ("q: ", "d: "), cache)
    texts, ids = pairs.of_batch(np.array([2, 0]))
    read = [tokenizer.decode(texts[number].ids, skip_special_tokens=True) for number in ids]
    assert read == ["q: k", "q: a", "d: b c", "d: b c", "d: e f", "d: g", "d: d"]
    assert texts.num_targets(ids).tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert [text.position for text in texts] == list(range(7))
    numbers = [text.number for text in texts]
    assert numbers[2] == numbers[3] and len(set(numbers)) == 6
    assert pairs.lengths(np.arange(3)).tolist() == [
        max(len(text.ids) for text in pairs.of_batch(np.array([number]))[0]) for number in range(3)
    ]
    micro_batch = collate_texts([texts[2], pairs.dummy_sample(), texts[1]], 0, ("attention_mask",))
    assert micro_batch["target_rows"].tolist() == [0, 2] and micro_batch["target_positions"].tolist() == [2, 1]
    assert micro_batch["attention_mask"].sum(1).tolist() == micro_batch["target_lengths"].tolist()
    assert len(micro_batch["targets"]) == 1


def columns_in(path, row, trained=None, **given):
    """The columns that are chosen for a file with this row. given: flags."""
    names = ("anchor_column", "positive_column", "negative_columns", "score_column", "loss")
    return choose_columns(SimpleNamespace(**dict.fromkeys(names) | given), source_of(path, [row]), trained)


def test_columns_with_known_names_are_found(tmp_path):
    """Every name of an anchor with every name of a positive; held-out data have their own."""
    for names, others, given in (
        (("question", "passage"), ("id", "source"), {}),
        (("query", "document"), ("source",), {}),
        (("sentence1", "answer"), (), {}),
        (("query", "positive"), ("anchors", "passage"), {}),
        (("sentence1", "sentence2"), ("source", "target"), {}),
        (("q", "answer"), ("question",), {"anchor_column": "q"}),
    ):
        row = dict.fromkeys([*others, *names], "a")
        assert columns_in(tmp_path / f"{'-'.join(names)}.jsonl", row, **given) == Columns(*names), names
    with_negatives, scored = Columns("a", "b", ("negative",)), Columns("a", "b", (), "score")
    pair = {"query": "a", "passage": "b", "score": 1}
    assert columns_in(tmp_path / "1.jsonl", pair, with_negatives) == Columns("query", "passage")
    assert columns_in(tmp_path / "2.jsonl", pair | {"negative": "c"}, scored) == Columns(
        "query", "passage", (), "score"
    )
    with pytest.raises(UserError, match="no column score; there are: query, passage"):
        columns_in(tmp_path / "3.jsonl", {"query": "a", "passage": "b"}, scored)


def test_mistakes_in_rows_are_named(tokenizer, cache, tmp_path):
    for number, (row, problem) in enumerate(
        (
            ({"anchor": "a", "text": "b"}, "no column positive; there are: anchor, text"),
            ({"anchor": "a", "positive": " "}, r"no row with anchor and positive \(1 have an empty text\)"),
            ({"anchor": "a", "positive": None}, "line 1: column positive is null"),
            ({"anchor": "a", "positive": "b", "negative": [3]}, "line 1: column negative is of type int"),
            ({"anchor": "a", "positive": "b", "score": "high"}, "line 1: column score is 'high', not a finite number"),
            ({"anchor": "a", "positive": "b", "score": 1, "negative": "c"}, "has negatives .negative. and a score"),
        )
    ):
        source = source_of(tmp_path / f"{number}.jsonl", [row])
        names = dict.fromkeys(("anchor_column", "positive_column", "negative_columns", "score_column", "loss"))
        with pytest.raises(UserError, match=problem) as error:
            tokenize_pairs(source, choose_columns(SimpleNamespace(**names), source), tokenizer, 16, ("", ""), cache)
        assert len(str(error.value).splitlines()) == 1


def test_pairs_with_an_empty_text_are_left_out_and_counted(tokenizer, cache, tmp_path):
    """An empty negative is none. Control: without them, the same texts, and no word of it."""
    names, whole = Columns("anchor", "positive", ("negative",)), []
    for number, negative in enumerate(("c", " ", [" ", "c"])):
        whole.append({"anchor": f"a {number}", "positive": f"b {number}", "negative": negative})
    empty = [whole[0] | {"anchor": ""}, whole[0] | {"positive": "\n"}]
    pairs, others = (
        tokenize_pairs(source_of(tmp_path / f"{name}.jsonl", rows), names, tokenizer, 16, ("q: ", "d: "), cache)
        for name, rows in {"rows": [empty[0], whole[0], empty[1], *whole[1:]], "whole": whole}.items()
    )
    assert len(pairs) == 3 and pairs.fingerprint == others.fingerprint
    assert pairs.texts_per_pair().tolist() == [3, 2, 3]
    assert "; 2 pairs with an empty text left out" in pairs.describe() and "left out" not in others.describe()


def test_a_docstring_is_parted_from_its_function():
    function = 'def f(x):\n    """Adds one.\n\n    More."""\n    return x + 1\n'
    assert split_function(function) == ("Adds one.", "    return x + 1\n")
    assert split_function("def f(x):\n    return x\n") is None


# --- the loss


def options(**more):
    given = {"loss": "contrastive", "temperature": 0.2, "normalize": True, "symmetric": False, "dimensions": None}
    return SimpleNamespace(**given | more)


def texts_with_twins():
    """Vectors of 5 pairs and 3 negatives. Two positives are equal texts, two anchors, and a negative and a positive."""
    torch.manual_seed(0)
    vectors = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    numbers = torch.tensor([0, 1, 2, 3, 0, 10, 11, 12, 11, 14, 20, 12, 22])
    scores = torch.tensor([0.5, 0.0, 1.0, 0.5, 0.25] + [0.0] * 8)
    return vectors, torch.stack([numbers.double(), scores.double()], 1)


def info_nce(vectors, facts, temperature, symmetric):
    """Pair by pair, as the formula reads."""
    vectors, numbers, total = torch.nn.functional.normalize(vectors), facts[:, 0].tolist(), 0
    for i in range(5):
        allowed = [j for j in range(8) if j == i or numbers[5 + j] != numbers[5 + i]]
        allowed = [j for j in allowed if j == i or j >= 5 or numbers[j] != numbers[i]]
        logits = {j: vectors[i] @ vectors[5 + j] / temperature for j in allowed}
        loss = torch.stack(list(logits.values())).logsumexp(0) - logits[i]
        if symmetric:
            back = {j: vectors[j] @ vectors[5 + i] / temperature for j in allowed if j < 5}
            loss = (loss + torch.stack(list(back.values())).logsumexp(0) - back[i]) / 2
        total = total + loss
    return total


def test_the_loss_and_its_gradients_are_the_formulas(monkeypatch):
    """In chunks too. Controls: without the mask of equal texts, and pairs that are contrasted in two parts."""
    vectors, facts = texts_with_twins()
    logarithm = torch.tensor([0.2], dtype=torch.float64).log().requires_grad_()
    monkeypatch.setattr(contrast, "CHUNK_ROWS", 2)
    for more in ({}, {"symmetric": True}, {"dimensions": [2, 4]}):
        expected = sum(
            info_nce(vectors[:, :width], facts, logarithm.exp(), more.get("symmetric", False))
            for width in (6, *more.get("dimensions", ()))
        )
        wanted = torch.autograd.grad(expected, [vectors, logarithm])
        loss, gradients, slope = contrast.with_gradients(vectors, facts, 5, logarithm, options(**more))
        torch.testing.assert_close(loss, expected.detach()[0], rtol=1e-12, atol=0)
        assert relative_difference([gradients, slope], wanted) < 1e-12
    other = facts.clone()
    other[:, 0] = torch.arange(13)
    assert abs(contrast.global_loss(vectors, other, 5, None, options()) - info_nce(vectors, facts, 0.2, False)) > 1e-3
    parts = [torch.tensor([0, 1, 5, 6]), torch.tensor([2, 3, 4, 7, 8, 9])]
    apart = sum(contrast.global_loss(vectors[one], facts[one], len(one) // 2, None, options()) for one in parts)
    naive = torch.autograd.grad(apart, vectors)[0]
    whole = contrast.with_gradients(vectors, facts, 5, None, options())[1]
    assert relative_difference([naive], [whole]) > 0.1


def test_the_loss_of_scores_is_the_formula():
    vectors, facts = texts_with_twins()
    cosines, scores = torch.cosine_similarity(vectors[:5], vectors[5:10]), facts[:5, 1]
    terms = [(cosines[j] - cosines[i]) / 0.2 for i in range(5) for j in range(5) if scores[i] > scores[j]]
    expected = 5 * torch.log(1 + torch.stack(terms).exp().sum())
    wanted = torch.autograd.grad(expected, vectors)[0]
    loss, gradients, _ = contrast.with_gradients(vectors, facts, 5, None, options(loss="cosent"))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    assert relative_difference([gradients], [wanted]) < 1e-12
    same = facts * torch.tensor([1.0, 0.0])
    assert contrast.global_loss(vectors, same, 5, None, options(loss="cosent")).abs() < 1e-12


def test_the_losses_are_those_of_sentence_transformers():
    """Of texts that all differ: it has no mask of equal texts."""
    losses = pytest.importorskip(
        "sentence_transformers.sentence_transformer.losses", reason="needs sentence-transformers"
    )
    vectors, scores = torch.randn(15, 6, dtype=torch.float64), torch.linspace(0, 1, 5, dtype=torch.float64)
    facts = torch.stack([torch.arange(15.0), torch.cat([scores, torch.zeros(10)])], 1)
    parts, model = list(vectors.split(5)), torch.nn.Identity()
    found = [
        contrast.global_loss(vectors[:rows], facts[:rows], 5, None, options(**more)) / 5
        for rows, more in ((15, {}), (10, {"symmetric": True}), (10, {"loss": "cosent"}))
    ]
    expected = [
        losses.MultipleNegativesRankingLoss(model, scale=5.0).compute_loss_from_embeddings(parts, None),
        losses.MultipleNegativesSymmetricRankingLoss(model, scale=5.0).compute_loss_from_embeddings(parts[:2], None),
        losses.CoSENTLoss(model, scale=5.0).compute_loss_from_embeddings(parts[:2], scores),
    ]
    assert [one.item() for one in found] == pytest.approx([one.item() for one in expected], rel=1e-9)


def test_pooling_ignores_padding_and_the_temperature_has_a_lower_limit():
    hidden, lengths = torch.arange(12.0).view(2, 3, 2), torch.tensor([3, 2])
    assert encoder.pool(hidden, lengths, "mean").tolist() == [[2, 3], [7, 8]]
    assert encoder.pool(hidden, lengths, "cls").tolist() == [[0, 1], [6, 7]]
    assert encoder.pool(hidden.bfloat16(), lengths, "last").tolist() == [[4, 5], [8, 9]]
    assert contrast.temperature_of(options(), torch.tensor([-20.0])) == pytest.approx(1e-4)
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([0.0, 0.5, 0.5, 1])) == pytest.approx(0.9486833)


def test_equal_and_nan_vectors_retrieve_nothing():
    """Control: with different ones, each positive is the first."""
    accelerator = SimpleNamespace(process_index=0, reduce=lambda tensor, reduction: tensor)
    run, numbers = SimpleNamespace(args=options(), accelerator=accelerator), torch.arange(40)
    different = torch.eye(20).repeat(2, 1)
    found = [retrieval._retrieve(run, x, numbers, 20) for x in (different, 0 * different + 1, different * torch.nan)]
    assert [set(figures.values()) for figures in found] == [{1.0}, {0.0}, {0.0}]


def test_dropout_is_the_same_in_both_passes(files, models, tmp_path, monkeypatch):
    """The gradient is that of one graph with these random numbers. Control: without the replay it differs."""
    args = options(model_name_or_path=str(models / "dropout"), trust_remote_code=False, pooling="mean")
    args.shared, args.learn_temperature = (lambda name: None), True
    model = encoder.build_encoder(args, encoder.load_config(args.model_name_or_path, False, AutoModel)).double().train()
    tokenizer = AutoTokenizer.from_pretrained(models / "dropout")
    rows = source_of(tmp_path / "rows.jsonl", [json.loads(line) for line in files["pairs"][0].open()][:4])
    pairs = tokenize_pairs(rows, Columns("anchor", "positive", ("negative",)), tokenizer, 32, cache_dir=tmp_path)
    texts, ids = pairs.of_batch(np.arange(4))
    micro_batches = [collate_texts([texts[i] for i in part], 0, ("attention_mask",)) for part in np.array_split(ids, 3)]

    class Accelerator:
        process_index, reduce = 0, staticmethod(lambda tensor, reduction: tensor)

    batch = SimpleNamespace(lengths=ids, num_targets=4)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), accelerator=Accelerator())
    run.micro_batches = lambda _: [(dict(one), number == 2) for number, one in enumerate(micro_batches)]

    def gradients():
        torch.manual_seed(1)
        model.zero_grad()
        for micro_batch, _ in replay.replayed(run, model, batch, embed.predict):
            embed.sum_losses(model, micro_batch).backward()
        return [p.grad.clone() for p in model.parameters()]

    found = gradients()
    torch.manual_seed(1)
    model.zero_grad()
    table, logarithm = torch.zeros(len(ids), 32, dtype=torch.float64), None
    for one in micro_batches:
        vectors, logarithm = embed.predict(model, one)
        table = table.index_copy(0, one["target_positions"], vectors)
    facts = torch.cat([one["target_facts"] for one in micro_batches]).double()
    contrast.global_loss(table, facts, 4, logarithm, args).backward()
    assert relative_difference(found, [p.grad for p in model.parameters()]) < 1e-12
    monkeypatch.setattr(replay, "_set_rng_states", lambda *_: None)
    assert relative_difference(gradients(), found) > 1e-3


def test_a_model_whose_vectors_depend_on_padding_is_refused(files, models, cache):
    """BERT without its mask."""
    args = options(model_name_or_path=str(models / "bert"), trust_remote_code=False, pooling="mean")
    args.shared, args.learn_temperature = (lambda name: None), False
    model = encoder.build_encoder(args, encoder.load_config(args.model_name_or_path, False, AutoModel))
    tokenizer, source = AutoTokenizer.from_pretrained(models / "bert"), Source(files=(str(files["pairs"][0]),))
    pairs = tokenize_pairs(source, Columns("anchor", "positive"), tokenizer, 96, cache_dir=cache)
    run = SimpleNamespace(device=torch.device("cpu"), accelerator=SimpleNamespace(mixed_precision="no"))
    check = partial(encoder.check_padding, run, model, embed.predict)
    check(partial(collate_texts, pad_token_id=0, inputs=("attention_mask",)), pairs)
    with pytest.raises(UserError, match="bert: padding on the right changes this model's vectors"):
        check(partial(collate_texts, pad_token_id=0, inputs=()), pairs)


# --- runs

ALL = ["--learn_temperature", "--symmetric", "--dimensions", 16]
LORA = ["--lora_rank", 4, "--pooling", "last"]
CUTS = {
    "one": ("bert", 1, ["--micro_batch_tokens", 4096, *ALL], {}),
    "three": ("bert", 1, ["--micro_batch_tokens", 512, *ALL], {}),
    "many": ("bert", 1, ["--micro_batch_size", 4, *ALL], {}),
    "two": ("bert", 2, ["--micro_batch_tokens", 256, *ALL], {}),
    "fsdp2": ("bert", ("fsdp2", 2), ["--micro_batch_tokens", 256, *ALL], {}),
    "four": ("bert", 4, ["--micro_batch_tokens", 128, *ALL], {}),
    "fsdp2 four": ("bert", ("fsdp2", 4), ["--micro_batch_size", 2, *ALL], {}),
    "alone": ("bert", 2, ["--micro_batch_tokens", 256, *ALL], {"own_texts": 1}),
    "lora": ("llama", 1, ["--micro_batch_tokens", 4096, *LORA], {}),
    "lora two": ("llama", 2, ["--micro_batch_tokens", 256, *LORA], {}),
    "scores": ("llama", 1, ["--micro_batch_tokens", 4096], {}),
    "scores two": ("llama", 2, ["--micro_batch_tokens", 256], {}),
}


@pytest.fixture(scope="module")
def cuts(files, models, tmp_path_factory):
    """Gradients of the first update and metrics, in float64, of every cut."""
    specs = {
        name: (
            layout,
            flags(files, models / model, *more, kind=name.split()[0] if "scores" in name else "pairs"),
            changes,
        )
        for name, (model, layout, more, changes) in CUTS.items()
    }
    return run_in_float64("embed", specs, tmp_path_factory.mktemp("cuts"))


def test_every_cut_makes_the_same_update(cuts):
    """Control: ranks that contrast their own texts only."""
    whole = ("one", "three", "many", "two", "fsdp2", "four", "fsdp2 four")
    assert_same_update(cuts, *whole)
    assert_same_update(cuts, "lora", "lora two")
    assert_same_update(cuts, "scores", "scores two")
    assert relative_difference(cuts["alone"][0], cuts["one"][0]) > 1e-2
    for first, *others in (whole, ("lora", "lora two"), ("scores", "scores two")):
        expected = results_of(cuts[first][2])
        names = ("spearman",) if first == "scores" else ("recall_at_1", "recall_at_10", "mrr_at_10")
        for name in ("validation_loss", *names):
            figures = [results_of(cuts[other][2])[name] for other in others]
            assert figures == pytest.approx([expected[name]] * len(others), rel=1e-6), name
    assert results_of(cuts["one"][2])["temperature"] != pytest.approx(0.05, rel=1e-4)
    assert "mrr_at_10/16" in results_of(cuts["one"][2])


def held_out_figures(rows, vectors_of, size, temperature):
    """Loss in global batches of `size` pairs, and retrieval, of vectors by kind of text."""
    anchors, positives = (
        vectors_of([row["anchor"] for row in rows], 0),
        vectors_of([row["positive"] for row in rows], 1),
    )
    negatives = [vectors_of(row["negative"], 1) if "negative" in row else positives[:0] for row in rows]
    loss = 0.0
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        logits = anchors[part] @ torch.cat([positives[part], *negatives[part]]).T / temperature
        loss += torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)), reduction="sum").item()
    similarity = anchors @ torch.cat([positives, *negatives]).T
    for i, j in ((2, 5), (5, 2)):  # the same text in another global batch
        similarity[i, j] = -torch.inf
    ranks = (similarity >= similarity.diagonal()[:, None]).sum(1).float()
    return loss / len(rows), (ranks <= 1).float().mean().item(), (1 / ranks * (ranks <= 10)).mean().item()


PROMPTS = ("query: ", "text: ")
EXPORTED = {
    "bert": ["--learn_temperature"],
    "llama": ["--pooling", "last"],
    "dot": ["--no-normalize", "--pooling", "cls"],
}


@pytest.fixture(scope="module")
def exported(files, models, tmp_path_factory):
    """Runs with each pooling, and held-out rows."""
    directory = tmp_path_factory.mktemp("exported")
    given = ["--prompt_anchor", PROMPTS[0], "--prompt_positive", PROMPTS[1], "--global_batch_size", 4]
    specs = []
    for name, more in EXPORTED.items():
        model = models / ("llama" if name == "llama" else "bert")
        specs.append((flags(files, model, *given, *more, "--output_dir", directory / name), {}))
    run_specs("embed", specs, directory)
    return directory, [json.loads(line) for line in files["pairs"][1].open()]


def by_transformers(path, texts, kind):
    """Vectors of texts, one by one, of a saved model. kind: 0 for anchors, 1 for others."""
    model, tokenizer = (auto.from_pretrained(path / "model") for auto in (AutoModel, AutoTokenizer))
    vectors = []
    for text in texts:
        ids = tokenizer(PROMPTS[kind] + text, truncation=True, max_length=64, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model(input_ids=ids).last_hidden_state[0].float()
        vectors.append({"bert": hidden.mean(0), "llama": hidden[-1], "dot": hidden[0]}[path.name])
    return torch.stack(vectors) if path.name == "dot" else torch.nn.functional.normalize(torch.stack(vectors))


@pytest.mark.parametrize("name", EXPORTED)
def test_held_out_figures_are_those_of_the_saved_model(name, exported):
    directory, rows = exported
    figures = [results_of(directory / name)[key] for key in ("validation_loss", "recall_at_1", "mrr_at_10")]
    most = 1 if name == "dot" else 3  # dot products of a model that is hardly trained are nearly equal
    temperature = results_of(directory / name).get("temperature", 0.05)
    expected = held_out_figures(rows, partial(by_transformers, directory / name), 4, temperature)
    assert figures[:most] == pytest.approx(expected[:most], rel=1e-4)
    model = directory / name / "model"
    settings = json.loads((model / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == dict(zip(("query", "document"), PROMPTS, strict=True))
    kinds = [one["type"].split(".")[-1] for one in json.loads((model / "modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling", "Normalize"][: 2 if name == "dot" else 3]
    pooling = json.loads((model / "1_Pooling/config.json").read_text())
    assert pooling["word_embedding_dimension"] == 32 and pooling["include_prompt"]
    chosen = [key for key, value in pooling.items() if value is True and key != "include_prompt"]
    assert chosen == [encoder.POOLING_KEYS[{"bert": "mean", "llama": "last", "dot": "cls"}[name]]]
    assert json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"] == 64


def test_an_exported_checkpoint_and_an_upload_have_all_files(exported):
    """A learned temperature is no weight of the model."""
    directory, _ = exported
    export(directory / "bert/checkpoints/update-000003", directory / "again")
    files, others = find_files(directory / "bert/model")
    assert {"1_Pooling/config.json", "2_Normalize/config.json", "modules.json"} < set(files) and not others
    for name in set(files) - {"README.md"}:
        assert (directory / "again" / name).read_bytes() == (directory / "bert/model" / name).read_bytes(), name


def test_sentence_transformers_gives_the_vectors_that_were_trained(exported):
    """To 1e-6. Control: without the prompt they differ."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    directory, rows = exported
    texts = [row["positive"] for row in rows]
    for name in EXPORTED:
        sentences = sentence_transformers.SentenceTransformer(str(directory / name / "model"), device="cpu")
        assert sentences.max_seq_length == 64
        for kind, encode in enumerate((sentences.encode_query, sentences.encode_document)):
            ours, theirs = by_transformers(directory / name, texts, kind), encode(texts, convert_to_tensor=True)
            most = 1e-6 * ours.abs().max()
            assert (theirs - ours).abs().max() <= most
            assert (sentences.encode(texts, convert_to_tensor=True) - ours).abs().max() > 100 * most


def test_what_cannot_be_learned_or_does_not_fit_is_refused(files, models, tmp_path):
    same = write_jsonl(tmp_path / "same.jsonl", [{"anchor": f"a {n}", "positive": "b"} for n in range(8)])
    equal = [{"anchor": f"a {n}", "positive": f"b {n}", "score": 1} for n in range(8)]
    equal = write_jsonl(tmp_path / "equal.jsonl", equal)
    scored = [{"anchor": f"a {n}", "positive": f"b {n}", "score": n} for n in range(8)]
    scored = write_jsonl(tmp_path / "scored.jsonl", scored)
    anchors = write_jsonl(tmp_path / "anchors.jsonl", [{"anchor": "a", "positive": f"b {n}"} for n in range(8)])
    T5EncoderModel(T5Config(vocab_size=384, d_model=8, d_kv=4, d_ff=8, num_layers=1)).save_pretrained(tmp_path / "t5")
    bare = write_jsonl(tmp_path / "bare.jsonl", [{"anchor": f"a {n}", "positive": f"b {n}"} for n in range(8)])
    given = ["--global_batch_size", 4, "--output_dir", tmp_path / "out", "--train_file"]
    for more, problem in (
        ([same], "all positives are equal, so nothing can be learned"),
        ([anchors], "all anchors are equal, so nothing can be learned"),
        ([equal], "all scores are equal"),
        ([scored, "--symmetric"], "--symmetric has no effect with CoSENT, the loss of pairs with a score"),
        ([scored, "--no-normalize"], "--no-normalize: CoSENT, the loss of pairs with a score, compares cosines"),
        ([scored, "--score_column", "score", "--loss", "contrastive"], "--score_column score has no effect with"),
        ([f"{bare}:1", f"{scored}:2"], "files of pairs cannot be mixed by weights; remove the weights from"),
        ([bare, "--model_name_or_path", tmp_path / "t5"], "t5 is an encoder-decoder; use an encoder or a decoder"),
        ([bare, "--global_batch_size", 1], "--global_batch_size 1: the loss compares the pairs of a global batch"),
        ([bare, "--loss", "cosent"], "--loss cosent needs a score for each pair"),
        ([bare, "--model_name_or_path", models / "llama", "--pooling", "cls"], "--pooling cls: in a decoder .llama."),
        ([bare, "--model_name_or_path", models / "bert", "--dimensions", 64], "the model's vectors have 32"),
        ([bare, "--temperature", 1e-5], "--temperature 1e-05 is too low; use at least 0.0001"),
        ([bare, "--micro_batch_tokens", "auto"], "texts are embedded twice per update; pass a number"),
    ):
        assert_mistake(run_recipe_alone("embed.py", *given, *more), problem)
    assert not (tmp_path / "out").exists()


def test_a_model_from_scratch_learns_to_find_bodies(tmp_path):
    """Of other files; by chance 1 / 275 of them are first. An evaluation stops the run early, and the best is kept."""
    given = ["--num_updates", 60, "--global_batch_size", 32, "--sequence_length", 32, "--eval_every", 30, "--keep_best"]
    printed = launch(*given, "--output_dir", tmp_path / "run", script="recipes/embed.py").stdout
    results = results_of(tmp_path / "run")
    assert results["validation_loss"] < math.log(32) and results["recall_at_10"] > 2 * 10 / 275
    assert f"first 10 for {results['recall_at_10']:.1%}" in printed and results["best"]["checkpoint"]


def test_a_prompt_that_leaves_no_text_or_is_no_text_is_refused(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"anchor": f"a {n}", "positive": f"b {n}"} for n in range(64)])
    flags = ["--train_file", rows, "--output_dir", tmp_path / "run", "--sequence_length", 16]
    for prompt, pattern in {
        "a b " * 9: "of [0-9]+ tokens leaves no text in --sequence_length 16",
        "\udcff": "not UTF-8",
    }.items():
        result = run_recipe_alone("embed.py", *flags, "--prompt_positive", prompt)
        assert_mistake(result, f"--prompt_positive .*{pattern}")
    assert not (tmp_path / "run").exists()
