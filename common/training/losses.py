"""The sum of a language model's token losses, without its full logits.

Logits are the largest tensor of a training step: 8 x 1024 positions over a vocabulary of 128,000 use 4 GB in float32,
and cross-entropy needs several such tensors. `sum_token_losses(model)` computes the loss over a few hundred rows at a
time. `output_head` first finds how a model computes logits from its last hidden state. If it cannot reproduce them, the
model's own full logits are used.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from common.training.linear_cross_entropy import linear_cross_entropy
from common.training.output_head import Head, examine_head, restore_afterwards


def sum_token_losses(model: PreTrainedModel, chunk_rows: int = 512, keeps_own_loss: bool = True) -> str:
    """Makes `model(input_ids=..., targets=..., target_rows=...)` return the sum of its token losses.

    Call it on the bare model, before `Accelerator.prepare`. Without `targets` the model works as before.

    With `input_ids` (B, L), `targets` (N,) and `target_rows` (N,), position `target_rows[i]` of the flattened (B * L,)
    input predicts token `targets[i]`, without a further shift. The model returns a scalar tensor: the sum of the N
    cross-entropies in nats, in float32 (float64 for a float64 model). If N is 0, the loss is 0, and gradients are zero,
    not None. If the model's own loss has more terms (such as a router's load balancing) and is used, the result is N
    times its own mean loss. With `loss_of`, it is the result of this function of the token losses (N,).
    Raises UserError: the model's own loss has more terms and does not support shifted targets; or its logits cannot be
    reproduced, and its own loss is not their cross-entropy.

    Args:
        model: a causal LM. The `forward` of this instance and of its output layer are replaced.
        chunk_rows: maximum rows of logits at once. More than 256 brings little on a CPU.
        keeps_own_loss: whether the model's own loss is used if it has more terms than the cross-entropy.

    Returns: one line that describes the loss computation.
    """
    patched: Any = model
    original = patched.forward.__func__
    with restore_afterwards(model):
        loss_sum, message = _choose(model, chunk_rows, keeps_own_loss)

    def forward(self: Any, *args: Any, targets: Any = None, target_rows: Any = None, **kwargs: Any) -> Any:
        if targets is None:
            return original(self, *args, **kwargs)
        return loss_sum(self, original, targets, target_rows, **no_cache, **kwargs)

    signature = inspect.signature(original)
    no_cache = {"use_cache": False} if "use_cache" in signature.parameters else {}
    # A bound method, because accelerate's prepare() requires it. generate() reads the signature. functools.wraps is not
    # used, because accelerate's unwrap_model would follow __wrapped__ to the original forward.
    patched.forward = types.MethodType(forward, model)
    vars(forward)["__signature__"] = signature
    return message


def _choose(model: PreTrainedModel, chunk_rows: int, keeps_own_loss: bool) -> tuple[Callable[..., Any], str]:
    """Returns the function that computes the loss sum, and a line that describes it; equal on ranks without weights."""
    try:
        head = examine_head(model)
    except Exception as error:  # any error of a model's own code: use its own logits
        from common.training.own_loss import choose_own_loss

        return choose_own_loss(model, error, keeps_own_loss)
    message = "chunked linear cross-entropy" + (f", logits times {head.scale:g}" if head.scale != 1 else "")
    message += f", soft-capped at {head.softcap:g}" if head.softcap is not None else ""
    _add_loss(model.get_output_embeddings())
    return _chunked_loss_sum(head, chunk_rows), message


def _chunked_loss_sum(head: Head, chunk_rows: int) -> Callable[..., Any]:
    def loss_sum(model, original, targets, target_rows, input_ids, loss_of=None, **kwargs):
        backbone = model.get_submodule(head.backbone)
        hidden = backbone(input_ids=input_ids, **(head.backbone_arguments | kwargs))[0]
        hidden = hidden.flatten(0, 1).index_select(0, target_rows)
        # Calls the layer, not a function of its weight, because hooks all-gather the weight (ZeRO-3, FSDP).
        return model.get_output_embeddings()(
            hidden, targets=targets, scale=head.scale, softcap=head.softcap, chunk_rows=chunk_rows, loss_of=loss_of
        )

    return loss_sum


def _add_loss(head: nn.Module) -> None:
    """Makes the output layer return the loss if it is called with targets."""
    patched: Any = head
    original = patched.forward.__func__

    def forward(self: Any, hidden: Tensor, targets: Tensor | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return original(self, hidden)
        vocabulary = getattr(self, "vocabulary", None)  # set if the head's weight is partitioned among processes
        return linear_cross_entropy(hidden, self.weight, self.bias, targets, vocabulary=vocabulary, **kwargs)

    patched.forward = types.MethodType(forward, head)
