"""Sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509): N processes share each sequence.

In a transformer, each token is processed independently, except in attention. So each process of a sequence group runs
the model on its part of the tokens. An all-to-all before attention gives each process the full sequences for H / N of
the H heads; an all-to-all after attention returns the output to the parts of the tokens. In attention, masks, windows
and kernels are therefore the same as with one process. Activations use 1 / N of the memory.

Queries, keys and values are exchanged in one all-to-all. A process sends (N - 1) / N of its part, which is 1 / N of the
sequence, so the communication volume per process falls with N.
"""

import inspect
import math
from collections.abc import Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from common.errors import UserError
from common.internals.transformers_uncommon import attention_name, supports_sdpa
from common.parallel.process_groups import group_of, group_ranks
from common.training.precision import autocast_dtype
from common.training.process_grid import ProcessGrid
from common.training.token_positions import computes_positions, has_longrope, why_not_by_attention

# Supported layer types. All others pass information between tokens outside of attention.
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def check_model(config: PreTrainedConfig, model_class: Any, grid: ProcessGrid) -> Iterator[str]:
    """Yields one line per reason why a model does not support sequence parallelism; called before it is built."""
    if grid.sequence == 1:
        return
    setting = f"parallelism_config_sp_size {grid.sequence}"
    if model_class is not AutoModelForCausalLM:
        yield f"{setting} is for causal language models (lm.py, moe.py, long_sequence.py); set it to 1"
        return
    name, text = config.model_type, config.get_text_config()
    if why := _why_not(config):
        yield f"{setting}: {name} {why}; set it to 1, or use a different model"
        return
    for heads in {text.num_attention_heads, *(getattr(text, "num_attention_heads_per_layer", None) or ())}:
        if heads % grid.sequence:
            fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            yield f"{setting} does not divide the model's {heads} attention heads; use one of {fit}"


def _why_not(config: PreTrainedConfig) -> str | None:
    """Returns why a causal LM does not support sequence parallelism, as the end of a sentence; None if it does."""
    if why := why_not_by_attention(config, LAYER_TYPES):
        return why
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = config.get_text_config()
    if not supports_sdpa(kind) or not kind.is_backend_compatible():
        return "does not use transformers' attention interface, or does not support SDPA"
    if computes_positions(config):
        return "computes positions or masks itself, so the positions of each part would start at 0"
    if has_longrope(config):
        return "has rotary positions (longrope) that depend on the largest position, which differs between the parts"
    if getattr(text, "use_bidirectional_attention", False) or getattr(text, "layerdrop", 0):
        return "attends to later tokens, or drops layers at random (layerdrop)"
    if not isinstance(getattr(text, "num_attention_heads", None), int):
        return "does not define the number of attention heads per layer"
    return None


def share_sequences(model: PreTrainedModel, grid: ProcessGrid) -> None:
    """Enables sequence parallelism in the forward passes of this process, until `whole_sequences` is called.

    Call it on the bare model, on all ranks together. A forward raises UserError if a layer's attention does not use
    transformers' interface, because such a layer would see only this process's part of the tokens.
    """
    if grid.sequence == 1:
        return
    name, num_layers = type(model).__name__, getattr(model.config.get_text_config(), "num_hidden_layers", 1)
    if attention_name(model) != "sdpa" or not type(model).__module__.startswith("transformers."):
        raise UserError(
            f"parallelism_config_sp_size: {name} is not a class of transformers, or does not use SDPA; set it to 1"
        )
    whole_sequences()  # the registered functions may be wrapped for an earlier model of this process
    group, calls = group_of(group_ranks), []
    attention, mask = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]

    @wraps(attention)
    def shared_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any):
        calls.append(module)
        num_key_heads = key.shape[1]
        query, key, value = _to_heads(query, key, value, group)
        if num_key_heads % group.size():  # `_to_heads` has repeated keys, so the module's number of groups is wrong
            causal = getattr(module, "is_causal", True)
            module = SimpleNamespace(is_causal=causal, num_key_value_groups=query.shape[1] // key.shape[1])
        output, _ = attention(module, query, key, value, *args, **given)
        return _to_tokens(output, group), None

    @wraps(mask)
    def whole_mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **given: Any):
        assert attention_mask is None, "a part of a sequence has no mask of its own"
        q_length, kv_length = q_length * group.size(), kv_length * group.size()
        return mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **given)

    def check_calls(*_: Any) -> None:
        if AttentionInterface()["sdpa"] is shared_attention and len(calls) < num_layers:
            raise UserError(
                f"parallelism_config_sp_size: {name} has layers that compute attention themselves; set it to 1"
            )

    AttentionInterface.register("sdpa", shared_attention)
    AttentionMaskInterface.register("sdpa", whole_mask)
    model.register_forward_pre_hook(lambda *_: calls.clear())  # also removes the calls of a recomputation
    model.register_forward_hook(check_calls)


def whole_sequences() -> None:
    """Disables sequence parallelism in this process, for example to generate a sample."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface.register("sdpa", inspect.unwrap(interface()["sdpa"]))


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of (N, ...) in the group: part i goes to process i; part j of the result comes from process j."""
    return _AllToAll.apply(parts.contiguous(), group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts, group):
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        returned = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(returned, gradient.contiguous(), group=ctx.group)
        return returned, None


def _to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Converts query, key and value, each (B, H, L / N, D) with its own H and D, to (B, H / N, L, D).

    If N does not divide the number of key-value heads, they are repeated. Under autocast, results have its dtype.
    """
    size, dtype = group.size(), autocast_dtype(query.device) or query.dtype
    num_heads = query.shape[1]
    parts, shapes = [], []
    for x in (query, key, value):
        if x.shape[1] % size:
            assert num_heads % x.shape[1] == 0, f"{num_heads} heads, {x.shape[1]} of keys and values"
            x = x.repeat_interleave(math.lcm(x.shape[1], size) // x.shape[1], dim=1)
        batch, heads, length, width = x.shape
        x = x.to(dtype).reshape(batch, size, heads // size, length, width).transpose(0, 1)
        parts.append(x.flatten(1))
        shapes.append(x.shape)
    received = _exchange(torch.cat(parts, 1), group).split([part.shape[1] for part in parts], 1)
    whole = [x.view(shape) for x, shape in zip(received, shapes, strict=True)]  # (N, B, H / N, L / N, D)
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in whole]


def _to_tokens(output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Converts (B, L, H / N, D) to (B, L / N, H, D)."""
    batch, length, heads, width = output.shape
    size = group.size()
    parts = output.view(batch, size, length // size, heads, width).transpose(0, 1)
    return _exchange(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)
