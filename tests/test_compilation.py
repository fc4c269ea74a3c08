"""Which layers are compiled, and that a compiled layer and the compiled softmax compute what the plain ones do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import need
from transformers import LlamaConfig, LlamaForCausalLM

from common.parallel.launch import Launch
from common.training import compilation, fused_softmax
from common.training.linear_cross_entropy import _logits_to_gradient
from common.training.recipe_traits import Traits

GPU, CPU = torch.device("cuda"), torch.device("cpu")
BLOCKS, TEXTS = [64] * 99 + [40], list(range(1, 101))


def llama(num_layers=4, device="cpu", **shape):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1} | shape
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=num_layers, **shape))


class Samples:
    def __init__(self, lengths):
        self.all = np.array(lengths)

    def __len__(self):
        return len(self.all)

    def lengths(self, ids):
        return self.all[ids]


def fake_run(device, compile_flag, mode="plain", checkpointing="none", **traits):
    args = SimpleNamespace(compile=compile_flag, activation_checkpointing=checkpointing)
    return SimpleNamespace(args=args, device=device, launch_config=Launch(mode=mode), traits=Traits(**traits))


@pytest.fixture
def cudnn():
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.fixture(scope="module")
def large():
    """More than 100 M parameters, without memory."""
    return llama(2, "meta", hidden_size=4096, intermediate_size=8192)


@pytest.mark.parametrize(
    ("expected", "device", "compile_flag", "lengths", "more"),
    [
        (True, GPU, None, BLOCKS, {}),
        (True, GPU, None, BLOCKS, {"mode": "DDP"}),
        (False, CPU, None, BLOCKS, {}),
        (False, GPU, False, BLOCKS, {}),
        (False, GPU, None, TEXTS, {}),
        (True, GPU, True, TEXTS, {}),
        (True, CPU, True, TEXTS, {}),
        (False, GPU, None, BLOCKS, {"mode": "FSDP"}),
        (False, GPU, None, BLOCKS, {"checkpointing": "offload"}),
        (False, GPU, None, BLOCKS, {"compiles_layers": False}),
    ],
)
def test_layers_are_compiled_by_default_where_that_was_measured(
    expected, device, compile_flag, lengths, more, large, cudnn, monkeypatch
):
    """And cuDNN's attention, which plans each shape anew, is off on a GPU where lengths differ."""
    monkeypatch.setattr(compilation, "can_compile", lambda: True)
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: compiled.append(module))
    run = fake_run(device, compile_flag, **more)
    compilation.choose_kernels(run, large, Samples(lengths))
    assert run.args.compile == expected
    assert compiled == (list(large.model.layers) if expected else [])
    assert cudnn() == (device == CPU)  # even the last block of a corpus is a new shape
    vars(large).pop("generate", None)


def test_small_models_and_machines_without_a_compiler_do_not_compile(large, cudnn, monkeypatch):
    for model, can in ((llama(), True), (large, False)):
        monkeypatch.setattr(compilation, "can_compile", lambda can=can: can)
        run = fake_run(GPU, None)
        compilation.choose_kernels(run, model, Samples([64] * 4))
        assert run.args.compile is False and cudnn()


def test_a_compiler_needs_triton_and_the_headers_of_python(monkeypatch, tmp_path):
    compilation.can_compile.cache_clear()
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CC", "cc")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda _: str(tmp_path))
    try:
        assert compilation.can_compile()
        for module, name, value in (
            (compilation.importlib.util, "find_spec", None),
            (compilation.sysconfig, "get_path", str(tmp_path / "none")),
        ):
            compilation.can_compile.cache_clear()
            with monkeypatch.context() as change:
                change.setattr(module, name, lambda _, value=value: value)
                assert not compilation.can_compile()
    finally:
        compilation.can_compile.cache_clear()


def count_graphs(monkeypatch, graphs):
    """Graphs are counted and run as they are; the options of torch's own compiler are left out."""
    compile_module = torch.nn.Module.compile

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda m, dynamic, options: compile_module(m, backend=backend, dynamic=dynamic)
    )


@pytest.mark.parametrize("num_layers", [2, 6])
def test_all_layers_share_one_graph_and_samples_are_generated_without(num_layers, monkeypatch):
    """Whatever their number. Control: without the change of `generate`, a sample compiles more."""
    model, graphs = llama(num_layers).eval(), []
    ids = torch.arange(12).view(2, 6)
    expected = model(input_ids=ids, labels=ids).loss
    count_graphs(monkeypatch, graphs)
    run = fake_run(CPU, True)
    compilation.choose_kernels(run, model, Samples(TEXTS))
    assert torch.allclose(model(input_ids=ids, labels=ids, use_cache=False).loss, expected)
    assert len(graphs) == 1
    written = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert written.shape == (2, 10) and len(graphs) == 1
    del model.generate
    model.generate(ids, max_new_tokens=4, do_sample=False)
    assert len(graphs) > 1
    torch._dynamo.reset()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 3.0)])
def test_the_softmax_of_a_gpu_is_that_of_a_cpu(scale, softcap, dtype, is_compiled):
    """Losses, and the gradient in place of the logits, for rows of different weights."""
    if is_compiled:
        need("g++")
    function = fused_softmax.compiled() if is_compiled else fused_softmax.cross_entropy_gradient_
    for num_rows in (7, 64):
        torch.manual_seed(num_rows)
        logits, targets = (3 * torch.randn(num_rows, 1000)).to(dtype), torch.randint(1000, (num_rows,))
        weights = torch.rand(num_rows)
        wide, narrow, kept = logits.clone().float(), logits.clone(), logits.clone()
        expected = _logits_to_gradient(wide, targets, weights, scale, softcap, True, None)
        assert torch.allclose(function(narrow, targets, weights, scale, softcap, True, None), expected, atol=1e-5)
        error = (narrow.float() - wide).abs().max() / wide.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 4e-3)
        losses = function(kept, targets, None, scale, softcap, False, None)
        assert torch.allclose(losses, expected, atol=1e-5) and torch.equal(kept, logits)  # no gradient is wanted
        assert not torch.equal(narrow, logits)
    torch._dynamo.reset()


def test_chunks_on_a_gpu_hold_half_a_gibibyte_of_logits(monkeypatch):
    weight = torch.empty(131072, 8, device="meta")
    monkeypatch.setattr(fused_softmax, "can_compile", lambda: True)
    assert fused_softmax.choose(weight, 512) == (fused_softmax, 2048)
    assert fused_softmax.choose(torch.empty(2**22, 8, device="meta"), 512)[1] == 512
    monkeypatch.setattr(fused_softmax, "can_compile", lambda: False)
    assert fused_softmax.choose(weight, 512) == (None, 512)
