"""The cross-entropy of an output head without full logits: loss and gradients are computed together, in chunks.

torch's `F.linear_cross_entropy(options=...)` is not used: it supports neither scale nor soft-cap, requires torch 2.13,
and returns the sum in bf16, with errors of 3e-4 and more. In float32 on a CPU, it uses 1.3 times the time and memory.
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

# Elements (1 MB in float32), so that the passes of a softmax read from the CPU's cache.
CACHED_LOGITS = 2**18
# In bf16 on a CPU, the number of rows is a multiple of this: see loader_sizes.PAD_MULTIPLE.
ROW_MULTIPLE = 64


@torch.compiler.disable  # because its loop would be unrolled, and compiled again for every number of targets
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
    criterion: Callable[..., Tensor] | None = None,
) -> Any:
    """Returns the summed cross-entropies of `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`, in nats.

    Shapes: hidden (N, D), weight (V, D), bias (V,) or None, targets (N,) int64; the result is a scalar. At most
    `chunk_rows` rows of logits exist at once (twice as many in bf16 on a CPU, at least `fused_softmax.CHUNK_LOGITS`
    logits on a GPU). Backward needs only the gradients, which forward has computed.

    Matmuls run in autocast's dtype, or without autocast in the weight's dtype; the softmax in float32 at least. Forward
    computes the gradients too, while a chunk's softmax is available, as in Liger Kernel (arXiv:2410.10989). Backward
    can run only once per forward.

    Args:
        vocabulary: if the weight is partitioned among ranks: their group, and the first token id of this rank's part.
            All ranks have the same rows and targets, and get the loss and the gradient of `hidden` of the full weight.
        loss_of: replaces the sum: maps the token losses (N,) to a tuple of the loss and values without gradient, which
            is returned. It needs a fourth matmul per chunk. If no gradient is required, it may return anything.
        criterion: replaces `_logits_to_gradient`, for chunks of rows; `targets` (N,) may then have any meaning.
    """
    dtype = weight.dtype
    if dtype != torch.float64:  # autocast does not change float64
        dtype = autocast_dtype(weight.device) or dtype
    with_gradients = torch.is_grad_enabled()  # inside an autograd.Function gradients are always off

    def loss_sum(with_gradients: bool, row_weights: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        options = (scale, softcap, chunk_rows, dtype, with_gradients, vocabulary, criterion, row_weights, rows)
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
        scale, softcap, chunk_rows, dtype, with_gradients, vocabulary, criterion, row_weights, rows = options
        needed = [with_gradients and is_needed for is_needed in ctx.needs_input_grad[:3]]
        # Gradients of weight and bias are sums over chunks, in float32 at least; autograd casts them at the end.
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        hidden_grad = torch.zeros_like(hidden) if needed[0] else None
        weight_grad = torch.zeros_like(weight, dtype=sum_dtype) if needed[1] and not len(hidden) else None
        bias_grad = torch.zeros_like(bias, dtype=sum_dtype) if needed[2] else None

        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)  # once, not once per chunk
        is_cpu, wide = weight.device.type == "cpu", torch.promote_types(dtype, torch.float32)
        multiple_of, fused = 1, None
        if is_cpu and dtype != wide:
            # Twice the rows use the memory of a float32 chunk, because only a slice is in float32 at a time.
            chunk_rows, multiple_of = 2 * chunk_rows, ROW_MULTIPLE
        elif weight.device.type == "cuda" and bias is None and vocabulary is criterion is None:
            from common.training import fused_softmax

            fused, chunk_rows = fused_softmax.choose(weight, chunk_rows)
        to_gradient = criterion or (fused.compiled() if fused else _logits_to_gradient)
        products = hidden.new_empty(round_up(min(chunk_rows, len(hidden)), multiple_of), len(weight), dtype=dtype)
        loss = hidden.new_zeros((), dtype=wide)
        for start in range(0, len(hidden), chunk_rows):
            chunk = hidden[start : start + chunk_rows].to(dtype)
            count = len(chunk)
            if padding := round_up(count, multiple_of) - count:
                chunk = F.pad(chunk, (0, 0, 0, padding))
            product = products[: len(chunk)]
            if bias is None:
                torch.mm(chunk, weight.t(), out=product)
            else:
                torch.addmm(bias, chunk, weight.t(), out=product)
            # With a partitioned vocabulary, each slice needs two collectives.
            size = max(1, CACHED_LOGITS // len(weight)) if is_cpu and vocabulary is None else chunk_rows
            for first, slice_ in zip(range(start, start + count, size), product[:count].split(size), strict=True):
                part = slice(first, first + len(slice_))
                factors = None if row_weights is None else row_weights[part]
                logits = slice_ if fused else slice_.to(wide)
                losses = to_gradient(logits, targets[part], factors, scale, softcap, any(needed), vocabulary)
                if rows is not None:
                    rows[part] = losses
                loss += (losses if factors is None else losses * factors).sum()
                if bias_grad is not None:
                    bias_grad += logits.sum(0)
                if logits.dtype != dtype:
                    slice_.copy_(logits)
            if hidden_grad is not None:
                hidden_grad[start : start + chunk_rows] = (product @ weight)[:count]
            if needed[1]:
                add = fused.add_product if fused and sum_dtype != dtype else _add_product
                weight_grad = add(weight_grad, product.t(), chunk)
        if hidden_grad is not None and vocabulary is not None:
            total = hidden_grad.to(torch.promote_types(hidden_grad.dtype, torch.float32))
            dist.all_reduce(total, group=vocabulary[0])
            hidden_grad.copy_(total)
        ctx.gradients = [hidden_grad, weight_grad, bias_grad]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient):
        # Not in save_for_backward: the weight's gradient is scaled in place and returned without a copy (in float32);
        # saved-tensor hooks that offload to the CPU must not copy it.
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "linear_cross_entropy can run backward only once"
        return *(g if g is None else g.mul_(loss_gradient) for g in gradients), *[None] * 10


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Returns `total + a @ b` in float32 at least, added in place; the first sum of a large array needs no zeros."""
    if total is None:
        return (a @ b).to(torch.promote_types(a.dtype, torch.float32))
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(a @ b)


def _logits_to_gradient(
    logits: Tensor,
    targets: Tensor,
    row_weights: Tensor | None,
    scale: float,
    softcap: float | None,
    wants_gradient: bool,
    vocabulary: "tuple[dist.ProcessGroup, int] | None",
) -> Tensor:
    """Returns the losses (n,) of a chunk; overwrites `logits` (n, V), a matmul's output, with their gradient."""
    is_local: Any = None
    targets = targets.unsqueeze(1)
    if vocabulary is not None:
        targets = targets - vocabulary[1]
        is_local = (targets >= 0) & (targets < logits.shape[1])
        targets = torch.where(is_local, targets, 0)
    if scale != 1.0:
        logits.mul_(scale)
    tanh_derivative = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        tanh_derivative = logits.square().neg_().add_(1) if wants_gradient else None
        logits.mul_(softcap)
    row_max = logits.amax(1, keepdim=True)
    if vocabulary is not None:
        dist.all_reduce(row_max, dist.ReduceOp.MAX, group=vocabulary[0])
    logits.sub_(row_max)  # so that exp cannot overflow
    target_logits = logits.gather(1, targets)
    normalizer = logits.exp_().sum(1, keepdim=True)
    minus_one = torch.full_like(target_logits, -1)
    if vocabulary is not None:
        sums = torch.cat([normalizer, torch.where(is_local, target_logits, 0)], 1)
        dist.all_reduce(sums, group=vocabulary[0])
        normalizer, target_logits = sums.split(1, 1)
        minus_one *= is_local
    losses = (normalizer.log() - target_logits).squeeze(1)
    if wants_gradient:  # softmax minus one-hot, then the chain rule through tanh and scale
        logits.div_(normalizer).scatter_add_(1, targets, minus_one)
        if tanh_derivative is not None:
            logits.mul_(tanh_derivative)
        if scale != 1.0:
            logits.mul_(scale)
        if row_weights is not None:
            logits.mul_(row_weights.unsqueeze(1))
    return losses
