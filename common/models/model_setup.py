"""FSDP2 from a single copy of the weights: the main process builds the model, the others receive their shards.

Without it, each process of a machine would hold the full model until it is sharded. It replaces Accelerate's method,
which identifies an optimizer's parameters by their addresses (tensors on the meta device have none), ties weights that
a checkpoint keeps separate, and ignores persistent buffers. transformers 5.23 reads the weights on every rank.
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
    """The model that DDP or DeepSpeed wraps; any other as it is.

    Not Accelerate's `unwrap_model`, which imports DeepSpeed wherever it is installed.
    """
    return model if isinstance(model, PreTrainedModel) else getattr(model, "module", model)


def check_model(
    config: PreTrainedConfig, model_class: Any, make_empty: Callable[[], nn.Module], degrees: Degrees
) -> list[str]:
    """A line for what keeps a model from being shared as was asked, before it is built.

    model_class: an Auto class. make_empty: makes the model without data.
    """
    if degrees.sequence > 1:
        from common.parallel import sequence

        return list(sequence.check_model(config, model_class, degrees))
    if degrees.tensor > 1:
        from common.parallel import tensor

        return list(tensor.check_model(config, make_empty, degrees))
    return []


def whole_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """All weights, whole, on the main process; call it on all ranks together."""
    bare = without_wrapper(model)
    if hasattr(bare, "pipeline_stages"):
        return bare.pipeline_stages.whole_weights(bare)
    if hasattr(bare, "shares"):
        from common.parallel import tensor

        return tensor.whole_state_dict(bare)
    if accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return bare.state_dict()  # Accelerate's method imports DeepSpeed wherever it is installed
    return accelerator.get_state_dict(model)


def write_model(
    accelerator: Accelerator, model: nn.Module, directory: Path, dtype: str | None, *pretrained: Any
) -> PreTrainedModel | None:
    """Writes a directory that `from_pretrained` loads, whole or not at all; `Run.write_model` tells the rest.

    dtype: of the weights there, None for their own.
    """
    weights = whole_weights(accelerator, model)
    if not accelerator.is_main_process:
        return None
    model = without_wrapper(model)
    vars(model).pop("hf_quantizer", None)  # of a base in 4 bits: it would give its own weights to be saved, not these
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
    """`accelerator.prepare` of a model that `models.load.build_model` made; call it on all ranks together.

    Groups and state stay the objects that they were: an optimizer that wraps others shares these with them.

    Raises UserError: the learning rate would not reach an optimizer that another one wraps.
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
        wait_for_all()  # however long one of them read its data or its model
        if token_budget.adjusting():
            return _unwrapped(accelerator, model), accelerator.prepare(optimizer)
        return accelerator.prepare(model, optimizer)
    from common.models import fsdp_loading

    return fsdp_loading.prepare(accelerator, model, optimizer, weights)


def _unwrapped(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """The model without DDP, which sums gradients while a backward runs; with the main process's weights, as DDP."""
    model = accelerator.prepare_model(model, evaluation_mode=True)
    if accelerator.num_processes > 1:
        for one in (*model.parameters(), *model.buffers()):
            dist.broadcast(one.data, src=0)
    return model
