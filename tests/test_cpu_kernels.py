"""Attention and norms on a CPU compute what transformers' own do, and the recipes take them, in bf16 and in float32."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, equivalence_flags, read_metrics, run_specs
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from common.models import cpu_kernels
from common.parallel.rates import fastest

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


def test_other_norms_keep_their_forward():
    for norm in (GemmaRMSNorm(32), nn.LayerNorm(32), nn.LayerNorm(32, bias=False), nn.BatchNorm1d(32), nn.Linear(8, 8)):
        assert not cpu_kernels._is_root_mean_square_norm(norm), norm


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


def test_the_fastest_precision_is_chosen_where_it_pays():
    assert fastest({"no": 100.0, "bf16": 400.0}, "no") == "bf16"
    assert fastest({"no": 100.0, "bf16": 120.0}, "no") == "no"
    assert fastest({"no": 100.0, "bf16": 20.0}, "bf16") == "no"
    assert fastest({"no": 10.0, "bf16": 10.0, "fp16": 80.0}, "bf16") == "fp16"  # a GPU of 2018
    flags = subprocess.run([sys.executable, "-m", "common.parallel.rates"], cwd=ROOT, capture_output=True, text=True)
    launcher, path, *_ = flags.stdout.split()
    assert launcher == "--config_file" and (ROOT / path).is_file()
