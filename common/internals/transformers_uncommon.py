"""Private names of transformers for pretrained models and properties of models. Tested with 5.17 and 5.23."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.internals.library import private


def has_model(auto_class: Any, config: Any) -> bool:
    """Returns whether an Auto class has a model for the type of a configuration.

    Needs `_model_mapping` of the Auto class; raises UserError without it. The public mappings
    (`MODEL_FOR_CAUSAL_LM_MAPPING`, ...) cannot be found from an Auto class.
    """
    return type(config) in private(auto_class, "_model_mapping")


def make_model(model_class: Any, config: Any, **options: Any) -> Any:
    """Returns a model with random weights, for a class that is not an Auto class.

    Needs `PreTrainedModel._from_config`; raises UserError without it. The constructor ignores `dtype`, the requested
    attention and ZeRO-3.
    """
    return private(model_class, "_from_config")(config, **options)


@torch.no_grad()
def draw_weights(model: Any, module: nn.Module) -> None:
    """Draws new random weights for the parameters of one layer of the model, as in a new model.

    Needs `_init_weights` of the model, which skips parameters with `_is_hf_initialized`. The public `init_weights`
    draws all weights of the model.
    """
    owners: tuple[Any, ...] = (module, *module.parameters(recurse=False))
    for owner in owners:
        owner._is_hf_initialized = False
    private(type(model), "_init_weights")(model, module)


@contextmanager
def read_matrices_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Makes `from_pretrained` load matrices in `dtype`, without a float32 copy, and vectors as usual; None: no effect.

    Overwrites `PreTrainedModel._get_dtype_plan` for the duration of the block; raises UserError without it.
    """
    if dtype is None:
        yield
        return
    from transformers import PreTrainedModel

    plan = private(PreTrainedModel, "_get_dtype_plan")

    def with_matrices(model: Any, requested: torch.dtype) -> dict[str, torch.dtype]:
        names = (name for name, weight in model.named_parameters() if weight.ndim > 1)
        return {f"^{re.escape(name)}$": dtype for name in names} | plan(model, requested)

    owner: Any = PreTrainedModel
    owner._get_dtype_plan = with_matrices
    try:
        yield
    finally:
        owner._get_dtype_plan = plan


@contextmanager
def keep_untied(names: list[str]) -> Iterator[None]:
    """Makes `from_pretrained` leave these weights untied.

    Overwrites `PreTrainedModel.tie_weights` for the duration of the block; needs the arguments of transformers 5. By
    itself, transformers unties different values, but not under ZeRO-3, where each process has only a part of them.
    """
    if not names:
        yield
        return
    from transformers import PreTrainedModel

    original = PreTrainedModel.tie_weights

    def tie_others(self: Any, missing_keys: Any = None, recompute_mapping: bool = True) -> None:
        for name in names:
            self.all_tied_weights_keys.pop(name, None)
        original(self, missing_keys=missing_keys, recompute_mapping=False)

    owner: Any = PreTrainedModel
    owner.tie_weights = tie_others
    try:
        yield
    finally:
        owner.tie_weights = original


def find_file(where: Mapping[str, Any], name: str, local_files_only: bool, must_exist: bool) -> Path | None:
    """Returns the path of a model's file, downloaded if necessary; None if it does not exist and `must_exist` is false.

    Needs the arguments `_raise_exceptions_for_missing_entries` and `_raise_exceptions_for_connection_errors` of
    `transformers.utils.cached_file`; raises TypeError without them.

    Args:
        where: contains `pretrained_model_name_or_path`, and `revision` if it is not the default.
    """
    from transformers.utils import cached_file

    found = cached_file(
        where["pretrained_model_name_or_path"],
        name,
        revision=where.get("revision"),
        local_files_only=local_files_only,
        _raise_exceptions_for_missing_entries=must_exist,
        _raise_exceptions_for_connection_errors=must_exist,
    )
    return Path(found) if found else None


def float32_modules(model: nn.Module) -> list[str]:
    """Returns the patterns of modules that stay in float32: `_keep_in_fp32_modules`; empty without it."""
    return list(getattr(model, "_keep_in_fp32_modules", None) or ())


def attention_name(model: Any) -> str | None:
    """Returns the attention implementation of the model, such as sdpa: `config._attn_implementation`."""
    return model.config._attn_implementation


def is_recurrent(model_class: Any) -> bool:
    """Returns whether the model has recurrent layers, as Mamba. Needs `_is_stateful`; raises UserError without it."""
    return private(model_class, "_is_stateful")


def supports_sdpa(model_class: Any) -> bool:
    """Returns whether the model supports SDPA attention. Needs `_supports_sdpa`; raises UserError without it."""
    return private(model_class, "_supports_sdpa")


def leave_out_of_files(model: Any, names: set[str]) -> None:
    """Makes `save_pretrained` leave out these weights, which are of our own: adds to `_keys_to_ignore_on_save`."""
    model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), *names}


def wrap_checkpointing(module: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a layer's function for recomputing activations by `wrap(function)` (`is_checkpointed`)."""
    module._gradient_checkpointing_func = wrap(module._gradient_checkpointing_func)


def encodes_with_backend(tokenizer: Any) -> bool:
    """Returns whether `tokenizer(text)` encodes with `backend_tokenizer` alone: `_encode_plus` is that of the base."""
    from transformers import PreTrainedTokenizerFast

    base = getattr(PreTrainedTokenizerFast, "_encode_plus", None)
    return base is not None and getattr(type(tokenizer), "_encode_plus", None) is base
