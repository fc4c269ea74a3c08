"""The model FLOP/s of metrics.jsonl are what the model's products are, and nothing that a run computes beside them."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from conftest import read_metrics, results_of, run_specs, write_rows
from test_recipes import RECIPES
from transformers import GPT2Config, MixtralConfig

from common.models.untrained import empty_model
from common.report import flops
from common.training.batching import GlobalBatch, GlobalBatches, collate_tokens

# Each recipe's default model and, of the others, one of another kind.
MODELS = {recipe.removesuffix(".py"): (recipe.removesuffix(".py"), []) for recipe in RECIPES}
# And prompts, whose tokens are no targets: no logits of them are computed.
PROMPTS = ["--shape", "examples", "--prompt_column", "target", "--completion_column", "source"]
MODELS |= {"vit": ("vision", ["--model_config", "vit"]), "prompts": ("lm", PROMPTS)}
# Of what torch counts. A first convolution has no gradient of its input, a recurrence none of its first state.
ERROR = {"vision": 0.015, "long_sequence": 0.003, "vit": 0.001}
# Both answers of a pair are padded alike, and the losses of their tokens are computed once more before the gradient.
ERROR |= {"dpo": 0.15, "reward": 0.05}
# Each text is embedded twice, and a run tells one forward of the two; nor does it tell the similarities of the batch.
ERROR |= {"embed": 0.003}
COUNTED = {"embed": 3 / 4}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 60)


def own_flags(recipe, rows, output_dir, *more):
    """Updates of samples of different lengths, without padding."""
    data = [] if recipe == "vision" else ["--train_file", rows, "--sequence_length", 64]
    data += ["--segments", "none"] if recipe == "long_sequence" else []
    size = ["--global_batch_size", 4, "--micro_batch_size", 1, "--num_updates", 1]
    return [*data, *size, "--output_dir", output_dir, *more]


@pytest.fixture(scope="module")
def counted(rows, tmp_path_factory):
    """By model, what torch counted and what the run told: all in one process."""
    out = tmp_path_factory.mktemp("counted")
    cases = MODELS | {
        "again": ("lm", ["--activation_checkpointing", "full"]),
        "padded": ("lm", [*PROMPTS, "--micro_batch_size", 4]),
    }
    runs = [
        (own_flags(recipe, rows, out / name, *more), FLOPS | {"count_products": str(out / f"{name}.json")}, recipe)
        for name, (recipe, more) in cases.items()
    ]
    run_specs("lm", runs, out)
    return {name: json.loads((out / f"{name}.json").read_text()) for name in cases}


@pytest.mark.parametrize("name", MODELS)
def test_a_models_figure_is_what_torch_counts_of_its_forwards_and_backwards(name, counted):
    found = counted[name]
    assert found["told"] == pytest.approx(found["counted"] * COUNTED.get(name, 1), rel=ERROR.get(name, 1e-9))


def test_what_is_recomputed_and_padding_are_no_work(counted):
    """They are counted where they are computed: the control."""
    again, padded = counted["again"], counted["padded"]
    assert again["told"] == counted["lm"]["told"] and again["counted"] > 1.1 * again["told"]
    assert padded["told"] == counted["prompts"]["told"] and padded["counted"] > 1.1 * padded["told"]


def per_token(lines):
    """FLOPs of a token of each update, of which the clock is no part."""
    return [line["model_flops_per_second"] / line["tokens_per_second"] for line in lines]


@pytest.fixture(scope="module")
def one_process(rows, tmp_path_factory):
    """Four updates, and the last two of them once more after a resume."""
    out = tmp_path_factory.mktemp("one")
    flags = own_flags("lm", rows, out / "run", *LONGER)
    run_specs("lm", [(flags, FLOPS)], out)
    before = (out / "run/metrics.jsonl").read_text().splitlines()
    shutil.rmtree(out / "run/checkpoints/update-000004")
    run_specs("lm", [([*flags, "--resume"], FLOPS)], out)
    return before, out / "run"


FLOPS = {"flops": 1}
LONGER = ["--shape", "examples", "--num_updates", 4, "--save_every", 2, "--micro_batch_size", 2]


def test_a_resumed_runs_lines_are_those_of_one_that_went_on(one_process):
    before, out = one_process
    after = (out / "metrics.jsonl").read_text().splitlines()
    assert after[:2] == before[:2] and after[2:] != before[2:] and len(after) == len(before) == 4
    expected = per_token(map(json.loads, before))
    assert per_token(read_metrics(out)) == pytest.approx(expected, rel=1e-12)
    assert expected[2] != pytest.approx(expected[0], rel=1e-9)  # other samples are other work
    rates = {round(line["model_flops_per_second"] / line["share_of_rate"]) for line in read_metrics(out)[2:]}
    assert len(rates) == 1
    # The results are those of both starts, which may have had other devices.
    assert "model_flops_per_second" in results_of(out) and "share_of_rate" not in results_of(out)


@pytest.mark.parametrize(
    ("config", "recipe", "has_rate"),
    [("multi_cpu", "lm", True), ("sequence_parallel", "lm", False), ("pipeline", "pipeline", False)],
)
def test_processes_that_share_the_work_tell_the_whole_models(config, recipe, has_rate, one_process, rows, tmp_path):
    """A share only where the config is for this machine: without its GPUs, a speed says nothing."""
    run_specs(recipe, [(own_flags(recipe, rows, tmp_path / "run", *LONGER), FLOPS)], tmp_path, config)
    lines = read_metrics(tmp_path / "run")
    assert per_token(lines) == pytest.approx(per_token(read_metrics(one_process[1])), rel=1e-12)
    assert all(("share_of_rate" in line) == has_rate for line in lines)


class Tokens:
    """Samples of these lengths."""

    def __init__(self, *lengths):
        self.of = np.array(lengths)

    def __len__(self):
        return len(self.of)

    def lengths(self, ids):
        return self.of[ids]

    def dummy_sample(self):
        return [np.zeros(1, np.int64)] * 3


def work_of(config, *lengths, change=lambda model: None):
    def meta_model():
        model = empty_model(config)
        change(model)
        return model

    samples, collate = Tokens(*lengths), partial(collate_tokens, pad_token_id=0)
    size = {"global_batch_size": 1, "micro_batch_size": 1, "micro_batch_tokens": None}
    batches = GlobalBatches(samples, collate, **size, rank=0, world_size=1, seed=None)
    found = flops.count(meta_model, batches)
    own = torch.from_numpy(samples.of)
    batch = GlobalBatch(0, [], len(own), int(own.sum()), int(own.sum()), 0, torch.zeros(1), "", own)
    return found and found.of(batch)


def test_of_experts_those_count_that_are_chosen():
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)

    def work(num_experts, chosen):
        sizes = dict(num_local_experts=num_experts, num_experts_per_tok=chosen)
        return work_of(MixtralConfig(**shape, num_key_value_heads=4, **sizes), 5, 40)

    one_expert, one_score = 3 * 32 * 48 * 2 * 2 * 3 * 45, 32 * 2 * 2 * 3 * 45
    assert work(4, 2) - work(4, 1) == pytest.approx(one_expert)
    assert work(8, 2) - work(4, 2) == pytest.approx(4 * one_score)


def test_the_formula_of_palms_appendix():
    """6 N for a token and 12 L H Q T for its attention, N without embeddings that are looked up (arXiv:2204.02311)."""
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, pad_token_id=0)
    weights = 3 * 12 * 32**2 + 64 * 32
    for lengths in ([7], [1], [3, 100, 20]):
        expected = sum(6 * weights * n + 12 * 3 * 32 * n * n for n in lengths)
        assert work_of(config, *lengths) == pytest.approx(expected)


def test_a_model_that_needs_its_data_is_not_counted_and_draws_nothing():
    def look(model):
        model.transformer.register_forward_pre_hook(lambda module, *_: module.wte.weight.sum().item())

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)
    before = torch.get_rng_state()
    assert work_of(config, 7, change=look) is None and work_of(config, 7) > 0
    assert torch.equal(torch.get_rng_state(), before)
