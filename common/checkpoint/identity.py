"""The properties of a run that must stay the same when it is resumed: model, tokenizer, data and settings."""

import hashlib
import json
import platform
from typing import Any

from accelerate import Accelerator

from common.models.adapters import flags
from common.training.recipe_traits import Arguments

# Settings that affect an update besides samples and weights. A value that differs from the checkpoint is rejected.
# False: also with --allow_changed, because the saved state would not fit.
SETTINGS = {
    "global_batch_size": False,  # determines the samples of an update
    "num_updates": True,
    "seed": True,
    "drop_last_window": True,
    "optimizer": False,
    "learning_rate": True,
    "head_learning_rate": True,
    "weight_decay": True,
    "warmup_updates": True,
    "lr_schedule": True,
    "max_grad_norm": True,
    "mixed_precision": True,
}
CHANGEABLE = ("dataset", "validation", *(name for name, can_change in SETTINGS.items() if can_change))


def identify(
    args: Arguments,
    accelerator: Accelerator,
    config: Any,
    tokenizer: Any,
    samples: Any,
    held_out: Any,
    *own_flags: str,
) -> dict:
    """Returns the properties that must stay the same when a run is resumed.

    Args:
        config: model configuration. tokenizer: transformers tokenizer, or None. samples: `training.batching.Samples`,
            which may have an `identity` in addition to their fingerprint. held_out: the same, or None.
        own_flags: names of the recipe's own flags that affect an update.
    """
    model = {
        key: value
        for key, value in json.loads(config.to_json_string(use_diff=False)).items()
        if not key.startswith("_") and key not in ("transformers_version", "dtype", "torch_dtype", "architectures")
    }
    words = ""
    if tokenizer is not None:
        words = json.dumps(
            [sorted(tokenizer.get_vocab().items()), str(tokenizer.chat_template), tokenizer.eos_token_id]
        )
    own_flags += flags(args)
    shared = (name for name in SETTINGS if name in args.shared_flags)
    settings = {name: getattr(args, name) for name in (*shared, *own_flags)}
    settings["mixed_precision"] = accelerator.mixed_precision
    identity = {
        "model": model,
        "tokenizer": hashlib.sha256(words.encode()).hexdigest()[:16],
        "dataset": samples.fingerprint,
        "validation": None if held_out is None else held_out.fingerprint,
        "settings": settings,
    }
    return identity | _standard_library(args) | _adapter_base(args) | getattr(samples, "identity", {})


def _adapter_base(args: Arguments) -> dict[str, str]:
    """Identifies the base model of an adapter, because a checkpoint does not contain its weights."""
    if args.shared("lora_rank") is None:
        return {}
    from common.data.hub import identify_pretrained

    return {"base": identify_pretrained(args.model_name_or_path)}


def _standard_library(args: Arguments) -> dict[str, str]:
    """Returns the version of Python whose standard library is the training text; {} if data is specified."""
    is_default = "train_file" in args.shared_flags and not (args.train_file or args.dataset_name)
    return {"standard_library": platform.python_version()} if is_default else {}
