"""Preference tuning: the loss is the formula's, however it is cut, and the reference is what the base thinks."""

import json
import math
import shutil
import textwrap
from functools import partial

import numpy as np
import pytest
import torch
from conftest import (
    assert_mistake,
    assert_refused,
    assert_same_update,
    launch,
    launch_command,
    read_metrics,
    relative_difference,
    results_of,
    run,
    run_in_float64,
    run_recipe_alone,
    source_of,
    stdlib_functions,
    write_jsonl,
)
from test_losses import OWN_LOSS, build
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.chats import CHATML
from common.data.preferences import split_body
from common.errors import UserError
from common.tasks.dpo.answers import mask_common_start
from common.tasks.dpo.losses import Options, sum_answers
from common.tasks.dpo.preferences import Pair, collate_preferences, tokenize_preferences
from common.tasks.dpo.reference import of_answers
from common.training.linear_cross_entropy import linear_cross_entropy
from common.training.losses import sum_token_losses
from recipes import dpo

BETA = 0.1


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """22 pairs of the standard library to train on, beside one of equal answers, and 9 that are held out."""
    path = tmp_path_factory.mktemp("preferences")
    parts = [one for text in stdlib_functions(300) if (one := split_body(textwrap.dedent(text)))][:33]
    rows = [
        {"prompt": prompt[:120], "chosen": body[:80], "rejected": other[:60]}
        for (prompt, body), (_, other) in zip(parts[1:], parts, strict=False)
    ]
    assert len(rows) == 32
    return write_jsonl(path / "train.jsonl", rows[:23]), write_jsonl(path / "held_out.jsonl", rows[23:])


def flags(files, model, *more):
    given = ["--train_file", files[0], "--validation_file", files[1], "--model_name_or_path", model]
    given += ["--sequence_length", 96, "--num_updates", 4, "--global_batch_size", 8, "--learning_rate", 1e-3]
    return [str(part) for part in [*given, "--max_grad_norm", 0.5, *more]]


# --- samples


def decoded(tokenizer, stored):
    """What is read, and what of it counts."""
    ids = np.where(stored < 0, ~stored, stored)
    return tokenizer.decode(ids), tokenizer.decode(ids[stored >= 0])


def test_pairs_of_texts_and_of_messages(tokenizer, cache, tmp_path):
    """Answers count from where they part, whichever way the prompt is given; equal and cut ones are left out."""
    chat = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    chat.chat_template = CHATML.read_text()
    user, answers = {"role": "user", "content": "hello"}, ("hello a", "b c d")
    said = [[{"role": "assistant", "content": answer}] for answer in answers]
    end = chat.eos_token
    kinds = {
        "texts": (["a b ", "c d", "e f"], ("c d" + end, "e f" + end)),
        "whole texts": ([None, "a b c d", "a b e f"], None),
        "one goes on": (["a b ", "c d", "c d e f"], (end, " e f" + end)),
        "messages": ([[user], *said], None),
        "whole messages": ([None, *([user, *one] for one in said)], None),
        "a prompt that the messages have": (["hello", *([user, *one] for one in said)], None),
        "messages that the messages have": ([[user], *([user, *one] for one in said)], None),
    }
    found = {}
    for name, (row, expected) in kinds.items():
        row = {key: one for key, one in zip(("prompt", "chosen", "rejected"), row, strict=True) if one is not None}
        same = row | {"rejected": row["chosen"]}
        pairs = tokenize_preferences(source_of(tmp_path / f"{name}.jsonl", [same, row]), chat, 64, "", cache)
        assert (len(pairs), pairs.num_dropped) == (1, 1)
        found[name] = [decoded(chat, stored) for stored in pairs[0].answers]
        assert expected is None or tuple(counted for _, counted in found[name]) == expected
        assert pairs.num_predicted(np.arange(1)) == sum((stored >= 0).sum() for stored in pairs[0].answers)
        assert pairs.lengths(np.arange(1)) == 2 * max(len(stored) - 1 for stored in pairs[0].answers)
    assert all(found["messages"] == pair for name, pair in found.items() if name.endswith(("messages", "have")))
    (_, chosen), (_, rejected) = found["messages"]
    assert chosen.startswith("hello a<|im_end|>") and rejected.startswith("b c d<|im_end|>")
    assert found["whole texts"][0][0].endswith("a b c d" + end) and "a b" not in found["whole texts"][0][1]
    row = {"prompt": "a b c d e f g h", "chosen": "i", "rejected": "j"}
    with pytest.raises(UserError, match=r"no pair of answers that differ within --sequence_length 4; 1 left out, "):
        tokenize_preferences(source_of(tmp_path / "long.jsonl", [row]), tokenizer, 4, "", cache)
    good = {"chosen": [user, *said[0]], "rejected": [user, *said[1]]}
    mute, other = {"role": "assistant"}, {"role": "user", "content": "bye"}
    for bad, problem in (
        ({"prompt": "a", "chosen": "b"}, "no column rejected"),
        ({"chosen": said[0], "rejected": "b"}, "chosen has messages, and rejected has not; write all as messages"),
        ({"chosen": "b", "rejected": said[0]}, "rejected has messages, and chosen has not"),
        ({"prompt": [user], "chosen": "b", "rejected": "c"}, "prompt has messages, and chosen, rejected have not"),
        ({"chosen": "b", "rejected": None}, "column rejected is null"),
        ({"prompt": "bye", **good}, "chosen has no user message with the text of prompt"),
        ({**good, "chosen": [user, mute]}, "column chosen has a message of assistant without content"),
        ({**good, "chosen": [user]}, "chosen does not end with a message of the assistant"),
        ({"chosen": [], "rejected": []}, "chosen does not end with a message of the assistant"),
        ({**good, "chosen": [other, *said[0]]}, "chosen and rejected differ before an answer of the assistant"),
        ({**good, "chosen": [*good["rejected"], user, *said[0]]}, "chosen and rejected differ before an answer"),
    ):
        first = good | {name: "hello" for name in bad if name == "prompt"}
        for number, rows in enumerate(([bad], [first if isinstance(bad["chosen"], list) else bad, bad])):
            with pytest.raises(UserError, match=problem) as error:
                tokenize_preferences(source_of(tmp_path / f"{number} {problem}.jsonl", rows), chat, 64, "", cache)
            assert len(str(error.value).splitlines()) == 1
    rows = [{"chosen": "a b", "rejected": "a c"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(UserError, match="line 2: has a prompt, but the first row has none; give all rows"):
        tokenize_preferences(source_of(tmp_path / "later.jsonl", rows), chat, 64, "", cache)


def test_a_body_is_parted_from_its_docstring():
    function = 'def f(x):\n    """Adds one."""\n    return x + 1\n'
    assert split_body(function) == ('def f(x):\n    """Adds one."""\n', "    return x + 1\n")
    assert split_body("def f(x):\n    return x\n") is split_body('def f(x):\n    """No body."""\n') is None


# --- the loss


def log_probability(model, prompt, answer):
    """Of a whole answer, by the model's own logits."""
    ids = torch.tensor([prompt + answer])
    logits = model(input_ids=ids[:, :-1]).logits[0]
    return logits.log_softmax(1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()


def options(*numbers):
    """In float64, as in a micro-batch."""
    return torch.tensor(Options(*numbers), dtype=torch.float64)


@pytest.mark.parametrize("family", ["llama tied", "gemma2 soft-cap", "phi bias", "bert dense head", "bamba z-loss"])
def test_loss_and_gradients_are_the_formulas(family):
    """In float64, where two of the answers begin alike. Controls: another beta, and another reference."""
    triples = [([5, 6, 7], [8, 9, 10, 11], [8, 9, 20]), ([30], [31], [32, 33]), ([40, 41], [42, 43], [42, 43, 44])]
    model, base = build(family, torch.float64), build(family, torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    terms = []
    for prompt, *answers in triples:
        ours, theirs = ([log_probability(one, prompt, answer) for answer in answers] for one in (model, base))
        margin = BETA * ((ours[0] - theirs[0].detach()) - (ours[1] - theirs[1].detach()))
        terms.append(-torch.log(1 / (1 + torch.exp(-margin))))
    expected = torch.autograd.grad(sum(terms), list(model.parameters()))

    def stored(prompt, *answers):
        pair = [(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for answer in answers]
        return mask_common_start(*pair, 32)[0]

    pairs = [Pair(tuple(stored(*one)), number, np.zeros(2)) for number, one in enumerate(triples)]
    micro_batch = collate_preferences(pairs, 0) | {"target_loss_sigmoid": options(BETA)}
    for one in (model, base):
        assert not sum_token_losses(one, chunk_rows=4, keeps_own_loss=False).startswith(OWN_LOSS)
    with torch.no_grad():
        reference = of_answers(base, micro_batch, partial(sum_answers, places=micro_batch["target_places"])).view(-1, 2)
    loss, margins = dpo.predict(model, micro_batch | {"target_reference": reference})
    # Bamba's state space is float32's in a model of any type, and with it the length of a batch shows.
    torch.testing.assert_close(loss, sum(terms), rtol=1e-7 if "bamba" in family else 1e-12, atol=0)
    assert margins.shape == (3,)
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert relative_difference(found, expected) < 1e-6  # some norms are float32's
    for other in ({"target_loss_sigmoid": options(0.2)}, {"target_reference": reference.flip(1)}):
        assert abs(dpo.predict(model, {"target_reference": reference} | micro_batch | other)[0] - loss) > 1e-3


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16], ids=str)
def test_small_weights_of_rows_are_not_lost_in_16_bits(precision):
    """A loss that counts 1e-4 of each token has gradients as near to float32's as one that counts all."""
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(40, 32), torch.randn(500, 32) / 4, torch.randint(0, 500, (40,))

    def gradient(dtype, factor):
        given = hidden.to(dtype).requires_grad_()
        loss, _ = linear_cross_entropy(
            given, weight.to(dtype), None, targets, loss_of=lambda losses: (losses.sum() * factor, losses)
        )
        (found,) = torch.autograd.grad(loss * (1 if dtype == torch.float32 else 1024), given)
        return found.float() / (1 if dtype == torch.float32 else 1024) / factor

    expected, most = gradient(torch.float32, 1.0), {torch.float16: 2e-3, torch.bfloat16: 2e-2}[precision]
    for factor in (1.0, 1e-4):
        assert (gradient(precision, factor) - expected).norm() / expected.norm() < most


# --- runs


LORA = ["--lora_rank", 4]
CUTS = {
    "one": (1, ["--micro_batch_size", 1], {}),
    "tokens": (1, ["--micro_batch_tokens", 512], {}),
    "two": (2, ["--micro_batch_tokens", 256], {}),
    "means": (1, ["--micro_batch_tokens", 600], {"mean_of_means": 1}),
    "lora": (1, ["--micro_batch_size", 8, *LORA], {}),
    "lora two": (2, ["--micro_batch_tokens", 256, *LORA], {}),
}


@pytest.fixture(scope="module")
def cuts(files, model_dir, tmp_path_factory):
    """Gradients of the first update and metrics, in float64, of every cut; an epoch ends with a shorter update."""
    specs = {name: (layout, flags(files, model_dir, *more), changes) for name, (layout, more, changes) in CUTS.items()}
    return run_in_float64("dpo", specs, tmp_path_factory.mktemp("cuts"))


def test_every_cut_makes_the_same_update(cuts):
    """Of the whole model and of an adapter. Control: a loop that divides by the number of micro-batches."""
    assert_same_update(cuts, "one", "tokens", "two")
    assert_same_update(cuts, "lora", "lora two")
    assert relative_difference(cuts["means"][0], cuts["one"][0]) > 1e-3
    figures = [results_of(cuts[name][2]) for name in ("one", "tokens", "two")]
    for name in ("validation_loss", "accuracy", "margin"):
        assert [one[name] for one in figures] == pytest.approx([figures[0][name]] * 3, rel=1e-6)
    for name in ("one", "lora"):  # before the first update the model is its reference
        losses = [line["loss"] for line in read_metrics(cuts[name][2])]
        assert losses[0] == pytest.approx(math.log(2), rel=1e-12) and losses[3] < losses[0]
    assert results_of(cuts["one"][2])["padding_share"] < 0.5


def held_out_figures(model, base, tokenizer, path):
    """Loss, accuracy and margin by transformers alone, in float32: whole answers, one after the other."""
    margins = []
    for row in map(json.loads, path.read_text().splitlines()):
        prompt = tokenizer(row["prompt"])["input_ids"]
        answers = [tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in ("chosen", "rejected")]
        answers = [(ids + [tokenizer.eos_token_id])[: 97 - len(prompt)] for ids in answers]  # --sequence_length 96
        with torch.no_grad():
            ours, theirs = ([log_probability(one, prompt, ids).item() for ids in answers] for one in (model, base))
        margins.append(BETA * (ours[0] - theirs[0] - ours[1] + theirs[1]))
    margins = torch.tensor(margins, dtype=torch.float64)
    return -torch.nn.functional.logsigmoid(margins).mean(), (margins > 0).double().mean(), margins.mean()


def test_the_reference_is_the_base_is_kept_and_is_the_same_when_it_is_gone(files, model_dir, tmp_path, monkeypatch):
    """The figures at the end by transformers alone; and a resumed run has the same bits with and without the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = [*flags(files, model_dir, "--save_every", 2, "--keep_last", 9, "--beta", BETA), "--output_dir"]
    env = {"script": "recipes/dpo.py", "XDG_CACHE_HOME": tmp_path / "cache"}
    printed = launch(*given, tmp_path / "run", **env).stdout
    assert "      loss  sigmoid, beta 0.1; chunked linear cross-entropy\n" in printed
    assert "reference: log-probabilities of 22 training pairs" in printed and "of 9 held-out pairs" in printed
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    found = results_of(tmp_path / "run")
    expected = held_out_figures(
        load(tmp_path / "run/model"), load(model_dir), AutoTokenizer.from_pretrained(model_dir), files[1]
    )
    named = [found[name] for name in ("validation_loss", "accuracy", "margin")]
    assert named == pytest.approx([one.item() for one in expected], rel=1e-4)
    assert abs(found["margin"]) > 0.01
    assert f"higher reward in {found['accuracy']:.1%} of the held-out pairs, by {found['margin']:.4f}" in printed
    values = {path.parent.name: path.read_bytes() for path in tmp_path.glob("cache/*/reference-*/reference.npy")}
    assert len(values) == 2
    for is_kept in (True, False):
        again = tmp_path / f"again-{is_kept}"
        shutil.copytree(tmp_path / "run", again)
        shutil.rmtree(again / "checkpoints/update-000004")
        if not is_kept:
            for path in tmp_path.glob("cache/*/reference-*/reference.npy"):
                shutil.rmtree(path.parent)
        printed = launch(*given, again, "--resume", **env).stdout
        assert ("reference: log-probabilities" in printed) == (not is_kept)
        weights = [(one / "model/model.safetensors").read_bytes() for one in (tmp_path / "run", again)]
        assert weights[0] == weights[1]
    assert values == {
        path.parent.name: path.read_bytes() for path in tmp_path.glob("cache/*/reference-*/reference.npy")
    }
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.embed_tokens.weight.data[5] += 1e-3
    model.save_pretrained(other)
    result = launch(*given, again, "--resume", "--model_name_or_path", other, check=False, **env)
    assert_refused(result, "the reference model differs: its fingerprint is .*; use the model that the run began with")
    result = launch(*given, again, "--resume", "--beta", 0.2, check=False, **env)
    assert_refused(result, "--beta is 0.2, the checkpoint's is 0.1")


def test_a_model_from_scratch_tunes_and_one_of_another_seed_does_not_go_on(files, tmp_path):
    given = ["--train_file", files[0], "--sequence_length", 64, "--num_updates", 2, "--output_dir", tmp_path / "run"]
    launch(*given, script="recipes/dpo.py")
    assert math.isfinite(read_metrics(tmp_path / "run")[-1]["loss"])
    result = run_recipe_alone("dpo.py", *given, "--resume", "--seed", 1, "--allow_changed", "seed")
    expected = "the reference model differs: its fingerprint is tiny, seed 1, the checkpoint's is tiny, seed 0"
    assert_mistake(result, expected)


def test_what_does_not_go_together_is_refused(files, tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    out = ["--output_dir", tmp_path / "out"]
    result = run_recipe_alone("dpo.py", "--train_file", tmp_path / "rows.jsonl", *out)
    assert_mistake(result, "rows.jsonl.*no column chosen, rejected|no columns? chosen")
    result = run_recipe_alone("dpo.py", "--train_file", files[0], "--micro_batch_tokens", 100, *out)
    assert_mistake(result, "--micro_batch_tokens 100 does not hold the longest sample")
    command = launch_command("sequence_parallel")
    result = run([*command, "recipes/dpo.py", "--train_file", files[0], *out], CUDA_VISIBLE_DEVICES="")
    assert_refused(result, "sp_size to 2, and this recipe's loss needs all tokens of a text; set it to 1", lines=None)
    assert not (tmp_path / "out").exists()
