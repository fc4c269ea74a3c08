"""The loss sum equals the model's own, in value and in every gradient, whatever the model does to make its logits."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import UserError
from common.training import output_head
from common.training.linear_cross_entropy import linear_cross_entropy
from common.training.losses import sum_token_losses

SMALL = {
    "vocab_size": 101,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_NAMES = {"n_embd": 16, "n_head": 2, "n_layer": 1}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [0], "num_hidden_layers": 2}
CHUNKED, FULL_LOGITS = "chunked linear cross-entropy", "cross-entropy over the model's own"
OWN_LOSS = "the model's own loss"
FAMILIES = {  # name: (model type, its config, how the message begins, what it says besides)
    "llama": ("llama", {}, CHUNKED, ""),
    "llama tied": ("llama", {"tie_word_embeddings": True}, CHUNKED, ""),
    "gpt2": ("gpt2", GPT2_NAMES, CHUNKED, ""),
    "gemma2 soft-cap": ("gemma2", {"final_logit_softcapping": 2.5}, CHUNKED, "soft-capped at 2.5"),
    "cohere scale": ("cohere", {"logit_scale": 0.3}, CHUNKED, "times 0.3"),
    "granite division": ("granite", {"logits_scaling": 4.0}, CHUNKED, "times 0.25"),
    "phi bias": ("phi", {}, CHUNKED, ""),
    "opt inner decoder": ("opt", {"ffn_dim": 24, "word_embed_proj_dim": 16}, CHUNKED, ""),
    "mixtral": ("mixtral", MIXTRAL, CHUNKED, ""),
    "mixtral router loss": ("mixtral", MIXTRAL | {"output_router_logits": True}, OWN_LOSS, "output_router_logits"),
    "bamba z-loss": ("bamba", BAMBA | {"z_loss_coefficient": 0.1}, OWN_LOSS, "not the cross-entropy"),
    "bert dense head": ("bert", {"is_decoder": True}, FULL_LOGITS, "cls.predictions.transform"),
}


def config_of(family: str):
    model_type, settings, _, _ = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **(SMALL | settings))
    config._experts_implementation = "eager"  # torch's grouped product of experts has no float64
    return config


def build(family: str, dtype: torch.dtype = torch.float32):
    """The untouched model, every parameter random: a fresh one has biases of zero and logits too small for a cap."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batch(num_targets: int = 9) -> dict[str, torch.Tensor]:
    """Three samples of up to 12 tokens; the rows without a target are prompts and padding."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(36, generator=generator)[:num_targets].sort().values
    return {
        "input_ids": torch.randint(3, 101, (3, 12), generator=generator),
        "targets": torch.randint(3, 101, (num_targets,), generator=generator),
        "target_rows": rows,
    }


def own_loss_sum(model, input_ids, targets, target_rows):
    """What the model's own labels give."""
    labels = torch.full((input_ids.numel(),), -100)
    labels[target_rows] = targets
    labels = labels.view_as(input_ids)
    return model(input_ids=input_ids, labels=labels, shift_labels=labels).loss * len(targets)


def full_logits_loss_sum(model, input_ids, targets, target_rows):
    logits = model(input_ids=input_ids).logits.flatten(0, 1)[target_rows]
    return F.cross_entropy(logits, targets, reduction="sum")


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def difference(model, loss, reference_model, reference_loss) -> float:
    """The largest relative difference of the two losses and of each parameter's gradients."""
    value = abs(loss.item() - reference_loss.item()) / abs(reference_loss.item())
    ours, theirs = gradients(model, loss), gradients(reference_model, reference_loss)
    assert ours.keys() == theirs.keys()
    # A gradient that is zero by algebra (the bias of keys) is rounding noise in both: measure it by the largest one.
    floor = 1e-2 * max(g.norm().item() for g in theirs.values())
    return max(value, *((ours[n] - theirs[n]).norm().item() / max(theirs[n].norm().item(), floor) for n in ours))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_models_own(family, dtype):
    model = build(family, dtype)
    reference = copy.deepcopy(model)
    message = sum_token_losses(model, chunk_rows=4)  # 9 targets: two full chunks and a short one
    _, _, kind, detail = FAMILIES[family]
    assert message.startswith(kind) and detail in message
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config_of(family))
    assert sum_token_losses(empty, chunk_rows=4) == message  # as ranks do that have no weights
    loss = model(**batch())
    with torch.no_grad():
        value = model(**batch())
    assert not value.requires_grad and value.item() == loss.item()
    assert loss.dtype == (torch.float32 if kind == OWN_LOSS else dtype)  # the model's own loss is always in float32
    assert difference(model, loss, reference, own_loss_sum(reference, **batch())) < 3e-6
    if dtype == torch.float64 and kind != OWN_LOSS:
        exact = difference(model, model(**batch()), reference, full_logits_loss_sum(reference, **batch()))
        assert exact < 1e-12
    if kind == OWN_LOSS:  # the control: what the model adds to its cross-entropy is seen
        assert difference(model, model(**batch()), reference, full_logits_loss_sum(reference, **batch())) > 1e-4


@pytest.mark.parametrize("family", ["gemma2 soft-cap", "cohere scale", "granite division"])
def test_the_test_above_fails_where_detection_is_off(family, monkeypatch):
    model = build(family)
    reference = copy.deepcopy(model)
    blind = copy.deepcopy(model)
    monkeypatch.setattr(output_head, "_fit", lambda *_: (1.0, None))
    assert sum_token_losses(blind).startswith(CHUNKED)
    assert difference(blind, blind(**batch()), reference, own_loss_sum(reference, **batch())) > 0.05

    monkeypatch.undo()  # a name that we do not know: not chunked, but right
    monkeypatch.setattr(output_head, "SCALE_NAMES", ())
    monkeypatch.setattr(output_head, "SOFTCAP_NAME", "unknown")
    message = sum_token_losses(model)
    assert message.startswith(FULL_LOGITS) and "differ by" in message
    assert difference(model, model(**batch()), reference, own_loss_sum(reference, **batch())) < 3e-6


def late_bias(head, _, logits):
    return logits + head.late


def dropout(head, _, logits):
    return F.dropout(logits, 0.1, head.training)


@pytest.mark.parametrize("change", [late_bias, dropout])
def test_what_shows_only_in_training_is_seen(change):
    """A bias that is still zero, and dropout on the logits of a model in eval mode."""
    model = build("llama")
    assert sum_token_losses(copy.deepcopy(model)).startswith(CHUNKED)
    model.lm_head.register_forward_hook(change)
    model.lm_head.late = torch.nn.Parameter(torch.zeros(101)) if change == late_bias else None
    assert sum_token_losses(model).startswith(FULL_LOGITS)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_targets_loss_and_every_gradient_are_zero(family):
    model = build(family)
    sum_token_losses(model)
    loss = model(**batch(0))
    assert loss.item() == 0 and loss.shape == ()
    found = gradients(model, loss)
    assert len(found) == len(list(model.parameters())) and not any(g.any() for g in found.values())
    assert any(g.any() for g in gradients(model, model(**batch())).values())


@pytest.mark.parametrize("family", ["llama tied", "gemma2 soft-cap", "cohere scale", "phi bias"])
def test_autocast_is_as_close_to_float32_as_full_logits_are(family):
    model = build(family)
    reference = copy.deepcopy(model)
    sum_token_losses(model, chunk_rows=4)
    with torch.autocast("cpu", torch.bfloat16):
        loss, full = model(**batch()), own_loss_sum(reference, **batch())
    exact = copy.deepcopy(reference)
    ours = difference(model, loss, exact, own_loss_sum(exact, **batch()))
    theirs = difference(reference, full, exact, own_loss_sum(exact, **batch()))
    assert loss.dtype == torch.float32
    assert ours < 1.2 * theirs
    assert ours > 1e-4  # the control: the products did run in bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", None])
def test_linear_cross_entropy_alone(dtype, frozen):
    """Half precision parameters, a hidden state of another dtype, frozen inputs, a loss that is scaled afterwards."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (10, 8), "weight": (33, 8), "bias": (33,)}
    tensors = {
        n: torch.randn(*s, generator=generator).to(torch.float32 if n == "hidden" else dtype) for n, s in shapes.items()
    }
    for name, tensor in tensors.items():
        tensor.requires_grad_(name != frozen)
    targets = torch.randint(33, (10,), generator=generator)
    (0.25 * linear_cross_entropy(*tensors.values(), targets, 0.5, 3.0, chunk_rows=4)).backward()

    exact = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    logits = 3.0 * torch.tanh(0.5 * F.linear(*exact.values()) / 3.0)
    (0.25 * F.cross_entropy(logits, targets, reduction="sum")).backward()
    for name, tensor in tensors.items():
        assert (tensor.grad is None) == (name == frozen)
        if name != frozen:
            torch.testing.assert_close(
                tensor.grad.double(), exact[name].grad, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.03
            )


def test_backward_twice_is_an_error():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    loss = linear_cross_entropy(hidden, weight, None, torch.tensor([0, 1, 2]))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="only once"):
        loss.backward()


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("family", ["llama", "gemma2 soft-cap", "cohere scale"])
def test_no_tensor_is_as_large_as_the_logits(family):
    model = build(family)
    reference = copy.deepcopy(model)
    sum_token_losses(model, chunk_rows=8)
    input_ids = torch.randint(3, 101, (20, 16))
    rows = torch.arange(320)
    inputs = {"input_ids": input_ids, "targets": input_ids.flatten(), "target_rows": rows}
    saved = []
    with (
        LargestTensor() as ours,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t),
    ):
        model(**inputs).backward()
    with LargestTensor() as full:
        own_loss_sum(reference, **inputs).backward()
    logits = len(rows) * 101
    assert full.elements >= logits  # the control
    assert max(ours.elements, *saved) <= logits / 2  # here the largest is inside a layer
    assert max(ours.elements, *saved) < full.elements


def test_the_model_is_left_as_it_was():
    model = build("llama")
    model.model.train()  # a mixture of modes must return
    modes = [m.training for m in model.modules()]
    state = {n: t.clone() for n, t in model.state_dict().items()}
    random = torch.random.get_rng_state()
    ids = batch()["input_ids"]
    logits, words = model(ids).logits, model.generate(ids, max_new_tokens=3, do_sample=False)
    signature = inspect.signature(model.forward)
    assert sum_token_losses(model).startswith(CHUNKED)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes and "forward" not in model.model.__dict__
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items()) and len(state) == len(
        model.state_dict()
    )
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), words)
    assert inspect.signature(model.forward) == signature


def test_a_backbone_that_gets_more_than_tokens_is_not_chunked():
    class Positions(type(build("llama"))):
        def forward(self, input_ids, **kwargs):
            return super().forward(input_ids, position_ids=torch.zeros_like(input_ids), **kwargs)

    model = build("llama")
    assert sum_token_losses(copy.deepcopy(model)).startswith(CHUNKED)
    model.__class__ = Positions
    reference = copy.deepcopy(model)
    message = sum_token_losses(model)
    assert message.startswith(FULL_LOGITS) and "position_ids" in message
    assert difference(model, model(**batch()), reference, own_loss_sum(reference, **batch())) < 3e-6


def test_a_custom_loss_is_kept_or_refused():
    model = build("llama")
    model.loss_function = lambda logits, labels, vocab_size, shift_labels=None, **_: F.cross_entropy(
        logits.flatten(0, 1), shift_labels.flatten(), label_smoothing=0.1
    )
    reference = copy.deepcopy(model)
    assert sum_token_losses(model).startswith(OWN_LOSS)
    assert difference(model, model(**batch()), reference, own_loss_sum(reference, **batch())) < 1e-6

    model = build("llama")  # one that shifts by itself, whatever it is given, would train on the wrong tokens
    model.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
    )
    with pytest.raises(UserError, match="ignores shift_labels"):
        sum_token_losses(model)


def test_a_loss_that_grows_where_the_head_is_not_understood_is_refused(monkeypatch):
    model = build("bert dense head")
    forward = type(model).forward

    def more(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.loss = None if output.loss is None else output.loss + 0.1
        return output

    monkeypatch.setattr(type(model), "forward", more)
    with pytest.raises(UserError, match="is not the cross-entropy of its logits; use a different"):
        sum_token_losses(model)


def test_vocabulary_padded_beyond_the_config():
    model = build("llama")
    model.resize_token_embeddings(128)
    model.config.vocab_size = 101
    reference = copy.deepcopy(model)
    assert sum_token_losses(model).startswith(CHUNKED)
    assert difference(model, model(**batch()), reference, full_logits_loss_sum(reference, **batch())) < 1e-6


def test_accelerate_prepares_it_and_unwraps_it_again():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = build("llama")
    plain = copy.deepcopy(model)
    sum_token_losses(model)
    prepared = accelerator.prepare(model)
    loss = prepared(**batch())
    with torch.autocast("cpu", torch.bfloat16):
        assert loss.item() == pytest.approx(own_loss_sum(plain, **batch()).item(), rel=1e-3)
    assert loss.item() != pytest.approx(own_loss_sum(plain, **batch()).item(), rel=1e-6)  # autocast was on
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped(**batch()).item() == pytest.approx(own_loss_sum(plain, **batch()).item(), rel=1e-6)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "fsdp2 head apart"])
@pytest.mark.parametrize("num_targets", [9, 0])
def test_distributed_wrappers_see_every_gradient(mode, num_targets):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = build("llama" if mode == "fsdp2 head apart" else "llama tied")
        reference = copy.deepcopy(model)
        sum_token_losses(model, chunk_rows=4)
        wrapped = torch.nn.parallel.DistributedDataParallel(model) if mode == "ddp" else model
        for unit in [*model.model.layers, *([model.lm_head] if "apart" in mode else []), model] * (mode != "ddp"):
            fully_shard(unit, mesh=dist.init_device_mesh("cpu", (1,)))
        wrapped(**batch(num_targets)).backward()
        expected = gradients(reference, own_loss_sum(reference, **batch()) * (num_targets > 0))
        for name, parameter in model.named_parameters():
            found = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-5)
    finally:
        dist.destroy_process_group()
