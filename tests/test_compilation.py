"""Which layers are compiled, and that a compiled layer and the compiled softmax compute what the plain ones do."""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import need
from transformers import LlamaConfig, LlamaForCausalLM

from common import auto_compile
from common.parallel.launch import Launch
from common.training import compilation, fused_softmax
from common.training.batching import collate_tokens
from common.training.linear_cross_entropy import _logits_to_gradient
from common.training.recipe_traits import Arguments, Traits

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


def fake_run(device, compile_flag, mode="plain", checkpointing="none", num_updates=10**9, **traits):
    args = Arguments(
        compile=compile_flag, activation_checkpointing=checkpointing, dry_run=False, num_updates=num_updates
    )
    loader = SimpleNamespace(dataset=OneBatch())
    return SimpleNamespace(
        args=args,
        device=device,
        launch_config=Launch(mode=mode),
        traits=Traits(**traits),
        loader=loader,
        meta_model=lambda: llama(2, "meta", hidden_size=256, intermediate_size=512),
    )


class OneBatch:
    """A `GlobalBatches` of one update of four blocks of 64 tokens."""

    def __init__(self):
        self.samples, self.collate = self, partial(collate_tokens, pad_token_id=0)

    def __len__(self):
        return 4

    def lengths(self, ids):
        return np.full(len(ids), 64)

    def dummy_sample(self):
        return np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)

    def __getitem__(self, update):
        return SimpleNamespace(lengths=torch.full((4,), 64), num_targets=256, num_predicted=None)


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
        (True, GPU, "auto", BLOCKS, {}),
        (True, GPU, None, BLOCKS, {"mode": "DDP"}),
        (False, GPU, None, BLOCKS, {"num_updates": 100}),
        (True, CPU, None, BLOCKS, {}),
        (True, CPU, "auto", BLOCKS, {"mode": "DDP"}),
        (False, CPU, None, TEXTS, {}),
        (False, CPU, None, BLOCKS, {"num_updates": 100}),
        (True, CPU, True, BLOCKS, {"num_updates": 1}),
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
    monkeypatch.setattr(compilation, "can_compile", lambda _: True)
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: compiled.append(module))
    monkeypatch.setattr(compilation, "compiled_only_if", lambda *_: None)
    run = fake_run(device, compile_flag, **more)
    assert bool(auto_compile.choose_kernels(run, large, Samples(lengths))) == expected
    assert run.args.compile is expected
    assert compiled == (list(large.model.layers) if expected else [])
    assert cudnn() == (device == CPU)  # even the last block of a corpus is a new shape
    vars(large).pop("generate", None)


def test_a_dry_run_compiles_nothing_by_default_and_says_that_the_run_will(large, monkeypatch):
    """Control: with --compile it compiles."""
    monkeypatch.setattr(compilation, "can_compile", lambda _: True)
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: compiled.append(module))
    run = fake_run(CPU, None)
    run.args.dry_run = True
    assert auto_compile.choose_kernels(run, large, Samples(BLOCKS))["compiled"].startswith("nothing in this dry run")
    assert run.args.compile is True and not compiled
    auto_compile.choose_kernels(run, large, Samples(BLOCKS))
    assert compiled == list(large.model.layers)
    vars(large).pop("generate", None)


def test_small_models_and_machines_without_a_compiler_do_not_compile(large, cudnn, monkeypatch):
    for model, can, device in ((llama(), True, GPU), (large, False, GPU), (large, False, CPU)):
        monkeypatch.setattr(compilation, "can_compile", lambda _, can=can: can)
        run = fake_run(device, None)
        auto_compile.choose_kernels(run, model, Samples([64] * 4))
        assert run.args.compile is False and cudnn()


@pytest.mark.parametrize(("num_processes", "threads"), [(1, 1), (1, 2), (2, 2)])
def test_a_run_is_long_from_a_number_of_flops_per_thread(num_processes, threads, monkeypatch):
    """6 FLOPs per weight of a matrix and token, and 12 per attention score and width: PaLM's appendix B."""
    matrices, width, layers = 2 * (256 * 256 * 3 + 3 * 256 * 512) + 64 * 256, 256, 2
    flops = 256 * (6 * matrices + 12 * layers * width * 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    fewest = auto_compile.FEWEST_FLOPS["cpu"] * threads * num_processes / flops
    for num_updates, expected in ((int(fewest * 0.99), False), (int(fewest * 1.01), True)):
        run = fake_run(CPU, None, num_updates=num_updates)
        run.launch_config = Launch(num_processes=num_processes)
        assert auto_compile._is_long(run) == expected


@pytest.mark.parametrize(("device", "variable"), [("cuda", "CC"), ("cpu", "CXX")])
def test_a_compiler_needs_the_headers_of_python_and_triton_on_a_gpu(device, variable, monkeypatch, tmp_path):
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv(variable, "compiler")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda _: str(tmp_path))
    can_compile = compilation.can_compile.__wrapped__
    assert can_compile(device)
    for owner, name, value, needed in (
        (compilation.importlib.util, "find_spec", None, device == "cuda"),
        (compilation.sysconfig, "get_path", str(tmp_path / "none"), True),
        (compilation.shutil, "which", None, True),
    ):
        with monkeypatch.context() as change:
            change.setattr(owner, name, lambda _, value=value: value)
            change.delenv(variable, raising=name != "which") if name == "which" else None
            assert can_compile(device) != needed, name


def count_graphs(monkeypatch, graphs):
    """Graphs are counted and run as they are; the options of torch's own compiler are left out."""
    compile_module = torch.nn.Module.compile

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda m, dynamic, options: compile_module(m, backend=backend, dynamic=dynamic)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_have_a_graph_per_shape_and_other_lengths_and_evaluations_none(checkpointing, monkeypatch):
    """Whatever came before. Controls: without the length, or without the check of gradients, there are more."""
    model, graphs = llama(), []
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()
    expected = copy.deepcopy(model)
    count_graphs(monkeypatch, graphs)
    compilation.compile_layers(model.base_model, varies=False, longest=6)

    def step(rows, length):
        ids = torch.arange(rows * length).view(rows, length)
        losses = [one(input_ids=ids, labels=ids, use_cache=False).loss for one in (model, expected)]
        assert torch.allclose(*losses)
        if torch.is_grad_enabled():
            for loss in losses:
                loss.backward()
            for one, other in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.allclose(one.grad, other.grad, atol=1e-6)
        return len(graphs)

    try:
        assert [step(2, 6), step(2, 6), step(2, 5), step(3, 6), step(2, 6)] == [1, 1, 1, 2, 2]
        with torch.no_grad():
            assert step(2, 6) == 2
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("num_layers", [2, 6])
def test_all_layers_share_one_graph_and_samples_are_generated_without(num_layers, monkeypatch):
    """Whatever their number. Control: without the change of `generate`, a sample compiles more."""
    model, graphs = llama(num_layers).eval(), []
    ids = torch.arange(12).view(2, 6)
    expected = model(input_ids=ids, labels=ids).loss
    count_graphs(monkeypatch, graphs)
    run = fake_run(CPU, True)
    auto_compile.choose_kernels(run, model, Samples(TEXTS))
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
    monkeypatch.setattr(fused_softmax, "can_compile", lambda _: True)
    assert fused_softmax.choose(weight, 512) == (fused_softmax, 2048)
    assert fused_softmax.choose(torch.empty(2**22, 8, device="meta"), 512)[1] == 512
    monkeypatch.setattr(fused_softmax, "can_compile", lambda _: False)
    assert fused_softmax.choose(weight, 512) == (None, 512)
