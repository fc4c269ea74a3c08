"""LoRA (arXiv:2106.09685) with peft: trains a few small matrices next to the frozen matrices of a base model."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.errors import UserError
from common.models import packed_experts
from common.models.decisions import decided_once
from common.models.narrow_dtype import narrow_dtype
from common.models.packed_experts import is_of_experts
from common.packages import find_missing
from common.training.precision import is_deepspeed, is_fsdp
from common.training.process_grid import ProcessGrid


def check_flags(args: argparse.Namespace, grid: ProcessGrid) -> Iterator[str]:
    """Yields a line for each flag of an adapter that conflicts with other flags or with the launch."""
    yield from find_missing("--lora_rank", "peft")
    if grid.tensor > 1:
        yield "--lora_rank is not supported with tensor parallelism; use a different config"
    if not args.model_name_or_path:
        yield "--lora_rank needs a pretrained model; pass --model_name_or_path"
    if args.lora_dropout >= 1:
        yield f"--lora_dropout {args.lora_dropout:g} must be below 1"


def base_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `build_model` for the frozen base."""
    if args.quantize:
        from common.models import quantization

        return quantization.options(args.quantize)
    return {"frozen_dtype": narrow_dtype()}


def describe_frozen(args: argparse.Namespace) -> str:
    """Returns the precision of the frozen weights, to follow the precision in the run summary."""
    dtype = str(narrow_dtype() or "").removeprefix("torch.")
    kinds = [f"linear layers in {args.quantize}"] if args.quantize else []
    kinds += [f"{'other matrices' if kinds else 'matrices'} in {dtype}"] if dtype else []
    return f"; frozen {', '.join(kinds)}" if kinds else ""


def resolve_alpha(alpha: int | None, rank: int) -> int:
    """Returns --lora_alpha; the default is twice --lora_rank."""
    return alpha or 2 * rank


def add_adapter(
    args: argparse.Namespace, model: PreTrainedModel, new_weights: list[str] | None = None
) -> PreTrainedModel:
    """Returns the model, frozen, with the adapter of --lora_rank next to its matrices.

    Before the first update, the output is that of the base, because the matrices B start at zero. The adapter is in
    float32. Frozen matrices have the dtype of the matmuls; float32 matrices would be cast in each matmul.

    new_weights: names of the weights that the pretrained model does not have; their layers are trained in full.

    Raises UserError: a target is not a layer of the model, or peft cannot adapt it.
    """
    new = sorted({name.rpartition(".")[0] for name in new_weights or ()})
    if new_weights is not None:
        new = decided_once(lambda: new)  # only ranks with the weights know the names
    dtype, trained = narrow_dtype(), torch.promote_types(model.dtype, torch.float32)
    with packed_experts.shown(model, dtype or torch.float32):
        _inject(args, model, new)
    packed_experts.dequantize_in_forward(model, dtype or torch.float32)
    if is_deepspeed():
        trained = model.dtype  # DeepSpeed keeps float32 master weights
    module: Any
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if weight.requires_grad:
                weight.data = weight.data.to(trained)
            elif dtype is not None and weight.ndim > 1 and weight.dtype == torch.float32:
                weight.data = weight.data.to(dtype)
        if isinstance(module, nn.Embedding) and module.weight.dtype == dtype and not is_fsdp():
            module.forward = MethodType(_float32_rows, module)  # type: ignore[method-assign]  # on purpose
    return model


def _inject(args: argparse.Namespace, model: PreTrainedModel, new: list[str]) -> None:
    """Adds peft's adapter to the model. new: names of layers that are trained in full. Raises UserError."""
    from peft import LoraConfig  # here because the import takes a second

    modules, parameters = _targets(args, model, new)
    for flag in ("use_dora", "lora_dropout"):
        if parameters and getattr(args, flag):
            raise UserError(
                f"--{flag}: peft supports only linear layers, and the experts of this mixture are not; remove it, or "
                "exclude the experts with --lora_targets"
            )
    config: Any = LoraConfig(
        r=args.lora_rank,
        lora_alpha=resolve_alpha(args.lora_alpha, args.lora_rank),
        lora_dropout=args.lora_dropout,
        use_dora=args.use_dora,
        use_rslora=args.use_rslora,
        target_modules=modules,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's layers
        target_parameters=parameters or None,
        modules_to_save=new or None,
    )
    try:
        model.add_adapter(config)
    except ValueError as error:
        raise UserError(f"--lora_rank: {' '.join(str(error).split())}") from error
    if (path := Path(os.path.expanduser(args.model_name_or_path))).is_dir():
        config.base_model_name_or_path = str(path.resolve())  # a relative path depends on the current directory
    config.target_modules = sorted(config.target_modules)  # the order of peft's set differs between processes


def _float32_rows(self: nn.Embedding, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the output of a 16-bit embedding in float32, because autocast keeps the residual stream in float32."""
    return type(self).forward(self, *args, **kwargs).float()  # position embeddings take more arguments than ids


def _targets(args: argparse.Namespace, model: PreTrainedModel, new: list[str]) -> tuple[list[str], list[str]]:
    """Returns the names of the linear layers and the stacked expert parameters to adapt, shortened if unambiguous."""
    layers = {name: one for name, one in model.named_modules() if isinstance(one, (nn.Linear, Conv1D))}
    head = model.get_output_embeddings()
    linear = [name for name, one in layers.items() if one is not head and name not in new]
    stacked = [name for name, weight in model.named_parameters() if is_of_experts(name, weight)]
    modules, parameters = linear, _endings(stacked, parts=2)
    if args.lora_targets:
        modules, parameters = [], []
        for target in args.lora_targets:
            found = [name for name in linear if f".{name}".endswith(f".{target}")]
            modules += found
            if not found and any(name.endswith(f".{target}") for name in stacked):
                parameters.append(target)
            elif not found:
                known = ", ".join([*_endings(linear), *_endings(stacked, parts=2)])
                raise UserError(f"--lora_targets {target} is no linear layer of this model; it has {known}")
    sides = [_most_rank(layers[name]) for name in modules]
    if args.lora_rank > max(sides, default=args.lora_rank):
        raise UserError(
            f"--lora_rank {args.lora_rank}: the matrices that it adapts have a rank of {max(sides)} at most; give less"
        )
    # peft matches the ends of names. If a layer that is not adapted has the same last part, the full name is required.
    others = set(_endings(layers.keys() - set(modules)))
    named = (name if (last := name.rpartition(".")[2]) in others else last for name in modules)
    return list(dict.fromkeys(named)), parameters


def _most_rank(layer: Any) -> int:
    """Returns the smaller dimension of a layer's matrix, also if it is packed in 4 bits or partitioned by ZeRO-3."""
    if isinstance(layer, nn.Linear):
        return min(layer.in_features, layer.out_features)
    return min(getattr(layer.weight, "ds_shape", layer.weight.shape))


def _endings(names: Any, parts: int = 1) -> list[str]:
    """Returns the last parts of dotted names, without duplicates."""
    return list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))
