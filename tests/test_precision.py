"""In bf16, in every mode: sums are float32, each recipe's model computes, and what is logged has float32's digits."""

import pytest
import torch
from conftest import read_metrics, run_specs
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageClassification

from common.checkpoint.read import Reader, list_checkpoints
from common.models.load import build_model
from common.tasks.long_sequence.recurrent import RecurrentConfig, RecurrentLM
from common.tasks.moe import routing
from common.training.half_precision import follow_precision
from common.training.linear_cross_entropy import linear_cross_entropy

CONFIGS = (
    "multi_gpu",
    "fsdp2",
    "hsdp",
    "sequence_parallel",
    "pipeline",
    "tensor_parallel",
    "fsdp2_offload",
    "zero1",
    "zero2",
    "zero3",
    "zero3_offload_cpu",
)
SAMPLES = 256  # of one length, in one update
CUTS = (1, 4, 16, 64)  # into so many micro-batches on each process


def in_bf16(config, processes=2):
    return config, "--mixed_precision", "bf16", "--num_processes", processes


def cut(functions_file, model_dir, out, micro_batch_size, **changes):
    """One update of AdamW without clipping: its first moment is a tenth of the gradient, in float32."""
    flags = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--shape", "blocks"]
    flags += ["--sequence_length", 16, "--global_batch_size", SAMPLES, "--micro_batch_size", micro_batch_size]
    flags += ["--num_updates", 1, "--warmup_updates", 0, "--learning_rate", 1e-3, "--max_grad_norm", 0]
    flags += ["--save_every", 1, "--output_dir", out]
    return flags, changes


def outcome(out):
    """The gradient of the update, float64 (elements,), and its line of metrics.jsonl."""
    ((path, manifest),), _ = list_checkpoints(out)
    reader = Reader(path, manifest)
    names = [name for name in sorted(reader.tensors) if name.startswith("optimizer.exp_avg/")]
    return torch.cat([reader.read(name).flatten().double() * 10 for name in names]), read_metrics(out)[0]


@pytest.fixture(scope="module")
def exact(functions_file, model_dir, tmp_path_factory):
    """One process in float32."""
    directory = tmp_path_factory.mktemp("exact")
    run_specs("lm", [cut(functions_file, model_dir, directory / "run", SAMPLES)], directory)
    return outcome(directory / "run")


def errors_of(outs, exact):
    """The norm of each gradient's difference from the exact one, as a share of that one's."""
    gradients = [outcome(out)[0] for out in outs]
    return [((gradient - exact[0]).norm() / exact[0].norm()).item() for gradient in gradients]


def is_coarse(line):
    """Whether the update's sum of losses is a multiple of 1/32, as sums of bf16 are from 4 on."""
    sum_of_losses = line["loss"] * line["target_tokens"] * 32
    return abs(sum_of_losses - round(sum_of_losses)) < 1e-6


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_finer_cut_makes_no_gradient_worse(config, exact, functions_file, model_dir, tmp_path):
    """The rounding of products is in all of them (0.3 % with float32 weights, 0.5 % where weights are bf16 too).

    And each loss is a sum of float32: bf16 has the sum of a micro-batch in steps of 1 (of two samples) to 64.
    """
    processes = 4 if config == "hsdp" else 2
    cuts, ranks, recipe = CUTS, processes, "lm"
    if config == "pipeline":  # as many micro-batches as stages, at least
        cuts, ranks, recipe = (2, *CUTS[1:]), 1, "pipeline"
    outs = [tmp_path / str(count) for count in cuts]
    sizes = [SAMPLES // ranks // count for count in cuts]
    runs = [cut(functions_file, model_dir, out, size) for out, size in zip(outs, sizes, strict=True)]
    run_specs(recipe, runs, tmp_path, *in_bf16(config, processes))
    errors = errors_of(outs, exact)
    print(config, errors)
    assert all(1e-4 < error < 0.01 for error in errors)
    assert all(error < 1.1 * errors[0] for error in errors[1:])
    for out in outs:
        line, expected = outcome(out)[1], exact[1]
        assert line["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.01)
        assert line["loss"] != expected["loss"]
    assert not all(is_coarse(outcome(out)[1]) for out in outs)


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize("config", ["zero1", "fsdp2"])
def test_sums_in_bf16_would_be_noticed(config, exact, functions_file, model_dir, tmp_path):
    """Control: ZeRO accumulates in bf16, and FSDP2 reduces in it and rounds the losses, where they are left alone."""
    outs = [tmp_path / str(count) for count in (CUTS[0], CUTS[-1])]
    runs = [
        cut(functions_file, model_dir, out, size, sums_in_bf16=True)
        for out, size in zip(outs, (SAMPLES // 2, SAMPLES // 2 // CUTS[-1]), strict=True)
    ]
    run_specs("lm", runs, tmp_path, *in_bf16(config))
    errors = errors_of(outs, exact)
    print(config, errors)
    if config == "zero1":
        assert errors[1] > 1.1 * errors[0]
    else:
        line = outcome(outs[0])[1]
        assert line["loss"] != pytest.approx(exact[1]["loss"], rel=2e-5)
        assert is_coarse(line)


IMAGES = {  # micro-batches of 4, since batch norm needs several images
    "resnet": ["--model_config", "resnet"],
    "resnet with batch norm": ["--model_config", "resnet", "--norm", "batch"],
    "vit": ["--model_config", "vit"],
}


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize("config", ["fsdp2", "zero2", "zero3"])
def test_every_image_model_trains_in_bf16(config, tmp_path):
    """Beside those of tests/test_resume.py: of all inputs, only images are floating-point numbers."""
    flags = ["--global_batch_size", 16, "--micro_batch_size", 4, "--num_updates", 2, "--warmup_updates", 0]
    flags += ["--eval_every", 2, "--save_every", 0, "--output_dir"]
    runs = [([*flags, tmp_path / name, *more], {}) for name, more in IMAGES.items()]
    run_specs("vision", runs, tmp_path, *in_bf16(config))
    for name in IMAGES:
        line = read_metrics(tmp_path / name)[-1]
        assert 1.5 < line["loss"] < 5 and 1.5 < line["validation_loss"] < 5


def test_inputs_that_are_whole_numbers_stay(monkeypatch):
    seen = {}
    config = routing.moe_config(SHAPE, 4, 2, 32)
    model = build_model(config).bfloat16()
    follow_precision(model)
    monkeypatch.setattr(model, "forward", lambda **inputs: seen.update(inputs))
    model(input_ids=torch.arange(3)[None], inputs_embeds=torch.ones(1, 3, 32), mask=torch.ones(3, dtype=torch.bool))
    assert [tensor.dtype for tensor in seen.values()] == [torch.int64, torch.bfloat16, torch.bool]


SHAPE = dict(
    vocab_size=64,
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
)


class Products(TorchDispatchMode):
    """The types of what experts' products see."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "grouped_mm" in str(function):
            self.seen += [tensor.dtype for tensor in args[:2]]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", ["torch", "loop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_experts_compute_in_autocasts_type(dtype, kernel, monkeypatch):
    """So does the loop that transformers takes where torch's own kernel does not run. Without autocast: float32."""
    from transformers.integrations import moe

    if kernel == "loop":
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    model = build_model(routing.moe_config(SHAPE, 4, 2, 32))
    products, ids = Products(), torch.arange(16)[None]
    with products, torch.autocast("cpu", dtype, enabled=dtype is not None):
        model(input_ids=ids, labels=ids).loss.backward()
    assert set(products.seen) == {dtype or torch.float32} and len(products.seen) >= 8  # two products, and backward's
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad.dtype == torch.float32


def test_the_chunked_loss_sums_the_weights_gradient_in_float32(monkeypatch):
    """bf16 weights, as DeepSpeed's: 64 chunks make the gradient of one chunk, but for its one rounding."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 16), torch.randn(50, 16)
    targets = torch.randint(50, (2048,))

    def error(chunk_rows):
        inputs = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight, torch.zeros(50))]
        linear_cross_entropy(*inputs, targets, chunk_rows=chunk_rows).backward()
        assert [x.grad.dtype for x in inputs] == [torch.bfloat16] * 3
        wide = [x.detach().double().requires_grad_() for x in inputs]
        linear_cross_entropy(*wide, targets).backward()
        return [((x.grad - y.grad).norm() / y.grad.norm()).item() for x, y in zip(inputs, wide, strict=True)][1:]

    whole, cut_64 = error(2048), error(32)
    assert all(b < 1.3 * a < 0.01 for a, b in zip(whole, cut_64, strict=True))
    monkeypatch.setattr(torch, "promote_types", lambda dtype, _: dtype)  # control
    assert all(b > 1.5 * a for a, b in zip(whole, error(32), strict=True))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_recurrence_computes_in_float32(cell):
    """With weights in bf16 and under autocast: the loss of the same weights in float32, in every bit."""
    model = build_model(RecurrentConfig(cell=cell, vocab_size=17, hidden_size=8), model_class=RecurrentLM)
    model = model.bfloat16().float()
    ids = torch.arange(60)[None] % 17
    rows = {"targets": ids[0, 1:], "target_rows": torch.arange(59)}
    expected = model(input_ids=ids, **rows)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(input_ids=ids, **rows).equal(expected)
    model.bfloat16()
    assert model(input_ids=ids, **rows).equal(expected)
    assert expected.dtype == torch.float32


def test_images_of_float32_meet_weights_of_bf16():
    from transformers import ResNetConfig

    config = ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8], depths=[1])
    model = build_model(config, model_class=AutoModelForImageClassification).bfloat16()
    follow_precision(model)
    norm = model.resnet.embedder.embedder.normalization
    norm.running_mean, norm.running_var = norm.running_mean.float(), norm.running_var.float()
    assert model(pixel_values=torch.ones(2, 1, 16, 16)).logits.dtype == torch.bfloat16
