"""Distillation: the loss is the formula's for any split of the batch, and the teacher stays outside the model."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    assert_mistake,
    assert_refused,
    assert_same_losses,
    assert_same_update,
    launch,
    make_model_dir,
    need,
    relative_difference,
    results_of,
    run_in_float64,
    run_recipe_alone,
    run_specs,
    save_models,
    stdlib_functions,
    write_jsonl,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BitsAndBytesConfig,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
)

from common.data.source_types import Source
from common.data.tokenizer import train_tokenizer

ROWS, LENGTH = 8, 48
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


@pytest.fixture(scope="module")
def place(functions_file, tmp_path_factory):
    """Eight rows, a student, a teacher of another architecture with more rows in its head, and others.

    Neither of the two computes norms in float32, as Llama, Gemma and Granite do.
    """
    path = tmp_path_factory.mktemp("distillation")
    write_jsonl(path / "rows.jsonl", [{"text": text[: 40 + 20 * n]} for n, text in enumerate(stdlib_functions(ROWS))])
    tokenizer = train_tokenizer(Source(files=(str(functions_file),)), 384)
    tokenizer.save_pretrained(path / "student")
    special = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    neox = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4} | special
    sizes = neox | {"vocab_size": 384, "num_key_value_heads": 2, "head_dim": 8}
    configs = {
        "student": GPT2Config(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=512, **special, **dropouts),
        "teacher": GPTNeoXConfig(vocab_size=400, max_position_embeddings=512, **neox),
        "short": GPTNeoXConfig(vocab_size=400, max_position_embeddings=32, **neox),
        "capped": Gemma2Config(final_logit_softcapping=2.0, **sizes),
        "divided": GraniteConfig(logits_scaling=0.25, **sizes),
        "bloom": BloomConfig(vocab_size=400, hidden_size=32, n_layer=1, n_head=2, **special),
    }
    save_models(path, configs, path / "student")
    teacher = AutoModelForCausalLM.from_pretrained(path / "teacher", dtype=torch.float64)
    for p in teacher.parameters():
        p.data *= 8 if p.ndim > 1 else 1  # so that it prefers some tokens
    teacher.save_pretrained(path / "teacher")
    get_peft_model(teacher, LoraConfig(target_modules=["dense"])).save_pretrained(path / "adapter")
    BertForMaskedLM(BertConfig(num_hidden_layers=1)).save_pretrained(path / "bert")
    make_model_dir(path / "other", path / "rows.jsonl")
    round_teacher(path)
    return path


def round_teacher(place):
    """Writes `rounded`: the teacher after bitsandbytes has rounded it to 4 bits, in float32."""
    need("bitsandbytes", "deepspeed")
    four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(**four_bits, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(place / "teacher", dtype=torch.float32, quantization_config=config)
    model.dequantize().save_pretrained(place / "rounded")
    AutoTokenizer.from_pretrained(place / "teacher").save_pretrained(place / "rounded")


def flags(place, *more):
    given = ["--train_file", place / "rows.jsonl", "--model_name_or_path", place / "student", "--shape", "examples"]
    given += ["--sequence_length", LENGTH, "--global_batch_size", ROWS, "--learning_rate", 1e-2, "--num_updates", 3]
    return [str(part) for part in [*given, "--max_grad_norm", 1e9, "--teacher", place / "teacher", *more]]


def plain(place, divergence, weight, temperature, student="student", teacher="teacher"):
    """Mean loss and gradients of all rows: both models' full logits, in float64."""
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(place / name, dtype=torch.float64) for name in (student, teacher)
    )
    tokenizer = AutoTokenizer.from_pretrained(place / "student")
    losses = []
    for line in (place / "rows.jsonl").read_text().splitlines():
        ids = torch.tensor([[*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]])
        ids = ids[:, : LENGTH + 1]
        own = model(ids[:, :-1]).logits[0]
        with torch.no_grad():
            asked = teacher(ids[:, :-1]).logits[0, :, : own.shape[1]]
        log_p, log_q = ((x / temperature).log_softmax(1) for x in (asked, own))
        p, q = log_p.exp(), log_q.exp()
        mixture = ((p + q) / 2).log()
        distance = {
            "forward_kl": (p * (log_p - log_q)).sum(1),
            "reverse_kl": (q * (log_q - log_p)).sum(1),
            "jsd": (p * (log_p - mixture)).sum(1) / 2 + (q * (log_q - mixture)).sum(1) / 2,
        }[divergence]
        entropy = F.cross_entropy(own, ids[0, 1:], reduction="none")
        losses.append(weight * temperature**2 * distance + (1 - weight) * entropy)
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return loss.item(), sorted(gradients, key=lambda gradient: gradient.ndim == 1)  # as the optimizer: matrices first


def options(divergence):
    weight, temperature = {"forward_kl": (0.7, 2.0), "reverse_kl": (1, 0.5), "jsd": (0.25, 1.0)}[divergence]
    return ["--divergence", divergence, "--distillation_weight", weight, "--distillation_temperature", temperature]


SCALED = ("capped", "divided"), ("divided", "capped")  # student and teacher


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory):
    """Each divergence with another weight and temperature; forward KL with other splits, models, shapes and weights."""
    own = {name: options(name) for name in DIVERGENCES}
    cuts = {name: (1, flags(place, "--micro_batch_size", 2, *own[name]), {}) for name in DIVERGENCES}
    common = own["forward_kl"]
    held_out = ["--validation_file", place / "rows.jsonl"]
    cuts["whole"] = (1, flags(place, "--micro_batch_size", ROWS, *common, *held_out), {})
    cuts["two ranks"] = (2, flags(place, "--micro_batch_size", 1, *common), {})
    cuts["two shards"] = (("fsdp2", 2), flags(place, "--micro_batch_size", 4, *common), {})
    for student, teacher in SCALED:
        models = ["--model_name_or_path", place / student, "--teacher", place / teacher]
        cuts[student] = (1, flags(place, *common, *models), {})
    wide = ["--sequence_length", 512]
    cuts["apart"] = (1, flags(place, *common, *wide), {})
    cuts["packed"] = (1, flags(place, *common, *wide, "--shape", "packed", "--global_batch_size", 1), {})
    quantized, in_float32 = (
        flags(place, *common, "--quantize_teacher", "nf4"),
        {"float64": None},
    )  # as bitsandbytes needs
    cuts["nf4"] = (1, quantized, in_float32)
    cuts["rounded"] = (1, flags(place, *common, "--teacher", place / "rounded"), in_float32)
    cuts["nf4 shards"] = (("fsdp2", 2), quantized, in_float32)
    return run_in_float64("lm", cuts, tmp_path_factory.mktemp("float64"))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_loss_and_gradients_are_those_of_full_logits(divergence, place, runs):
    gradients, metrics, _ = runs[divergence]
    _, _, _, weight, _, temperature = options(divergence)
    loss, expected = plain(place, divergence, weight, temperature)
    assert metrics[0]["loss"] == pytest.approx(loss, rel=1e-10)
    assert relative_difference(gradients, expected) < 1e-10


@pytest.mark.parametrize(("student", "teacher"), SCALED)
def test_scaled_and_capped_logits_are_those_of_the_models(student, teacher, place, runs):
    gradients, metrics, _ = runs[student]
    loss, expected = plain(place, "forward_kl", 0.7, 2.0, student, teacher)
    assert metrics[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert relative_difference(gradients, expected) < 1e-4


def test_the_update_is_the_same_however_the_batch_is_cut(runs):
    assert_same_update(runs, "whole", "forward_kl", "two ranks", "two shards")


def test_documents_of_a_block_do_not_attend_to_each_other_in_the_teacher(runs):
    gradients, metrics, _ = runs["packed"]
    expected, apart, _ = runs["apart"]
    assert metrics[0]["loss"] == pytest.approx(apart[0]["loss"], rel=1e-10)
    assert relative_difference(gradients, expected) < 1e-10


def test_a_teacher_in_4_bits_is_its_rounded_weights(runs):
    """Also if it is sharded. Control: rounding changes the loss."""
    assert_same_losses(runs["nf4"][2], runs["rounded"][2])
    assert_same_losses(runs["nf4 shards"][2], runs["nf4"][2])
    assert runs["nf4"][1][0]["loss"] != pytest.approx(runs["whole"][1][0]["loss"], rel=1e-4)


def test_the_teacher_is_not_saved(place, runs):
    model = load_file(runs["whole"][2] / "model/model.safetensors")
    assert model.keys() == load_file(place / "student/model.safetensors").keys()
    for name in ("whole", "two shards"):
        sizes = [path.stat().st_size for path in (runs[name][2] / "checkpoints").rglob("*") if path.is_file()]
        trained = sum(tensor.numel() for tensor in model.values())
        assert 24 * trained < sum(sizes) < 32 * trained  # in float64: weights and AdamW's two numbers per weight


def test_the_validation_loss_is_the_cross_entropy(place, runs):
    """So that it can be compared with that of a run without a teacher."""
    AutoModelForCausalLM.from_pretrained(runs["whole"][2] / "model").save_pretrained(place / "trained")
    loss, _ = plain(place, "forward_kl", 0, 1.0, student="trained")
    assert results_of(runs["whole"][2])["validation_loss"] == pytest.approx(loss, rel=1e-5)


def test_layers_that_a_config_names_are_those_of_the_student(place, runs, tmp_path):
    """FSDP2 shards the teacher by its own layers."""
    given = flags(place, "--micro_batch_size", 4, *options("forward_kl"), "--output_dir", tmp_path / "run")
    named = "--mixed_precision", "no", "--fsdp_transformer_layer_cls_to_wrap", "GPT2Block"
    run_specs("lm", [(given, {})], tmp_path, "fsdp2", *named)
    assert_same_losses(tmp_path / "run", runs["whole"][2])


@pytest.mark.usefixtures("extensions")
def test_zero2_makes_the_update_of_one_process(place, runs, tmp_path):
    given = flags(place, "--micro_batch_size", 2, *options("forward_kl"), "--output_dir", tmp_path / "run")
    run_specs("lm", [(given, {})], tmp_path, "zero2", "--mixed_precision", "no")
    assert_same_losses(tmp_path / "run", runs["whole"][2])


MISTAKES = {
    ("--teacher", "other"): r"--teacher .*other: \d+ tokens differ from those of the model's tokenizer; use a teacher",
    ("--teacher", "missing"): "--teacher .*missing: it is neither a directory here nor",
    ("--teacher", "adapter"): "--teacher .*adapter: it is an adapter; make a whole model of it",
    ("--teacher", "bert"): "--teacher .*bert: this bert is not causal",
    (
        "--teacher",
        "short",
    ): "--teacher .*short: --sequence_length 48 is beyond the model's 32 positions; use at most 32",
    ("--teacher", "bloom", "--shape=packed"): "--document_mask .*: bloom computes positions or masks itself",
    ("--divergence", "jsd", None): "--divergence has no effect without --teacher; pass both, or remove it",
    ("--distillation_weight", "1.5"): "--distillation_weight 1.5: it is a share; use a number from 0 to 1",
    ("--divergence", "kl"): "argument --divergence: invalid choice: 'kl' .choose from",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_in_one_line(mistake, place, tmp_path):
    given = flags(place)
    if mistake[-1] is None:
        given = given[: given.index("--teacher")]
    more = [str(place / word) if word.isalpha() and mistake[0] == "--teacher" else word for word in mistake if word]
    assert_mistake(run_recipe_alone("lm.py", *given, *more, "--output_dir", tmp_path / "run"), MISTAKES[mistake])
    assert not (tmp_path / "run").exists()


def test_a_run_is_resumed_only_with_its_teacher(place, runs, tmp_path):
    """Also not without a teacher; the path of the teacher may change, so that only the weight differs."""
    shutil.copytree(runs["whole"][2] / "checkpoints", tmp_path / "run/checkpoints")
    shutil.copytree(place / "teacher", place / "moved")
    own = ["--distillation_weight", 0.7, "--distillation_temperature", 2]
    given = flags(
        place, "--resume", "--allow_changed", "mixed_precision", "validation", "--output_dir", tmp_path / "run"
    )
    at = given.index("--teacher")
    changes = {
        "the teacher differs, .*; pass the run's own --teacher": [*given, *own, "--teacher", place / "rounded"],
        "--distillation_weight is 0.2, the checkpoint's is 0.7": [
            *given,
            *own,
            "--teacher",
            place / "moved",
            "--distillation_weight",
            0.2,
        ],
        "the teacher differs, .* its fingerprint is none, the checkpoint's is [0-9a-f]+;": given[:at] + given[at + 2 :],
    }
    for problem, words in changes.items():
        assert_mistake(run_recipe_alone("lm.py", *words), problem)


@pytest.mark.parametrize(
    ("config", "kind"),
    {"tensor_parallel": "tensor parallelism", "sequence_parallel": "sequence parallelism", "zero3": "ZeRO-3"}.items(),
)
def test_modes_without_teacher_are_refused_by_name(config, kind, place, tmp_path):
    result = launch(*flags(place, "--output_dir", tmp_path / "run"), config=config, check=False)
    assert_refused(result, f"--teacher is not supported with {kind}, which .*{config}.yaml sets; use fsdp2.yaml")
    assert not (tmp_path / "run").exists()
