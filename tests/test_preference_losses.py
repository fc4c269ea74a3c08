"""The losses of dpo.py: each is the formula of its paper, for any split of the global batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import assert_mistake, assert_same_update, results_of, run_in_float64, run_recipe_alone, source_of
from test_dpo import decoded, flags
from test_dpo import files as files  # a fixture
from test_losses import build
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.chats import CHATML
from common.data.examples import mark_targets
from common.errors import UserError
from common.tasks.dpo.baseline import with_baseline
from common.tasks.dpo.losses import LOSSES, Objective, Options
from common.tasks.dpo.preferences import Pair, collate_preferences, tokenize_preferences
from common.tasks.dpo.samples import collate_samples
from common.tasks.dpo.unpaired import tokenize_unpaired
from common.training.losses import sum_token_losses
from recipes import dpo

# Prompt, chosen and rejected; the answers of two begin alike, and one has a single token.
TRIPLES = [([5, 6, 7], [8, 9, 10, 11], [8, 9, 20]), ([30], [31], [32, 33]), ([40, 41], [42, 43], [42, 43, 44])]
OPTIONS = Options(beta=0.3, label_smoothing=0.1, simpo_gamma=0.7)
ALPHA = 0.6


def token_log_probabilities(model, prompt, answer):
    """Of all tokens but the first, by the model's own logits."""
    ids = torch.tensor([prompt + answer])
    logits = model(input_ids=ids[:, :-1]).logits[0]
    return logits.log_softmax(1).gather(1, ids[0, 1:, None])[:, 0]


def odds(mean):
    probability = mean.exp()
    return probability / (1 - probability)


def plain_loss(name, chosen, rejected, chosen_0, rejected_0):
    """Of a pair, from the log-probabilities of the tokens of each answer, by the model and by the reference."""
    beta, smoothing, gamma, *_ = OPTIONS
    summed = (chosen.sum() - chosen_0.sum()) - (rejected.sum() - rejected_0.sum())
    averaged = (chosen - chosen_0).mean() - (rejected - rejected_0).mean()

    def smooth(logit):
        return -(1 - smoothing) * logsigmoid(logit) - smoothing * logsigmoid(-logit)

    return {
        "sigmoid": lambda: -logsigmoid(beta * summed),
        "ipo": lambda: (averaged - 1 / (2 * beta)) ** 2,
        "hinge": lambda: (1 - beta * summed).clamp(min=0),
        "robust": lambda: (
            -((1 - smoothing) * logsigmoid(beta * summed) - smoothing * logsigmoid(-beta * summed))
            / (1 - 2 * smoothing)
        ),
        "orpo": lambda: -beta * logsigmoid(torch.log(odds(chosen.mean()) / odds(rejected.mean()))),
        "simpo": lambda: smooth(beta * (chosen.mean() - rejected.mean()) - gamma),
        "cpo": lambda: smooth(beta * (chosen.sum() - rejected.sum())),
    }[name]()


@pytest.fixture(scope="module")
def models():
    model, base = build("llama tied", torch.float64), build("llama tied", torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    sum_token_losses(model, chunk_rows=4)
    return model, base


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "kto"])
def test_loss_and_gradients_are_the_formulas(models, name):
    """In float64, by the logits of transformers alone. Control: each other loss is a different number."""
    model, base = models
    terms, nll, in_nll, reference = [], 0, 0, []
    for prompt, *answers in TRIPLES:
        found = [[token_log_probabilities(one, prompt, answer) for answer in answers] for one in models]
        parts = [part[len(prompt) - 1 :] for both in found for part in both]
        reference.append([part.sum().item() for part in parts[2:]])
        terms.append(plain_loss(name, *parts))
        if name in ("cpo", "orpo"):  # cpo: of the chosen answer alone; orpo: with its prompt
            tokens = parts[0] if name == "cpo" else found[0][0]
            nll, in_nll = nll - tokens.sum(), in_nll + len(tokens)
    weight = ALPHA if name == "cpo" else 1.0
    expected = sum(terms) / 3 + (weight * nll / in_nll if in_nll else 0)
    gradients = torch.autograd.grad(expected, list(model.parameters()), materialize_grads=True)

    objective = Objective(name, OPTIONS, weight)
    pairs = [
        Pair(
            tuple(mark_targets(prompt + answer, [False] * len(prompt) + [True] * len(answer), 32) for answer in both),
            number,
            torch.tensor(reference[number], dtype=torch.float64).numpy(),
            weight * 3 / in_nll if in_nll else 0.0,
        )
        for number, (prompt, *both) in enumerate(TRIPLES)
    ]
    micro_batch = collate_preferences(pairs, 0, objective)
    key = f"target_loss_{name}"
    micro_batch |= {key: torch.tensor(OPTIONS, dtype=torch.float64)}
    micro_batch["target_nll_scale"] = torch.tensor(pairs[0].nll_scale, dtype=torch.float64)
    loss, margins = dpo.predict(model, micro_batch)
    torch.testing.assert_close(loss / 3, expected, rtol=1e-12, atol=0)
    for found, gradient in zip(torch.autograd.grad(loss / 3, list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-9)
    assert margins.shape == (3,)
    for other in LOSSES.keys() - {name, "kto"}:
        changed = {k: v for k, v in micro_batch.items() if k != key} | {f"target_loss_{other}": micro_batch[key]}
        assert abs(dpo.predict(model, changed)[0] - loss) > 1e-3


def test_kto_is_the_formula(model_dir, tokenizer, cache, tmp_path):
    """In float64: the baseline is that of the global batch, whose rows come in the order of their ids.

    Control: without the baseline the loss is a different number.
    """
    models = [AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64) for _ in range(2)]
    torch.manual_seed(0)
    with torch.no_grad():
        for p in models[1].parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    sum_token_losses(models[0], chunk_rows=4)
    beta, desirable, undesirable = 0.3, 1.2, 0.7
    rows = [(f"a {'b ' * n}", f"c d {'e ' * (5 - n)}", n % 3 > 0) for n in range(5)]
    written = [dict(zip(("prompt", "completion", "label"), row, strict=True)) for row in rows]
    objective = Objective("kto", Options(beta, desirable_weight=desirable, undesirable_weight=undesirable))
    samples = tokenize_unpaired(source_of(tmp_path / "rows.jsonl", written), tokenizer, 64, "", cache)
    ids = [3, 0, 4, 1]
    batch, again = samples.of_epoch(2).of_batch(np.array(ids))
    micro_batch = collate_samples([batch[n] for n in again], 0, objective)
    assert micro_batch["target_pairs"].tolist() == [2 * 5 + number for number in ids]
    assert batch.lengths(again).tolist() == [2 * max(len(one) - 1 for one in batch[n].answers) for n in again]

    def log_probability(model, prompt, completion):
        answer = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        prompt = tokenizer(prompt)["input_ids"]
        return token_log_probabilities(model, prompt, answer)[len(prompt) - 1 :].sum()

    own = [[log_probability(one, *rows[n][:2]) for n in ids] for one in models]
    others = [[log_probability(one, rows[n][0], rows[ids[k - 1]][1]) for k, n in enumerate(ids)] for one in models]
    ratios, mismatched = ([a - b.detach() for a, b in zip(*both, strict=True)] for both in (own, others))
    baseline = max(sum(mismatched).item() / 4, 0.0)
    assert baseline > 0.01
    terms = [
        desirable * (1 - torch.sigmoid(beta * (ratio - baseline)))
        if rows[n][2]
        else undesirable * (1 - torch.sigmoid(beta * (baseline - ratio)))
        for n, ratio in zip(ids, ratios, strict=True)
    ]
    model = models[0]
    reference = torch.tensor([[a.item(), b.item()] for a, b in zip(own[1], others[1], strict=True)])
    micro_batch |= {"target_reference": reference.double(), "target_loss_kto": micro_batch["target_loss_kto"].double()}
    run = SimpleNamespace(
        args=SimpleNamespace(loss="kto"),
        accelerator=SimpleNamespace(reduce=lambda total, reduction: total),
        micro_batches=lambda batch: [(micro_batch, True)],
    )
    ((found, is_last),) = with_baseline(run, model, SimpleNamespace(num_samples=4))
    assert is_last and found["target_baseline"].item() == pytest.approx(baseline, rel=1e-6)
    loss, margins = dpo.predict(model, found)
    torch.testing.assert_close(loss, sum(terms), rtol=1e-6, atol=0)
    expected = torch.autograd.grad(sum(terms), list(model.parameters()))
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert margins.tolist() == pytest.approx([beta * (ratio.item() - baseline) for ratio in ratios], rel=1e-4)
    without = micro_batch | {"target_baseline": torch.zeros(())}
    assert abs(dpo.predict(model, without)[0] - loss) > 1e-3
    micro_batch["target_reference"] += 9  # so that the mean ratio is below 0
    ((found, _),) = with_baseline(run, model, SimpleNamespace(num_samples=4))
    assert found["target_baseline"].item() == 0


def test_pairs_become_two_rows_and_bad_labels_are_refused(tokenizer, cache, tmp_path):
    pair = {"prompt": "a ", "chosen": "b c", "rejected": "b d"}
    options = tokenizer, 64, "", cache
    samples = tokenize_unpaired(source_of(tmp_path / "pairs.jsonl", [pair]), *options)
    end = tokenizer.eos_token
    assert [samples[n].label for n in range(2)] == [1, 0]
    assert [decoded(tokenizer, samples[n].answers[0])[1] for n in range(2)] == ["b c" + end, "b d" + end]
    assert [decoded(tokenizer, samples[n].answers[1])[1] for n in range(2)] == ["b d" + end, "b c" + end]
    for rows, problem in (
        ([{"prompt": "a", "completion": "b", "label": "good"}], "line 1: column label is 'good'; write true"),
        ([{"prompt": "a", "completion": "b", "label": None}], "line 1: column label is None; write true"),
        ([{"prompt": "a", "label": True}], "no column completion"),
        ([{"chosen": "a b", "rejected": "a c"}], "line 1: --loss kto needs the prompt of texts; add a column prompt"),
        ([{"prompt": "a " * 99, "completion": "b", "label": True}], "no answer begins within --sequence_length 64"),
    ):
        with pytest.raises(UserError, match=problem):
            tokenize_unpaired(source_of(tmp_path / f"{problem[:9]}.jsonl", rows), *options)


CASES = {
    "ipo": [],
    "hinge": [],
    "robust": ["--label_smoothing", 0.1],
    "orpo": [],
    "simpo": ["--beta", 2],
    "cpo": ["--label_smoothing", 0.1, "--cpo_alpha", 0.5],
    "kto": ["--undesirable_weight", 1.5],
}
SPLITS = {"one": (1, ["--micro_batch_size", 1]), "two": (2, ["--micro_batch_tokens", 256])}


@pytest.fixture(scope="module")
def runs(files, model_dir, tmp_path_factory):
    specs = {
        f"{name} {split}": (processes, flags(files, model_dir, "--loss", name, *more, *size), {})
        for name, more in CASES.items()
        for split, (processes, size) in SPLITS.items()
    }
    return run_in_float64("dpo", specs, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", CASES)
def test_every_split_makes_the_same_update(runs, name):
    """The means over tokens of ORPO and CPO too, in training and for the held-out set."""
    assert_same_update(runs, f"{name} one", f"{name} two")
    results = [results_of(runs[f"{name} {split}"][2]) for split in SPLITS]
    for key in ("validation_loss", "accuracy", "margin"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-6)


def test_nll_is_a_mean_over_the_tokens_of_the_global_batch(tokenizer, cache, tmp_path):
    """And of the held-out set over all its tokens. ORPO's tokens are those of prompt and chosen answer."""
    rows = [{"prompt": "a b", "chosen": "c " * n, "rejected": "d"} for n in (2, 9, 4, 30)]
    for name, weight in (("cpo", 0.5), ("orpo", 1.0)):
        options = source_of(tmp_path / "rows.jsonl", rows), tokenizer, 64, "", cache, Objective(name, OPTIONS, weight)
        for ids in ([0, 1], [3], [2, 1, 3]):
            samples, again = tokenize_preferences(*options).of_batch(np.array(ids))
            lengths = [len(samples[number].answers[0]) - 1 for number in again]
            targets = [(samples[number].answers[0] >= 0).sum() for number in again]
            assert sum(lengths) > sum(targets) and list(again) == ids
            expected = weight * len(ids) / sum(lengths if name == "orpo" else targets)
            assert [samples[number].nll_scale for number in again] == pytest.approx([expected] * len(ids), rel=1e-12)
        held_out = tokenize_preferences(*options, is_held_out=True)
        whole = tokenize_preferences(*options).of_batch(np.arange(4))[0]
        assert held_out.of_batch(np.array([0]))[0][0].nll_scale == whole[0].nll_scale


def test_targets_are_whole_answers_after_the_prompt(tokenizer, cache, tmp_path):
    """Of texts and messages, where answers begin alike, and after earlier answers. Control: the targets of sigmoid."""
    chat = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    chat.chat_template = CHATML.read_text()
    end = chat.eos_token

    def turns(*contents):
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]

    cases = {
        "texts": ({"prompt": "a ", "chosen": "b c", "rejected": "b d"}, ("b c" + end, "b d" + end)),
        "without a prompt": ({"chosen": "a b c", "rejected": "a b d"}, ("c" + end, "d" + end)),
        "messages": (
            {"prompt": turns("a", "x", "e"), "chosen": turns("a", "b c")[1:], "rejected": turns("a", "b d")[1:]},
            ("b c<|im_end|>\n" + end, "b d<|im_end|>\n" + end),
        ),
        "whole messages": (
            {"chosen": turns("a", "x", "e", "b c"), "rejected": turns("a", "x", "e", "b d")},
            ("b c<|im_end|>\n" + end, "b d<|im_end|>\n" + end),
        ),
    }
    for name, (row, expected) in cases.items():
        source = source_of(tmp_path / f"{name}.jsonl", [row | {"rejected": row["chosen"]}, row])
        found = tokenize_preferences(source, chat, 256, "", cache, Objective("orpo"))
        assert (len(found), found.num_dropped) == (1, 1)
        targets = [decoded(chat, stored)[1] for stored in found[0].answers]
        assert [text.strip().removesuffix(end).strip() for text in targets] == [
            text.removesuffix(end).strip() for text in expected
        ]
        differing = tokenize_preferences(source, chat, 256, "", cache)
        is_fewer = differing.num_predicted(np.arange(1)) < found.num_predicted(np.arange(1))
        assert is_fewer or name == "without a prompt"
    long = [{"prompt": "a " * 60, "chosen": "b c d", "rejected": "b d"}]
    with pytest.raises(UserError, match="no pair of answers that differ within --sequence_length 8"):
        tokenize_preferences(source_of(tmp_path / "long.jsonl", long), tokenizer, 8, "", cache, Objective("orpo"))


def test_options_of_other_losses_are_refused(files, tmp_path):
    for given, problem in (
        (["--loss", "orpo", "--label_smoothing", 0.1], "--label_smoothing has no effect with --loss orpo; remove it"),
        (["--simpo_gamma", 1], "--simpo_gamma has no effect with --loss sigmoid; remove it .it is for simpo"),
        (["--loss", "robust"], "--loss robust needs the share of swapped pairs; pass --label_smoothing"),
        (["--loss", "cpo", "--label_smoothing", 0.5], "--label_smoothing 0.5 is not below 0.5; pass a smaller share"),
        (["--loss", "kto", "--global_batch_size", 1], "--loss kto compares the answers of a global batch; use a --glo"),
    ):
        result = run_recipe_alone("dpo.py", "--train_file", files[0], *given, "--output_dir", tmp_path / "out")
        assert_mistake(result, problem)
    assert not (tmp_path / "out").exists()
