"""Attention and norms on a CPU compute what transformers' own do, and the recipes take them, in bf16 and in float32."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, equivalence_flags, read_metrics, run_specs
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, Mamba2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from common.models import cpu_kernels
from common.parallel import precision_choice

# Heads, heads of keys, queries, keys, mask, whether positions have a bias, whether the module is causal.
SHAPES = {
    "causal": (6, 6, 40, 40, None, False, True),
    "heads that share keys": (6, 2, 40, 40, None, False, True),
    "with padding": (6, 2, 40, 40, "bool", False, False),
    "a mask to add, other keys": (6, 6, 7, 33, "float", False, False),
    "a bias of positions": (6, 6, 30, 30, None, True, False),
    "with padding too": (6, 6, 30, 30, "bool", True, False),
    "causal too": (6, 6, 30, 30, None, True, True),
    "no mask": (4, 4, 20, 25, None, False, False),
    "long": (2, 2, 600, 600, None, False, True),
}


def attend(attention, shape, dtype, causal=None):
    """Output and gradients of query, key, value and bias, of the same random numbers for each call."""
    torch.manual_seed(0)
    heads, key_heads, queries, keys, mask, has_bias, is_causal = shape
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = heads // key_heads, is_causal if causal is None else causal
    sizes = [(queries, heads), (keys, key_heads), (keys, key_heads)]
    inputs = [torch.randn(3, *size, 16).transpose(1, 2).requires_grad_() for size in sizes]
    bias = torch.randn(1, heads, queries, keys).requires_grad_() if has_bias else None
    if mask:
        mask = torch.rand(3, 1, queries, keys) > 0.3
        mask[..., 0] = True
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if shape[4] == "float" else mask
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        output, _ = attention(module, *inputs, mask, scaling=0.2, position_bias=bias, position_ids=torch.arange(3))
    (output.float() * torch.randn(output.shape)).sum().backward()
    return [output.detach(), *(x.grad for x in (*inputs, bias) if x is not None)]


def errors(results, exact):
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(results, exact, strict=True)]


@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_as_exact_as_sdpa(name, monkeypatch):
    """Output and each gradient in bf16. Control: seen with the causal order left out, and that long rows are SDPA's."""
    calls = []
    theirs = lambda *args, **kwargs: calls.append(1) or sdpa_attention_forward(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(cpu_kernels, "sdpa_attention_forward", theirs)
    exact = attend(sdpa_attention_forward, SHAPES[name], torch.float32)
    ours = attend(cpu_kernels.attention, SHAPES[name], torch.bfloat16)
    assert bool(calls) == (name == "long")
    assert ours[0].dtype == torch.bfloat16
    theirs = errors(attend(sdpa_attention_forward, SHAPES[name], torch.bfloat16), exact)
    assert all(1e-4 < mine < max(1.6 * its, 6e-3) for mine, its in zip(errors(ours, exact), theirs, strict=True))
    if name == "causal":
        assert min(errors(attend(cpu_kernels.attention, SHAPES[name], torch.bfloat16, causal=False), exact)) > 0.1
    in_float32 = attend(cpu_kernels.attention, SHAPES[name], torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(in_float32, exact, strict=True))  # SDPA's own


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm, T5LayerNorm])
def test_a_norm_is_that_of_its_module(kind):
    """Output and gradients; under autocast the output is the one that each layer behind it would round to.

    Without autocast the module's own forward runs, whose sums over rows are closer.
    """
    torch.manual_seed(0)
    norm, x, factors = kind(32, eps=1e-6), torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 5, 32)
    nn.init.normal_(norm.weight)
    results = []
    for forward in (norm.forward, lambda x: cpu_kernels._RootMeanSquareNorm.apply(x, norm.weight, 1e-6, x.dtype)):
        x.grad = norm.weight.grad = None
        output = forward(x)
        (output * factors).sum().backward()
        results.append([output.detach(), x.grad, norm.weight.grad])
    assert cpu_kernels._is_root_mean_square_norm(norm)
    assert max(errors(results[1], [x.double() for x in results[0]])) < 1e-6
    assert torch.equal(cpu_kernels._norm_forward(norm, x), results[0][0])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = cpu_kernels._norm_forward(norm, x)
    assert rounded.dtype == torch.bfloat16 and torch.allclose(rounded, results[0][0].bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_zeroes_as_many_as_asked_and_keeps_the_mean(dtype, probability):
    """Within five standard deviations, and to 1 in 65,536; no two neighbours of a draw together; the gradient too."""
    module = nn.Sequential(nn.Dropout(probability)).train()
    x = torch.ones(999, 1001, dtype=dtype, requires_grad=True)
    cpu_kernels.use_cpu_kernels(module)
    torch.manual_seed(0)
    output = module(x)
    output.sum().backward()
    is_zero = output.detach() == 0
    deviation = (probability * (1 - probability) / x.numel()) ** 0.5
    assert abs(is_zero.double().mean().item() - probability) < 5 * deviation + 2**-16
    (kept,) = output.detach()[~is_zero].unique().tolist()
    assert kept == pytest.approx(1 / (1 - probability), rel=2**-8)
    assert torch.equal(x.grad, output.detach()) and output.dtype == dtype
    if probability == 0.5:
        for shift in (1, 2, 3, 4, 1001):
            both = (is_zero.flatten()[shift:] & is_zero.flatten()[:-shift]).double().mean().item()
            assert abs(both - 0.25) < 5e-3, shift
    torch.manual_seed(0)
    assert torch.equal(module(x), output)
    assert not torch.equal(module(x), output)
    torch.manual_seed(0)
    assert not torch.equal(nn.functional.dropout(x, probability), output)  # the control: torch's own draws others
    assert module.eval()(x) is x


def test_attention_with_dropout_keeps_its_mean(monkeypatch):
    """In both types, as many weights are dropped as asked. Control: without dropout nothing differs between calls."""
    torch.manual_seed(0)
    module = nn.Module()
    module.is_causal = False
    query, key, value = (torch.randn(4, 2, 30, 16) for _ in range(3))
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), torch.no_grad():
            with monkeypatch.context() as alone:
                alone.delattr(cpu_kernels, "sdpa_attention_forward")  # whose own dropout would keep it too
                some = [
                    cpu_kernels.attention(module, query, key, value, None, dropout=0.3)[0].float() for _ in range(400)
                ]
            exact = cpu_kernels.attention(module, query, key, value, None)[0].float()
            again = cpu_kernels.attention(module, query, key, value, None, dropout=0.0)[0].float()
        assert torch.equal(exact, again) and not torch.allclose(some[0], exact, atol=0.1)
        assert (torch.stack(some).mean(0) - exact).abs().mean() < 0.02 + most


def test_other_norms_keep_their_forward():
    for norm in (GemmaRMSNorm(32), nn.LayerNorm(32), nn.LayerNorm(32, bias=False), nn.BatchNorm1d(32), nn.Linear(8, 8)):
        assert not cpu_kernels._is_root_mean_square_norm(norm), norm


TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
TINY |= {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
GATED = {"num_heads": 8, "state_size": 8, "n_groups": 1, "expand": 2}  # its norms are given a gate
NO_WEIGHT = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}  # some of its norms


@pytest.mark.parametrize(
    "config",
    [Mamba2Config(**TINY | GATED), Gemma4TextConfig(**TINY | NO_WEIGHT), LlamaConfig(**TINY)],
    ids=lambda config: config.model_type,
)
def test_a_model_with_norms_of_several_kinds_computes_as_by_itself(config, monkeypatch):
    """The loss of transformers' own modules, and near it in bf16."""
    ids = torch.arange(40).view(2, 20)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()

    @torch.no_grad()
    def loss():
        return model(input_ids=ids, labels=ids, use_cache=False).loss.item()

    expected = loss()
    monkeypatch.setattr("transformers.AttentionInterface._global_mapping", {**AttentionInterface._global_mapping})
    cpu_kernels.use_cpu_kernels(model)
    assert loss() == pytest.approx(expected, rel=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss() == pytest.approx(expected, rel=1e-2)


def test_the_recipe_computes_with_them(functions_file, model_dir, tmp_path):
    """With cpu_bf16.yaml: losses as of transformers' own, but for rounding, which shows that they ran.

    Weights are cast once an update, and the head's in each micro-batch: the same bits as with all in each.
    """
    names = {"ours": {}, "theirs": {"own_kernels": 1}, "cast": {"cast_in_each_micro_batch": 1}}
    runs = []
    for name, changes in names.items():
        changes |= {"count_casts": str(tmp_path / f"{name}.txt")}
        runs.append((equivalence_flags(functions_file, model_dir, tmp_path / name), changes))
    run_specs("lm", runs, tmp_path, "cpu_bf16")
    ours, theirs, cast = ([line["loss"] for line in read_metrics(tmp_path / name)] for name in names)
    assert ours == cast and ours != theirs and ours == pytest.approx(theirs, rel=1e-3)
    once, _, each = (int((tmp_path / f"{name}.txt").read_text()) for name in names)
    updates, micro_batches, layers = 10, 38, 2 * 7  # one global batch is the short one of an epoch
    assert (once, each) == (updates * layers + micro_batches, micro_batches * (layers + 1))


def test_the_fastest_precision_is_chosen_where_it_pays(monkeypatch):
    assert precision_choice.fastest({"no": 100.0, "bf16": 400.0}, "no") == "bf16"
    assert precision_choice.fastest({"no": 100.0, "bf16": 120.0}, "no") == "no"
    assert precision_choice.fastest({"no": 100.0, "bf16": 20.0}, "bf16") == "no"
    assert precision_choice.fastest({"no": 10.0, "bf16": 10.0, "fp16": 80.0}, "bf16") == "fp16"  # a GPU of 2018
    for recipe in ("lm", "moe"):
        command = [sys.executable, "-m", "common.parallel.precision_choice", recipe]
        flags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        launcher, path, *_ = flags.stdout.split()
        assert launcher == "--config_file" and (ROOT / path).is_file()
        assert (
            recipe == "lm" or torch.cuda.is_available() or path.endswith("/cpu.yaml")
        )  # its small model gains nothing
    monkeypatch.setattr(precision_choice, "measure_throughputs", lambda _: {"no": 1.0, "bf16": 4.0})
    cpu = torch.device("cpu")
    assert "4.0 times as fast: before the recipe, --mixed_precision bf16" in precision_choice.advise(cpu, "no", 10**7)
    assert not precision_choice.advise(cpu, "bf16", 10**7) and not precision_choice.advise(cpu, "no", 10**6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_keeps_the_norms_of_transformers(device):
    """A replaced norm would break the graph of a compiled layer. Control: on a CPU they are replaced."""
    from accelerate import Accelerator, PartialState

    from common.models.untrained import make_ready

    Accelerator(cpu=True, mixed_precision="bf16")
    PartialState().device = torch.device(device)
    model = make_ready(AutoModelForCausalLM.from_config(LlamaConfig(**TINY)))
    assert ("forward" in vars(model.model.norm)) == (device == "cpu")
