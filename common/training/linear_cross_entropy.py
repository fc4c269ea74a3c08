"""The loss of an output head without its logits: chunk by chunk, forward and backward at once.

Not torch's `F.linear_cross_entropy(options=...)`, which has neither scale nor soft-cap, begins with torch 2.13, and
returns the sum in bf16, off by 3e-4 and more. For 2,048 rows of width 384, a vocabulary of 32,000 and chunks of 512, on
two CPU cores, ours and the fastest of its policies: float32 1.8 and 2.3 s, +148 and +198 MiB; bf16 0.90 and 0.82 s,
+249 and +136 MiB (its gradients are bf16 too). Its own choice of chunk takes 9 and 14 s; full logits +785 MiB.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.training.precision import autocast_dtype, without_autocast


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
    with without_autocast(weight.device):
        return _LinearCrossEntropy.apply(
            hidden, weight, bias, targets, scale, softcap, chunk_rows, dtype, with_gradients
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, chunk_rows, dtype, with_gradients):
        # The last two are sums over chunks, in float32 at least; autograd rounds them to the types of weight and bias.
        dtypes = [hidden.dtype, *[torch.promote_types(weight.dtype, torch.float32)] * 2]
        inputs = zip((hidden, weight, bias), dtypes, ctx.needs_input_grad[:3], strict=True)
        ctx.gradients = [torch.zeros_like(x, dtype=d) if with_gradients and needed else None for x, d, needed in inputs]
        into_hidden, into_weight, into_bias = ctx.gradients
        wants_gradients = any(x is not None for x in ctx.gradients)

        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)  # once, not once a chunk
        wide, rows = torch.promote_types(dtype, torch.float32), min(chunk_rows, len(hidden))
        products = hidden.new_empty(rows, len(weight), dtype=dtype)
        wide_products = products if dtype == wide else hidden.new_empty(rows, len(weight), dtype=wide)
        loss = hidden.new_zeros((), dtype=wide)
        for start in range(0, len(hidden), chunk_rows):
            chunk = hidden[start : start + chunk_rows].to(dtype)
            product, logits = products[: len(chunk)], wide_products[: len(chunk)]
            if bias is None:
                torch.mm(chunk, weight.t(), out=product)
            else:
                torch.addmm(bias, chunk, weight.t(), out=product)
            if dtype != wide:
                logits.copy_(product)
            loss += _logits_to_gradient(logits, targets[start : start + chunk_rows], scale, softcap, wants_gradients)
            if dtype != wide:
                product.copy_(logits)
            if into_hidden is not None:
                into_hidden[start : start + chunk_rows] = product @ weight
            if into_weight is not None and into_weight.dtype == dtype:
                into_weight.addmm_(product.t(), chunk)
            elif into_weight is not None:
                into_weight += product.t() @ chunk
            if into_bias is not None:
                into_bias += logits.sum(0)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient):
        # Not in save_for_backward: so the weight's gradient, as large as the weight, is scaled in place and (float32)
        # handed over uncopied, and hooks that move saved tensors to the CPU leave it where it is.
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "linear_cross_entropy can run backward only once"
        return *(g if g is None else g.mul_(loss_gradient) for g in gradients), *[None] * 6


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
