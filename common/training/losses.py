"""The sum of a language model's token losses, without its full logits.

Logits are the largest tensor of a training step: 8 x 1024 positions over a vocabulary of 128,000 use 4 GB in float32,
and cross-entropy needs several such tensors. `sum_token_losses(model)` makes a transformers causal LM compute its loss
over a few hundred rows at a time. Some models apply more than a matmul between their last hidden state and their
logits. Therefore the model's behaviour is first measured on random numbers. A model that cannot be reproduced keeps its
own logits.
"""

import inspect
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.errors import UserError
from common.training.linear_cross_entropy import linear_cross_entropy
from common.training.output_head import (
    Head,
    MoreTerms,
    check_own_loss_takes_shifted_targets,
    examine_head,
    left_unchanged,
    own_loss_is_cross_entropy,
)


def sum_token_losses(model: PreTrainedModel, chunk_rows: int = 512, keeps_own_loss: bool = True) -> str:
    """Makes `model(input_ids=..., targets=..., target_rows=...)` return the sum of its token losses.

    Call it on the bare model, before `Accelerator.prepare`. Without `targets` the model works as before.

    Args:
        model: a causal LM. Its `forward` and its output layer's are replaced, on these two instances only.
        chunk_rows: maximum rows of logits at once. More than 256 gains little on a CPU.
        keeps_own_loss: whether the model's own loss is used if it has more terms than the cross-entropy.

    The model is then called with `input_ids` (B, L), `targets` (N,) and `target_rows` (N,). Position `target_rows[i]`
    of the flattened (B * L,) input predicts token `targets[i]`; nothing is shifted inside. It returns a scalar tensor:
    the sum of the N cross-entropies in nats, in float32 (float64 for a float64 model). If N is 0, the loss is 0, and
    every parameter has a zero gradient, not None. If the model's own loss has more terms (such as a router's load
    balancing) and is used, it returns N times its own mean loss. With `loss_of`, a function of the token losses (N,),
    it returns that function's result, as in `linear_cross_entropy`.

    Returns: one line that describes the loss computation.
    Raises UserError: the model's own loss has more terms and does not support shifted targets; or its logits cannot be
    reproduced, and its own loss is not their cross-entropy.
    """
    original = model.forward.__func__
    with left_unchanged(model):
        loss_sum, message = _choose(model, chunk_rows, keeps_own_loss)

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


def _choose(model: PreTrainedModel, chunk_rows: int, keeps_own_loss: bool) -> tuple[Callable[..., Tensor], str]:
    """Returns the function that computes the loss sum, and a line that describes it; equal on ranks without weights."""
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    try:
        head = examine_head(model)
    except MoreTerms as reason:
        if not keeps_own_loss:
            return _full_logits_loss_sum, f"cross-entropy over the model's own full logits (because {reason})"
        if has_weights:
            check_own_loss_takes_shifted_targets(model)
        message = f"the model's own loss over full logits (because {reason}); it is a mean of each micro-batch, so "
        return _own_loss_sum, message + "that the update depends, a little, on how its global batch is cut"
    except Exception as error:  # any error of foreign code: not reproducible, but the model has its own logits
        reason = " ".join(f"{error}".split())[:200] or type(error).__name__
        if has_weights and not own_loss_is_cross_entropy(model):
            name = type(model).__name__
            raise UserError(f"{name}: its own loss is not the cross-entropy of its logits; take another") from error
        return _full_logits_loss_sum, f"cross-entropy over the model's own full logits (because {reason})"
    message = f"chunked linear cross-entropy, {chunk_rows} rows at once"
    message += f", logits times {head.scale:g}" if head.scale != 1 else ""
    message += f", soft-capped at {head.softcap:g}" if head.softcap is not None else ""
    _give_head_a_loss(model.get_output_embeddings())
    return _chunked_loss_sum(head, chunk_rows), message


def _chunked_loss_sum(plan: Head, chunk_rows: int) -> Callable[..., Tensor]:
    def loss_sum(model, original, targets, target_rows, input_ids, loss_of=None, **kwargs):
        backbone = model.get_submodule(plan.backbone)
        hidden = backbone(input_ids=input_ids, **(plan.backbone_arguments | kwargs))[0]
        hidden = hidden.flatten(0, 1).index_select(0, target_rows)
        # Calls the layer itself, so that hooks run that all-gather its weight (ZeRO-3, FSDP).
        return model.get_output_embeddings()(
            hidden, targets=targets, scale=plan.scale, softcap=plan.softcap, chunk_rows=chunk_rows, loss_of=loss_of
        )

    return loss_sum


def _give_head_a_loss(head: nn.Linear) -> None:
    original = head.forward.__func__

    def forward(self, hidden: Tensor, targets: Tensor | None = None, **kwargs) -> Tensor:
        if targets is None:
            return original(self, hidden)
        vocabulary = getattr(self, "vocabulary", None)  # set if the head's weight is partitioned among processes
        return linear_cross_entropy(hidden, self.weight, self.bias, targets, vocabulary=vocabulary, **kwargs)

    head.forward = types.MethodType(forward, head)


def _full_logits_loss_sum(model, original, targets, target_rows, loss_of=None, **kwargs) -> Tensor:
    logits = original(model, **kwargs)[0].flatten(0, 1).index_select(0, target_rows)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if loss_of is None:
        return F.cross_entropy(logits, targets, reduction="sum")
    return loss_of(F.cross_entropy(logits, targets, reduction="none"))


def _own_loss_sum(model, original, targets, target_rows, input_ids, **kwargs) -> Tensor:
    count = len(targets)
    labels = targets.new_full((input_ids.numel(),), -100).index_copy(0, target_rows, targets)
    if count == 0:
        labels[0] = 0  # a mean over no targets is NaN; this mean is multiplied by 0
    labels = labels.view_as(input_ids)
    return original(model, input_ids=input_ids, labels=labels, shift_labels=labels, **kwargs).loss * count
