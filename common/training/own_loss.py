"""The summed loss of a causal language model whose logits cannot be reproduced: from its own logits or its own loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import UserError
from common.training.output_head import MoreTerms, own_loss_is_cross_entropy


def choose_own_loss(model: PreTrainedModel, error: Exception, keeps_own_loss: bool) -> tuple[Callable[..., Any], str]:
    """Returns the function that computes the loss sum, and a line that describes it; equal on ranks without weights.

    error: error of `examine_head`.
    """
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    reason = " ".join(f"{error}".split())[:200] or type(error).__name__
    if isinstance(error, MoreTerms) and keeps_own_loss:
        if has_weights:
            _check_shifted_targets(model)
        message = f"the model's own loss over full logits (because {reason}); it is a mean per micro-batch, so "
        return _own_loss_sum, message + "that the update depends slightly on the split of the global batch"
    if not isinstance(error, MoreTerms) and has_weights and not own_loss_is_cross_entropy(model, _few_tokens(model)):
        problem = f"{type(model).__name__}: its own loss is not the cross-entropy of its logits"
        raise UserError(f"{problem}; use a different model") from error
    return _full_logits_loss_sum, f"cross-entropy over the model's own full logits (because {reason})"


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
        labels[0] = 0  # because a mean over no targets is NaN; this loss is multiplied by count = 0
    labels = labels.view_as(input_ids)
    return original(model, input_ids=input_ids, labels=labels, shift_labels=labels, **kwargs).loss * count


def _check_shifted_targets(model: PreTrainedModel) -> None:
    """Checks that a target affects the gradient of the model's own loss only at the row of this target."""
    ids, rows = _few_tokens(model), [1, 2, 5]
    model.eval()  # without dropout or router noise, because two runs are compared

    def logits_gradient(target: int) -> Tensor:
        labels = torch.full_like(ids, -100)
        labels[0, rows] = target
        output = model(input_ids=ids, labels=labels, shift_labels=labels)
        return torch.autograd.grad(output.loss, output.logits)[0][0]

    try:
        with torch.enable_grad():  # terms that do not depend on targets (a z-loss) cancel in the difference
            change = (logits_gradient(1) - logits_gradient(2)).abs().amax(1)
        changed = (change > 1e-3 * change.max()).nonzero().flatten().tolist()
    except Exception as error:
        raise UserError(f"{type(model).__name__}: cannot run its own loss with shift_labels: {error}") from error
    if changed != rows:
        raise UserError(f"{type(model).__name__}: its own loss ignores shift_labels; use a loss that supports them")


def _few_tokens(model: PreTrainedModel) -> Tensor:
    return torch.arange(8, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
