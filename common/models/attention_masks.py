"""Which attention mask does a micro-batch need? Decided by what the host knows: no forward waits for the device.

transformers looks twice whether a plain mask would do: at the positions, for several sequences packed into a row, and
at the padding mask, for one without padding. Each look is a wait a micro-batch, and inside torch.compile, where it
cannot look, SDPA gets a materialised mask in the place of its causal flag. The recipes know both answers when they
collate: a row is never packed, and there is a padding mask only where there is padding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionMaskInterface, masking_utils


def decide_on_the_host() -> None:
    """From now on transformers' masks, of SDPA and of eager attention, depend on shapes alone; in this process."""
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # no row holds several sequences
    AttentionMaskInterface.register("sdpa", partial(_mask, masking_utils.sdpa_mask, True))
    AttentionMaskInterface.register("eager", partial(_mask, masking_utils.eager_mask, False))


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
    """None where all tokens see all others, or by the flag all before them; else bool or float (B, 1, Q, KV)."""
    given |= {"q_length": q_length, "kv_length": kv_length, "local_size": local_size}
    if attention_mask is not None:  # there is padding: no look is needed
        return make(attention_mask=attention_mask, **given | {"allow_is_causal_skip": False})
    is_whole = local_size is None or kv_length < local_size
    is_causal = has_causal_flag and given.get("allow_is_causal_skip", True) and q_length == kv_length
    if is_whole and (allow_is_bidirectional_skip or is_causal):
        return None
    return make(allow_is_bidirectional_skip=allow_is_bidirectional_skip, **given)
