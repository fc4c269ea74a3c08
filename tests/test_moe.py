"""Mixtures of experts: law 1 for the router, every way to balance, up-cycling, the modes, resume, and mistakes."""

import re
import sys

import pytest
import torch
from conftest import (
    assert_mistake,
    assert_same_update,
    example_flags,
    launch,
    read_metrics,
    relative_difference,
    results_of,
    run,
    run_in_float64,
    run_recipe_alone,
    run_specs,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, JetMoeConfig, OlmoeConfig

from common.data.source_types import Source
from common.data.text import tokenize
from common.tasks.moe import routing
from common.training.losses import sum_token_losses

RECIPE = "recipes/moe.py"
BIAS = "mlp.moe_statics.e_score_correction_bias"
SHAPE = dict(
    vocab_size=384,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


def save_model(path, config, model_dir):
    """A random model with the tokenizer of `model_dir`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for layer in routing.find_layers(model):
        torch.nn.init.normal_(layer.router.weight, std=0.2)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory, model_dir):
    """Two layers of width 32 with eight experts, two for a token."""
    config = routing.moe_config(SHAPE | {"head_dim": 8}, 8, 2, 24)
    return save_model(tmp_path_factory.mktemp("moe"), config, model_dir)


def flags(functions_file, model_dir, output_dir, *more):
    base = ["--global_batch_size", 16, "--learning_rate", 1e-3, "--warmup_updates", 0]
    return example_flags(functions_file, model_dir, output_dir, *base, *more)


# Processes, and (balance, cut of a global batch of 16 samples, what is taken out).
CUTS = {
    1: [
        *[("bias", cut, {}) for cut in (("size", 16), ("size", 4), ("tokens", 128))],
        *[("exact", cut, {}) for cut in (("size", 16), ("size", 1), ("tokens", 128))],
        *[("usual", cut, {}) for cut in (("size", 16), ("size", 2))],
    ],
    2: [
        *[("bias", cut, {}) for cut in (("size", 8), ("tokens", 96))],
        ("bias", ("size", 2), {"own_counts": 1}),
        *[("exact", cut, {}) for cut in (("size", 2), ("tokens", 96))],
    ],
}


@pytest.fixture(scope="module")
def float64_runs(functions_file, moe_dir, tmp_path_factory):
    """First gradients, metrics and directory of each combination, in float64."""
    out, cuts = tmp_path_factory.mktemp("float64"), {}
    for processes, combinations in CUTS.items():
        for balance, (kind, number), changes in combinations:
            more = ["--balance", balance, "--balance_strength", 0.05, f"--micro_batch_{kind}", number]
            given = flags(functions_file, moe_dir, out, *more, "--num_updates", 3)
            name = "-".join(map(str, (balance, processes, kind, number, *changes)))
            cuts[name] = (processes, given, {"float64_experts": 1, **changes})
    return run_in_float64("moe", cuts, out)


def biases(output_dir):
    weights = load_file(output_dir / "model/model.safetensors")
    return {name: weight for name, weight in weights.items() if name.endswith(BIAS)}


@pytest.mark.parametrize("balance", ["bias", "exact"])
def test_the_update_is_the_same_however_the_global_batch_is_cut(balance, float64_runs):
    """Law 1 with a router: gradients, losses, counts and the moved bias, over micro-batch and processes."""
    first, *others = [name for name in float64_runs if name.startswith(balance) and not name.endswith("own_counts")]
    assert len(others) == 4
    assert_same_update(float64_runs, first, *others)
    _, metrics, out = float64_runs[first]
    for name in others:
        for field in ("busiest_expert", "dead_experts"):
            assert [line[field] for line in float64_runs[name][1]] == [line[field] for line in metrics], name
        assert all(torch.equal(bias, biases(out)[key]) for key, bias in biases(float64_runs[name][2]).items())
    moved = [bias.abs().max().item() for bias in biases(out).values()]
    assert len(moved) == 2 and all((move > 0.04) == (balance == "bias") for move in moved)


def test_the_usual_balancing_loss_depends_on_the_cut(float64_runs):
    """Control: the loss per micro-batch makes another gradient, a rank's own counts another bias."""
    whole, cut = (float64_runs[f"usual-1-size-{size}"][0] for size in (16, 2))
    assert relative_difference(cut, whole) > 1e-3
    together, alone = (biases(float64_runs[f"bias-{name}"][2]) for name in ("2-size-8", "2-size-2-own_counts"))
    assert any(not torch.equal(together[key], alone[key]) for key in together)


def test_a_resume_that_forgets_the_biases_is_noticed(functions_file, moe_dir, tmp_path):
    """Control of tests/test_resume.py, which resumes this recipe in every mode."""
    more = ["--balance_strength", 0.05, "--num_updates", 6, "--save_every", 3]
    whole, again = tmp_path / "whole", tmp_path / "again"
    changes = {"copy_run": [str(whole), str(again), 3], "forget": "buffers"}
    runs = [(flags(functions_file, moe_dir, whole, *more), {})]
    runs.append((flags(functions_file, moe_dir, again, *more, "--resume"), changes))
    run_specs("moe", runs, tmp_path)
    losses = [[line["loss"] for line in read_metrics(path)] for path in (whole, again)]
    assert losses[0][:3] == losses[1][:3] and losses[0] != losses[1]


def test_the_reported_figures_are_those_of_the_saved_model(functions_file, moe_dir, tmp_path):
    """Counted again, sample by sample, from the router logits and biases of the saved model, and of the export."""
    out = tmp_path / "run"
    more = ["--balance_strength", 0.05, "--num_updates", 2, "--validation_file", functions_file, "--save_every", 2]
    result = launch(*flags(functions_file, moe_dir, out, *more), script=RECIPE)
    results = results_of(out)
    run([sys.executable, "-m", "tools.checkpoint", "export", out / "checkpoints/update-000002", tmp_path / "export"])
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    samples = tokenize(Source(files=(str(functions_file),)), tokenizer, 64, "examples")
    for path in (out / "model", tmp_path / "export"):
        model = AutoModelForCausalLM.from_pretrained(path)
        biases = [
            parameter.squeeze() for name, parameter in model.named_parameters() if name.endswith("correction_bias")
        ]
        assert len(biases) == 2 and all(bias.abs().max() > 0.09 for bias in biases)
        counts = torch.zeros(2, 8)
        for ids, _, rows in (samples[number] for number in range(len(samples))):
            logits = model(torch.tensor(ids).unsqueeze(0), output_router_logits=True).router_logits
            for layer, bias in enumerate(biases):
                chosen = (logits[layer].softmax(-1) + bias).topk(2).indices[torch.tensor(rows)]
                counts[layer] += torch.bincount(chosen.flatten(), minlength=8)
        shares = counts / counts.sum(1, keepdim=True)
        assert torch.allclose(torch.tensor(results["expert_shares"]), shares, atol=1e-3)
        assert results["busiest_expert"] == pytest.approx(shares.amax(1).mean().item() * 8, rel=0.01)
        assert results["dead_experts"] == (counts == 0).sum()
    assert f"gets {results['busiest_expert']:.2f} times its equal share of the held-out tokens" in result.stdout


def test_the_exact_loss_is_the_mean_of_the_layers_losses(moe_dir):
    """E x sum over the experts of share x mean probability, of each layer. Control: transformers pools the layers."""
    model = AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)
    ids = torch.randint(0, 384, (2, 40), generator=torch.Generator().manual_seed(0))
    logits = model(ids, output_router_logits=True).router_logits
    means = [layer.softmax(-1).mean(0) for layer in logits]
    shares = [torch.bincount(layer.topk(2).indices.flatten(), minlength=8) / (2 * ids.numel()) for layer in logits]
    expected = sum(8 * (share * mean).sum().item() / 2 for share, mean in zip(shares, means, strict=True))
    sum_token_losses(model)
    router = routing.Routing(model, "exact", 1.0)
    router.logits, router.shares = list(logits), torch.stack(shares)
    rows = torch.arange(ids.numel())
    assert router._loss_sum(rows).item() / len(rows) == pytest.approx(expected, rel=1e-5)
    router.balance = "usual"
    assert router._loss_sum(rows).item() / len(rows) != pytest.approx(expected, rel=1e-4)


def test_what_a_token_meets(model_dir, moe_dir):
    """Active parameters: all, less the experts that a token does not meet."""
    model = AutoModelForCausalLM.from_pretrained(moe_dir)
    total, one_expert = sum(p.numel() for p in model.parameters()), 3 * 32 * 24
    layers = routing.find_layers(model)
    assert routing.count_active(layers, total) == total - 2 * 6 * one_expert
    assert [(layer.num_experts, layer.top_k) for layer in layers] == [(8, 2)] * 2


def test_an_upcycled_model_computes_what_the_dense_one_does(model_dir):
    """The same logits, whichever experts the routers choose. Control: without turning the heads' halves, others."""
    dense = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(routing.upcycled_config(dense.config, 4, 2))
    ids = torch.randint(0, 384, (2, 48), generator=torch.Generator().manual_seed(0))
    routing.upcycle(dense, model)
    with torch.no_grad():
        assert (model(ids).logits - dense(ids).logits).abs().max() < 1e-5
        model.model.layers[0].self_attn.k_proj.weight.copy_(dense.model.layers[0].self_attn.k_proj.weight)
        assert (model(ids).logits - dense(ids).logits).abs().max() > 1e-3


MISTAKES = {
    "dense and balanced": (["--dense", "--balance", "exact"], "--dense has no experts to balance"),
    "one expert": (["--num_experts", 1], "num_experts 1 is a dense model"),
    "more for a token than there are": (["--num_experts", 4, "--experts_per_token", 5], "is more than --num_experts 4"),
    "a router without a bias": (["OLMOE"], "OlmoeTopKRouter has no e_score_correction_bias.* exact, usual or none"),
    "another kind of mixture": (["JETMOE"], "JetMoeForCausalLM: its experts are not a single module that is called"),
    "up-cycling nothing": (["--upcycle"], "--upcycle has no effect without --model_name_or_path"),
    "up-cycling below an adapter": (["DENSE", "--upcycle", "--lora_rank", 4], "--lora_rank needs a base with files"),
    "up-cycling a mixture": (["MOE", "--upcycle"], "a mixture of experts already; remove --upcycle"),
    "a dense model": (["DENSE"], "is a dense model, without experts: add experts with --upcycle"),
    "another number of a pretrained one": (["MOE", "--num_experts", 4], "cannot change a pretrained model"),
    "a strength of nothing": (["--balance", "none", "--balance_strength", 1], "no effect with --balance none"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, functions_file, moe_dir, model_dir, tmp_path):
    """Status 2, and nothing is written."""
    more, pattern = MISTAKES[mistake]
    if "OLMOE" in more:
        olmoe = OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2)
        save_model(tmp_path / "olmoe", olmoe, model_dir)
    if "JETMOE" in more:
        JetMoeConfig(vocab_size=384, num_hidden_layers=1).save_pretrained(tmp_path / "jetmoe")
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "jetmoe")
    names = {"OLMOE": "olmoe", "JETMOE": "jetmoe"}
    models = {name: tmp_path / path for name, path in names.items()} | {"MOE": moe_dir, "DENSE": model_dir}
    parts = [["--model_name_or_path", models[part]] if part in models else [part] for part in more]
    base = ["--train_file", functions_file, "--output_dir", tmp_path / "run"]
    assert_mistake(run_recipe_alone("moe.py", *base, *sum(parts, [])), pattern)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "config",
    [
        OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2),
        GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda config: config.model_type,
)
def test_a_pretrained_mixture_without_a_bias(config, functions_file, model_dir, tmp_path):
    """The exact loss. Activations that are computed again are not counted again."""
    path = save_model(tmp_path / "model", config, model_dir)
    specs = []
    for mode in ("none", "full"):
        more = ["--balance", "exact", "--num_updates", 2, "--activation_checkpointing", mode]
        specs.append((flags(functions_file, path, tmp_path / mode, *more), {}))
    result = run_specs("moe", specs, tmp_path)
    lines, expected = read_metrics(tmp_path / "full"), read_metrics(tmp_path / "none")
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-6)
    assert [line["busiest_expert"] for line in lines] == [line["busiest_expert"] for line in expected]
    assert "chunked linear cross-entropy" in result.stdout


def test_deepspeed_in_bf16_leaves_the_bias_its_small_steps(moe_dir):
    """DeepSpeed casts a model, buffers too. Control: in bf16 a step of 0.001 beside 0.5 is lost."""
    model = AutoModelForCausalLM.from_pretrained(moe_dir)
    sum_token_losses(model)
    router = routing.Routing(model, "bias", 1e-3)
    model.bfloat16()
    assert router.layers[0].bias.dtype == torch.bfloat16
    assert torch.tensor(0.5, dtype=torch.bfloat16) + 1e-3 == 0.5
    router.prepared()
    assert all(layer.bias.dtype == torch.float32 for layer in router.layers)


def test_the_dense_peer_has_as_many_active_parameters(functions_file, tmp_path):
    """But for the routers: in 4 layers a weight for each of 8 experts and 128 features."""
    given = ["--train_file", functions_file, "--dry_run", "--output_dir", tmp_path / "run"]
    printed = [run_recipe_alone("moe.py", *given, *more).stdout for more in ([], ["--dense"])]
    active = re.search(r"([\d,]+) of [\d,]+ parameters are active", printed[0])[1]
    dense = re.search(r"ForCausalLM, ([\d,]+) parameters", printed[1])[1]
    assert int(active.replace(",", "")) - int(dense.replace(",", "")) == 4 * 8 * 128
    assert not (tmp_path / "run").exists()
