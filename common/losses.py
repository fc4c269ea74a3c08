"""The sum of a language model's token losses, without its full logits.

Logits are the largest tensor of a training step: 8 x 1024 positions over a vocabulary of 128,000 take 4 GB in
float32, and cross-entropy wants several of them. `sum_token_losses(model)` makes a transformers causal LM compute its
loss over a few hundred rows at a time. Some models do more between their last hidden state and their logits than one
matrix product, so what the model does is measured first, on random numbers; a model that cannot be reproduced keeps
its own logits.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutputWithPast

from common.errors import UserError
from common.loading import decided_once
from common.precision import autocast_dtype, without_autocast

# Where transformers' configs keep a factor on the logits (Cohere, Granite, Falcon-H1, ...). Some models multiply by it
# and some divide, under the same name, so both are tried and the model's own logits decide.
SCALE_NAMES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
SOFTCAP_NAME = "final_logit_softcapping"


class Head(NamedTuple):
    """What a model does from token ids to logits: `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`."""

    backbone: str  # the name of the module that makes the last hidden state
    backbone_arguments: dict[str, Any]  # constants that the model passes to it beside the token ids
    scale: float
    softcap: float | None  # None: no tanh


def sum_token_losses(model: PreTrainedModel, chunk_rows: int = 512) -> str:
    """Make `model(input_ids=..., targets=..., target_rows=...)` return the sum of its token losses.

    Call it on the bare model, before `Accelerator.prepare`. Without `targets` the model works as before.

    Args:
        model: a causal LM. Its `forward`, and its output layer's, are replaced on these two instances.
        chunk_rows: how many rows of logits exist at once. More than 256 gains little on a CPU.

    The model is then called with `input_ids` (B, L), `targets` (N,) and `target_rows` (N,): position `target_rows[i]`
    of the flattened (B * L,) input predicts token `targets[i]`; nothing is shifted inside. It returns a scalar tensor:
    the sum of the N cross-entropies in nats, in float32 (float64 for a float64 model). N may be 0: the loss is 0 and
    every parameter's gradient is zero, not missing. A model whose own loss has more terms (a router's load balancing,
    ...) returns N times its own mean loss instead.

    Returns: one line that says what will run.
    Raises: UserError where the model's own loss has to be kept and cannot be told which positions predict what.
    """
    if not hasattr(model.forward, "__func__"):
        raise ValueError(f"{type(model).__name__}.forward is wrapped already: call sum_token_losses(model) first")
    original = model.forward.__func__
    with _left_unchanged(model):
        way, message = decided_once(lambda: _choose(model, chunk_rows))
    if isinstance(way, Head):
        _give_head_a_loss(model.get_output_embeddings())
    loss_sum = _chunked_loss_sum(way, chunk_rows) if isinstance(way, Head) else way

    def forward(self, *args, targets: Tensor | None = None, target_rows: Tensor | None = None, **kwargs):
        if targets is None:
            return original(self, *args, **kwargs)
        return loss_sum(self, original, targets, target_rows, **no_cache, **kwargs)

    signature = inspect.signature(original)
    no_cache = {"use_cache": False} if "use_cache" in signature.parameters else {}
    # generate() looks up the names of forward's arguments. No functools.wraps: accelerate's unwrap_model would follow
    # its __wrapped__ down to the original forward.
    forward.__signature__ = signature
    model.forward = types.MethodType(forward, model)  # a bound method, which accelerate's prepare() relies on
    return message


@torch.compiler.disable  # its loop would be unrolled and compiled again for every number of targets
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = 512,
) -> Tensor:
    """The sum of the cross-entropies of `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`, in nats.

    Shapes: hidden (N, D), weight (V, D), bias (V,) or None, targets (N,) int64; the result is a scalar. At most
    `chunk_rows` rows of logits exist at once, and what is kept for the backward is the gradients themselves.

    The matrix products run in autocast's dtype, else in the weight's; the softmax in float32 at least. The gradients
    are computed in the forward, while a chunk's softmax is at hand (the idea of Liger Kernel's fused linear
    cross-entropy, arXiv:2410.10989): three matrix products a chunk, none of them twice. A graph can run backward once.
    """
    dtype = weight.dtype
    if dtype != torch.float64:  # autocast leaves float64 alone
        dtype = autocast_dtype(weight.device) or dtype
    with_gradients = torch.is_grad_enabled()  # inside an autograd.Function gradients are always off
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, softcap, chunk_rows, dtype, with_gradients)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, chunk_rows, dtype, with_gradients):
        wanted = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        # Those of weight and bias are sums over chunks, in float32 at least; autograd rounds them to the weight's type.
        dtypes = [hidden.dtype, *[torch.promote_types(weight.dtype, torch.float32)] * 2]
        inputs = zip((hidden, weight, bias), dtypes, wanted, strict=True)
        into = [torch.zeros_like(x, dtype=dtype) if want else None for x, dtype, want in inputs]
        ctx.gradients = into
        with without_autocast(hidden.device):
            return _loss_sum_and_gradients(hidden, weight, bias, targets, scale, softcap, chunk_rows, dtype, into)

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient):
        # Not in save_for_backward: so the weight's gradient, as large as the weight, is scaled in place and (float32)
        # handed over uncopied, and hooks that move saved tensors to the CPU leave it where it is.
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "linear_cross_entropy can run backward only once"
        return *(g if g is None else g.mul_(loss_gradient) for g in gradients), *[None] * 6


def _loss_sum_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    chunk_rows: int,
    dtype: torch.dtype,
    into: list[Tensor | None],
) -> Tensor:
    """The loss sum; adds the gradients of hidden, weight and bias to the tensors in `into`, where they are not None."""
    into_hidden, into_weight, into_bias = into
    weight_cast, bias_cast = weight.to(dtype), None if bias is None else bias.to(dtype)  # once, not once a chunk
    float_dtype = torch.promote_types(dtype, torch.float32)
    rows = min(chunk_rows, len(hidden))
    products = hidden.new_empty(rows, len(weight), dtype=dtype)
    float_buffer = products if dtype == float_dtype else hidden.new_empty(rows, len(weight), dtype=float_dtype)
    loss = hidden.new_zeros((), dtype=float_dtype)
    for start in range(0, len(hidden), chunk_rows):
        chunk = hidden[start : start + chunk_rows].to(dtype)
        product, logits = products[: len(chunk)], float_buffer[: len(chunk)]
        if bias_cast is None:
            torch.mm(chunk, weight_cast.t(), out=product)
        else:
            torch.addmm(bias_cast, chunk, weight_cast.t(), out=product)
        if logits.dtype != dtype:
            logits.copy_(product)
        wants_gradients = any(x is not None for x in into)
        loss += _logits_to_gradient(logits, targets[start : start + chunk_rows], scale, softcap, wants_gradients)
        if logits.dtype != dtype:
            product.copy_(logits)
        if into_hidden is not None:
            into_hidden[start : start + chunk_rows] = product @ weight_cast
        if into_weight is not None and into_weight.dtype == dtype:
            into_weight.addmm_(product.t(), chunk)
        elif into_weight is not None:
            into_weight += product.t() @ chunk
        if into_bias is not None:
            into_bias += logits.sum(0)
    return loss


def _logits_to_gradient(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, wants_gradient: bool
) -> Tensor:
    """The loss sum of a chunk; `logits` (n, V), as the matrix product left them, become the loss's gradient by them.

    In place because on a CPU a pass over a fresh (n, V) tensor costs more than the arithmetic.
    """
    targets = targets.unsqueeze(1)
    if scale != 1.0:
        logits.mul_(scale)
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = logits.square().neg_().add_(1) if wants_gradient else None
        logits.mul_(softcap)
    logits.sub_(logits.amax(1, keepdim=True))  # so that exp cannot overflow
    target_logits = logits.gather(1, targets)
    normalizer = logits.exp_().sum(1, keepdim=True)
    loss = (normalizer.log() - target_logits).sum()
    if wants_gradient:  # softmax minus one-hot, then the chain rule through tanh and scale
        logits.div_(normalizer).scatter_add_(1, targets, torch.full_like(target_logits, -1))
        if slope is not None:
            logits.mul_(slope)
        if scale != 1.0:
            logits.mul_(scale)
    return loss


# What follows finds out what a model does, and makes the function that sum_token_losses installs.


def _choose(model: PreTrainedModel, chunk_rows: int) -> tuple[Head | Callable[..., Tensor], str]:
    """The head to compute the loss sum by, or the function that returns it; and the line that says so."""
    reason = _own_loss_has_more_terms(model)
    try:
        if not reason:
            plan = _examine_head(model)
            message = f"chunked linear cross-entropy, {chunk_rows} rows at once"
            message += f", logits times {plan.scale:g}" if plan.scale != 1 else ""
            message += f", soft-capped at {plan.softcap:g}" if plan.softcap is not None else ""
            return plan, message
    except Exception as error:  # whatever a foreign forward raises: it cannot be reproduced, and has logits of its own
        reason = " ".join(f"{error}".split())[:200] or type(error).__name__
    if not _own_loss_has_more_terms(model) and _own_loss_is_cross_entropy(model):
        return _full_logits_loss_sum, f"cross-entropy over the model's own full logits (because {reason})"
    _check_own_loss_takes_shifted_targets(model)
    message = f"the model's own loss over full logits (because {reason}); it is a mean of each micro-batch, so that "
    return _own_loss_sum, message + "the update depends, a little, on how its window is cut"


def _chunked_loss_sum(plan: Head, chunk_rows: int) -> Callable[..., Tensor]:
    def loss_sum(model, original, targets, target_rows, input_ids, **kwargs):
        backbone = model.get_submodule(plan.backbone)
        hidden = backbone(input_ids=input_ids, **(plan.backbone_arguments | kwargs))[0]
        hidden = hidden.flatten(0, 1).index_select(0, target_rows)
        # Through the layer's own call, so that hooks which gather its weight (ZeRO-3, FSDP) see it used.
        return model.get_output_embeddings()(
            hidden, targets=targets, scale=plan.scale, softcap=plan.softcap, chunk_rows=chunk_rows
        )

    return loss_sum


def _give_head_a_loss(head: nn.Linear) -> None:
    original = head.forward.__func__

    def forward(self, hidden: Tensor, targets: Tensor | None = None, **kwargs) -> Tensor:
        if targets is None:
            return original(self, hidden)
        return linear_cross_entropy(hidden, self.weight, self.bias, targets, **kwargs)

    head.forward = types.MethodType(forward, head)


def _full_logits_loss_sum(model, original, targets, target_rows, **kwargs) -> Tensor:
    logits = original(model, **kwargs)[0].flatten(0, 1).index_select(0, target_rows)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="sum")


def _own_loss_sum(model, original, targets, target_rows, input_ids, **kwargs) -> Tensor:
    count = len(targets)
    labels = targets.new_full((input_ids.numel(),), -100).index_copy(0, target_rows, targets)
    if count == 0:
        labels[0] = 0  # a mean over nothing is NaN; this one is multiplied by 0
    labels = labels.view_as(input_ids)
    return original(model, input_ids=input_ids, labels=labels, shift_labels=labels, **kwargs).loss * count


def _own_loss_has_more_terms(model: PreTrainedModel) -> str:
    """Why the model's loss is more than a cross-entropy, as far as its config says; else an empty string."""
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        return "its config has output_router_logits, which adds a router loss"
    if model.loss_function is not ForCausalLMLoss:
        return f"its loss_function is {getattr(model.loss_function, '__name__', 'its own')}"
    return ""


def _examine_head(model: PreTrainedModel) -> Head:
    """Find how the model computes logits: run its forward on a random last hidden state and random head weights.

    Random weights, because a bias that is still zero would hide, and because weights may not be there yet (FSDP loads
    them on one rank only). The hidden rows go from 0 (nothing but the bias is left) to logits in the hundreds (a
    soft-cap bends them). The backbone is replaced by a stub: it costs the head on eight positions, and for that time
    the memory of a float32 copy of the head's weight.
    Raises: ValueError that says what cannot be reproduced, or whatever the model raises.
    """
    head, backbone = model.get_output_embeddings(), model.get_decoder()
    if type(head) is not nn.Linear:
        raise ValueError(f"its output layer is a {type(head).__name__}")
    if backbone is model:
        raise ValueError("its backbone is not a module of its own")
    known = {id(p) for p in [*backbone.parameters(), head.weight, head.bias]}
    foreign = [name for name, p in model.named_parameters() if id(p) not in known]
    if foreign:
        raise ValueError(f"{foreign[0]} is neither in its backbone nor its output layer")

    vocabulary, width = head.out_features, head.in_features
    device = torch.device("cpu") if head.weight.is_meta else head.weight.device
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(min(vocabulary, 1021), width, generator=generator) / width**0.5
    weight = block[torch.arange(vocabulary) % len(block)].to(device)
    bias = None if head.bias is None else torch.randn(vocabulary, generator=generator).to(device)
    sizes = torch.tensor([0, 0.1, 1, 3, 10, 30, 100, 300]).unsqueeze(1)
    hidden = (sizes * torch.randn(len(sizes), width, generator=generator)).to(device)

    names = {id(p): name for name, p in model.named_parameters()}  # a tied weight has one name here, that is enough
    random_head = {names[id(head.weight)]: weight} | ({} if bias is None else {names[id(head.bias)]: bias})
    ids = torch.zeros(1, len(sizes), dtype=torch.int64, device=device)
    with torch.no_grad(), _stubbed(backbone, hidden.unsqueeze(0)) as calls:
        logits = torch.func.functional_call(model, random_head, kwargs={"input_ids": ids})[0].squeeze(0)
        arguments = _constant_arguments(calls, ids)
        if not _own_loss_is_cross_entropy(model, ids, random_head):
            raise ValueError("its own loss is not the cross-entropy of its logits")
    scale, softcap = _fit(logits, F.linear(hidden, weight, bias), model.config.get_text_config())
    backbone_name = next(name for name, module in model.named_modules() if module is backbone)
    return Head(backbone_name, arguments, scale, softcap)


def _fit(logits: Tensor, products: Tensor, config: Any) -> tuple[float, float | None]:
    """The scale and soft-cap that turn `products` into the model's `logits`, both (rows, V). ValueError if none do."""
    numbers = [getattr(config, name, None) for name in SCALE_NAMES]
    numbers = [x for x in numbers if isinstance(x, int | float) and x]
    scales = [1.0, *numbers, *(1 / x for x in numbers)]
    softcap = getattr(config, SOFTCAP_NAME, None)
    errors = {}
    for scale in scales:
        for cap in {None, softcap}:
            guess = products * scale if cap is None else torch.tanh(products * scale / cap) * cap
            largest = logits.abs().amax(1) + 1e-3  # each row by its own size, or the large ones would hide the small
            errors[scale, cap] = ((logits - guess).abs().amax(1) / largest).max().item()
    best = min(errors, key=errors.__getitem__)
    if not errors[best] < 1e-4:  # float32 rounding is 1e-6; this way round NaN is refused too
        raise ValueError(f"its logits differ by {errors[best]:.1%} from a linear map of its last hidden state")
    return best


def _constant_arguments(calls: list[tuple[tuple, dict[str, Any]]], ids: Tensor) -> dict[str, Any]:
    """What the model passes to its backbone beside the token ids; ValueError if that is more than constants."""
    if len(calls) != 1:
        raise ValueError(f"it calls its backbone {len(calls)} times")
    positional, named = calls[0]
    named = {"input_ids": positional[0], **named} if positional else dict(named)
    if named.pop("input_ids", None) is not ids or any(x is not None for x in positional[1:]):
        raise ValueError("its backbone gets something else than the token ids")
    constants = {name: value for name, value in named.items() if value is not None}
    for name, value in constants.items():
        if not isinstance(value, bool | int | float | str) or (name == "output_router_logits" and value):
            raise ValueError(f"its backbone gets {name} beside the token ids")
    return constants


def _own_loss_is_cross_entropy(
    model: PreTrainedModel, ids: Tensor | None = None, weights: dict[str, Tensor] | None = None
) -> bool:
    """Whether the model's loss is the mean cross-entropy of its logits.

    All labels are the same token, so that it does not matter whether the model shifts them by one or not at all. A loss
    that cannot run (a vocabulary padded beyond config.vocab_size, no labels argument) has nothing that could be lost.
    """
    ids = _few_tokens(model) if ids is None else ids
    with torch.no_grad():
        try:
            output = torch.func.functional_call(
                model, weights or {}, kwargs={"input_ids": ids, "labels": torch.ones_like(ids)}
            )
            loss, logits = output.loss, output.logits[0]
        except Exception:
            return True
        losses = F.cross_entropy(logits.float(), torch.ones_like(ids[0]), reduction="none")
    return any(torch.isclose(loss.float(), mean, rtol=1e-4).item() for mean in (losses.mean(), losses[:-1].mean()))


def _check_own_loss_takes_shifted_targets(model: PreTrainedModel) -> None:
    """Raise UserError unless a target changes the own loss's gradient at exactly the row that it was given for."""
    ids, rows = _few_tokens(model), [1, 2, 5]
    model.eval()  # two runs are compared: no dropout, no router noise

    def logits_gradient(target: int) -> Tensor:
        labels = torch.full_like(ids, -100)
        labels[0, rows] = target
        output = model(input_ids=ids, labels=labels, shift_labels=labels)
        return torch.autograd.grad(output.loss, output.logits)[0][0]

    try:
        with torch.enable_grad():  # a difference, for terms that look at all rows (a z-loss) are the same in both
            change = (logits_gradient(1) - logits_gradient(2)).abs().amax(1)
        changed = (change > 1e-3 * change.max()).nonzero().flatten().tolist()
    except Exception as error:
        raise UserError(f"{type(model).__name__}: cannot run its own loss with shift_labels: {error}") from error
    if changed != rows:
        raise UserError(f"{type(model).__name__}: its own loss ignores shift_labels; give it one that takes them")


def _few_tokens(model: PreTrainedModel) -> Tensor:
    return torch.arange(8, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size


@contextmanager
def _stubbed(backbone: nn.Module, hidden: Tensor) -> Iterator[list[tuple[tuple, dict[str, Any]]]]:
    """While open, `backbone` returns `hidden` and records its arguments."""
    calls = []

    def stub(*args, **kwargs) -> BaseModelOutputWithPast:
        calls.append((args, kwargs))
        output = BaseModelOutputWithPast(last_hidden_state=hidden)
        for name in ("cross_attentions", "router_logits", "cache_params", "state"):  # which some models pass on
            setattr(output, name, None)
        return output

    before = backbone.__dict__.get("forward")
    backbone.forward = stub
    try:
        yield calls
    finally:
        del backbone.forward
        if before is not None:
            backbone.forward = before


@contextmanager
def _left_unchanged(model: PreTrainedModel) -> Iterator[None]:
    """While open, the model is in train mode (dropout in a head must show), without autocast; then all is as before."""
    modes = [(module, module.training) for module in model.modules()]
    device = model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), without_autocast(device):
        try:
            model.train()
            yield
        finally:
            for module, training in modes:
                module.training = training
