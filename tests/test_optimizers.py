import math
import sys
from collections.abc import Callable

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

from common import arguments
from common.errors import UserError
from common.training.activation_checkpointing import ACTIVATION_CHECKPOINTING
from common.training.optimizers import (
    OPTIMIZERS,
    SCHEDULES,
    learning_rate,
    make_optimizer,
    optimizers_help,
    parameter_groups,
    set_learning_rate,
)

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
CAUSAL = {**TEXT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "bos_token_id": 1}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}

FAMILIES = {  # class prefix, the rest of the class, settings
    "llama": ("Llama", "ForCausalLM", CAUSAL),
    "llama tied": ("Llama", "ForCausalLM", {**CAUSAL, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "t5": ("T5", "ForConditionalGeneration", T5),
    "bert": ("Bert", "ForSequenceClassification", {**TEXT, "num_labels": 1}),
    "mixtral": ("Mixtral", "ForCausalLM", {**CAUSAL, "num_local_experts": 4}),
    "vit": ("ViT", "ForImageClassification", {**IMAGE, "patch_size": 4, "num_channels": 1}),
    "mamba": ("Mamba", "ForCausalLM", {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}),
    "cohere": ("Cohere", "ForCausalLM", {**CAUSAL, "use_qk_norm": True}),
    "convnext": ("ConvNext", "ForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
}

# Written out by hand; a layer's number is 0, since every model has one layer.
LLAMA_NO_DECAY = {
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.norm.weight",
}
NO_DECAY = {
    "llama": LLAMA_NO_DECAY,
    "llama tied": LLAMA_NO_DECAY,
    "gpt2": {
        *(f"transformer.{norm}.{name}" for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f") for name in ("weight", "bias")),
        *(f"transformer.h.0.{layer}.bias" for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    },
    "t5": {  # not relative_attention_bias.weight: an embedding, whatever its name says
        *(f"encoder.block.0.layer.{layer}.layer_norm.weight" for layer in (0, 1)),
        *(f"decoder.block.0.layer.{layer}.layer_norm.weight" for layer in (0, 1, 2)),
        *(f"{half}.final_layer_norm.weight" for half in ("encoder", "decoder")),
    },
    "mixtral": LLAMA_NO_DECAY,  # so the router and the stacked experts, which are 3-D, are decayed
    "mamba": {
        "backbone.layers.0.norm.weight",
        "backbone.norm_f.weight",
        *(f"backbone.layers.0.mixer.{name}" for name in ("A_log", "D", "conv1d.bias", "dt_proj.bias")),
    },
    "cohere": {  # the norm of each head has a weight of shape (heads, head size)
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.norm.weight",
    },
}


def build(family: str, **settings) -> nn.Module:
    prefix, head, config = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**config, **settings})
    return getattr(transformers, f"{prefix}{head}")(config)


def names_of_groups(model: nn.Module) -> dict[str, list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: [names[id(p)] for p in group["params"]] for group in parameter_groups(model, 0.1)}


def set_gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


# ---- parameter groups


@pytest.mark.parametrize("family", FAMILIES)
def test_each_trainable_parameter_is_in_one_group_and_the_expected_one(family):
    model = build(family)
    groups = names_of_groups(model)
    # named_parameters gives a tied weight once, so this equality also says that no weight is there twice.
    names = sorted(name for name, _ in model.named_parameters())
    assert sorted(groups["decay"] + groups["no_decay"]) == names
    if family in NO_DECAY:
        assert set(groups["no_decay"]) == NO_DECAY[family]
        # Control: a grouping by names misplaces some of every family.
        assert {name for name in names if "bias" in name or "LayerNorm.weight" in name} != NO_DECAY[family]
    frozen = groups["decay"].pop(0)
    model.get_parameter(frozen).requires_grad_(False)
    assert names_of_groups(model) == groups


def test_vectors_in_disguise_are_not_decayed_and_one_output_heads_are():
    vit = names_of_groups(build("vit"))
    assert "vit.embeddings.cls_token" in vit["no_decay"] and "vit.embeddings.position_embeddings" in vit["decay"]
    # The head of a regression has shape (1, 32), a vector by its sizes too: only the type of its module tells.
    bert = build("bert")
    assert bert.classifier.weight.shape == (1, 32) and "classifier.weight" in names_of_groups(bert)["decay"]
    convnext = names_of_groups(build("convnext"))["no_decay"]
    # A norm inside a Sequential: no part of its name says so.
    assert "convnext.encoder.stages.1.downsampling_layer.0.weight" in convnext
    assert "convnext.encoder.stages.0.layers.0.layer_scale_parameter" in convnext


def test_a_norm_over_two_dimensions_is_not_decayed():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm((4, 6)), nn.RMSNorm((4, 6)))
    assert names_of_groups(model)["decay"] == ["0.weight"]
    # Control: by shape alone both norms would be decayed.
    assert all(parameter.ndim == 2 for norm in model[1:] for parameter in norm.parameters())


def test_parameters_that_deepspeed_has_partitioned_keep_their_group():
    whole, partitioned = build("llama"), build("llama")
    for parameter in partitioned.parameters():  # as deepspeed.zero.Init leaves them; its kernels take minutes
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert names_of_groups(partitioned) == names_of_groups(whole)
    # Control: without the recorded shape a raw parameter of the model is a vector.
    experts = build("mixtral").model.layers[0].mlp.experts
    experts.gate_up_proj.data = torch.empty(0)
    assert names_of_groups(experts) == {"decay": ["down_proj"], "no_decay": ["gate_up_proj"]}


def test_groups_carry_their_decay_and_an_empty_one_is_left_out():
    groups = parameter_groups(build("llama"), 0.25)
    assert [(group["name"], group["weight_decay"]) for group in groups] == [("decay", 0.25), ("no_decay", 0.0)]
    assert [group["name"] for group in parameter_groups(nn.Linear(2, 2, bias=False), 0.25)] == ["decay"]


# ---- optimizers


def state_bytes(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> int:
    """Bytes of the distinct storages of these parameters' states (bitsandbytes shares its code books)."""
    tensors = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_in_the_help_are_those_of_the_real_states(name):
    model = build("llama", hidden_size=384, intermediate_size=768, vocab_size=128)
    optimizer = make_optimizer(name, model, 1e-3, 0.1)
    set_gradients(model, 1e-3)
    optimizer.step()
    embeddings = [model.model.embed_tokens.weight]
    others = list(model.model.layers.parameters())  # without the head, for which muon keeps AdamW's states
    measured = state_bytes(optimizer, others) / sum(p.numel() for p in others)
    # Tolerance 0.05 bytes: the norms' states and, in adafactor, rows and columns weigh more in a model this small.
    assert measured == pytest.approx(OPTIMIZERS[name].state_bytes, abs=0.05)
    # Control: no other figure would pass.
    figures = {info.state_bytes for info in OPTIMIZERS.values()}
    assert [figure for figure in figures if abs(measured - figure) < 0.05] == [OPTIMIZERS[name].state_bytes]
    if name in ("adamw8bit", "muon"):  # as their help says; AdamW also counts its steps
        assert state_bytes(optimizer, embeddings) in (8 * embeddings[0].numel(), 8 * embeddings[0].numel() + 4)
    assert f"{name} ({OPTIMIZERS[name].state_bytes:g} bytes): " in optimizers_help()


def test_adafactor_takes_the_learning_rate_of_adamw():
    def mean_change(make: Callable[[nn.Module], torch.optim.Optimizer]) -> float:
        model = build("llama")
        before = model.model.layers[0].mlp.up_proj.weight.clone()
        optimizer = make(model)
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return (model.model.layers[0].mlp.up_proj.weight - before).abs().mean().item()

    change = mean_change(lambda model: make_optimizer("adafactor", model, 1e-3, 0.0))
    assert 0.5e-3 < change < 1.5e-3
    # Control: torch's own multiplies by the size of the parameter, and takes a fiftieth of the step.
    assert mean_change(lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3)) < 0.05e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_shrinks_exactly_the_decayed_elements(name):
    model = build("cohere", hidden_size=64)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    optimizer = make_optimizer(name, model, 0.1, 0.5)
    set_gradients(model, 0.0)
    optimizer.step()
    for key, parameter in model.named_parameters():
        if key in NO_DECAY["cohere"]:
            assert torch.equal(parameter, before[key]), key
        else:
            torch.testing.assert_close(parameter.detach(), before[key] * (1 - 0.1 * 0.5), rtol=1e-6, atol=0)
            assert not torch.equal(parameter, before[key]), key  # control: the tolerance does not hide the decay


def test_32_bit_states_of_embeddings_do_not_leak_into_a_later_optimizer():
    """Which has its own embedding at the same place of the same group: bitsandbytes' own manager is the process's."""
    import bitsandbytes

    dtypes = []
    for make in (lambda model: make_optimizer("adamw8bit", model, 1e-3, 0.1), bitsandbytes.optim.AdamW8bit):
        model = build("llama tied", hidden_size=128)
        optimizer = make(model if dtypes == [] else parameter_groups(model, 0.1))
        set_gradients(model, 1e-3)
        optimizer.step()
        dtypes.append(optimizer.state[model.model.embed_tokens.weight]["state1"].dtype)
    assert dtypes == [torch.float32, torch.uint8]


def test_adamw_is_fused():
    assert make_optimizer("adamw", build("llama"), 1e-3, 0.1).defaults["fused"] is True


def test_a_missing_bitsandbytes_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # Python's own way to make an import fail
    with pytest.raises(UserError, match="pip install bitsandbytes") as error:
        make_optimizer("adamw8bit", build("llama"), 1e-3, 0.1)
    assert "\n" not in str(error.value)
    make_optimizer("adamw", build("llama"), 1e-3, 0.1)


def test_a_model_without_a_trainable_parameter_is_refused():
    with pytest.raises(UserError, match="no trainable parameter"):
        make_optimizer("adamw", build("llama").requires_grad_(False), 1e-3, 0.1)


def test_decay_that_reaches_no_parameter_is_said(recwarn):
    with pytest.warns(UserWarning, match="no effect"):
        make_optimizer("adamw", nn.LayerNorm(4), 1e-3, 0.1)
    recwarn.clear()
    make_optimizer("adamw", nn.LayerNorm(4), 1e-3, 0.0)  # control: nothing was asked, nothing is said
    make_optimizer("adamw", nn.Linear(4, 4), 1e-3, 0.1)
    assert not recwarn.list


# ---- learning rate


def curve(schedule: str, num_updates: int = 1000, warmup_updates: int = 100, peak: float = 2.0) -> list[float]:
    settings = {"schedule": schedule, "peak": peak, "num_updates": num_updates, "warmup_updates": warmup_updates}
    return [learning_rate(update, **settings) for update in range(num_updates)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_updates, warmup_updates", [(1000, 100), (1000, 0), (1000, 950), (7, 3), (2, 1), (1, 0)])
def test_the_rate_rises_to_its_peak_once_and_is_never_zero(schedule, num_updates, warmup_updates):
    rates = curve(schedule, num_updates, warmup_updates)
    assert len(rates) == num_updates and all(0 < rate <= 2.0 for rate in rates)
    assert rates[warmup_updates] == 2.0
    rising, falling = rates[: warmup_updates + 1], rates[warmup_updates:]
    assert rising == sorted(set(rising)) and falling == sorted(falling, reverse=True)
    # No jump: a change from one update to the next is at most the slope of the steepest part.
    steepest = max(1 / (warmup_updates + 1), math.pi / 2 / (num_updates - warmup_updates), 5 / num_updates)
    if schedule == "wsd":
        steepest = max(steepest, 1 / (num_updates - warmup_updates))
    changes = [abs(b - a) / 2.0 for a, b in zip(rates, rates[1:], strict=False)]
    assert all(change <= steepest * (1 + 1e-9) for change in changes)


@pytest.mark.parametrize(
    "schedule, update, expected",
    [
        ("constant", 0, 2 / 101),
        ("constant", 49, 2 * 50 / 101),
        ("constant", 999, 2),
        ("linear", 100, 2),
        ("linear", 550, 1),
        ("linear", 999, 2 / 900),
        ("cosine", 550, 2 * 0.55),  # half-way between the peak and a tenth of it
        ("cosine", 1000 - 1e-9, 0.2),  # as good as the end: a tenth of the peak
        ("cosine", 400, 2 * (0.1 + 0.9 * 0.75)),  # a third of the way: cos(60 degrees) = 1/2
        ("wsd", 800, 2),
        ("wsd", 801, 2 * 199 / 200),
        ("wsd", 900, 1),
        ("wsd", 999, 2 / 200),
    ],
)
def test_the_rate_is_the_closed_form_at_marked_updates(schedule, update, expected):
    rate = learning_rate(update, schedule=schedule, peak=2.0, num_updates=1000, warmup_updates=100)
    assert rate == pytest.approx(expected, rel=1e-12)


def test_the_rate_reaches_every_group_through_accelerate():
    model = nn.Linear(4, 4)
    inner = make_optimizer("adamw", model, 1e-3, 0.1)
    prepared = Accelerator(cpu=True).prepare(inner)
    set_learning_rate(prepared, 0.125)
    assert type(prepared).__name__ == "AcceleratedOptimizer"
    assert [group["lr"] for group in inner.param_groups] == [0.125, 0.125]
    before = model.bias.detach().clone()
    set_gradients(model, 1.0)
    prepared.step()  # Adam's first step is the rate
    torch.testing.assert_close(before - model.bias.detach(), torch.full((4,), 0.125))


def test_a_new_head_has_groups_of_its_own_and_keeps_its_ratio():
    """Also with an adapter, where peft trains a copy under a longer name. Control: an equal rate has no such group."""
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    names = ["head.weight", "head.bias"]
    optimizer = make_optimizer("adamw", model, 1e-3, 0.1, names, 1e-2)
    groups = {group["name"]: [tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups}
    assert groups == {"decay": [(4, 4)], "no_decay": [(4,)], "head_decay": [(2, 4)], "head_no_decay": [(2,)]}
    prepared = Accelerator(cpu=True).prepare(optimizer)
    for rate in (0.5, 0.125):
        set_learning_rate(prepared, rate)
        assert [group["lr"] for group in optimizer.param_groups] == [rate, rate, 10 * rate, 10 * rate]
    assert [group["name"] for group in parameter_groups(model, 0.1, names)] == ["decay", "no_decay"]
    adapted = nn.Module()
    adapted.score = nn.ModuleDict({"modules_to_save": nn.ModuleDict({"default": nn.Linear(4, 2)})})
    assert [group["name"] for group in parameter_groups(adapted, 0.1, ["score.weight", "score.bias"], 10.0)] == [
        "head_decay",
        "head_no_decay",
    ]


def test_an_optimizer_from_elsewhere_keeps_the_ratio_of_its_groups():
    body, head = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": body.parameters()}, {"params": head.parameters(), "lr": 0.5}], lr=0.125)
    for rate in (1.0, 0.25):
        set_learning_rate(optimizer, rate)
        assert [group["lr"] for group in optimizer.param_groups] == [rate, 4 * rate]


def test_help_can_be_printed():
    """A per cent sign in it would be argparse's format code."""
    parser = arguments.recipe_parser("")
    text = " ".join(parser.format_help().split())
    for line in (
        *ACTIVATION_CHECKPOINTING.values(),
        *SCHEDULES.values(),
        *(o.description for o in OPTIMIZERS.values()),
    ):
        assert line in text
