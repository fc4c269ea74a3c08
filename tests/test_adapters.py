"""Adapters: the base at first, the gradients of a dense model's, and files that peft alone loads and merges."""

import json
import re
import shutil

import pytest
import torch
import transformers
from bitsandbytes.functional import has_avx512bf16
from conftest import (
    BIN,
    ROOT,
    assert_mistake,
    assert_refused,
    launch,
    make_model_dir,
    read_metrics,
    results_of,
    run,
    run_recipe_alone,
    run_specs,
    told,
    write_rows,
)
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from common.checkpoint.read import list_checkpoints
from common.errors import UserError
from common.models import adapters, lora
from common.models.adapters import base_options, build_base, with_adapter
from common.models.classifiers import build_classifier
from common.models.load import build_model, load_config
from common.models.packed import PackedLinear
from common.training.recipe_traits import Arguments
from tools.checkpoint.export import export

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


def asked(**more):
    flags = {"lora_rank": 4, "lora_alpha": None, "lora_targets": [], "lora_dropout": 0.0, "use_dora": False}
    flags |= {"use_rslora": False, "quantize": None, "model_name_or_path": "base"}
    return Arguments(frozenset(flags), **flags | more)


def tiny(dtype=torch.float64):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).to(dtype)


def test_embeddings_of_a_frozen_base_take_what_their_model_gives_them(monkeypatch):
    """OPT's of positions takes a mask and a length. Without 16 bits they are as they were."""
    config = OPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=48)
    for dtype in (None, torch.bfloat16):
        monkeypatch.setattr(lora, "narrow_dtype", lambda dtype=dtype: dtype)
        model = adapters.with_adapter(asked(), OPTForCausalLM(config))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            assert model(torch.arange(2, 9)[None]).logits.isfinite().all()


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_a_frozen_base_never_exists_in_float32(tmp_path, monkeypatch, saved):
    """Its matrices come from the files in 16 bits, as they would be cast. Control: a base to be trained is float32."""
    monkeypatch.setattr(lora, "narrow_dtype", lambda: torch.bfloat16)
    tiny(saved).save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    read = build_model(config, str(tmp_path), **base_options(asked()))
    whole = build_model(config, str(tmp_path), **base_options(asked(lora_rank=None)))
    for (name, one), (_, other) in zip(read.named_parameters(), whole.named_parameters(), strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one, other.to(torch.bfloat16 if one.ndim > 1 else torch.float32)), name
        assert one.dtype == (torch.bfloat16 if one.ndim > 1 else torch.float32), name


@pytest.mark.parametrize(
    "more", [{}, {"use_rslora": True}, {"use_dora": True}, {"lora_targets": ["q_proj", "mlp.up_proj"]}]
)
def test_step_0_is_the_base_and_only_the_adapter_is_trained(more):
    """Control: with B no longer zero it is another model."""
    ids, base = torch.arange(20).view(2, 10), tiny(torch.float32)
    expected = base(ids).logits
    model = with_adapter(asked(**more), base)
    exact = {"atol": 1e-6, "rtol": 1e-5} if more.get("use_dora") else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(model(ids).logits, expected, **exact)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trained}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers == ({"q_proj", "up_proj"} if "lora_targets" in more else every)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    assert (model(ids).logits - expected).abs().max() > 1e-3


def test_gradients_are_those_of_the_dense_model_with_merged_weights():
    """W = W0 + s B A, so that of A it is s Bᵀ dW, and of B s dW Aᵀ. In float64. Control: another alpha is off."""
    ids = torch.arange(40).view(4, 10)
    model, dense = with_adapter(asked(lora_alpha=12), tiny()).double(), tiny()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    for name, p in dense.named_parameters():
        where = name.removesuffix(".weight")
        module = model.get_submodule(where)
        if hasattr(module, "lora_A"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            p.data += 12 / 4 * (b @ a).detach()
    torch.testing.assert_close(model(ids).logits, dense(ids).logits, atol=1e-12, rtol=1e-12)
    for one in (model, dense):
        one(ids, labels=ids).loss.backward()
    checked = 0
    for name, p in dense.named_parameters():
        module = model.get_submodule(name.removesuffix(".weight"))
        if hasattr(module, "lora_A"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            torch.testing.assert_close(a.grad, 3 * b.T @ p.grad, atol=1e-12, rtol=1e-9)
            torch.testing.assert_close(b.grad, 3 * p.grad @ a.T, atol=1e-12, rtol=1e-9)
            assert not torch.allclose(b.grad, 4 * p.grad @ a.T, rtol=1e-3)
            checked += 1
    assert checked == 14


@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
def test_layers_are_found_whatever_their_kind_and_names(kind):
    """GPT-2's are no nn.Linear; RoBERTa's new head has a `dense` as its layers do, and is trained whole, once."""
    torch.manual_seed(0)
    if kind == "gpt2":
        base, new = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)), None
    else:
        shape = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
        base = RobertaForSequenceClassification(RobertaConfig(**shape, num_hidden_layers=2))
        new = [name for name, _ in base.named_parameters() if name.startswith("classifier.")]
    ids = torch.arange(2, 22).view(2, 10)
    expected = base.eval()(ids).logits
    model = with_adapter(asked(), base, new).eval()
    assert (model(ids).logits == expected).all()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len([name for name in trained if "lora_A" in name]) == 2 * {"gpt2": 4, "roberta": 6}[kind]
    heads = [name for name in trained if "lora_" not in name]
    assert len(heads) == len(new or ()) and not any("lora_" in name for name in trained if "classifier" in name)


def test_a_head_that_is_trained_whole_does_not_limit_the_rank():
    """Of three labels, over GPT-2's layers, which are no nn.Linear. Control: a rank beyond its layers."""
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "num_labels": 3, "pad_token_id": 0}
    for new in (["score.weight"], None):  # None: without its files, as a plan builds it
        base = GPT2ForSequenceClassification(GPT2Config(**sizes))
        assert with_adapter(asked(lora_rank=8), base, new).transformer.h[0].attn.c_attn.r["default"] == 8
    with pytest.raises(UserError, match="--lora_rank 33: the matrices that it adapts have a rank of 32 at most"):
        with_adapter(asked(lora_rank=33), GPT2ForSequenceClassification(GPT2Config(**sizes)), ["score.weight"])


@pytest.mark.parametrize("flag", [{"use_dora": True}, {"lora_dropout": 0.1}])
def test_experts_that_an_adapter_cannot_have_are_named(flag):
    """Control: without them the rest is adapted."""
    config = MixtralConfig(**TINY | {"tie_word_embeddings": False}, num_local_experts=2)
    with pytest.raises(UserError, match=f"--{next(iter(flag))}: .* the experts .* with --lora_targets$"):
        with_adapter(asked(**flag), MixtralForCausalLM(config))
    with_adapter(asked(**flag, lora_targets=["q_proj", "v_proj"]), MixtralForCausalLM(config))


@pytest.fixture(scope="module")
def place(functions_file, tmp_path_factory):
    """Data, a base, and a run with an adapter that has been trained for long enough to differ."""
    directory = tmp_path_factory.mktemp("adapters")
    write_rows(directory / "rows.jsonl", 60)
    write_rows(directory / "held_out.jsonl", 20)
    make_model_dir(directory / "base", functions_file)
    launch(*flags(directory, directory / "run"), config="multi_cpu")
    return directory


def flags(place, out, *more):
    base = ["--train_file", place / "rows.jsonl", "--validation_file", place / "held_out.jsonl"]
    base += ["--model_name_or_path", place / "base", "--sequence_length", 64, "--num_updates", 6, "--save_every", 2]
    return [*base, "--lora_rank", 8, "--learning_rate", 0.05, "--output_dir", out, "--keep_last", 9, *more]


PEFT_ALONE = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter, merged, file = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(adapter)
text = "".join(tokenizer.bos_token + json.loads(line)["text"] for line in open(file)) + tokenizer.eos_token
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
blocks = [ids[:, start : start + 65] for start in range(0, ids.shape[1] - 1, 64)]
float32 = {"dtype": torch.float32}
models = {
    "peft": PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **float32), adapter),
    "transformers": AutoModelForCausalLM.from_pretrained(adapter, **float32),
    "merged": AutoModelForCausalLM.from_pretrained(merged, **float32),
    "base": AutoModelForCausalLM.from_pretrained(base, **float32),
}
for name, model in models.items():
    with torch.no_grad():
        losses = [model(block, labels=block).loss * (block.shape[1] - 1) for block in blocks]
    print(name, (sum(losses) / (ids.shape[1] - 1)).item())
"""


def test_peft_loads_it_in_a_fresh_process_and_it_merges(place, tmp_path):
    """The held-out loss of the run, computed without this repository. Control: the base's is another."""
    checkpoint = place / "run/checkpoints/update-000006"
    for name, more in (("merged", ["--merge"]), ("exported", []), ("half", ["--merge", "--dtype", "bfloat16"])):
        command = [BIN / "python", "-m", "tools.checkpoint", "export", checkpoint, tmp_path / name, *more]
        result = run(command)
        assert result.returncode == 0, told(result)
    script, held_out = tmp_path / "alone.py", place / "held_out.jsonl"
    script.write_text(PEFT_ALONE)
    expected = results_of(place / "run")["validation_loss"]
    for adapter in (place / "run/model", tmp_path / "exported"):
        result = run([BIN / "python", script, place / "base", adapter, tmp_path / "merged", held_out], cwd=tmp_path)
        assert result.returncode == 0, told(result)
        losses = {name: float(loss) for name, loss in (line.split() for line in result.stdout.splitlines()[-4:])}
        base = losses.pop("base")
        assert losses == pytest.approx(dict.fromkeys(losses, expected), rel=1e-5) and base > expected + 0.05
    exported, written = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path / "exported", place / "run/model")
    )
    assert exported.keys() == written.keys() and all((exported[name] == written[name]).all() for name in written)
    weights, half = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "half"))
    assert all((half[name] == weight.bfloat16()).all() for name, weight in weights.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_the_printed_call_loads_a_dora_adapter_as_trained(place, tmp_path):
    """Also one with a new head. Control: transformers alone starts its magnitudes anew."""
    out, head = tmp_path / "dora", tmp_path / "head"
    runs = [(flags(place, out, "--use_dora"), {}, "lm")]
    runs.append((flags(place, head, "--use_dora", "--sequence_length", 32), {}, "classify"))
    printed = run_specs("lm", runs, tmp_path).stdout
    calls = re.findall(r"; load with (PeftModel.*)\)$", printed, re.MULTILINE)
    names = {"PeftModel": PeftModel, "AutoConfig": transformers.AutoConfig}
    names |= {kind.__name__: kind for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification)}
    model, classifier = (eval(call, names) for call in calls)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    rows = [json.loads(line)["text"] for line in (place / "held_out.jsonl").read_text().splitlines()]
    text = "".join(tokenizer.bos_token + row for row in rows) + tokenizer.eos_token
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]

    @torch.no_grad()
    def loss(model):
        blocks = [ids[:, start : start + 65] for start in range(0, ids.shape[1] - 1, 64)]
        losses = [model.float()(block, labels=block).loss * (block.shape[1] - 1) for block in blocks]
        return (sum(losses) / (ids.shape[1] - 1)).item()

    expected = results_of(out)["validation_loss"]
    assert loss(model) == pytest.approx(expected, rel=1e-5)
    assert abs(loss(AutoModelForCausalLM.from_pretrained(out / "model")) - expected) > 1e-4
    rest = re.compile(r"(?<=_vector)\.default\.weight|\.default|\.modules_to_save")  # of peft's names in memory
    loaded = [rest.sub("", name) for name in classifier.state_dict()]
    loaded = dict(zip(loaded, classifier.state_dict().values(), strict=True))
    saved = load_file(head / "model/adapter_model.safetensors")
    assert any("magnitude" in name for name in saved) and any("score" in name for name in saved)
    assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())


@pytest.mark.parametrize("config", ["fsdp2", "zero3"])
def test_a_sharded_run_exports_what_it_wrote(place, tmp_path, config):
    """Its adapter, and merged; and a whole model. FSDP2 gives the model's class another name."""
    for name in ("adapter", "whole"):
        asked = [one for one in flags(place, tmp_path / name) if name == "adapter" or one not in ("--lora_rank", 8)]
        launch(*asked, "--num_updates", 1, config=config)
        ((checkpoint, manifest),) = list_checkpoints(tmp_path / name)[0]
        assert manifest["architecture"] == "LlamaForCausalLM"
        export(checkpoint, tmp_path / f"{name} exported")
        directories = tmp_path / f"{name} exported", tmp_path / name / "model"
        (exported,), (written,) = ([*directory.glob("*model.safetensors")] for directory in directories)
        exported, written = load_file(exported), load_file(written)
        assert exported.keys() == written.keys() and all(exported[key].equal(written[key]) for key in exported)
    export(tmp_path / "adapter/checkpoints/update-000001", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(merged).__name__ == "LlamaForCausalLM"


def test_a_checkpoint_holds_the_adapter_and_knows_its_base(place, tmp_path):
    """Nothing of the frozen base, and nothing that another base would be taken for. Control: the own base goes on."""
    (path, manifest), *_ = list_checkpoints(place / "run")[0]
    header = {name for rank in path.glob("rank-*.safetensors") for name in load_file(rank)}
    assert header and all("lora_" in name for name in header)
    out = tmp_path / "run"
    shutil.copytree(place / "run", out)
    shutil.rmtree(out / "checkpoints/update-000006")
    other = tmp_path / "other"
    shutil.copytree(place / "base", other)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.embed_tokens.weight.data[5] += 1e-3
    model.save_pretrained(other)
    more = ["--resume", "--model_name_or_path", other]
    assert_refused(
        launch(*flags(place, out, *more), check=False), "the base of the adapter differs, or its files have changed"
    )
    more = ["--lora_alpha", 5, "--lora_targets", "q_proj", "v_proj", "--use_rslora", "--lora_dropout", 0.1]
    result = launch(*flags(place, out, "--resume", *more), check=False)
    lines = ["lora_alpha is 5, the checkpoint's is 16; pass 16\n", "use_rslora is set, .* run had none; remove it"]
    lines += ["lora_targets is q_proj v_proj, .* run had none; remove", "lora_dropout is 0.1, .* is 0.0; pass 0.0"]
    assert_refused(result, *lines, lines=4)
    without = [part for part in flags(place, out, "--resume") if part not in ("--lora_rank", 8)]
    assert_refused(launch(*without, check=False), "--lora_rank is not set, the checkpoint's is 8; pass 8$")
    result = launch(*flags(place, out, "--resume", "--model_name_or_path", place / "run/model"), check=False)
    assert_refused(result, "run/model: it is an adapter; make a whole model of it .*--merge.*, or name its base$")
    launch(*flags(place, out, "--resume", "--lora_alpha", 16, "--dry_run"))
    shutil.copytree(place / "base", tmp_path / "moved")
    launch(*flags(place, out, "--resume", "--model_name_or_path", tmp_path / "moved"), config="multi_cpu")
    assert load_file(out / "model/adapter_model.safetensors").keys()


def test_a_base_of_the_hub_is_merged_as_it_was(place, tmp_path):
    """Of the commit that was trained beside, whatever the newest is. Control: the newest is another model."""
    hub, merged = tmp_path / "models--me--base", tmp_path / "merged"
    for commit in "ab":
        shutil.copytree(place / "base", hub / "snapshots" / (commit * 40))
    model = AutoModelForCausalLM.from_pretrained(hub / "snapshots" / ("b" * 40))
    model.model.embed_tokens.weight.data *= 2
    model.save_pretrained(hub / "snapshots" / ("b" * 40))
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("a" * 40)
    more = ["--model_name_or_path", "me/base", "--num_updates", 2, "--export_dtype", "bfloat16"]
    launch(*flags(place, tmp_path / "run", *more), HF_HUB_CACHE=str(tmp_path))
    weights = load_file(tmp_path / "run/model/adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    (hub / "refs/main").write_text("b" * 40)
    checkpoint = tmp_path / "run/checkpoints/update-000002"
    command = [BIN / "python", "-m", "tools.checkpoint", "export", checkpoint, merged, "--merge"]
    result = run(command, HF_HUB_CACHE=str(tmp_path))
    assert result.returncode == 0 and not result.stderr, told(result)
    embedded = load_file(merged / "model.safetensors")["model.embed_tokens.weight"]
    bases = [load_file(path / "model.safetensors") for path in sorted((hub / "snapshots").iterdir())]
    assert [torch.equal(embedded, one["model.embed_tokens.weight"].float()) for one in bases] == [True, False]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--lora_rank", 8], "--lora_rank needs a pretrained model; pass --model_name"),
        (["--lora_alpha", 8], "--lora_alpha has no effect without --lora_rank"),
        (["--use_dora"], "--use_dora has no effect without --lora_rank"),
        (["--quantize", "nf4"], "--quantize has no effect without --lora_rank"),
        (["--quantize", "nf"], "'nf' is not one of nf4, did you mean nf4"),
        (
            ["--lora_rank", 8, "--model_name_or_path", "BASE", "--lora_targets", "qq"],
            "qq is no linear layer .* has q_proj",
        ),
        (["--lora_rank", 8, "--model_name_or_path", "BASE", "--lora_dropout", 1.5], "--lora_dropout 1.5"),
        (
            ["--lora_rank", 500, "--model_name_or_path", "BASE"],
            "--lora_rank 500: .* have a rank of .* at most; give",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(more, problem, place, tmp_path):
    more = [place / "base" if word == "BASE" else word for word in more]
    result = run_recipe_alone("lm.py", "--train_file", place / "rows.jsonl", *more, "--output_dir", tmp_path / "out")
    assert_mistake(result, problem)
    assert not (tmp_path / "out").exists()


def test_a_base_in_4_bits_is_trained_evaluated_merged_and_refused(place, tmp_path):
    """Evaluations change nothing of what follows, in any of the three; the merged model has the run's own loss."""
    losses, base = {}, tmp_path / "base"
    shutil.copytree(place / "base", base)
    model = AutoModelForCausalLM.from_pretrained(base)
    for p in model.model.layers.parameters():
        p.data *= 1 if p.ndim == 1 else 10  # else what the layers add is small, and what 4 bits change smaller
    model.save_pretrained(base)
    more = ["--quantize", "nf4", "--model_name_or_path", base]
    for name, every in (("evaluated", 1), ("not", 0)):
        out = tmp_path / name
        given = flags(place, out, *more, "--eval_every", every, "--export_dtype", "bfloat16")
        result = launch(*given, config="cpu_bf16")
        assert "(bfloat16, " in result.stdout
        losses[name] = [(line["loss"], line["grad_norm"]) for line in read_metrics(out)]
    assert losses["evaluated"] == losses["not"] and all(norm > 0 for _, norm in losses["not"])
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(place / "base").parameters())
    assert f", {whole + 8192:,} parameters, 8,192 of them trained" in result.stdout
    assert "frozen linear layers in nf4, other matrices in bfloat16" in result.stdout
    out, merged = tmp_path / "float32", tmp_path / "merged"
    launch(*flags(place, out, *more), config="multi_cpu")
    checkpoint = out / "checkpoints/update-000006"
    result = run([BIN / "python", "-m", "tools.checkpoint", "export", checkpoint, merged, "--merge"])
    assert result.returncode == 0, told(result)
    assert "quantization_config" not in (merged / "config.json").read_text()
    script = tmp_path / "alone.py"
    script.write_text(PEFT_ALONE)
    result = run([BIN / "python", script, base, out / "model", merged, place / "held_out.jsonl"], cwd=tmp_path)
    assert result.returncode == 0, told(result)
    found = {name: float(loss) for name, loss in (line.split() for line in result.stdout.splitlines()[-4:])}
    expected = results_of(out)["validation_loss"]
    assert found["merged"] == pytest.approx(expected, rel=1e-5)
    assert abs(found["peft"] - expected) > 2e-5 * expected  # control: beside the base of its files it is another model


def test_a_new_head_is_never_quantized(place, tmp_path):
    """With every combination of flags on an encoder without a head; and what has a head of its own keeps it."""
    sizes = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, intermediate_size=48, pad_token_id=2)
    for name in ("bert", "without-pooler"):
        BertModel(config, add_pooling_layer=name == "bert").save_pretrained(tmp_path / name)
    sizes = {"vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    config = T5Config(**sizes, pad_token_id=2, decoder_start_token_id=2, tie_word_embeddings=False)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    for name in ("bert", "without-pooler", "t5"):
        AutoTokenizer.from_pretrained(place / "base").save_pretrained(tmp_path / name)
    switches = ["--quantize nf4", "--use_dora", "--use_rslora"]
    chosen = [[one for number, one in enumerate(switches) if case >> number & 1] for case in range(8)]
    small = ["--sequence_length", 32, "--num_updates", 2, "--model_name_or_path"]
    runs = [
        (
            flags(place, tmp_path / f"classify-{number}", *" ".join(more).split(), *small, tmp_path / "bert"),
            {},
            "classify",
        )
        for number, more in enumerate(chosen)
    ]
    every = " ".join(switches).split()
    runs.append((flags(place, tmp_path / "seq2seq", *every, "--generate", 0, *small, tmp_path / "t5"), {}, "seq2seq"))
    runs += [(flags(place, tmp_path / name, *every, *small, place / "base"), {}, name) for name in ("lm", "dpo")]
    run_specs("classify", runs, tmp_path)
    # Of two ranks, only the first knows which layers are new.
    sharded = flags(place, tmp_path / "classify-fsdp2", *every, *small, tmp_path / "without-pooler")
    run_specs("classify", [(sharded, {})], tmp_path, "fsdp2")
    for name in (*range(len(chosen)), "fsdp2"):
        saved = load_file(tmp_path / f"classify-{name}/model/adapter_model.safetensors")
        (head,) = (weight for name, weight in saved.items() if name.endswith("classifier.weight"))
        assert head.shape == (2, 32) and head.dtype == torch.float32
    for name in ("seq2seq", "lm", "dpo"):
        assert results_of(tmp_path / name)["updates"] == 2


def test_a_head_with_a_bias_is_not_quantized(place, tmp_path):
    """As transformers' own list would have it: that has only the head's bias, its last parameter."""
    from transformers.quantizers.base import get_keys_to_not_convert

    sizes = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertForSequenceClassification(BertConfig(**sizes, intermediate_size=48)).save_pretrained(tmp_path)
    args, kind = asked(quantize="nf4", model_name_or_path=str(tmp_path)), AutoModelForSequenceClassification
    config = load_config(str(tmp_path), model_class=kind)
    model, new = build_classifier(config, str(tmp_path), False, kind, False, **base_options(args))
    assert not new and type(model.classifier) is torch.nn.Linear
    assert type(model.bert.encoder.layer[0].output.dense) is PackedLinear
    plain = BertForSequenceClassification(config)
    assert "classifier" not in get_keys_to_not_convert(plain)


@pytest.mark.skipif(not has_avx512bf16(), reason="only a CPU with AVX512-BF16 packs weights anew")
def test_an_evaluation_would_cut_the_gradients(place):
    """The control: as bitsandbytes has it, no gradient comes through a layer in 4 bits that has been evaluated."""
    args = asked(quantize="nf4", model_name_or_path=str(place / "base"), trust_remote_code=False)
    ids = torch.arange(20).view(2, 10)

    def gradients(model):
        model.zero_grad()
        model.train()(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def around_an_evaluation(model):
        first = gradients(model)
        with torch.no_grad():
            model.eval()(ids)
        return first, gradients(model)

    first, second = around_an_evaluation(build_base(args, load_config(place / "base")))
    assert all(map(torch.equal, first, second)) and first
    own = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32, **base_options(args))
    try:  # a layer so small cannot be packed at all; of a larger one the gradients are missing, or others
        first, second = around_an_evaluation(with_adapter(args, own))
    except RuntimeError:
        second = []
    assert len(second) != len(first) or not all(map(torch.equal, first, second))


def test_deepspeed_does_not_partition_weights_in_4_bits(place, tmp_path):
    result = launch(*flags(place, tmp_path / "out", "--quantize", "nf4"), config="zero2", check=False)
    assert_refused(result, "--quantize nf4: DeepSpeed does not support weights in 4 bits, .*; use fsdp2.yaml")
    assert not (tmp_path / "out").exists()


DTYPES = """
import sys
from accelerate import Accelerator
sys.path[:0] = [{tests!r}, {root!r}]
accelerator = Accelerator(cpu=True, mixed_precision=sys.argv[1])
from test_adapters import asked, tiny
from common.models.adapters import with_adapter
import torch
model, ids = with_adapter(asked(), tiny(torch.float32)), torch.arange(20).view(2, 10)
for name, p in model.named_parameters():
    print("trained" if p.requires_grad else "matrix" if p.ndim > 1 else "vector", p.dtype)
with torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1] == "bf16"):
    hidden = model.model(ids)[0]
    exact = tiny(torch.float32)
    for p in exact.parameters():
        if p.ndim > 1 and sys.argv[1] == "bf16":
            p.data = p.data.bfloat16().float()  # as the files of most published models are
    assert torch.equal(hidden, exact.model(ids)[0])
"""


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("no", "float32")])
def test_the_frozen_base_has_no_float32_copy_in_16_bits(precision, dtype, tmp_path):
    """And computes, under autocast, bit for bit what a float32 copy of a base in bf16 would."""
    script = tmp_path / "dtypes.py"
    script.write_text(DTYPES.format(tests=str(ROOT / "tests"), root=str(ROOT)))
    result = run([BIN / "python", script, precision])
    assert result.returncode == 0, told(result)
    found = set(result.stdout.splitlines())
    assert found == {f"matrix torch.{dtype}", "vector torch.float32", "trained torch.float32"}
