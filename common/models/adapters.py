"""Flags for an adapter on a frozen base model, and the model that they configure; `models.lora` adds the adapter."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from common.models.load import build_model
from common.models.untrained import empty_model
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Arguments

QUANTIZED = {"nf4": "NF4 (arXiv:2305.14314), 4.13 bits per weight"}
FLAGS = ("lora_alpha", "lora_targets", "lora_dropout", "use_dora", "use_rslora", "quantize")  # besides --lora_rank


def is_asked(args: Arguments) -> bool:
    """Returns whether --lora_rank is set, so that an adapter is trained."""
    return args.shared("lora_rank") is not None


def check(args: Arguments, grid: ProcessGrid) -> Iterable[str]:
    """Returns a line for each adapter flag that conflicts with other flags or with the launch."""
    if is_asked(args):
        from common.models import lora

        return lora.check_flags(args, grid)
    unused = [name for name in FLAGS if args.shared(name)]
    return [f"--{name} has no effect without --lora_rank; pass both, or remove it" for name in unused]


def flags(args: Arguments) -> tuple[str, ...]:
    """Returns the names of the flags that affect an update of an adapter."""
    return ("lora_rank", *FLAGS) if is_asked(args) else ()


def has_adapter(model: nn.Module) -> bool:
    """Returns whether an adapter is trained next to the model's frozen weights."""
    return bool(getattr(model, "peft_config", None))


def base_options(args: Arguments) -> dict[str, Any]:
    """Returns the arguments of `build_model` for the frozen base of an adapter; {} if the full model is trained."""
    if not is_asked(args):
        return {}
    from common.models import lora

    return lora.base_options(args)


def build_base(args: Arguments, config: PreTrainedConfig, model_class: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Returns the model that the flags select, with --quantize and --lora_rank. Raises UserError: as `build_model`."""
    path, trusts_code = args.model_name_or_path, args.trust_remote_code
    return with_adapter(args, build_model(config, path, trusts_code, model_class, **base_options(args)))


def build_meta_base(args: Arguments, config: PreTrainedConfig, model_class: Any) -> PreTrainedModel:
    """Returns the model of `build_base` on the `meta` device, without data."""
    model = empty_model(config, args.trust_remote_code, model_class)
    if args.shared("quantize"):
        from common.models import quantization

        quantization.imagine(model)
    return with_adapter(args, model)


def with_adapter(args: Arguments, model: PreTrainedModel, new_weights: list[str] | None = None) -> PreTrainedModel:
    """Returns the model with the adapter of --lora_rank (`lora.add_adapter`), or unchanged without that flag."""
    if not is_asked(args):
        return model
    from common.models import lora

    return lora.add_adapter(args, model, new_weights)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Returns the numbers of all and of trained parameters, even if they are partitioned by ZeRO-3 or in 4 bits."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    total = sum(size for size, _ in sizes)
    if has_adapter(model):
        from common.models.packed import count_all

        total = count_all(model)
    return total, sum(size for size, is_trained in sizes if is_trained)
