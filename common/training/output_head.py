"""Finds how a causal language model computes its logits: output layer, scale and soft-cap.

The model's forward is compared with a formula on random numbers, because a list of architectures would be incomplete:
of 136 in transformers, ten scale or soft-cap their logits, and 22 others apply further operations. No weight is read,
so ranks without weights (FSDP2) get the same result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutputWithPast

from common.training.precision import without_autocast

# Names of a factor on the logits in transformers' configs (Cohere, Granite, Falcon-H1, ...). Some models multiply by it
# and some divide, so both are compared with the model's own logits.
SCALE_NAMES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
SOFTCAP_NAME = "final_logit_softcapping"


class MoreTerms(ValueError):
    """Error: the model's loss has more terms than the cross-entropy of its logits."""


class Head(NamedTuple):
    """The logits of a model: `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`."""

    backbone: str  # name of the module that computes the last hidden state
    backbone_arguments: dict[str, Any]  # constants that the model passes to it with the token ids
    scale: float
    softcap: float | None  # None: no tanh


def examine_head(model: PreTrainedModel) -> Head:
    """Finds how a model computes logits, from its forward on a random last hidden state and random head weights.

    Logits range from the bias (hidden is 0) to hundreds (bent by a soft-cap). A stub replaces the backbone. A float32
    copy of the head's weight temporarily uses memory.

    Raises: MoreTerms; ValueError that describes what cannot be reproduced; any error of the model.
    """
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise MoreTerms("its config has output_router_logits, which adds a router loss")
    if model.loss_function is not ForCausalLMLoss:
        raise MoreTerms(f"its loss_function is {getattr(model.loss_function, '__name__', 'its own')}")
    head, backbone = model.get_output_embeddings(), model.get_decoder()
    if type(head) is not nn.Linear:
        raise ValueError(f"its output layer is a {type(head).__name__}")
    if backbone is model:
        raise ValueError("its backbone is not a separate module")
    covered = {id(x) for x in [*backbone.parameters(), *backbone.buffers(), head.weight, head.bias]}
    others = [name for name, x in [*model.named_parameters(), *model.named_buffers()] if id(x) not in covered]
    if others:
        raise ValueError(f"{others[0]} is neither in its backbone nor its output layer")

    vocabulary, width = head.out_features, head.in_features
    device = torch.device("cpu") if head.weight.is_meta else head.weight.device
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(min(vocabulary, 1021), width, generator=generator) / width**0.5
    weight = block[torch.arange(vocabulary) % len(block)].to(device)
    bias = None if head.bias is None else torch.randn(vocabulary, generator=generator).to(device)
    sizes = torch.tensor([0, 0.1, 1, 3, 10, 30, 100, 300]).unsqueeze(1)
    hidden = (sizes * torch.randn(len(sizes), width, generator=generator)).to(device)

    names = {id(p): name for name, p in model.named_parameters()}  # of a tied weight only the first name: enough
    random_head = {names[id(head.weight)]: weight} | ({} if bias is None else {names[id(head.bias)]: bias})
    ids = torch.zeros(1, len(sizes), dtype=torch.int64, device=device)
    with torch.no_grad(), _stubbed(backbone, hidden.unsqueeze(0)) as calls:
        logits = torch.func.functional_call(model, random_head, kwargs={"input_ids": ids})[0].squeeze(0)
        arguments = _constant_arguments(calls, ids)
        if not own_loss_is_cross_entropy(model, ids, random_head):
            raise MoreTerms("its own loss is not the cross-entropy of its logits")
    scale, softcap = _fit(logits, F.linear(hidden, weight, bias), model.config.get_text_config())
    backbone_name = next(name for name, module in model.named_modules() if module is backbone)
    return Head(backbone_name, arguments, scale, softcap)


def _fit(logits: Tensor, matmul: Tensor, config: Any) -> tuple[float, float | None]:
    """Returns the scale and soft-cap that turn `matmul`, hidden @ weight.T + bias, into the model's `logits`."""
    settings = [getattr(config, name, None) for name in SCALE_NAMES]
    factors: list[float] = [x for x in settings if isinstance(x, int | float) and x]
    errors: dict[tuple[float, float | None], float] = {}
    for scale in (1.0, *factors, *(1 / x for x in factors)):
        for cap in {None, getattr(config, SOFTCAP_NAME, None)}:
            guess = matmul * scale if cap is None else torch.tanh(matmul * scale / cap) * cap
            largest = logits.abs().amax(1) + 1e-3  # per row: otherwise rows with large logits would hide the others
            errors[scale, cap] = ((logits - guess).abs().amax(1) / largest).max().item()
    best = min(errors, key=errors.__getitem__)
    if not errors[best] < 1e-4:  # float32 rounding is 1e-6; `not <` also rejects NaN
        raise ValueError(f"its logits differ by {errors[best]:.1%} from a linear map of its last hidden state")
    return best


def _constant_arguments(calls: list[tuple[tuple, dict[str, Any]]], ids: Tensor) -> dict[str, Any]:
    """Returns the arguments that the model passes to its backbone in addition to the token ids."""
    if len(calls) != 1:
        raise ValueError(f"it calls its backbone {len(calls)} times")
    positional, named = calls[0]
    named = {"input_ids": positional[0], **named} if positional else dict(named)
    if named.pop("input_ids", None) is not ids or any(x is not None for x in positional[1:]):
        raise ValueError("its backbone gets an input other than the token ids")
    constants = {name: value for name, value in named.items() if value is not None}
    for name, value in constants.items():
        if not isinstance(value, bool | int | float | str) or (name == "output_router_logits" and value):
            raise ValueError(f"its backbone gets {name} in addition to the token ids")
    return constants


def own_loss_is_cross_entropy(model: PreTrainedModel, ids: Tensor, weights: dict[str, Tensor] | None = None) -> bool:
    """Returns whether the model's loss is the mean cross-entropy of its logits.

    All labels are the same token, so the result does not depend on a shift of the labels. Also True if the loss cannot
    run (a vocabulary padded beyond config.vocab_size, no labels argument), because such a loss cannot be used.
    """
    inputs = {"input_ids": ids, "labels": torch.ones_like(ids)}
    with torch.no_grad():
        try:
            output = torch.func.functional_call(model, weights or {}, kwargs=inputs)
            loss, logits = output.loss, output.logits[0]
        except Exception:
            return True
        losses = F.cross_entropy(logits.float(), torch.ones_like(ids[0]), reduction="none")
    return any(torch.isclose(loss.float(), mean, rtol=1e-4).item() for mean in (losses.mean(), losses[:-1].mean()))


@contextmanager
def _stubbed(backbone: nn.Module, hidden: Tensor) -> Iterator[list[tuple[tuple, dict[str, Any]]]]:
    """Makes `backbone` return `hidden` during the block, and yields a list of the arguments of each call."""
    calls: list[tuple[tuple, dict[str, Any]]] = []

    def stub(*args, **kwargs) -> BaseModelOutputWithPast:
        calls.append((args, kwargs))
        output = BaseModelOutputWithPast(last_hidden_state=hidden)
        for name in ("cross_attentions", "router_logits", "cache_params", "state"):  # some models return these too
            setattr(output, name, None)
        return output

    with mock.patch.object(backbone, "forward", stub):
        yield calls


@contextmanager
def restore_afterwards(model: PreTrainedModel) -> Iterator[None]:
    """Restores train/eval modes and RNG state after the block, which runs in train mode without autocast."""
    modes = [(module, module.training) for module in model.modules()]
    device = model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), without_autocast(device):
        try:
            model.train()  # so that dropout in a head shows as a difference
            yield
        finally:
            for module, training in modes:
                module.training = training
