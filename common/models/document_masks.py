"""Makes tokens attend only to their own document, in rows of several documents whose positions restart at each.

transformers' models pass the positions to the functions that make their attention masks. From the positions, these
functions find the documents, so that the mask is block-diagonal, and a sliding window counts within a document. On a
CPU, `document_attention` skips the masked parts; other attention computes the whole mask. GPU kernels that skip them
(FlexAttention, variable-length FlashAttention) need other inputs, and are not used.
"""

from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import UserError
from common.process import this_process
from common.training.process_grid import ProcessGrid
from common.training.token_positions import computes_positions, has_longrope, why_not_by_attention

# Supported layer types. All others pass information between tokens outside of attention, or by their own masks.
LAYER_TYPES = {"full_attention", "sliding_attention"}


class _FirstAttention(Exception):
    """Ends a forward pass at its first attention. Its argument: whether this attention gets a mask."""


def mask_documents(meta_model: PreTrainedModel, grid: ProcessGrid) -> None:
    """Makes all models of this process attend only to the documents that `position_ids` delimit, in training.

    meta_model: the model on the meta device. Raises UserError: the model or the launch does not support it.
    """
    subject, fix = "--document_mask (and --shape packed)", "use a different model, or --no-document_mask"
    for name, size in (("sp_size", grid.sequence), ("pp_size", grid.pipeline)):
        if size > 1:
            raise UserError(f"{subject}: not supported with parallelism_config_{name} {size}; set it to 1")
    this_process().has_document_mask = True
    config = meta_model.config
    if why := _why_not(config) or _why_not_masked(meta_model):
        raise UserError(f"{subject}: {config.model_type} {why}; {fix}")


def check_unpacked(*position_ids: torch.Tensor) -> None:
    """Raises UserError: positions (B, L), on the host, restart within a row, but there is no document mask."""
    if not this_process().has_document_mask and any(bool((rows[..., 1:] == 0).any()) for rows in position_ids):
        raise UserError(
            "position_ids: positions restart within a row, but there is no document mask, so tokens would attend to "
            "other documents; pass --document_mask or --shape packed, or call document_masks.mask_documents"
        )


def _why_not(config: PreTrainedConfig) -> str | None:
    """Returns why a causal LM does not support a document mask, as the end of a sentence; None if it may do."""
    if why := why_not_by_attention(config, LAYER_TYPES):
        return why
    if computes_positions(config):
        return "computes positions or masks itself"
    if has_longrope(config):
        return "has rotary positions (longrope) that depend on the longest document of a micro-batch"
    if getattr(config, "use_bidirectional_attention", False):
        return "attends to later tokens"
    return None


def _why_not_masked(meta_model: PreTrainedModel) -> str | None:
    """Returns why the model's first attention gets no mask of two documents, as the end of a sentence; None: it does.

    The forward pass ends at the attention, because the experts of a mixture cannot run on the meta device.
    """

    def stop(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        masks = [x for x in (*inputs, *named.values()) if torch.is_tensor(x) and x.shape[-2:] == (5, 5)]
        raise _FirstAttention(bool(masks))

    positions = torch.tensor([[0, 1, 0, 1, 2]], device="meta")
    attention = [module for module in meta_model.modules() if "Attention" in type(module).__name__]
    handles = [module.register_forward_pre_hook(stop, with_kwargs=True) for module in attention]
    try:
        # With a pad token, some models search the token ids for padding, but meta tensors have no data.
        with mock.patch.object(meta_model.config, "pad_token_id", None):
            meta_model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    except _FirstAttention as reached:
        return None if reached.args[0] else "does not mask attention by documents"
    except Exception as error:  # any error of a model's own code
        return f"cannot be examined ({type(error).__name__})"
    finally:
        for handle in handles:
            handle.remove()
    return "has no attention that can be examined"
