"""Applies parallelism other than DDP and ZeRO to a model, and collects its full weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from common.models.single_copy import holds_weights, main_builds_weights
from common.parallel.liveness import wait_for_all
from common.training.accumulation import RunAccelerator
from common.training.precision import is_fsdp
from common.training.process_grid import current_grid


def whole_weights(accelerator: Accelerator, model: nn.Module, bare: Any) -> Any:
    """Implements `model_setup.whole_weights` for sharded weights. bare: the model without its wrapper."""
    if hasattr(bare, "pipeline_stages"):
        return bare.pipeline_stages.whole_weights(bare)
    if hasattr(bare, "shares"):
        from common.parallel import tensor

        return tensor.whole_state_dict(bare)
    return accelerator.get_state_dict(model)


def prepare(accelerator: RunAccelerator, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Implements `model_setup.prepare` for FSDP2, sequence and tensor parallelism, and automatic token budgets."""
    is_source = main_builds_weights() and holds_weights()
    weights = {name: p.detach() for name, p in model.named_parameters()} if is_source else {}
    if current_grid().sequence > 1:
        from common.parallel import sequence

        sequence.share_sequences(model, current_grid())
    if current_grid().tensor > 1:
        from common.parallel import tensor

        tensor.cut_model(model, optimizer, current_grid())
    if main_builds_weights():
        from common.models import fsdp_loading

        return fsdp_loading.prepare(accelerator, model, optimizer, weights)
    wait_for_all()  # some ranks may take long to read their data or model
    if accelerator.token_budget:
        return _without_ddp(accelerator, model), accelerator.prepare(optimizer)
    return accelerator.prepare(model, optimizer)


def prepare_frozen(accelerator: RunAccelerator, build: Callable[[], PreTrainedModel]) -> Any:
    """Returns a second model, without gradients, on the device; sharded under FSDP2, full in other modes."""
    model = build().requires_grad_(False).eval()
    if not is_fsdp():
        return model.to(accelerator.device)
    from common.models import fsdp_loading

    weights = {name: p.detach() for name, p in model.named_parameters()} if holds_weights() else {}
    return fsdp_loading.prepare(accelerator, model, None, weights)[0]


def _without_ddp(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Returns the model with the main process's weights but without DDP, which all-reduces gradients in backward."""
    model = accelerator.prepare_model(model, evaluation_mode=True)
    if accelerator.num_processes > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)
    return model
