"""Selects the attention mask of a micro-batch on the host, so no forward pass waits for the device.

transformers checks twice per micro-batch whether a plain mask is sufficient: for packed sequences and for padding. Each
check waits for the device, and is impossible inside torch.compile. The recipes know both answers beforehand: rows are
packed if `document_masks.mask_documents` was called, and a padding mask exists only if there is padding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionMaskInterface, masking_utils
from transformers.utils.import_utils import is_tracing

from common.internals.transformers import find_documents_with
from common.process import this_process


def decide_on_the_host() -> None:
    """Makes the masks of SDPA and eager attention depend only on shapes, for all transformers models of a process."""
    find_documents_with(_documents_of)
    AttentionMaskInterface.register("sdpa", partial(_mask, masking_utils.sdpa_mask, True))
    AttentionMaskInterface.register("eager", partial(_mask, masking_utils.eager_mask, False))


def _documents_of(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Returns the index of each token's document, (B, L), if rows are packed; otherwise None."""
    if this_process().has_document_mask:  # a document begins wherever positions do not continue
        return torch.nn.functional.pad((position_ids.diff() != 1).cumsum(-1), (1, 0))
    if position_ids.device.type == "cpu" and not is_tracing(position_ids) and (position_ids[..., 1:] == 0).any():
        from common.models.document_masks import check_unpacked

        check_unpacked(position_ids)
    return None


def _mask(
    make: Callable[..., torch.Tensor | None],
    has_causal_flag: bool,
    *,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False,
    **given: Any,
) -> torch.Tensor | None:
    """Returns the mask, bool or float (B, 1, Q, KV).

    None if all tokens attend to all others or, with `has_causal_flag`, if the mask would be only causal.
    """
    given |= {"q_length": q_length, "kv_length": kv_length, "local_size": local_size}
    if attention_mask is not None:  # a mask means padding: its values need no check
        return make(attention_mask=attention_mask, **given | {"allow_is_causal_skip": False})
    is_whole = local_size is None or kv_length < local_size
    is_causal = has_causal_flag and given.get("allow_is_causal_skip", True) and q_length == kv_length
    if is_whole and (allow_is_bidirectional_skip or is_causal):
        return None
    return make(allow_is_bidirectional_skip=allow_is_bidirectional_skip, **given)
