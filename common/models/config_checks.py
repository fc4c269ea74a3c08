"""Checks the values in the configuration of a pretrained model, which may come from anywhere, before it is used."""

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from common.errors import UserError, raise_errors
from common.models.untrained import empty_model
from common.reading import reading

MAX_REPEATS = 10_000  # layers, experts, ...; the modules of more would take longer to build than a user waits
MAX_PARAMETERS = 10**14  # no machine trains more
REPEATED = re.compile("(?:layer|depth|expert|stage|block)s?$")  # how names of values end that count modules
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
FIX = "fix it, or save the model again"


def build_checked(
    config: PreTrainedConfig, location: str, trust_remote_code: bool, model_class: Any
) -> PreTrainedModel:
    """Returns the model of a configuration on the `meta` device.

    Raises UserError: transformers cannot build the model, or a value is out of range; `location` begins the lines.
    """
    settings = config.to_dict()
    raise_errors(f"{location}: its config.json has {problem}; {FIX}" for problem in _find_problems(settings))
    quantized = settings.get("quantization_config") or {}
    if "bitsandbytes" in str(quantized.get("quant_method")) or quantized.get("load_in_4bit"):
        raise UserError(
            f"{location}: its weights are quantized by bitsandbytes and cannot be trained; use the model before its "
            "quantization, with --quantize nf4 --lora_rank 16 for 4 bits"
        )
    with reading(f"{location}: transformers cannot build the model of its config.json", FIX):
        model = empty_model(copy.deepcopy(config), trust_remote_code, model_class)
        size = sum(parameter.numel() for parameter in model.parameters())
    if size > MAX_PARAMETERS:
        raise UserError(f"{location}: its config.json describes {size:.1e} parameters, too many to train; {FIX}")
    return model


def check_generation(directory: Path, location: str, is_saved: bool = False) -> None:
    """Raises UserError if generation_config.json is not an object or has invalid token ids; no file is valid.

    is_saved: it is saved with the model, so transformers must accept its settings.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return
    with reading(f"{location}: its generation_config.json", FIX):
        settings = json.loads(path.read_bytes())
        if not isinstance(settings, dict):
            raise UserError(f"{location}: its generation_config.json is no JSON object; remove it")
        problems = list(_find_problems({name: settings[name] for name in TOKEN_IDS if name in settings}))
        raise_errors(f"{location}: its generation_config.json has {problem}; {FIX}" for problem in problems)
        if is_saved:
            GenerationConfig.from_dict(settings).validate(strict=True)


def check_index(directory: Path, location: str) -> None:
    """Raises UserError if an index of weight files names a file outside of the model's directory."""
    for path in sorted(directory.glob("*.index.json")):
        with reading(f"{location}: its {path.name}", FIX):
            files = json.loads(path.read_bytes())["weight_map"].values()
            if outside := sorted({name for name in files if Path(name).name != name}):
                raise UserError(
                    f"{location}: its {path.name} names {outside[0]}, which is not a file of this directory; {FIX}"
                )


def _find_problems(values: dict[str, Any]) -> Iterator[str]:
    """Yields a text for each value out of range, in nested configurations too."""
    rows = values.get("vocab_size")
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if isinstance(value, dict) and name not in TOKEN_IDS:
            yield from _find_problems(value)
        elif any(isinstance(item, float) and math.isnan(item) for item in items):
            yield f"{name} {_short(value)}, not a number"
        elif name in ("num_hidden_layers", "rope_theta") and isinstance(value, int | float) and value <= 0:
            yield f"{name} {_short(value)}, not above 0"
        elif name in TOKEN_IDS:
            if not all(item is None or (type(item) is int and -1 <= item < 2**31) for item in items):
                yield f"{name} {_short(value)}, not the id of a token"
            elif name in ("pad_token_id", "decoder_start_token_id") and type(rows) is int and value is not None:
                if any(item is not None and item >= rows for item in items):
                    yield f"{name} {_short(value)}, beyond its vocabulary of {rows}"
        elif REPEATED.search(str(name)) and any(type(item) is int and item > MAX_REPEATS for item in items):
            yield f"{name} {_short(value)}, above {MAX_REPEATS}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."
