"""Full weights under ZeRO-3, which partitions the weights of a model while it is built."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate.state import AcceleratorState, is_initialized
from transformers.integrations import unset_hf_deepspeed_config
from transformers.integrations.deepspeed import deepspeed_config


def gathered(parameters: list[torch.nn.Parameter], modifier_rank: int | None = None) -> AbstractContextManager:
    """Returns a context with full parameters if ZeRO-3 has partitioned them; `modifier_rank` may change them."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank)


@contextmanager
def whole_weights() -> Iterator[None]:
    """Context manager in which ZeRO-3 does not partition the weights of a model while it is built.

    Otherwise random weights would differ from those of a single process. Each process temporarily holds the full model.
    Pretrained weights are still partitioned while they are loaded.
    """
    plugin = AcceleratorState().deepspeed_plugin if is_initialized() else None
    if plugin is None or deepspeed_config() is None:  # None also in a nested block
        yield
        return
    # The plugin's own zero3_init_context_manager(enable=False) has no effect: transformers 5.23 partitions the weights
    # nevertheless.
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()
