"""Loads or builds a model, and checks that it matches its tokenizer and the data."""

import copy
import json
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import unset_hf_deepspeed_config
from transformers.integrations.deepspeed import deepspeed_config
from transformers.utils import find_adapter_config_file

from common.data.hub import locate_pretrained
from common.errors import UserError, one_line, shorten
from common.models import model_setup, quantization, tied_weights
from common.models.attention_masks import decide_on_the_host
from common.models.cpu_kernels import use_cpu_kernels
from common.parallel import sequence
from common.training.batching import Samples
from common.training.precision import follow_precision

# What the models of an Auto class are called.
JOBS = {
    AutoModelForCausalLM: "causal language model",
    AutoModelForSeq2SeqLM: "encoder-decoder",
    AutoModelForSequenceClassification: "classifier of texts",
    AutoModelForImageClassification: "classifier of images",
}


def prepare_encoder_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Makes embeddings that have one weight one module, and returns it; for a bare model, on all ranks together.

    transformers gives encoder and decoder a module each, and FSDP2 refuses a weight that is in two of its groups. An
    embedding that a checkpoint keeps apart stays so.

    Raises UserError: the model begins its targets otherwise than `collate_pairs` does (mBART: with their language).
    """
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        labels, start = torch.arange(2, 6), model.config.decoder_start_token_id
        if model.prepare_decoder_input_ids_from_labels(labels.unsqueeze(0))[0].tolist() != [start, 2, 3, 4]:
            raise UserError(
                f"{type(model).__name__} does not begin all targets with its decoder_start_token_id; take another model"
            )
    shared, modules = model.get_input_embeddings(), list(model.named_modules())
    # Only what holds the weights knows whether the checkpoint keeps one apart.
    twins = model_setup.decided_once(
        lambda: [name for name, one in modules if isinstance(one, torch.nn.Embedding) and one.weight is shared.weight]
    )
    for parent, _, name in (twin.rpartition(".") for twin in twins):
        setattr(model.get_submodule(parent), name, shared)
    return model


def load_config(
    name_or_path: str, trust_remote_code: bool = False, model_class: Any = AutoModelForCausalLM
) -> PreTrainedConfig:
    """The configuration of a pretrained model of an Auto class: a local directory or a hub name.

    Raises UserError: there is none, or `model_class` has no model of its type.
    """
    where, problem = locate_pretrained(name_or_path)
    name, revision = where["pretrained_model_name_or_path"], where.get("revision")
    try:
        is_adapter = find_adapter_config_file(name, revision=revision, local_files_only=bool(problem))
        config = None if is_adapter else AutoConfig.from_pretrained(**where, trust_remote_code=trust_remote_code)
    except Exception as error:  # a dozen types, by what is missing
        reason = problem or f"its config.json cannot be loaded: {one_line(error)}"
        raise UserError(f"--model_name_or_path {name_or_path}: {reason}") from error
    if is_adapter:
        raise UserError(
            f"--model_name_or_path {name_or_path}: it is an adapter; make a whole model of it (python -m "
            "tools.checkpoint export CHECKPOINT DIR --merge), or name its base"
        )
    if not _is_object(Path(name) / "generation_config.json"):
        raise UserError(f"--model_name_or_path {name_or_path}: its generation_config.json is no JSON object; remove it")
    remote = model_class.__name__ in (getattr(config, "auto_map", None) or {})
    if type(config) not in model_class._model_mapping and not remote:
        kind = JOBS.get(model_class, model_class.__name__)
        what = f"{config.model_type} has no {kind} in transformers; take a model of another type"
        raise UserError(f"--model_name_or_path {name_or_path}: {what}")
    reads_ahead = getattr(config, "is_decoder", True) is False and type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if model_class is AutoModelForCausalLM and reads_ahead:
        raise UserError(
            f"--model_name_or_path {name_or_path}: this {config.model_type} looks at the tokens that it is to predict; "
            'put "is_decoder": true into its config.json, or take a causal model'
        )
    if getattr(config, "tie_word_embeddings", False):
        try:
            model = empty_model(copy.deepcopy(config), trust_remote_code, model_class)
        except Exception as error:  # by what its values are
            reason = f"transformers cannot build the model of its config.json: {one_line(error)}"
            raise UserError(f"--model_name_or_path {name_or_path}: {reason}") from error
        tied_weights.follow_files(config, model, tied_weights.find_untied(where, model))
    return config


def _is_object(path: Path) -> bool:
    """Returns whether a file is a JSON object, or missing."""
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except OSError:
        return True
    except ValueError:
        return False


def check_model(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Iterator[str]:
    """One line for each way in which tokenizer and sequence length do not fit the model."""
    text = config.get_text_config()
    rows = getattr(text, "vocab_size", None)  # CANINE hashes characters: it has no vocabulary
    if rows and len(tokenizer) > rows:
        yield (
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has {rows} rows: take "
            "the model's own tokenizer, or resize the embedding (model.resize_token_embeddings) and save the model"
        )
    # `max_position_embeddings` also names GPT-2's n_positions and the like; a model without positions has neither, or
    # says -1 (XLNet).
    positions = getattr(text, "max_position_embeddings", None)
    if positions and 0 < positions < sequence_length:
        yield (
            f"--sequence_length {sequence_length} is beyond the model's {positions} positions; use at most {positions}"
        )


def gathered(parameters: list[torch.nn.Parameter], modifier_rank: int | None = None) -> AbstractContextManager:
    """Whole parameters, where ZeRO-3 has cut them while the model was loaded; `modifier_rank` may change them."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank)


@contextmanager
def whole_weights() -> Iterator[None]:
    """ZeRO-3 cuts weights while a model is made, and then draws others than one process would: here they are whole.

    Each process then holds a model from scratch for a moment. Pretrained weights are cut as they are loaded.
    """
    plugin = AcceleratorState().deepspeed_plugin if is_initialized() else None
    if plugin is None or deepspeed_config() is None:  # also inside another such block
        yield
        return
    # Not the plugin's own zero3_init_context_manager(enable=False): transformers 5.23 cuts the weights all the same.
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()


def empty_model(
    config: PreTrainedConfig, trust_remote_code: bool = False, model_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The model of a configuration without data, on the `meta` device."""
    with torch.device("meta"):
        return build_model(config, trust_remote_code=trust_remote_code, model_class=model_class)


def attention_length(config: PreTrainedConfig) -> float:
    """The length of a row at which its attention costs as much as all else; infinite for a model without attention.

    In a layer of width d, linear maps take about 12 d² multiplications a token (Llama's shape, or a MLP of 4 d), and
    attention 2 d for each token that it looks at; it computes those to come as well, or is half as fast.
    """
    text = config.get_text_config()
    is_attending = getattr(text, "num_attention_heads", None) and getattr(text, "hidden_size", None)
    return 6 * text.hidden_size if is_attending else math.inf


@contextmanager
def _matrices_read_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Pretrained matrices come from their files in this dtype, and never exist in float32; vectors as they would."""
    if dtype is None:
        yield
        return
    plan = PreTrainedModel._get_dtype_plan  # it has no public form; transformers 5.17 has this one too

    def with_matrices(model, asked):
        names = (name for name, one in model.named_parameters() if one.ndim > 1)
        return {f"^{re.escape(name)}$": dtype for name in names} | plan(model, asked)

    PreTrainedModel._get_dtype_plan = with_matrices
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = plan


def build_model(
    config: PreTrainedConfig,
    name_or_path: str | None = None,
    trust_remote_code: bool = False,
    model_class: Any = AutoModelForCausalLM,
    frozen_dtype: torch.dtype | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model in float32 (torch's default dtype): loaded from `name_or_path`, or with random weights from `config`.

    Weights saved in half precision are loaded as float32 too, since the optimizer's small steps would be lost in
    them; the precision of the matrix products is Accelerate's business. Attention is SDPA where the model has it.
    Under FSDP2 a process other than the main one makes a model without data, for `loading.prepare` to fill.

    Args:
        model_class: an Auto class, or a model's own class.
        frozen_dtype: what pretrained matrices are read in, if they are not to be trained; None: float32.
        options: more of its `from_pretrained`, such as `ignore_mismatched_sizes`.

    Raises UserError: there are no weights, they cannot be read, or they are of other shapes than the configuration's.
    """
    dtype = torch.get_default_dtype()
    if name_or_path is not None and not model_setup.holds_weights():
        model = build_model(copy.deepcopy(config), None, trust_remote_code, model_class).eval()
        if "quantization_config" in options:
            quantization.imagine(model, options["quantization_config"].bnb_4bit_compute_dtype)
        return (model, {"missing_keys": [], "mismatched_keys": []}) if "output_loading_info" in options else model
    if name_or_path is None:
        with whole_weights(), nullcontext() if model_setup.holds_weights() else torch.device("meta"):
            if not hasattr(model_class, "from_config"):
                model = model_class._from_config(config, dtype=dtype)
            else:
                model = model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        return _ready(model)
    asks_loaded = options.pop("output_loading_info", False)
    model, loaded = _load_pretrained(config, name_or_path, trust_remote_code, model_class, frozen_dtype, options)
    missing = sorted(set(loaded["missing_keys"]) & {name for name, _ in model.named_parameters(remove_duplicate=False)})
    if missing and not asks_loaded:
        raise UserError(
            f"--model_name_or_path {name_or_path}: its files have no {shorten(missing)}, which would start at random; "
            'use a model whose files are complete, or set "tie_word_embeddings": true in its config.json if a missing '
            "head is the embedding"
        )
    _ready(model)
    return (model, loaded) if asks_loaded else model


def _load_pretrained(
    config: PreTrainedConfig,
    name_or_path: str,
    trust_remote_code: bool,
    model_class: Any,
    frozen_dtype: torch.dtype | None,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model with the weights of its files, tied or not, and what `from_pretrained` says of loading them."""
    where, _ = locate_pretrained(name_or_path)
    options = {**where, **options, "config": config, "trust_remote_code": trust_remote_code}
    try:
        empty = empty_model(copy.deepcopy(config), trust_remote_code, model_class)
        if "quantization_config" in options:
            options["quantization_config"].llm_int8_skip_modules = quantization.find_kept(empty)
        with _matrices_read_in(frozen_dtype), tied_weights.keep_apart(tied_weights.find_untied(where, empty)):
            return model_class.from_pretrained(**options, dtype=torch.get_default_dtype(), output_loading_info=True)
    except (OSError, RuntimeError, ValueError, ImportError, EOFError, UnpicklingError, SafetensorError) as error:
        # What the files provoke: torn or of other shapes, of an unknown kind, in need of a package that is not there.
        raise UserError(
            f"--model_name_or_path {name_or_path}: its weights cannot be loaded ({one_line(error)}); save the model "
            "again, or download it again"
        ) from error


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a new model one that every mode can take, and returns it."""
    follow_precision(model)
    quantization.keep_weights(model)
    decide_on_the_host()
    use_cpu_kernels(model)
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # CANINE has several
        return model
    # Of the modules that FSDP2 is to shard as a whole, leave out what contains the input embedding (BertEmbeddings,
    # ViTEmbeddings): Accelerate 1.15 shards that by itself, after these, and fails where it has been sharded already.
    kinds = {type(module).__name__ for module in model.modules() if embedding not in module.modules()}
    model._no_split_modules = kinds & set(model._no_split_modules or ())
    return model


def describe_use(
    model: PreTrainedModel, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, end_tokens: list[int]
) -> None:
    """Writes into what is saved beside the weights how the model is to be used: where it stops, how much it takes.

    Args:
        end_tokens: those that it is taught to end with, the most frequent one first. What it had been told to stop at
            before stays, where that is a special token of this tokenizer. Empty: there is none, and nothing changes.
    """
    generation, text = getattr(model, "generation_config", None), config.get_text_config()
    # from_pretrained gives the model a copy of the configuration.
    parts = [config, text, model.config, model.config.get_text_config(), generation] if end_tokens else []
    for part in {id(part): part for part in parts if part is not None}.values():
        before = getattr(part, "eos_token_id", None)
        before = before if isinstance(before, list) else [before]
        stops = end_tokens + [one for one in before if one in tokenizer.added_tokens_decoder and one not in end_tokens]
        part.eos_token_id = stops if part is generation and len(stops) > 1 else stops[0]
    if (positions := getattr(text, "max_position_embeddings", None) or 0) > 0:
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)


@torch.no_grad()
def write_sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Samples) -> str:
    """Text that the model writes after the beginning of the first sample; in one process, which has it whole."""
    sequence.whole_sequences()
    first_tokens, *_ = samples[0]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    most = positions if positions > 0 else math.inf
    input_ids = torch.from_numpy(first_tokens[: min(16, most - 1)]).unsqueeze(0).to(model.device)
    model.eval()
    written = model.generate(
        input_ids,
        max_new_tokens=min(100, most - input_ids.shape[1]),
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        attention_mask=torch.ones_like(input_ids),
        remove_invalid_values=True,  # of weights that have become NaN
        # What the model's own generation_config.json may ask for: text to stop at, several texts, more than tokens.
        tokenizer=tokenizer,
        num_return_sequences=1,
        return_dict_in_generate=False,
    )
    return tokenizer.decode(written[0], skip_special_tokens=True)
