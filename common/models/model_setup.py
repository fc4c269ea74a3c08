"""Applies the parallelism mode to a model, and exports its full weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from common.files import complete_or_absent
from common.models.saved_model import ADAPTER_CONFIG
from common.models.single_copy import main_builds_weights
from common.parallel.distributed_mode import is_sharded
from common.parallel.liveness import wait_for_all
from common.training.accumulation import RunAccelerator
from common.training.process_grid import current_grid


def without_wrapper(model: nn.Module) -> Any:
    """Returns the model without the wrapper of DDP or DeepSpeed; other models are returned unchanged.

    Accelerate's `unwrap_model` is not used, because it imports DeepSpeed if it is installed.
    """
    return model if isinstance(model, PreTrainedModel) else getattr(model, "module", model)


def whole_weights(accelerator: Accelerator, model: nn.Module) -> Any:
    """Returns the full weights by name on the main process; other ranks ignore the result. Call it on all ranks."""
    if not is_sharded(accelerator):
        return without_wrapper(model).state_dict()
    from common.models import parallel_setup

    return parallel_setup.whole_weights(accelerator, model, without_wrapper(model))


def save_pretrained(pretrained: Iterable[Any], directory: str | Path) -> None:
    """Saves configurations, processors, and tokenizers without the truncation and padding of their last call."""
    for item in pretrained:
        if fast := getattr(item, "backend_tokenizer", None):
            fast.no_truncation(), fast.no_padding()
        item.save_pretrained(directory)


def write_model(
    accelerator: Accelerator, model: nn.Module, directory: Path, dtype: str | None, *pretrained: Any
) -> PreTrainedModel | None:
    """Writes a directory that `from_pretrained` loads, completely or not at all; see `Run.write_model`."""
    weights, bare = whole_weights(accelerator, model), without_wrapper(model)
    if not accelerator.is_main_process:
        return None
    if dtype is not None:
        from common.models import export_dtype

        weights = export_dtype.cast(weights, dtype)
    with complete_or_absent(directory) as unfinished:
        bare.save_pretrained(unfinished, state_dict=weights)
        if (unfinished / ADAPTER_CONFIG).is_file():
            from common.models import adapter_files

            adapter_files.write_config(bare.config, unfinished)
        elif dtype is not None:
            export_dtype.note(unfinished / "config.json", dtype)
        save_pretrained(pretrained, unfinished)
    return bare


def prepare(
    accelerator: RunAccelerator, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Applies `accelerator.prepare`, on all ranks together. Raises UserError: the optimizer wraps another optimizer."""
    made, groups, state = optimizer, optimizer.param_groups, optimizer.state
    if main_builds_weights() or current_grid().group_size > 1 or accelerator.token_budget:
        from common.models import parallel_setup

        prepared, optimizer = parallel_setup.prepare(accelerator, model, optimizer)
    else:
        wait_for_all()  # some ranks may take long to read their data or model
        prepared, optimizer = accelerator.prepare(model, optimizer)
    if not type(made).__module__.startswith("torch.optim."):
        from common.training import optimizer_choice

        optimizer_choice.keep_objects(made, groups, state)
        optimizer_choice.check_prepared(optimizer)
    return prepared, optimizer
