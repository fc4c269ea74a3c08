"""Shards the weights of the main process over the ranks of FSDP2. Each other rank receives only its shards.

Otherwise each process would hold the full model until it is sharded. Accelerate's own method is not used, because it
finds an optimizer's parameters by their addresses, which meta tensors do not have, ties weights that a checkpoint keeps
separate, and ignores persistent buffers. Loading by transformers 5.23 reads the weights on every rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import distribute_tensor

from common.models.decisions import decided_once


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, weights: dict[str, torch.Tensor]
) -> tuple[nn.Module, Any]:
    """Applies `accelerator.prepare` to a model whose `weights` only the main process holds; call it on all ranks.

    optimizer: None for a frozen model, which Accelerate does not prepare again when it shards a second model.
    """
    tied, groups, buffers, generation = decided_once(lambda: _describe(model, optimizer))
    if generation is not None:  # only the main process has read it from the files
        model.generation_config = generation
    empty = _empty(model, tied, buffers)
    for group, names in zip(_groups(optimizer), groups, strict=True):
        group["params"] = [empty[name] for name in names]
    plugin = accelerator.state.fsdp_plugin
    settings = plugin.cpu_ram_efficient_loading, plugin.transformer_cls_names_to_wrap
    plugin.cpu_ram_efficient_loading = False
    try:
        # The parameters are on the meta device, so no values are copied.
        if optimizer:
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            plugin.transformer_cls_names_to_wrap = None  # layers of the trained model
            model = fsdp2_prepare_model(accelerator, model)
    finally:
        plugin.cpu_ram_efficient_loading, plugin.transformer_cls_names_to_wrap = settings
    _give_shards(model, tied, weights, to_host=isinstance(plugin.cpu_offload, CPUOffloadPolicy))
    named = dict(model.named_parameters())
    for group, names in zip(_groups(optimizer), groups, strict=True):
        group["params"] = [named[name] for name in names]
    return model, optimizer


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return optimizer.param_groups if optimizer else []


def _describe(model: nn.Module, optimizer: Any) -> tuple[dict[str, str], list[list[str]], dict[str, torch.Tensor], Any]:
    """Returns the properties of the model that may be missing or different on a rank without weights.

    These are, for each parameter name, the first name of the same parameter (tied parameters have several names), the
    parameter names of each optimizer group, the buffers, and the generation config or None.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    tied = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    groups = [[names[id(p)] for p in group["params"]] for group in _groups(optimizer)]
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return tied, groups, buffers, getattr(model, "generation_config", None)


def _empty(model: nn.Module, tied: dict[str, str], buffers: dict[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """Moves the parameters to the meta device and sets the buffers; returns the parameters by name, tied ones once."""
    empty: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        prefix += "." if prefix else ""
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            new = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            module.register_parameter(name, empty.setdefault(tied[prefix + name], new))
        for name, _ in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffers[prefix + name])
    return empty


@torch.no_grad()
def _give_shards(model: nn.Module, tied: dict[str, str], weights: dict[str, torch.Tensor], to_host: bool) -> None:
    """Sends each rank its shard of each parameter, one parameter at a time; frees the main process's `weights`."""
    shards: dict[str, nn.Parameter] = {}
    shares = getattr(model, "shares", None)
    p: Any
    for name, p in model.named_parameters():
        device, share = p.device_mesh.device_type, shares.of.get(name) if shares else None
        shape = share.shape if share else p.shape
        whole = weights.pop(name).to(device) if weights else torch.empty(shape, dtype=p.dtype, device=device)
        if share:  # the mesh contains only ranks with the same part of this parameter
            dist.broadcast(whole, src=0)
            whole = whole if share.dim is None else whole.narrow(share.dim, share.start, p.shape[share.dim])
        shard = distribute_tensor(whole, p.device_mesh, p.placements)
        shards[name] = nn.Parameter(shard.cpu() if to_host else shard, requires_grad=p.requires_grad)
    model.load_state_dict({name: shards[first] for name, first in tied.items()}, strict=False, assign=True)
