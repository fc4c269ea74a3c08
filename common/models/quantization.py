"""A frozen base model in 4 bits under an adapter: NF4 with double quantisation (QLoRA, arXiv:2305.14314; bitsandbytes).

64 weights of a linear layer share an 8-bit scale, and 256 scales share a float32 scale: 4.13 bits per weight.
"""

import logging
import re
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from common.errors import raise_errors
from common.internals.transformers_uncommon import float32_modules
from common.models import packed_experts
from common.models.narrow_dtype import narrow_dtype
from common.models.packed import PackedLinear, pack
from common.models.single_copy import main_builds_weights
from common.packages import find_missing

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it recommends a package that is not needed


def options(quantize: str | None) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` for a base with --quantize; {} without this flag."""
    if not quantize:
        return {}
    raise_errors(find_missing(f"--quantize {quantize}", "bitsandbytes"))
    from transformers import BitsAndBytesConfig  # here because this imports bitsandbytes

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=narrow_dtype() or torch.float32,
    )
    # By default, transformers loads the quantised model on the GPU, which may hold only a shard of it.
    place = {"device_map": {"": "cpu"}} if main_builds_weights() else {}
    return {"quantization_config": config, **place}


def pack_layers(model: Any) -> None:
    """Replaces the 4-bit layers of bitsandbytes with layers whose weights are plain parameters (`models.packed`).

    On CPUs with AVX512-BF16, an evaluation with bitsandbytes' layers would also repack their weights, and return no
    gradients afterwards.
    """
    from bitsandbytes.nn import Linear4bit

    for name, module in list(model.named_modules()):
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, Linear4bit) and hasattr(
            weight, "quant_state"
        ):  # not in a layer without pretrained weights
            packed = pack(weight.data, weight.quant_state)
            model.set_submodule(name, PackedLinear(module, module.compute_dtype, packed))
    # Now it is an ordinary model of these layers, as it is on ranks that load no weights.
    model.hf_quantizer.remove_quantization_config(model)
    model.is_loaded_in_4bit = False


def find_kept(model: Any) -> list[str]:
    """Returns name patterns of the linear layers that stay unquantised: heads, and layers with tied weights.

    A head is every layer that a model has in addition to its base, such as a classifier's head. transformers' own list
    contains only the last parameter of a head, `classifier.bias`, so the head's weight would be quantised.
    model: on the `meta` device.
    """
    base, head = model.base_model, model.get_output_embeddings()
    inner = set() if base is model else set(base.modules())
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    return [
        f"^{re.escape(name)}$"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (module is head or f"{name}.weight" in tied or (inner and module not in inner))
    ]


def unquantize_new(model: nn.Module, new_weights: set[str]) -> set[str]:
    """Replaces quantised layers without pretrained weights (a new pooler) with linear layers; returns their names."""
    from bitsandbytes.nn import Linear4bit

    names = {name.rpartition(".")[0] for name in new_weights}
    names = {name for name in names if isinstance(model.get_submodule(name), PackedLinear | Linear4bit)}
    for name in names:
        old: Any = model.get_submodule(name)
        new = nn.Linear(old.in_features, old.out_features, old.bias is not None, dtype=torch.float32)
        model.set_submodule(name, new.train(old.training))
    return names


def imagine(model: nn.Module) -> None:
    """Replaces linear layers of a model on the `meta` device as `pack_layers` does."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = [*find_kept(model), *float32_modules(model)]
    for name, module in list(model.named_modules()):
        linear: Any = module
        if isinstance(module, Conv1D):  # GPT-2's layers
            linear = nn.Linear(module.nx, module.nf, device="meta").train(module.training)
            linear.bias = module.bias
        if type(linear) is nn.Linear and should_convert_module(name, kept):
            model.set_submodule(name, PackedLinear(linear, narrow_dtype() or torch.float32))
    packed_experts.imagine(model)
