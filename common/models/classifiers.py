"""Classification heads: labels, new weights, learning rate, and the check that padding does not affect the output."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.errors import UserError, shorten
from common.internals.transformers_uncommon import draw_weights
from common.models.decisions import decided_once
from common.models.load import build_model
from common.models.model_setup import without_wrapper
from common.models.zero3 import gathered
from common.process import this_process
from common.training.batching import Collate, Samples
from common.training.recipe_traits import Arguments

HEAD = "ForSequenceClassification"  # suffix of transformers' classes with a head for labels
# A new head starts from random weights and needs larger steps than the pretrained layers. DeepLab (arXiv:1606.00915)
# trains its last layer at 10 times the learning rate of the pretrained layers.
HEAD_RATIO = 10
HEAD_RATE_HELP = f"peak learning rate of a new head (default: {HEAD_RATIO} x --learning_rate, with an adapter the same)"


def check_new_head(args: Arguments) -> Iterator[str]:
    """Yields a line if --new_head is set for a model from scratch."""
    if args.new_head and not args.model_name_or_path:
        yield "--new_head has no effect without --model_name_or_path; remove it, or name the model"


def needs_new_head(config: PreTrainedConfig, new_head: bool) -> bool:
    """Returns whether a pretrained model gets a new head: because it has none, or because `new_head` replaces it.

    Raises UserError: `new_head` is set, but the model has no head.
    """
    has_head = any(name.endswith(HEAD) for name in config.architectures or ())
    if new_head and not has_head:
        raise UserError("--new_head has no effect on a model without a head for labels; remove it")
    return new_head or not has_head


def resolve_head_rate(args: Arguments, is_new: bool) -> None:
    """Sets the default of --head_learning_rate if the head is new.

    Raises UserError: the flag is set, but the model keeps its head or has no pretrained weights.
    """
    if is_new:
        ratio = 1 if args.shared("lora_rank") else HEAD_RATIO
        args.head_learning_rate = args.head_learning_rate or ratio * args.learning_rate
    elif args.head_learning_rate:
        raise UserError("--head_learning_rate has no effect without a new head on a pretrained model; remove it")


def choose_labels(
    config: PreTrainedConfig, names: list[str] | None, is_new: bool, classes: list[str] | None = None
) -> list[str] | None:
    """Returns the labels for a pretrained model's head; None for regression.

    They are `names`, the labels of the data, if the head is new; otherwise the head's own, which must include `names`.
    classes: all labels in the order of their numbers, if the data numbers them; used for a head without label names.

    Raises UserError: the head is kept, but has different labels.
    """
    if is_new:
        return names
    own = _label_names(config)
    if names is None and len(own) == 1:
        return None
    if names is not None and set(names) <= set(own):
        return own
    unnamed = own == [f"LABEL_{number}" for number in range(len(own))] and len(own) > 1
    if names is not None and unnamed and set(names) <= {str(number) for number in range(len(own))}:
        return [str(number) for number in range(len(own))]
    if names is not None and unnamed and classes and len(classes) == len(own):
        return classes
    raise UserError(
        f"the labels of the model's head ({shorten(own)}) are not the data's ({shorten(names or ['numbers'])}); give "
        "data with its labels, or --new_head to replace the head"
    )


def _label_names(config: Any) -> list[str]:
    return [config.id2label[number] for number in range(config.num_labels)]


def set_labels(config: PreTrainedConfig, names: list[str] | None, label_column: str, pad_token_id: int) -> None:
    """Sets labels, problem type and padding token in the configuration."""
    config.id2label = dict(enumerate(names or [label_column]))
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.problem_type = "regression" if names is None else "single_label_classification"
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.pad_token_id = pad_token_id  # a decoder's logits are those of the last token that is not padding
        if hasattr(part, "use_cache"):
            part.use_cache = False  # the cache of keys and values is for generation only


def find_inputs(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the names of the tensors that the model accepts in addition to `input_ids`.

    Token types are omitted if the model has a single type, because some tokenizers return them nevertheless.
    """
    accepted = inspect.signature(model.forward).parameters
    inputs = ["attention_mask"] if "attention_mask" in accepted else []
    if "token_type_ids" in accepted and getattr(model.config, "type_vocab_size", 0) > 1:
        inputs.append("token_type_ids")
    return tuple(inputs)


def set_pipeline_inputs(tokenizer: PreTrainedTokenizerBase, sequence_length: int, inputs: tuple[str, ...]) -> None:
    """Configures the tokenizer, before it is saved, to make the same inputs in a pipeline as in training."""
    tokenizer.model_max_length = sequence_length
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = ["input_ids", *inputs]


@torch.no_grad()
def check_padding(model: torch.nn.Module, collate: Collate, samples: Samples, accelerator: Accelerator) -> None:
    """Checks that the shortest text has the same logits alone and padded; call it on all ranks, after `prepare`.

    Raises UserError: the logits differ, for example because the model uses the output at the last token even if this
    token is padding. An update would then depend on the split of its global batch into micro-batches.
    """
    if this_process().has_fake_weights:
        return
    lengths = samples.lengths(np.arange(len(samples)))
    short, long = samples[int(lengths.argmin())], samples[int(lengths.argmax())]
    model.eval()
    logits = []
    for batch in ([short], [short, long]):
        inputs = {
            name: tensor.to(accelerator.device) for name, tensor in collate(batch).items() if "target" not in name
        }
        logits.append(model(**inputs).logits[:1].float())
    model.train()
    alone, padded = logits
    allowed = 1e-3 if accelerator.mixed_precision == "no" else 0.1
    if not (alone - padded).abs().max() <= allowed * alone.abs().max() + 1e-6:  # NaN differs too
        raise UserError(
            f"{without_wrapper(model).config.model_type}: padding on the right changes this model's logits; "
            "use a different model"
        )


def choose_classes(config: PreTrainedConfig, classes: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """Returns the data's classes in the order of a pretrained model's head, and whether the model needs a new head.

    The model keeps its head if data and head have the same class names. LABEL_0, LABEL_1, ... match 0, 1, ...
    """
    own = tuple(_label_names(config))
    if own == tuple(f"LABEL_{number}" for number in range(len(own))):
        own = tuple(str(number) for number in range(len(own)))
    return (own, False) if sorted(own) == sorted(classes) else (classes, True)


def build_classifier(
    config: PreTrainedConfig,
    name_or_path: str | None,
    trust_remote_code: bool,
    model_class: Any,
    new_head: bool,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Returns a model with a head for `config`'s labels, and the names of its randomly initialised weights.

    The list of names is empty if the model is built from scratch.
    new_head: replace the head of the pretrained model even if it has the same number of labels; otherwise an existing
    head is kept.
    options: further arguments of `from_pretrained`.
    """
    if name_or_path is None:
        return build_model(config, None, trust_remote_code, model_class), []
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": new_head}
    model, loaded = build_model(config, name_or_path, trust_remote_code, model_class, **options)
    new_weights = {*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])}
    if new_head:  # `from_pretrained` has loaded an old head with the same number of labels
        kept = set(_head_parameters(config, trust_remote_code, model_class)) - new_weights
        _draw_again(model, kept)
        new_weights |= kept
    new = decided_once(lambda: sorted(new_weights))  # only ranks with the weights know the names
    if "quantization_config" in options:
        from common.models import quantization

        layers = quantization.unquantize_new(model, set(new))
        _draw_again(model, {f"{layer}.weight" for layer in layers})
    return model, new


def _head_parameters(config: Any, trust_remote_code: bool, model_class: Any) -> list[str]:
    """Returns the names of the parameters whose shape depends on the number of labels."""
    larger, shapes = copy.deepcopy(config), []
    larger.num_labels = config.num_labels + 1
    for one in (config, larger):
        with torch.device("meta"):
            model = build_model(one, trust_remote_code=trust_remote_code, model_class=model_class)
        shapes.append({name: parameter.shape for name, parameter in model.named_parameters()})
    return [name for name, shape in shapes[0].items() if shape != shapes[1][name]]


def _draw_again(model: PreTrainedModel, names: set[str]) -> None:
    """Reinitialises the layers of these parameters with random weights, as in a new model."""
    for layer in sorted({name.rpartition(".")[0] for name in names}):
        module = model.get_submodule(layer)
        with gathered(list(module.parameters(recurse=False)), modifier_rank=0):
            draw_weights(model, module)


def describe_new_weights(head: list[str], head_learning_rate: float | None) -> dict[str, str]:
    """Returns the line of the run summary on new weights, {label: text}; {} if there are none."""
    rate = f", learning rate {head_learning_rate:g}" if head_learning_rate else ""
    return {"new head": f"{shorten(head)} start at random{rate}"} if head else {}
