"""The loss of an output head without full logits: forward and backward together, chunk by chunk.

torch's `F.linear_cross_entropy(options=...)` is not used: it supports neither scale nor soft-cap, requires torch 2.13,
and returns the sum in bf16, with errors of 3e-4 and more. In float32 on a CPU, it needs 1.3 times the time and memory.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.training.padding import round_up
from common.training.precision import autocast_dtype, without_autocast

# 1 MB in float32, so that the data of a softmax's passes stays in the cache of a CPU.
CACHED_LOGITS = 2**18
# In bf16 on a CPU, the number of rows is a multiple of this: see loader_sizes.FEW_LENGTHS.
FEW_ROWS = 64


@torch.compiler.disable  # otherwise its loop is unrolled, and compiled again for every number of targets
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = 512,
    vocabulary: "tuple[dist.ProcessGroup, int] | None" = None,
    loss_of: Callable[[Tensor], Any] | None = None,
) -> Any:
    """Returns the summed cross-entropies of `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`, in nats.

    Shapes: hidden (N, D), weight (V, D), bias (V,) or None, targets (N,) int64; the result is a scalar. At most
    `chunk_rows` rows of logits exist at once (twice as many in bf16 on a CPU). Only the gradients themselves are kept
    for the backward.

    Matmuls run in autocast's dtype, or without autocast in the weight's dtype; the softmax in float32 at least. The
    gradients are computed in the forward, while a chunk's softmax is available, as in Liger Kernel (arXiv:2410.10989).
    A graph can run backward once.

    Args:
        vocabulary: if the weight is partitioned in a group of ranks: the group and the first token of this rank's part.
            All ranks have the same rows and targets, and get the loss and the gradient of `hidden` of the full weight.
        loss_of: replaces the sum: maps the token losses (N,) to the result, a tuple of the loss and values without
            gradient. It needs a fourth matmul. If no gradient is required, it may return anything.
    """
    dtype = weight.dtype
    if dtype != torch.float64:  # autocast does not change float64
        dtype = autocast_dtype(weight.device) or dtype
    with_gradients = torch.is_grad_enabled()  # inside an autograd.Function gradients are always off

    def loss_sum(with_gradients: bool, row_weights: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        options = (scale, softcap, chunk_rows, dtype, with_gradients, vocabulary, row_weights, rows)
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, *options)

    with without_autocast(weight.device):
        if loss_of is None:
            return loss_sum(with_gradients)
        from common.training.weighted_cross_entropy import apply_to_token_losses

        rows = hidden.new_empty(len(hidden), dtype=torch.promote_types(dtype, torch.float32))
        return apply_to_token_losses(loss_of, loss_sum, rows, with_gradients)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, *options):
        # row_weights (N,): weight of each row. rows (N,): receives the loss of each row.
        scale, softcap, chunk_rows, dtype, with_gradients, vocabulary, row_weights, rows = options
        # The last two gradients are sums over chunks, in float32 at least; autograd rounds them to the dtypes of weight
        # and bias.
        dtypes = [hidden.dtype, *[torch.promote_types(weight.dtype, torch.float32)] * 2]
        inputs = zip((hidden, weight, bias), dtypes, ctx.needs_input_grad[:3], strict=True)
        ctx.gradients = [torch.zeros_like(x, dtype=d) if with_gradients and needed else None for x, d, needed in inputs]
        into_hidden, into_weight, into_bias = ctx.gradients
        wants_gradients = any(x is not None for x in ctx.gradients)

        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)  # once, not once per chunk
        is_cpu, wide = weight.device.type == "cpu", torch.promote_types(dtype, torch.float32)
        multiple_of = 1
        if is_cpu and dtype != wide:
            chunk_rows *= 2  # uses the memory of one float32 chunk, since only a slice exists in float32
            multiple_of = FEW_ROWS
        products = hidden.new_empty(round_up(min(chunk_rows, len(hidden)), multiple_of), len(weight), dtype=dtype)
        loss = hidden.new_zeros((), dtype=wide)
        for start in range(0, len(hidden), chunk_rows):
            chunk = hidden[start : start + chunk_rows].to(dtype)
            count = len(chunk)
            if more := round_up(count, multiple_of) - count:
                chunk = F.pad(chunk, (0, 0, 0, more))
            product = products[: len(chunk)]
            if bias is None:
                torch.mm(chunk, weight.t(), out=product)
            else:
                torch.addmm(bias, chunk, weight.t(), out=product)
            # With a partitioned vocabulary, each slice needs two collectives.
            size = max(1, CACHED_LOGITS // len(weight)) if is_cpu and vocabulary is None else chunk_rows
            for first, slice_ in zip(range(start, start + count, size), product[:count].split(size), strict=True):
                logits, these = slice_.to(wide), slice(first, first + len(slice_))
                losses = _logits_to_gradient(logits, targets[these], scale, softcap, wants_gradients, vocabulary)
                if rows is not None:
                    rows[these] = losses
                if row_weights is not None:
                    losses = losses * row_weights[these]
                    logits.mul_(row_weights[these].unsqueeze(1))
                loss += losses.sum()
                if into_bias is not None:
                    into_bias += logits.sum(0)
                if dtype != wide:
                    slice_.copy_(logits)
            if into_hidden is not None:
                into_hidden[start : start + chunk_rows] = (product @ weight)[:count]
            if into_weight is not None and into_weight.dtype == dtype:
                into_weight.addmm_(product.t(), chunk)
            elif into_weight is not None:
                into_weight += product.t() @ chunk
        if into_hidden is not None and vocabulary is not None:
            total = into_hidden.to(torch.promote_types(into_hidden.dtype, torch.float32))
            dist.all_reduce(total, group=vocabulary[0])
            into_hidden.copy_(total)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient):
        # Not in save_for_backward: the weight's gradient is scaled in place and passed on without a copy (in float32),
        # and hooks that move saved tensors to the CPU do not move it.
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "linear_cross_entropy can run backward only once"
        return *(g if g is None else g.mul_(loss_gradient) for g in gradients), *[None] * 9


def _logits_to_gradient(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    wants_gradient: bool,
    vocabulary: "tuple[dist.ProcessGroup, int] | None",
) -> Tensor:
    """Returns the losses (n,) of a chunk; overwrites the matmul's `logits` (n, V) by the loss's gradient, if requested.

    It works in place, because on a CPU a pass over a new (n, V) tensor costs more than the arithmetic.
    """
    is_here: Any = None
    targets = targets.unsqueeze(1)
    if vocabulary is not None:
        targets = targets - vocabulary[1]
        is_here = (targets >= 0) & (targets < logits.shape[1])
        targets = torch.where(is_here, targets, 0)
    if scale != 1.0:
        logits.mul_(scale)
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = logits.square().neg_().add_(1) if wants_gradient else None
        logits.mul_(softcap)
    largest = logits.amax(1, keepdim=True)
    if vocabulary is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=vocabulary[0])
    logits.sub_(largest)  # so that exp cannot overflow
    target_logits = logits.gather(1, targets)
    normalizer = logits.exp_().sum(1, keepdim=True)
    minus_one = torch.full_like(target_logits, -1)
    if vocabulary is not None:
        sums = torch.cat([normalizer, torch.where(is_here, target_logits, 0)], 1)
        dist.all_reduce(sums, group=vocabulary[0])
        normalizer, target_logits = sums.split(1, 1)
        minus_one *= is_here
    losses = (normalizer.log() - target_logits).squeeze(1)
    if wants_gradient:  # softmax minus one-hot, then the chain rule through tanh and scale
        logits.div_(normalizer).scatter_add_(1, targets, minus_one)
        if slope is not None:
            logits.mul_(slope)
        if scale != 1.0:
            logits.mul_(scale)
    return losses
