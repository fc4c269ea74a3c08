"""A base in 4 bits: FSDP2 shards its bytes; its losses are those of one process, and of its dequantised weights."""

import json

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from conftest import make_model_dir, read_metrics, run_specs, write_rows
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from common.models.adapters import build_base, build_meta_base, count_parameters
from common.models.load import load_config
from common.training.recipe_traits import Arguments
from tools.checkpoint.export import export

QUANTIZED = ["--quantize", "nf4"]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(scope="module")
def place(functions_file, tmp_path_factory):
    """Rows, a base whose layers matter, and `dequantized`: the base after bitsandbytes has rounded it, in float32."""
    path = tmp_path_factory.mktemp("quantization")
    write_rows(path / "rows.jsonl", 40)
    make_model_dir(path / "base", functions_file, intermediate_size=54)  # 899 bytes: two ranks' shares differ
    model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
    for p in model.model.layers.parameters():
        p.data *= 1 if p.ndim == 1 else 10
    model.save_pretrained(path / "base")
    config = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32, quantization_config=config)
    rounded.dequantize().save_pretrained(path / "dequantized")
    AutoTokenizer.from_pretrained(path / "base").save_pretrained(path / "dequantized")
    return path


def flags(place, out, base="base", *more):
    given = ["--train_file", place / "rows.jsonl", "--model_name_or_path", place / base, "--sequence_length", 32]
    given += ["--global_batch_size", 8, "--micro_batch_size", 2, "--num_updates", 3, "--learning_rate", 1e-3]
    given += ["--save_every", 1, "--keep_last", 9]
    return [*given, "--lora_rank", 4, "--output_dir", out, *more]


def train(place, directory, config, precision, changes=None, base="base", recipe="lm", own=()):
    """Losses and gradient norms of a run; its base is in 4 bits, but `dequantized` ones. own: further flags."""
    more = [*own, *([] if base.startswith("dequantized") else QUANTIZED)]
    run_specs(recipe, [(flags(place, directory / "run", base, *more), changes or {})], directory, config, *precision)
    return [[line["loss"], line["grad_norm"]] for line in read_metrics(directory / "run")]


def packed_in(directory, processes):
    """What `save_packed` wrote on each rank."""
    return [json.loads((directory / f"packed-{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def one_process(place, tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    losses = train(place, directory, "cpu", (), {"save_packed": str(directory / "packed")})
    return losses, packed_in(directory, 1)[0]


@pytest.mark.parametrize(("config", "processes"), [("multi_cpu", 2), ("fsdp2", 2), ("hsdp", 4), ("fsdp2_offload", 2)])
def test_each_rank_holds_its_share_of_the_bytes_of_one_process(config, processes, place, one_process, tmp_path):
    """And the update is that of one process. `hsdp` has two replicas of two shards; DDP is the control."""
    expected, whole = one_process
    losses = train(place, tmp_path, config, ("--mixed_precision", "no"), {"save_packed": str(tmp_path / "packed")})
    assert sum(losses, []) == pytest.approx(sum(expected, []), rel=2e-6)
    ranks = packed_in(tmp_path, processes)
    assert len(whole) == 14
    for name, (_, size, digest) in whole.items():
        held = [rank[name][0] for rank in ranks]
        assert held == [size] * 2 if config == "multi_cpu" else sorted(set(held)) == sorted({-(-size // 2), size // 2})
        assert all(rank[name][1:] == [size, digest] for rank in ranks), name


def test_a_base_in_4_bits_is_the_base_of_its_dequantized_weights(place, one_process, tmp_path):
    """In float32 and in bf16, where FSDP2 casts what it gathers. Controls: the base itself, and bytes that are cast."""

    def losses(config, base, **changes):
        directory = tmp_path / "-".join([config, base, *changes])
        directory.mkdir()
        return train(place, directory, config, (), changes, base)

    assert losses("cpu", "dequantized") == one_process[0]
    rounded, quantized, cast = (
        losses("fsdp2", "dequantized"),
        losses("fsdp2", "base"),
        losses("fsdp2", "base", float_packed=1),
    )
    assert quantized == rounded
    assert abs(cast[0][0] - rounded[0][0]) > 1e-3


def test_compiled_layers_dequantize_too(place, one_process, tmp_path):
    """As on a GPU by default. What they compute is fused, so their rounding differs."""
    losses = train(place, tmp_path, "cpu", (), own=["--compile"])
    assert sum(losses, []) == pytest.approx(sum(one_process[0], []), rel=1e-5)


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(place, tmp_path):
    """tests/test_resume.py resumes on two. Control: without the checkpoint's optimizer state it ends elsewhere."""
    expected = train(place, tmp_path, "fsdp2", ("--mixed_precision", "no"))
    whole, far = load_file(tmp_path / "run/model/adapter_model.safetensors"), {}
    runs = []
    for name, forgotten in (("resumed", {}), ("control", {"forget": "optimizer"})):
        changes = {"copy_run": [str(tmp_path / "run"), str(tmp_path / name), 2], **forgotten}
        runs.append((flags(place, tmp_path / name, "base", *QUANTIZED, "--resume"), changes))
    run_specs("lm", runs, tmp_path, "cpu", "--mixed_precision", "no")
    for name in ("resumed", "control"):
        end = load_file(tmp_path / name / "model/adapter_model.safetensors")
        far[name] = max((end[key] - weight).abs().max() for key, weight in whole.items())
    assert far["resumed"] < 1e-5 < far["control"]
    assert [line["loss"] for line in read_metrics(tmp_path / "resumed")] == pytest.approx([one for one, _ in expected])


@pytest.fixture(scope="module")
def mixture(place):
    """Another base: a mixture of experts; and `dequantized-mixture`."""
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes))
    for p in model.model.layers.parameters():
        p.data *= 1 if p.ndim == 1 else 10
    for name in ("mixture", "dequantized-mixture"):
        model.save_pretrained(place / name)
        AutoTokenizer.from_pretrained(place / "base").save_pretrained(place / name)
        for key, p in model.named_parameters():
            if ".experts." in key or key.endswith("_proj.weight"):
                p.data = dequantize_4bit(*quantize_4bit(p.data, quant_type="nf4", compress_statistics=True))
    return place


def test_experts_are_quantized_too(mixture, tmp_path):
    """In one process and sharded; merged, they are those that were trained. Control: the file's own experts."""

    def losses(config, base, *precision, **changes):
        directory = tmp_path / f"{config}-{base}"
        directory.mkdir()
        return sum(train(mixture, directory, config, precision, changes, base, "moe"), [])

    for name in ("cpu", "fsdp2"):
        (tmp_path / name).mkdir()
    rounded = losses("cpu", "dequantized-mixture")
    assert losses("cpu", "mixture", save_packed=str(tmp_path / "cpu/packed")) == pytest.approx(rounded, rel=1e-6)
    found = losses("fsdp2", "mixture", "--mixed_precision", "no", save_packed=str(tmp_path / "fsdp2/packed"))
    assert found == pytest.approx(rounded, rel=2e-6)
    whole, *ranks = *packed_in(tmp_path / "cpu", 1), *packed_in(tmp_path / "fsdp2", 2)
    experts = [name for name in whole if ".experts." in name]
    assert len(experts) == 4 and all(2 * rank[name][0] == whole[name][1] for rank in ranks for name in experts)
    merged = []
    for run in ("cpu-mixture", "cpu-dequantized-mixture"):
        export(tmp_path / run / "run/checkpoints/update-000003", tmp_path / f"merged-{run}", merge=True)
        merged.append(load_file(tmp_path / f"merged-{run}/model.safetensors"))
    differences = {name: (weight - merged[1][name]).abs().max() for name, weight in merged[0].items()}
    assert max(differences.values()) < 1e-5
    base = load_file(mixture / "mixture/model.safetensors")
    assert all((base[name] - merged[0][name]).abs().max() > 1e-2 for name in base if ".experts." in name)


def base_arguments(path, quantize="nf4"):
    given = {"lora_rank": 4, "lora_alpha": None, "lora_targets": [], "lora_dropout": 0.0, "use_dora": False}
    given |= {"use_rslora": False, "quantize": quantize, "model_name_or_path": str(path)}
    return Arguments(frozenset(given), **given, trust_remote_code=False)


@pytest.mark.parametrize("name", ["base", "mixture", "gpt2", "tied"])
def test_a_base_without_weights_has_the_packed_weights_of_one_with(name, mixture):
    """Other ranks and plans have it: names, shapes and types. GPT-2's layers are no nn.Linear."""
    if name == "gpt2":
        GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=32, n_layer=1, n_head=4)).save_pretrained(mixture / name)
    if name == "tied":
        config = LlamaConfig.from_pretrained(mixture / "base", tie_word_embeddings=True)
        LlamaForCausalLM(config).save_pretrained(mixture / name)
    args, config = base_arguments(mixture / name), load_config(mixture / name)
    full, empty = build_base(args, config), build_meta_base(args, config, AutoModelForCausalLM)
    described = [{key: (p.shape, p.dtype) for key, p in model.named_parameters()} for model in (full, empty)]
    assert described[0] == described[1]
    assert any(dtype == torch.uint8 for _, dtype in described[0].values())
    assert count_parameters(full) == count_parameters(empty)


def test_no_dequantized_experts_are_kept_for_the_backward_pass(mixture):
    """They are recomputed. Control: those of a base in float32 are kept."""
    ids, kept = torch.arange(20).view(2, 10), []

    def keep(tensor):
        kept.append(tensor.ndim == 3 and len(tensor) == 4 and tensor.numel() >= 4 * 32 * 48)
        return tensor

    counts = {}
    for quantize in ("nf4", None):
        model = build_base(base_arguments(mixture / "mixture", quantize), load_config(mixture / "mixture"))
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model.train()(ids, labels=ids).loss
        counts[quantize] = sum(kept)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(gradient is not None for gradient in gradients)
    assert counts["nf4"] == 0 < counts[None]
