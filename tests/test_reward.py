"""Reward models: the loss is the formula's for any split, and the saved model has the rewards that were measured."""

import copy
import json
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import (
    assert_mistake,
    assert_refused,
    assert_same_update,
    launch,
    read_metrics,
    relative_difference,
    results_of,
    run_in_float64,
    run_recipe_alone,
    run_specs,
    source_of,
    stdlib_functions,
    write_jsonl,
)
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from common.data.chats import CHATML
from common.data.source_types import Source
from common.errors import UserError
from common.tasks.reward import reward_model
from common.tasks.reward.pairs import Pair, collate_pairs, tokenize_pairs
from recipes import reward

CENTER = 0.25


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """22 pairs with a margin to train on, and 9 that are held out."""
    path = tmp_path_factory.mktemp("pairs")
    rows = [
        {
            "prompt": text[:40],
            "chosen": text[40 : 90 + 5 * number],
            "rejected": text[90:40:-1],
            "margin": number % 4 / 4,
        }
        for number, text in enumerate(text for text in stdlib_functions(300) if len(text) > 300)
    ][:31]
    assert len(rows) == 31
    return write_jsonl(path / "train.jsonl", rows[:22]), write_jsonl(path / "held_out.jsonl", rows[22:])


def flags(files, model, *more):
    given = ["--train_file", files[0], "--validation_file", files[1], "--model_name_or_path", model]
    given += ["--sequence_length", 64, "--num_updates", 4, "--global_batch_size", 8, "--learning_rate", 1e-3]
    return [str(part) for part in [*given, "--max_grad_norm", 0.5, "--center_rewards", CENTER, *more]]


# --- loss


TRIPLES = [([5, 6, 7, 8, 9], [5, 6, 20], 0.5), ([30], [30, 31, 32, 33], 0.0), ([40, 41, 42], [40, 2, 44], 1.25)]


def load(path, **options):
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float64, **options)


def test_loss_and_gradients_are_the_formulas(model_dir):
    """In float64, of the last hidden state of each sequence alone. Controls: without margins, without centring."""
    torch.manual_seed(0)
    model = load(model_dir)
    torch.nn.init.normal_(model.score.weight)

    def reward_of(ids):
        return model.score.weight[0] @ model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]

    expected = 0
    for chosen, rejected, margin in TRIPLES:
        a, b = reward_of(chosen), reward_of(rejected)
        expected = expected + torch.log(1 + torch.exp(b - a + margin)) + CENTER * (a + b) ** 2
    gradients = torch.autograd.grad(expected, list(model.parameters()))

    pairs = [Pair(tuple(map(np.array, answers)), margin) for *answers, margin in TRIPLES]
    dummy = Pair((np.array([7]),), None)
    pad = model.config.pad_token_id
    micro_batch = collate_pairs([pairs[0], dummy, *pairs[1:]], pad, ("attention_mask",), CENTER, multiple_of=8)
    assert micro_batch["input_ids"].shape == (7, 8) and "attention_mask" in micro_batch
    loss, rewards = reward.predict(model, micro_batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for found, gradient in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(rewards[1, 1], reward_of(TRIPLES[1][1]), rtol=1e-12, atol=0)
    for without in ("targets", "target_center"):
        changed = micro_batch | {without: torch.zeros_like(micro_batch[without])}
        assert abs(reward.predict(model, changed)[0] - loss) > 1e-3
    nothing, rewards = reward.predict(model, collate_pairs([dummy], pad, ("attention_mask",), CENTER))
    assert nothing == 0 and rewards.shape == (0, 2) and nothing.requires_grad


def test_equal_rewards_are_no_hit():
    found = reward_model.summarize(np.array([[1, 1], [2, 1], [0, 3], [5, 4]], np.float32))
    assert found == {"accuracy": 0.5, "margin": -0.25, "reward": 17 / 8}


# --- samples


def test_pairs_are_whole_sequences_with_margins(tokenizer, cache, tmp_path):
    """Of texts, with the end token, and of messages; pairs that are equal within the length are left out."""
    chat, end = copy.deepcopy(tokenizer), tokenizer.eos_token_id
    chat.chat_template = CHATML.read_text()

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    texts = {"prompt": "a b ", "chosen": "c d", "rejected": "e", "margin": 0.1}
    long = {"prompt": "a " * 40, "chosen": "b", "rejected": "c", "margin": 2}
    pairs = tokenize_pairs(source_of(tmp_path / "texts.jsonl", [texts, long]), tokenizer, 32, cache)
    assert len(pairs) == 1 and "; 1 left out, because both answers are equal within 32 tokens" in pairs.describe()
    before = tokenizer("a b ")["input_ids"]
    assert pairs[0].margin == 0.1
    assert [list(one) for one in pairs[0].answers] == [[*before, *ids("c d"), end], [*before, *ids("e"), end]]
    lengths = list(map(len, pairs[0].answers))
    assert pairs.lengths(np.arange(1)) == 2 * max(lengths) == pairs.max_length
    assert list(pairs.sequence_lengths(np.arange(1))) == lengths

    question, *answers = ({"role": role, "content": role} for role in ("user", "assistant", "assistant"))
    answers[1]["content"] = "no"
    rows = [{"prompt": [question], "chosen": [answers[0]], "rejected": [answers[1]]}]
    rows += [{"chosen": [question, answers[0]], "rejected": [question, answers[1]]}]
    for number, row in enumerate(rows):
        pairs = tokenize_pairs(source_of(tmp_path / f"chat{number}.jsonl", [row]), chat, 128, cache)
        assert pairs[0].margin == 0
        for found, answer in zip(pairs[0].answers, answers, strict=True):
            assert tokenizer.decode(found) == chat.apply_chat_template([question, answer], tokenize=False)

    path = tmp_path / "rows.csv"
    path.write_text("prompt,chosen,rejected,margin\na,b,c,-1.5\n")
    source = source_of(tmp_path / "x.jsonl", [texts])
    assert tokenize_pairs(source.__class__(files=(str(path),)), tokenizer, 32, cache)[0].margin == -1.5


BAD_MARGINS = {
    "null": (None, "column margin is null; give all rows a margin, or none"),
    "missing": (..., "column margin is null; give all rows a margin, or none"),
    "nan": (float("nan"), "column margin is nan, not a finite number"),
    "huge": (1e39, r"column margin is 1e\+39, not a finite number"),
    "text": ("much", "column margin is 'much', not a finite number"),
    "switch": (True, "column margin is True, not a finite number"),
    "list": ([1], r"column margin is \[1\], not a finite number"),
}


@pytest.mark.parametrize("kind", BAD_MARGINS)
def test_a_margin_that_is_no_number_is_named_with_its_row(kind, tokenizer, cache, tmp_path):
    margin, problem = BAD_MARGINS[kind]
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    bad = row | ({} if margin is ... else {"margin": margin})
    with pytest.raises(UserError, match=f"rows.jsonl, line 2: {problem}") as error:
        tokenize_pairs(source_of(tmp_path / "rows.jsonl", [row | {"margin": 1}, bad]), tokenizer, 32, cache)
    assert len(str(error.value).splitlines()) == 1
    if kind == "null":
        with pytest.raises(UserError, match="late.jsonl, line 2: has a margin, but the first row has none; give all"):
            tokenize_pairs(source_of(tmp_path / "late.jsonl", [row, row | {"margin": 1}]), tokenizer, 32, cache)


def test_a_margin_of_a_type_that_json_does_not_have_is_named(tokenizer, cache, tmp_path):
    columns = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"], "margin": [Decimal("0.5")]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    source = Source(files=(str(tmp_path / "rows.parquet"),))
    with pytest.raises(UserError, match=r"row 1: column margin is a Decimal, not a finite number; fix or remove"):
        tokenize_pairs(source, tokenizer, 32, cache)


# --- runs


CUTS = {
    "one": (1, ["--micro_batch_size", 1], {}),
    "tokens": (1, ["--micro_batch_tokens", 512], {}),
    "two": (2, ["--micro_batch_tokens", 256], {}),
    "means": (1, ["--micro_batch_tokens", 400], {"mean_of_means": 1}),
    "lora": (1, ["--micro_batch_size", 8, "--lora_rank", 4], {}),
    "lora two": (2, ["--micro_batch_tokens", 256, "--lora_rank", 4], {}),
}


def test_every_split_makes_the_same_update(files, model_dir, tmp_path):
    """Of the whole model and of an adapter with a new head. Control: a loop that divides by the micro-batches."""
    specs = {name: (layout, flags(files, model_dir, *more), changes) for name, (layout, more, changes) in CUTS.items()}
    runs = run_in_float64("reward", specs, tmp_path)
    assert_same_update(runs, "one", "tokens", "two")
    assert_same_update(runs, "lora", "lora two")
    assert relative_difference(runs["means"][0], runs["one"][0]) > 1e-3
    for key in ("validation_loss", "accuracy", "margin", "reward"):
        found = [results_of(tmp_path / name)[key] for name in ("one", "tokens", "two")]
        assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    heads = [one for one in (tmp_path / "lora/model").glob("*.safetensors")]
    assert any(b"score" in one.read_bytes()[:5000] for one in heads)  # the names of the weights come first


def held_out_metrics(directory, path, **options):
    """Of the saved model, with transformers alone: each sequence by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, **options)
    tokenizer, terms, scores = AutoTokenizer.from_pretrained(directory), [], []
    for row in map(json.loads, path.read_text().splitlines()):
        prompt, pair = tokenizer(row["prompt"])["input_ids"], []
        for name in ("chosen", "rejected"):
            ids = [*prompt, *tokenizer(row[name], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            pair.append(model(input_ids=torch.tensor([ids[:64]])).logits.item())
        terms.append(np.log1p(np.exp(pair[1] - pair[0] + row["margin"])) + CENTER * sum(pair) ** 2)
        scores.append(pair)
    scores = np.array(scores)
    margins = scores[:, 0] - scores[:, 1]
    return [np.mean(terms), np.mean(margins > 0), np.mean(margins), np.mean(scores)]


def test_the_saved_model_has_the_measured_rewards(files, model_dir, tmp_path):
    """By transformers alone; an adapter too. Further training keeps its head, and replaces it with --new_head."""
    runs, more, lora = [], ["--learning_rate", 3e-3, "--num_updates", 8], ("lora", model_dir, "--lora_rank", 4)
    for name, base, *new in (("run", model_dir), ("kept", "run"), ("new", "run", "--new_head"), lora):
        base = base if base == model_dir else tmp_path / base / "model"
        runs.append(([*flags(files, base, *more, *new), "--output_dir", str(tmp_path / name)], {}))
    printed = run_specs("reward", runs, tmp_path).stdout
    config = AutoConfig.from_pretrained(tmp_path / "lora/model", subfolder="config")
    for name, options in (("lora", {"config": config, "ignore_mismatched_sizes": True}), ("run", {})):
        results = results_of(tmp_path / name)
        found = [results[key] for key in ("validation_loss", "accuracy", "margin", "reward")]
        assert found == pytest.approx(held_out_metrics(tmp_path / name / "model", files[1], **options), rel=1e-4)
    assert abs(results["margin"]) > 0.01
    assert f"higher reward in {results['accuracy']:.1%} of the held-out pairs, by {results['margin']:.4f}" in printed
    assert printed.count("new head  score.weight start") == 3
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert (config["architectures"], config["problem_type"]) == (["LlamaForSequenceClassification"], "regression")
    assert config["id2label"] == {"0": "reward"}
    first, kept, new = (read_metrics(tmp_path / name) for name in ("run", "kept", "new"))
    assert kept[0]["loss"] < 0.95 * first[0]["loss"] and kept[0]["loss"] < 0.95 * new[0]["loss"]
    score = pipeline("text-classification", str(tmp_path / "run/model"), dtype=torch.float32, device="cpu")
    (answer,) = score("a b")
    logit = score.model(**score.tokenizer("a b", return_tensors="pt")).logits.item()
    assert answer == {"label": "reward", "score": pytest.approx(logit, rel=1e-5)}


def test_what_does_not_go_together_is_refused(files, model_dir, tmp_path):
    load(model_dir).config.save_pretrained(tmp_path)
    for path in model_dir.iterdir():
        if "token" in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {n: str(n) for n in range(3)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = ["--output_dir", tmp_path / "out"]
    result = run_recipe_alone("reward.py", "--train_file", files[0], "--model_name_or_path", tmp_path, *out)
    assert_mistake(result, "its head has 3 labels, but a reward is one number; pass --new_head to replace the head")
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "t5", "is_encoder_decoder": True}))
    result = run_recipe_alone("reward.py", "--train_file", files[0], "--model_name_or_path", tmp_path, *out)
    assert_mistake(result, "t5 is an encoder-decoder; use a causal model")
    result = run_recipe_alone("reward.py", "--train_file", files[0], "--new_head", *out)
    assert_mistake(result, "--new_head has no effect without --model_name_or_path")
    result = run_recipe_alone("reward.py", *flags(files, model_dir), "--new_head", *out)
    assert_mistake(result, "--new_head has no effect on a model without a head for labels; remove it")
    result = run_recipe_alone("reward.py", "--train_file", files[0], "--micro_batch_tokens", 100, *out)
    assert_mistake(result, "--micro_batch_tokens 100 does not hold the longest sample")
    result = launch("--train_file", files[0], *out, config="sequence_parallel", script="recipes/reward.py", check=False)
    assert_refused(result, "sp_size to 2, and this recipe's loss needs all tokens of a text; set it to 1", lines=None)
    assert not (tmp_path / "out").exists()
