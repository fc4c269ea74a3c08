"""The flags of an adapter on a frozen base model, and the model that they name; `models.lora` adds the adapter."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from common.models.load import build_model
from common.models.untrained import empty_model
from common.training.precision import narrow_dtype
from common.training.process_grid import Degrees
from common.training.recipe_traits import Arguments

QUANTIZED = {"nf4": "NF4 (arXiv:2305.14314), 4.13 bits per weight"}
FLAGS = ("lora_alpha", "lora_targets", "lora_dropout", "use_dora", "use_rslora", "quantize")  # beside --lora_rank


def is_asked(args: Arguments) -> bool:
    """Whether an adapter is to be trained."""
    return args.shared("lora_rank") is not None


def check(args: Arguments, degrees: Degrees) -> Iterator[str]:
    """A line for each flag of an adapter that does not go with the others, or with the launch."""
    if is_asked(args):
        if degrees.tensor > 1:
            yield "--lora_rank: matrices that are divided among processes have no adapter; take another config"
        if not args.model_name_or_path:
            yield "--lora_rank adapts a pretrained model, and none is named; name one with --model_name_or_path"
        if args.lora_dropout >= 1:
            yield f"--lora_dropout {args.lora_dropout:g} is no share that leaves something; give one below 1"
        return
    for name in FLAGS:
        if args.shared(name):
            yield f"--{name} has no effect without --lora_rank; give that too, or take it out"


def flags(args: Arguments) -> tuple[str, ...]:
    """Names of the flags that an update of an adapter depends on."""
    return ("lora_rank", *FLAGS) if is_asked(args) else ()


def with_default_alpha(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the alpha that a run without --lora_alpha has."""
    if not settings.get("lora_rank"):
        return settings
    return settings | {"lora_alpha": settings.get("lora_alpha") or 2 * settings["lora_rank"]}


def has_adapter(model: nn.Module) -> bool:
    """Whether an adapter is trained beside the model's frozen weights."""
    return bool(getattr(model, "peft_config", None))


def base_options(args: Arguments) -> dict[str, Any]:
    """What `build_model` is given for the frozen base of an adapter; nothing for a model that is trained whole."""
    if args.shared("quantize"):
        from common.models import quantization

        return quantization.options(args.quantize)
    return {"frozen_dtype": narrow_dtype()} if is_asked(args) else {}


def build_base(args: Arguments, config: PreTrainedConfig, model_class: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """The model that the flags name, in the precision of --quantize, with the adapter of --lora_rank if one is asked.

    Raises UserError: as `build_model` and `with_adapter`.
    """
    where = args.model_name_or_path, args.trust_remote_code
    return with_adapter(args, build_model(config, *where, model_class, **base_options(args)))


def empty_base(args: Arguments, config: PreTrainedConfig, model_class: Any) -> PreTrainedModel:
    """The same without data, on the `meta` device; its frozen layers are not in 4 bits."""
    return with_adapter(args, empty_model(config, args.trust_remote_code, model_class))


def with_adapter(args: Arguments, model: PreTrainedModel, new_weights: list[str] | None = None) -> PreTrainedModel:
    """Returns the model with the adapter of --lora_rank (`lora.add_adapter`), or unchanged without that flag."""
    if not is_asked(args):
        return model
    from common.models import lora

    return lora.add_adapter(args, with_default_alpha(vars(args))["lora_alpha"], model, new_weights)


def number_of(weight: Tensor) -> int:
    """How many numbers a parameter has, also if ZeRO-3 has cut it while the model was made, or it is in 4 bits."""
    if getattr(weight, "quant_state", None) is not None:
        return weight.quant_state.shape.numel()
    return getattr(weight, "ds_numel", weight.numel())


def describe_frozen(args: Arguments) -> str:
    """What the frozen weights under an adapter are in, to follow the precision in the first printed block."""
    if not is_asked(args):
        return ""
    dtype = str(narrow_dtype() or "").removeprefix("torch.")
    kinds = [f"linear layers in {args.quantize}"] if args.quantize else []
    kinds += [f"{'other matrices' if kinds else 'matrices'} in {dtype}"] if dtype else []
    return f"; frozen {', '.join(kinds)}" if kinds else ""
