"""After loading, the weights are those of the file: tied or not, whatever the configuration says, in every mode."""

import hashlib

import pytest
import torch
import transformers
from conftest import (
    ROOT,
    assert_mistake,
    assert_refused,
    launch,
    make_model_dir,
    read_metrics,
    run_recipe_alone,
    run_specs,
    write_rows,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

from common.models.classifiers import build_classifier
from common.models.load import build_model, load_config
from tools.checkpoint.export import export

SHAPE = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 2}
LLAMA = SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
BERT = SHAPE | {"intermediate_size": 48, "max_position_embeddings": 64}
BART = {"vocab_size": 384, "d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2, "pad_token_id": 2}
BART |= {f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")}
BART |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
T5 = {"vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "pad_token_id": 2}
T5["dropout_rate"] = 0.0
# Class, configuration, and of a model with an output head the names of head and embedding.
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FAMILIES = {
    "Llama": ("LlamaForCausalLM", LLAMA, LM_HEAD, EMBEDDING),
    "Qwen2": ("Qwen2ForCausalLM", LLAMA, LM_HEAD, EMBEDDING),
    "Gemma": ("GemmaForCausalLM", LLAMA | {"head_dim": 8}, LM_HEAD, EMBEDDING),
    "Mistral": ("MistralForCausalLM", LLAMA, LM_HEAD, EMBEDDING),
    "Mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 2}, LM_HEAD, EMBEDDING),
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        LM_HEAD,
        "transformer.wte.weight",
    ),
    "OPT": (
        "OPTForCausalLM",
        SHAPE | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
        LM_HEAD,
        "model.decoder.embed_tokens.weight",
    ),
    "T5": ("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 2}, LM_HEAD, "shared.weight"),
    "Bart": ("BartForConditionalGeneration", BART, LM_HEAD, "model.shared.weight"),
    "Bert": ("BertForSequenceClassification", BERT, None, None),
    "Roberta": ("RobertaForSequenceClassification", BERT | {"max_position_embeddings": 70}, None, None),
}
KINDS = ("tied", "untied", "apart")  # apart: the configuration ties what the file keeps apart
CASES = [
    f"{name}-{kind}"
    for name, (_, _, head, _) in FAMILIES.items()
    for kind in KINDS
    # transformers ties the embeddings of an encoder-decoder in any case, or none of them.
    if (head or kind == "untied") and (kind != "untied" or name not in ("T5", "Bart"))
]


def hashes(weights):
    return {name: hashlib.sha256(one.detach().numpy().tobytes()).hexdigest() for name, one in weights.items()}


@pytest.fixture(scope="module")
def models(functions_file, tmp_path_factory):
    """A directory for each case, with a tokenizer beside the model; `plain` has rows for every recipe."""
    path = tmp_path_factory.mktemp("weights")
    tokenizer = AutoTokenizer.from_pretrained(make_model_dir(path / "plain", functions_file))
    write_rows(path / "rows.jsonl", 40)
    for case in CASES:
        name, kind = case.split("-")
        class_name, settings, head, embedding = FAMILIES[name]
        model_class = getattr(transformers, class_name)
        torch.manual_seed(0)
        config = model_class.config_class(**settings, **({"tie_word_embeddings": kind != "untied"} if head else {}))
        if not head:
            config.id2label, config.label2id = {0: "long", 1: "short"}, {"long": 0, "short": 1}
        model = model_class(config)
        model.save_pretrained(path / case)
        tokenizer.save_pretrained(path / case)
        expected = dict(model.named_parameters(remove_duplicate=False))  # Mixtral's have other names in its file
        if kind == "apart":
            expected[head] = torch.randn_like(expected[embedding]) * 0.1
            weights = load_file(path / case / "model.safetensors") | {head: expected[head]}
            save_file(weights, path / case / "model.safetensors", metadata={"format": "pt"})
        torch.save(hashes(expected), path / case / "hashes.pt")
    return path


def auto_class(case):
    kinds = {"ForConditionalGeneration": AutoModelForSeq2SeqLM, "ForSequenceC": AutoModelForSequenceClassification}
    name = FAMILIES[case.split("-")[0]][0]
    return next((auto for part, auto in kinds.items() if part in name), AutoModelForCausalLM)


def assert_those_of_the_file(weights, case, models):
    """Every weight, bit for bit, by its hash. A tied weight may be named once."""
    expected = torch.load(models / case / "hashes.pt")
    assert set(weights.values()) == set(expected.values())
    assert all(expected[name] == digest for name, digest in weights.items() if name in expected)
    assert not case.endswith("apart") or FAMILIES[case.split("-")[0]][2] in weights


@pytest.mark.parametrize("case", CASES)
def test_the_loaded_weights_are_those_of_the_file(case, models):
    auto = auto_class(case)
    config = load_config(str(models / case), model_class=auto)
    if auto is AutoModelForSequenceClassification:
        model, new = build_classifier(config, str(models / case), False, auto, new_head=False)
        assert not new
    else:
        model = build_model(config, str(models / case), model_class=auto)
        empty = build_model(config, None, model_class=auto)
        # An encoder-decoder keeps a configuration that ties, because its two embeddings are tied.
        assert config.tie_word_embeddings is (case.endswith("-tied") or "T5" in case or "Bart" in case)
        if auto is AutoModelForCausalLM:  # the planner, and every mode, counts the same parameters
            assert empty.num_parameters() == model.num_parameters()
    assert_those_of_the_file(hashes(dict(model.named_parameters(remove_duplicate=False))), case, models)


SMALL = ["--sequence_length", 32, "--num_updates", 1, "--save_every", 1, "--global_batch_size", 8]


def run_apart(config, models, out):
    """lm.py and seq2seq.py on models whose configuration ties what their files keep apart, in float32."""
    cases = {"lm": "Llama-apart", "seq2seq": "T5-apart"}
    if config == "tensor_parallel":  # lm.py only
        del cases["seq2seq"]
    runs = []
    for recipe, case in cases.items():
        flags = ["--train_file", models / "rows.jsonl", "--model_name_or_path", models / case, *SMALL]
        flags += ["--target_length", 16] if recipe == "seq2seq" else ["--shape", "examples"]
        runs.append(([*flags, "--output_dir", out / recipe], {"hash_start": str(out / f"{recipe}.pt")}, recipe))
    run_specs("apart", runs, out, config, "--mixed_precision", "no")
    return {recipe: (torch.load(out / f"{recipe}.pt"), read_metrics(out / recipe)[0]["loss"]) for recipe in cases}


@pytest.fixture(scope="module")
def one_process(models, tmp_path_factory):
    return run_apart("cpu", models, tmp_path_factory.mktemp("cpu"))


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize("config", ["multi_cpu", "fsdp2", "zero3", "tensor_parallel"])
def test_every_mode_starts_and_exports_with_both_matrices(config, one_process, models, tmp_path):
    for recipe, (digests, loss) in run_apart(config, models, tmp_path).items():
        case = {"lm": "Llama-apart", "seq2seq": "T5-apart"}[recipe]
        assert_those_of_the_file(digests, case, models)
        assert digests == one_process[recipe][0] and loss == pytest.approx(one_process[recipe][1], rel=1e-5)
        head, embedding = FAMILIES[case.split("-")[0]][2:]
        export(tmp_path / recipe / "checkpoints/update-000001", tmp_path / f"{recipe}-exported")
        for directory in (tmp_path / recipe / "model", tmp_path / f"{recipe}-exported"):
            weights = load_file(directory / "model.safetensors")
            model, loading = auto_class(case).from_pretrained(directory, output_loading_info=True)
            assert not loading["missing_keys"] and not torch.equal(weights[head], weights[embedding])
            assert torch.equal(model.get_output_embeddings().weight, weights[head])
            assert torch.equal(model.get_input_embeddings().weight, weights[embedding])


def test_files_without_a_head_are_refused(models, tmp_path):
    """An untied head that is missing would start at random."""
    transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "headless")
    AutoTokenizer.from_pretrained(models / "plain").save_pretrained(tmp_path / "headless")
    flags = ["--train_file", models / "rows.jsonl", "--model_name_or_path", tmp_path / "headless", *SMALL]
    assert_mistake(run_recipe_alone("lm.py", *flags, "--output_dir", tmp_path / "out"), "files have no lm_head.weight")
    assert not (tmp_path / "out").exists()


def test_a_layer_class_that_the_model_does_not_have_is_named(models, tmp_path):
    config = (ROOT / "accelerate_configs/fsdp2.yaml").read_text()
    line = "  fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer\n"
    (tmp_path / "wrong.yaml").write_text(config.replace("fsdp_config:\n", "fsdp_config:\n" + line))
    flags = ["--train_file", models / "rows.jsonl", "--model_name_or_path", models / "plain", *SMALL]
    result = launch(*flags, "--output_dir", tmp_path / "out", config=tmp_path / "wrong.yaml", check=False)
    assert_refused(result, "LlamaForCausalLM has no layer Qwen2DecoderLayer; use LlamaDecoderLayer")
    assert not (tmp_path / "out").exists()
