"""Chooses the model that embeds texts, pools its hidden states to a vector per text, and describes it for its users."""

import inspect
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModel,
    BertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.data.source_types import Source
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import UserError, raise_errors, shorten
from common.models.adapters import base_options, with_adapter
from common.models.load import build_model, check_model, load_config
from common.models.model_setup import without_wrapper
from common.process import this_process
from common.tasks.embed.contrast import LOWEST_TEMPERATURE
from common.tasks.embed.pairs import FLAGS, Columns, Pairs, check_loss
from common.tasks.embed.replay import Predict
from common.training.batching import Collate
from common.training.recipe_traits import Arguments

PROMPT_FLAGS = ("prompt_anchor", "prompt_positive")
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
POOLING = {
    "mean": "mean of all tokens (default of an encoder)",
    "cls": "first token",
    "last": "last token (default of a decoder)",
}
# Names of the same pooling in the files of sentence-transformers.
POOLING_KEYS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}


def check_arguments(args: Arguments) -> Iterator[str]:
    """Yields one line for each flag that needs a different flag, or has a value that cannot be used."""
    if args.temperature < LOWEST_TEMPERATURE:
        yield f"--temperature {args.temperature:g} is too low; use at least {LOWEST_TEMPERATURE:g}"
    if args.shared("micro_batch_tokens") == "auto":
        yield "--micro_batch_tokens auto: texts are embedded twice per update; pass a number (--plan predicts memory)"
    yield from check_loss(args)
    for flag in PROMPT_FLAGS:
        if (prompt := getattr(args, flag)) != prompt.encode(errors="ignore").decode():
            yield f"--{flag} {prompt}: is not UTF-8; correct its bytes"
    if args.validation_file and not (args.train_file or args.dataset_name):
        yield "--validation_file needs --train_file or --dataset_name; name the training data"
    if args.negative_columns and not (args.train_file or args.dataset_name):
        yield "--negative_columns has no effect without --train_file or --dataset_name; name the data, or remove it"


def choose_model(
    args: Arguments, sizes: dict[str, tuple], source: Source, columns: Columns
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Returns configuration and tokenizer of a pretrained model, or of a BERT model from scratch; sets --pooling.

    Args:
        sizes: models from scratch by name: layers, width, heads, MLP width, vocabulary, ...
        source: the training text; a new tokenizer is trained on its `columns`.

    Raises UserError: the model is an encoder-decoder, or pooling or texts do not fit it.
    """
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code, AutoModel)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code, needs_end_of_text=False)
        tokenizer.padding_side = "right"
    else:
        *numbers, vocabulary = sizes[args.model_config][:5]
        text_columns = None if source.embedded else (columns.anchor, columns.positive)
        tokenizer = train_tokenizer(source, vocabulary, columns=text_columns, flags=FLAGS)
        tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
        )
        shape = dict(zip(SHAPE, numbers, strict=True), vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
        config = BertConfig(**shape, max_position_embeddings=max(512, args.sequence_length))
    is_causal = _is_causal(config)
    args.pooling = args.pooling or ("last" if is_causal else "mean")
    raise_errors([*_check_model(args, config, is_causal), *check_model(config, tokenizer, args.sequence_length)])
    if args.sequence_length <= (number := tokenizer.num_special_tokens_to_add()):
        raise UserError(f"--sequence_length {args.sequence_length} leaves no text besides {number} special tokens")
    raise_errors(_check_prompts(args, tokenizer, number))
    tokenizer.model_max_length = args.sequence_length
    return config, tokenizer


def _check_prompts(args: Arguments, tokenizer: PreTrainedTokenizerBase, num_special: int) -> Iterator[str]:
    """Yields a line for each prompt that leaves no token for a text, so that all texts would be equal."""
    for flag in PROMPT_FLAGS:
        size = len(tokenizer(getattr(args, flag), add_special_tokens=False, verbose=False)["input_ids"])
        if size + num_special >= args.sequence_length:
            yield f"--{flag} of {size:,} tokens leaves no text in --sequence_length {args.sequence_length}; shorten it"


def _is_causal(config: PreTrainedConfig) -> bool:
    """Returns whether a token attends only to earlier tokens."""
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return bool(getattr(config, "is_decoder", False)) or not is_encoder


def _check_model(args: Arguments, config: PreTrainedConfig, is_causal: bool) -> Iterator[str]:
    """Yields a line for each flag that does not fit the model."""
    name = args.model_name_or_path
    if getattr(config, "is_encoder_decoder", False) or type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        yield f"--model_name_or_path {name}: {config.model_type} is an encoder-decoder; use an encoder or a decoder"
    if is_causal and args.pooling == "cls":
        yield f"--pooling cls: in a decoder ({config.model_type}), the first token sees no other; use last or mean"
    width = config.get_text_config().hidden_size
    if too_wide := [str(number) for number in args.dimensions or [] if number > width]:
        yield f"--dimensions {shorten(too_wide)}: the model's vectors have {width}; use at most that"


def build_encoder(args: Arguments, config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the model, whose `model(..., lengths=)` returns pooled vectors and the log temperature.

    Its forward with `lengths` (B,) returns vectors (B, D), in float32 or better, and with --learn_temperature the
    trained logarithm of the temperature (1,), otherwise None. Without `lengths` it works as before.

    Raises UserError: as `load.build_model`.
    """
    path, trusts_code = args.model_name_or_path, args.trust_remote_code
    if path is None:
        model = build_model(config, model_class=AutoModel)
    else:
        options = {"output_loading_info": True, **base_options(args)}
        model, loaded = build_model(config, path, trusts_code, AutoModel, **options)
        if missing := [name for name in loaded["missing_keys"] if not name.startswith("pooler.")]:
            raise UserError(
                f"--model_name_or_path {path}: its files have no {shorten(missing)}, which would start at random; "
                "use a model whose files are complete"
            )
    model = with_adapter(args, model)
    if args.learn_temperature:
        from common.internals.transformers_uncommon import leave_out_of_files

        first = next(p for p in model.parameters() if p.requires_grad)
        model.log_temperature = nn.Parameter(first.new_tensor([args.temperature]).log())
        leave_out_of_files(model, {"log_temperature"})
    _add_pooling(model, args.pooling)
    return model


def _add_pooling(model: PreTrainedModel, pooling: str) -> None:
    """Makes the model's forward pool if it is called with `lengths`; within it, because modes hold weights in parts."""
    patched: Any = model
    original = patched.forward.__func__
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(original).parameters else {}

    def forward(self: Any, *args: Any, lengths: Tensor | None = None, **kwargs: Any) -> Any:
        if lengths is None:
            return original(self, *args, **kwargs)
        output = original(self, *args, **no_cache, **kwargs)
        vectors = pool(output[0], lengths, pooling)
        if (unused := getattr(output, "pooler_output", None)) is not None:
            vectors = vectors + (unused * 0).sum()  # gives the weights of the model's own pooler a gradient, of zero
        scale = getattr(self, "log_temperature", None)
        return vectors, None if scale is None else scale.to(vectors.dtype) * 1  # not the parameter itself, for FSDP2

    patched.forward = types.MethodType(forward, model)
    vars(forward)["__signature__"] = inspect.signature(original)


def pool(hidden: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """Returns vectors (B, D) of hidden states (B, L, D), in float32 or better. lengths: tokens of each text, (B,)."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if pooling == "cls":
        return hidden[:, 0].to(dtype)
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].to(dtype)
    is_token = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return hidden.masked_fill(~is_token[..., None], 0).sum(1, dtype=dtype) / lengths[:, None]


@torch.no_grad()
def check_padding(run: Any, model: nn.Module, predict: Predict, collate: Collate, samples: Pairs) -> None:
    """Checks that a short text has the same vector alone and padded; call it on all ranks, after `prepare`.

    Raises UserError: the vectors differ, so an update would depend on the split of its global batch.
    """
    if this_process().has_fake_weights:
        return
    lengths = samples.lengths(np.arange(min(len(samples), 10_000)))
    short, long = samples[int(lengths.argmin())], samples[int(lengths.argmax())]
    model.eval()
    batches = (send_to_device(collate(texts), run.device) for texts in ([short], [short, long]))
    alone, padded = (predict(model, batch)[0][:1] for batch in batches)
    model.train()
    allowed = 1e-3 if run.accelerator.mixed_precision == "no" else 0.1
    if not (alone - padded).abs().max() <= allowed * alone.abs().max() + 1e-6:  # NaN differs too
        name = without_wrapper(model).config.model_type
        raise UserError(f"{name}: padding on the right changes this model's vectors; use a different model")


def describe_task(args: Arguments) -> dict[str, str]:
    """Returns the lines on loss and vectors for the run summary."""
    temperature = f"temperature {args.temperature:g}" + (" at first, learned" if args.learn_temperature else "")
    loss = "CoSENT" if args.loss == "cosent" else f"{'symmetric ' * args.symmetric}InfoNCE"
    vectors = f"{args.pooling} pooling" + (", normalised" if args.normalize else "")
    vectors += f", also of the first {', '.join(map(str, args.dimensions))} dimensions" if args.dimensions else ""
    return {"loss": f"{loss} over the whole global batch, {temperature}", "vectors": vectors}


class SentenceFiles:
    """The files with which sentence-transformers loads a model and its pooling: saved next to the weights."""

    def __init__(self, args: Arguments, config: PreTrainedConfig) -> None:
        self.args, self.width = args, config.get_text_config().hidden_size

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes modules.json and the files that it names."""
        args, path = self.args, Path(directory)
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")][: 2 + args.normalize]
        entries = [
            {"idx": number, "name": str(number), "path": folder, "type": f"sentence_transformers.models.{kind}"}
            for number, (folder, kind) in enumerate(modules)
        ]
        pooling = {"word_embedding_dimension": self.width, "include_prompt": True}
        pooling |= {key: name == args.pooling for name, key in POOLING_KEYS.items()}
        settings = {
            "prompts": {"query": args.prompt_anchor, "document": args.prompt_positive},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if args.normalize else "dot",
        }
        files: dict[str, Any] = {
            "modules.json": entries,
            "sentence_bert_config.json": {"max_seq_length": args.sequence_length, "do_lower_case": False},
            "1_Pooling/config.json": pooling,
            "config_sentence_transformers.json": settings,
        }
        files |= {"2_Normalize/config.json": {}} if args.normalize else {}
        for name, content in files.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(json.dumps(content, indent=2) + "\n")
