"""Applies the parallelism mode to a model, and exports its full weights.

FSDP2 starts from a single copy of the weights: the main process builds the model, the others receive their shards.
Otherwise each process of a machine would hold the full model until it is sharded. Accelerate's method is not used. It
identifies an optimizer's parameters by their addresses, but tensors on the meta device have none. It also ties weights
that a checkpoint keeps separate, and ignores persistent buffers. transformers 5.23 reads the weights on every rank.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.files import complete_or_absent
from common.models import export_dtype
from common.models.adapter_files import ADAPTER_CONFIG, write_config
from common.models.single_copy import has_one_copy, holds_weights
from common.parallel.liveness import wait_for_all
from common.training import token_budget
from common.training.optimizers import check_rate
from common.training.process_grid import Degrees, running


def without_wrapper(model: nn.Module) -> nn.Module:
    """Returns the model without the wrapper of DDP or DeepSpeed, any other model unchanged.

    Accelerate's `unwrap_model` is not used, because it imports DeepSpeed if it is installed.
    """
    return model if isinstance(model, PreTrainedModel) else getattr(model, "module", model)


def check_model(
    config: PreTrainedConfig, model_class: Any, make_empty: Callable[[], nn.Module], degrees: Degrees
) -> list[str]:
    """Returns one line per reason why the model does not support the requested parallelism, before it is built.

    model_class: an Auto class. make_empty: builds the model without data.
    """
    if degrees.sequence > 1:
        from common.parallel import sequence

        return list(sequence.check_model(config, model_class, degrees))
    if degrees.tensor > 1:
        from common.parallel import tensor

        return list(tensor.check_model(config, make_empty, degrees))
    return []


def whole_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Returns the full weights on the main process; call it on all ranks together."""
    bare = without_wrapper(model)
    if hasattr(bare, "pipeline_stages"):
        return bare.pipeline_stages.whole_weights(bare)
    if hasattr(bare, "shares"):
        from common.parallel import tensor

        return tensor.whole_state_dict(bare)
    if accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return bare.state_dict()  # Accelerate's method imports DeepSpeed if it is installed
    return accelerator.get_state_dict(model)


def write_model(
    accelerator: Accelerator, model: nn.Module, directory: Path, dtype: str | None, *pretrained: Any
) -> PreTrainedModel | None:
    """Writes a directory that `from_pretrained` loads, completely or not at all; `Run.write_model` documents the rest.

    dtype: dtype of the written weights; None: unchanged.
    """
    weights = whole_weights(accelerator, model)
    if not accelerator.is_main_process:
        return None
    model = without_wrapper(model)
    vars(model).pop("hf_quantizer", None)  # the quantizer of a 4-bit base would save its own weights instead
    with complete_or_absent(directory) as unfinished:
        model.save_pretrained(unfinished, state_dict=export_dtype.cast(weights, dtype))
        if not (unfinished / ADAPTER_CONFIG).is_file():
            export_dtype.note(unfinished / "config.json", dtype)
        write_config(model.config, unfinished)
        for one in pretrained:
            one.save_pretrained(unfinished)
    return model


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Applies `accelerator.prepare` to a model that `models.load.build_model` built; call it on all ranks together.

    The groups and the state stay the same objects, because an optimizer that wraps others shares them with these.

    Raises UserError: the learning rate would not reach an optimizer that a different optimizer wraps.
    """
    inner, groups, state = optimizer, optimizer.param_groups, optimizer.state
    model, optimizer = _prepare(accelerator, model, optimizer)
    if vars(inner).get("param_groups", groups) is not groups:  # Accelerate has loaded a copy of the optimizer's state
        for group, new in zip(groups, inner.param_groups, strict=True):
            if new is not group:
                group.clear()
                group.update(new)
        inner.param_groups = groups
    if vars(inner).get("state", state) is not state:
        new = dict(inner.state)
        state.clear()
        state.update(new)
        inner.state = state
    check_rate(optimizer)
    return model, optimizer


def _prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    weights = {name: p.detach() for name, p in model.named_parameters()} if has_one_copy() and holds_weights() else {}
    if running().sequence > 1:
        from common.parallel import sequence

        sequence.share_sequences(model, running())
    if running().tensor > 1:
        from common.parallel import tensor

        tensor.cut_model(model, optimizer, running())
    if not has_one_copy():
        wait_for_all()  # some ranks may read their data or model for a long time
        if token_budget.adjusting():
            return _unwrapped(accelerator, model), accelerator.prepare(optimizer)
        return accelerator.prepare(model, optimizer)
    from common.models import fsdp_loading

    return fsdp_loading.prepare(accelerator, model, optimizer, weights)


def _unwrapped(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Returns the model with the main process's weights, but without DDP, which sums gradients during backward."""
    model = accelerator.prepare_model(model, evaluation_mode=True)
    if accelerator.num_processes > 1:
        for one in (*model.parameters(), *model.buffers()):
            dist.broadcast(one.data, src=0)
    return model
