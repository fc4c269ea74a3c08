"""A base in 4 bits: FSDP2 shards its bytes; its losses are those of one process, and of its dequantised weights."""

import json

import pytest
import torch
from conftest import make_model_dir, read_metrics, run_specs, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

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
    return [*given, "--lora_rank", 4, "--output_dir", out, *more]


def train(place, directory, config, precision, changes=None, base="base"):
    """Losses and gradient norms of a run; without the base of 4 bits if it is `dequantized`."""
    more = QUANTIZED if base == "base" else []
    run_specs("lm", [(flags(place, directory / "run", base, *more), changes or {})], directory, config, *precision)
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
    for name, (_, _, size, digest) in whole.items():
        held = [rank[name][1] for rank in ranks]
        assert held == [size] * 2 if config == "multi_cpu" else sorted(set(held)) == sorted({-(-size // 2), size // 2})
        assert all(rank[name] == [True, rank[name][1], size, digest] for rank in ranks), name


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
