"""Attention, norms and dropout for transformers' models on a CPU, with fewer memory passes than the originals.

Attention in bf16: two batched matmuls around a softmax, for short rows, because SDPA's CPU kernel is slow there.
Forward and backward of 6 heads of 64 over 1,024 tokens, on two cores with AMX, at row lengths of 32, 64, 128 and 256
tokens: SDPA 8.6, 8.8, 9.8 and 7.0 ms, this file 1.7, 2.0, 2.8 and 3.5 ms. The largest error of output and gradients
against float64 is 4.1e-3 in both. In float32 both have the same speed, and SDPA uses less memory.

Root mean square norms under autocast: seven memory passes instead of fifteen. The output is rounded once, not again by
each layer that reads it.

Dropout: random numbers of 16 bits, four per draw. torch draws one number per element, on a single thread: 5.1 ms for a
million elements on two cores, compared with 0.8 ms here.
"""

import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.internals.torch import replace_parameters
from common.training.precision import autocast_dtype, without_autocast

# Maximum number of queries and of keys. The attention weights saved for the backward pass grow with the square of the
# length; at this length, they use about as much memory as the rest of a layer.
LONGEST_ROW = 512
# Attention arguments that these kernels do not support; transformers' own function supports or rejects them.
SPECIAL = ("cache", "output_attentions", "softcap")


def use_cpu_kernels(model: PreTrainedModel) -> None:
    """Makes `model` use these kernels; the attention applies to all models of this process with "sdpa" attention."""
    AttentionInterface.register("sdpa", attention)
    is_ours: dict[tuple, bool] = {}
    module: Any
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.forward = MethodType(_dropout_forward, module)  # type: ignore[method-assign]  # on purpose
        # Norms of the same class may differ in whether they have a weight.
        kind = type(module), _parameters_of(module), _eps(module)
        if kind not in is_ours:
            is_ours[kind] = _is_root_mean_square_norm(module)
        if is_ours[kind]:
            module.forward = MethodType(_norm_forward, module)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the signature of transformers' interface.

    It computes short rows on a CPU in bf16, or in float32 with dropout; transformers' own "sdpa" computes all others.
    Shapes: query (B, H, Q, D), key and value (B, H / n, K, D), attention_mask bool or float (B or 1, 1 or H, Q, K),
    position_bias (B or 1, H, Q, K), which is added to the scores. The result is (B, Q, H, D).
    """
    dtype = autocast_dtype(query.device) or query.dtype
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    (num_rows, num_heads, num_queries, _), (_, num_key_heads, num_keys, _) = query.shape, key.shape
    is_faster = dtype == torch.bfloat16 or dtype == torch.float32 and dropout  # SDPA's CPU kernel lacks dropout
    is_ours = query.device.type == "cpu" and is_faster and max(num_queries, num_keys) <= LONGEST_ROW
    is_special = causal and num_queries != num_keys or any(others.get(name) for name in SPECIAL)
    if not is_ours or is_special:
        given = {"is_causal": is_causal, "position_bias": position_bias} | others
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    with without_autocast(query.device):
        query, key, value = (x.to(dtype) for x in (query, key, value))
        # Query heads that share a key head become additional queries of one head, so that keys are not repeated.
        shape = (num_rows * num_key_heads, num_heads // num_key_heads * num_queries)
        query, key, value = query.reshape(*shape, -1), key.flatten(0, 1), value.flatten(0, 1)
        bias = _bias(query, (num_queries, num_keys), attention_mask, position_bias, causal)
        if bias is None:
            scores = torch.bmm(query * scaling, key.mT)
        else:
            bias = bias.expand(num_rows, num_heads, -1, -1).reshape(*shape, num_keys)
            scores = torch.baddbmm(bias, query, key.mT, alpha=scaling)
        weights = scores.softmax(-1)  # accumulates in float32
        output = torch.bmm(fast_dropout(weights, dropout) if dropout else weights, value)
        return output.view(num_rows, num_heads, num_queries, -1).transpose(1, 2).contiguous(), None


def _bias(
    query: Tensor, shape: tuple[int, int], mask: Tensor | None, position_bias: Tensor | None, causal: bool
) -> Tensor | None:
    """Returns the bias of the scores, (B or 1, H or 1, Q, K) in the query's dtype; None if there is none."""
    least = torch.finfo(query.dtype).min  # not -inf, because a fully masked row would become NaN
    if causal:
        mask = query.new_full(shape, least).triu(1)[None, None]
    elif mask is not None and mask.dtype == torch.bool:
        mask = query.new_full((), least).masked_fill(mask, 0)
    elif mask is not None:
        mask = mask.to(query.dtype).clamp(min=least)
    if position_bias is None:
        return mask
    position_bias = position_bias.to(query.dtype)
    return position_bias if mask is None else position_bias + mask


def fast_dropout(x: Tensor, probability: float) -> Tensor:
    """Returns `x` with elements zeroed with this probability, and the others scaled to keep the mean.

    The probability is rounded to a multiple of 1 / 65,536. The mask comes from torch's default generator, but differs
    from the mask of torch's dropout with the same seed.
    """
    threshold = min(round(probability * 2**16), 2**16 - 1)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    is_kept = draws[: x.numel()] >= threshold - 2**15
    return x * is_kept.to(x.dtype).div_(1 - threshold / 2**16).view(x.shape)


def _dropout_forward(dropout: nn.Dropout, x: Tensor) -> Tensor:
    if not dropout.training or x.device.type != "cpu" or not 0 < dropout.p < 1 or dropout.inplace:
        return type(dropout).forward(dropout, x)
    return fast_dropout(x, dropout.p)


def _is_root_mean_square_norm(module: Any) -> bool:
    """Returns whether a module computes `weight * x / sqrt(mean(x**2) + eps)` (RMSNorm, arXiv:1910.07467)."""
    given, eps = _parameters_of(module), _eps(module)
    if given != ("weight",) or module.weight.ndim != 1 or eps is None or list(module.children()):
        return False
    if len(inspect.signature(type(module).forward).parameters) != 2:  # only self and x, so there is no gate
        return False
    generator = torch.Generator().manual_seed(0)  # a separate generator leaves the run's random numbers unchanged
    x, weight = torch.randn(2, 4, len(module.weight), generator=generator, device="cpu").split([3, 1], dim=1)
    weight = weight[0, 0]
    try:
        with torch.no_grad(), without_autocast(x.device), replace_parameters(module, {"weight": weight}):
            return torch.allclose(type(module).forward(module, x), _RootMeanSquareNorm.apply(x, weight, eps, x.dtype))
    except Exception:  # a forward with different inputs may raise any error
        return False


def _parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the module's own parameters."""
    return tuple(name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False))


def _eps(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _norm_forward(norm: nn.Module, x: Tensor) -> Tensor:
    dtype = autocast_dtype(x.device) if x.device.type == "cpu" else None
    if dtype is None or not x.dtype == norm.weight.dtype == torch.float32:
        return type(norm).forward(norm, x)
    with without_autocast(x.device):
        return _RootMeanSquareNorm.apply(x, norm.weight, _eps(norm), dtype)


class _RootMeanSquareNorm(torch.autograd.Function):
    """Root mean square norm. Shapes: x (..., D) and weight (D,), both float32; the result is (..., D) in `dtype`."""

    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight, scale = ctx.saved_tensors
        size, gradient = x.shape[-1], gradient.to(x.dtype)
        products = (gradient * x).view(-1, size)
        of_weight = products.t().mv(scale.flatten())
        # Gradient through `scale`, before the factor x.
        slope = products.mv(weight).view_as(scale).mul_(scale**3).div_(-size)
        return (gradient * weight).mul_(scale).addcmul_(x, slope), of_weight, None, None
