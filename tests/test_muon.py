"""Muon's update: that of an independent computation, and the same in every mode that splits the matrices."""

import json

import pytest
import torch
from conftest import assert_refused, example_flags, launch, read_metrics, run_specs
from safetensors.torch import load_file
from test_checkpoint import outcome
from test_optimizers import build
from torch import nn

from common.errors import UserError
from common.training import muon
from common.training.optimizers import make_optimizer, set_learning_rate

# Of the matrices in layers, all but these belong to Muon.
BY_ADAMW = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "llama tied": {"model.embed_tokens.weight"},
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "mixtral": {"model.embed_tokens.weight", "lm_head.weight"},
    "mamba": {
        "backbone.embeddings.weight",
        "backbone.layers.0.mixer.A_log",
        "backbone.layers.0.mixer.conv1d.weight",
    },
    "vit": {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings", "classifier.weight"},
}
MODES = {  # config: processes; three make uneven shards
    "multi_cpu": 2,
    "fsdp2": 3,
    "hsdp": 4,
    "tensor_parallel": 2,
    "fsdp2_tensor_parallel": 4,
    "pipeline": 2,
}
NUM_UPDATES, SAVED = 4, 2


@pytest.mark.parametrize("family", BY_ADAMW)
def test_muon_gets_the_hidden_matrices(family):
    model = build(family)
    optimizer = make_optimizer("muon", model, 1e-3, 0.1)
    given = {p for group in optimizer.param_groups if group["is_hidden"] for p in group["params"]}
    matrices = {name for name, p in model.named_parameters() if p.ndim > 1}
    assert {name for name, p in model.named_parameters() if p in given} == matrices - BY_ADAMW[family]


def independent_updates(weight, gradients, rate, decay):
    """In float64, by singular values: the polynomial of the iteration is applied to each."""
    weight, momentum = weight.double(), 0
    for gradient in gradients:
        momentum = 0.95 * momentum + gradient.double()
        direction = gradient.double() + 0.95 * momentum
        flat = direction if direction.ndim < 4 else direction.flatten(1)
        left, values, right = torch.linalg.svd(flat, full_matrices=False)
        values = values / values.square().sum(-1, keepdim=True).sqrt()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        update = left @ torch.diag_embed(values) @ right * 0.2 * max(flat.shape[-2:]) ** 0.5
        weight = weight * (1 - rate * decay) - rate * update.view_as(weight)
    return weight


@pytest.mark.parametrize("family", ["llama", "mixtral", "vit"])
def test_the_update_is_that_of_an_independent_computation(family):
    """For matrices, stacked experts and a convolution; the other parameters move as AdamW moves them."""
    models = [build(family), build(family)]
    models[1].load_state_dict(models[0].state_dict())
    before = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    optimizers = [make_optimizer(name, model, 1e-2, 0.5) for name, model in zip(("muon", "adamw"), models, strict=True)]
    torch.manual_seed(0)
    gradients = [{name: torch.randn_like(p) for name, p in before.items()} for _ in range(3)]
    for given in gradients:
        for model, optimizer in zip(models, optimizers, strict=True):
            for name, p in model.named_parameters():
                p.grad = given[name].clone()
            set_learning_rate(optimizer, 1e-2)
            optimizer.step()
    hidden = {p for group in optimizers[0].param_groups if group["is_hidden"] for p in group["params"]}
    adamw = dict(models[1].named_parameters())
    for name, p in models[0].named_parameters():
        if p in hidden:
            expected = independent_updates(before[name], [given[name] for given in gradients], 1e-2, 0.5)
            torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=2e-6)
            change = (p.detach() - before[name] * (1 - 5e-3) ** 3).square().mean().sqrt() / 1e-2
            assert 0.2 < change < 0.7, name  # of three updates, as large as AdamW's; the tolerance hides none
        else:
            assert torch.equal(p, adamw[name]), name


def flags(functions_file, model_dir, output_dir, *more):
    base = ["--optimizer", "muon", "--num_updates", NUM_UPDATES, "--global_batch_size", 12, "--micro_batch_size", 1]
    base += ["--learning_rate", 1e-2, "--weight_decay", 1.0, "--max_grad_norm", 0.5, "--warmup_updates", 1]
    return example_flags(functions_file, model_dir, output_dir, *base, "--save_every", SAVED, "--keep_last", 9, *more)


def losses_and_weights(output_dir):
    losses = [line["loss"] for line in read_metrics(output_dir)]
    return losses, load_file(output_dir / "model/model.safetensors")


def assert_is_the_run_of(reference, output_dir):
    (expected, others), (losses, weights) = losses_and_weights(reference), losses_and_weights(output_dir)
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, weight in others.items():
        assert (weights[name] - weight).abs().max() < 1e-6, name


def run_all(runs, directory, config, processes):
    run_specs("lm", runs, directory, config, "--mixed_precision", "no", "--num_processes", processes)


@pytest.fixture(scope="module")
def reference(functions_file, model_dir, tmp_path_factory):
    """Runs of one process: lm.py's, also of an adapter, and moe.py's from scratch."""
    directory = tmp_path_factory.mktemp("reference")
    runs = [(flags(functions_file, model_dir, directory / "lm"), {})]
    runs.append((flags(functions_file, model_dir, directory / "adapter", "--lora_rank", 4), {}))
    runs.append((moe_flags(functions_file, directory / "moe"), {}, "moe"))
    run_all(runs, directory, "cpu", 1)
    return directory


def moe_flags(functions_file, output_dir):
    given = flags(functions_file, "MODEL", output_dir, "--balance", "none", "--model_config", "tiny")
    given += ["--learning_rate", "1e-3"]
    given[given.index("--num_updates") + 1] = "2"
    at = given.index("--model_name_or_path")
    return given[:at] + given[at + 2 :]


@pytest.mark.parametrize("config", MODES)
def test_every_mode_makes_the_update_of_one_process(config, reference, functions_file, model_dir, tmp_path):
    """Also from a checkpoint of one process; from its own, bit for bit."""
    recipe = "pipeline" if config == "pipeline" else "lm"
    given = {name: flags(functions_file, model_dir, tmp_path / name) for name in ("run", "again", "moved", "parts")}
    copies = {"again": tmp_path / "run", "moved": reference / "lm"}
    runs = [(given["run"], {"hash_weights": str(tmp_path / "hashes")}, recipe)]
    for name, source in copies.items():
        changes = {"copy_run": [str(source), str(tmp_path / name), SAVED]}
        runs.append(([*given[name], "--resume"], changes, recipe))
    if config == "fsdp2":
        runs.append((given["parts"], {"own_matrices": 1}))
        runs.append((flags(functions_file, model_dir, tmp_path / "adapter", "--lora_rank", 4), {}))
        runs.append((moe_flags(functions_file, tmp_path / "moe"), {}, "moe"))
    run_all(runs, tmp_path, config, MODES[config])
    assert_is_the_run_of(reference / "lm", tmp_path / "run")
    assert_is_the_run_of(reference / "lm", tmp_path / "moved")
    assert outcome(tmp_path / "again", NUM_UPDATES) == outcome(tmp_path / "run", NUM_UPDATES)
    hashes = [json.loads((tmp_path / f"hashes-{rank}.json").read_text()) for rank in range(MODES[config])]
    if config in ("multi_cpu", "hsdp"):
        assert hashes[0] == hashes[MODES[config] // 2]
    if config == "fsdp2":
        losses = [[line["loss"] for line in read_metrics(path / "adapter")] for path in (tmp_path, reference)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert_is_the_run_of(reference / "moe", tmp_path / "moe")
        (_, weights), (_, others) = (losses_and_weights(path) for path in (reference / "lm", tmp_path / "parts"))
        name = "model.layers.0.mlp.up_proj.weight"  # control: the orthogonal matrices of shards are other ones
        assert (weights[name] - others[name]).abs().max() > 1e-3


def test_the_work_is_spread_over_the_ranks():
    """In rounds in which each rank has one matrix at most."""
    model = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(9)] + [nn.Linear(16, 64, bias=False)])
    exchange = muon._Exchange(list(model.parameters()), model)
    exchange.blocks *= 4  # as on four ranks with the same matrices
    work, seen = [0] * 4, []
    for numbers, owners in exchange.rounds(list(range(10))):
        assert len(set(owners)) == len(numbers) <= 4
        seen += numbers
        for number, owner in zip(numbers, owners, strict=True):
            work[owner] += 8**3 if number < 9 else 64 * 16**2
    assert sorted(seen) == list(range(10))
    assert sorted(work) == [3 * 8**3, 3 * 8**3, 3 * 8**3, 64 * 16**2]


def test_a_model_without_a_hidden_matrix_is_refused():
    with pytest.raises(UserError, match="^--optimizer muon: the model trains no hidden matrix; use --optimizer adamw$"):
        make_optimizer("muon", nn.Embedding(4, 4), 1e-3, 0.1)


def test_zero_is_refused(tmp_path):
    result = launch("--optimizer", "muon", "--output_dir", tmp_path / "run", config="zero2", check=False)
    assert_refused(result, "--optimizer muon works on whole tensors, and ZeRO cuts them; use adamw or sgd$")
    assert not (tmp_path / "run").exists()
