"""The properties of a run that must stay the same when it is resumed: model, tokenizer, data and settings."""

import hashlib
import json
import platform
from typing import Any

from accelerate import Accelerator

from common.models.adapters import flags
from common.training.recipe_traits import Arguments

# Settings that affect an update, in addition to samples and weights. Different values than in the checkpoint are
# rejected. True: unless --allow_changed names the setting; False: always, because the saved state would not fit.
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
    args: Arguments, accelerator: Accelerator, config: Any, tokenizer: Any, samples: Any, held_out: Any, *own_flags: str
) -> dict:
    """Returns the properties that must stay the same when a run is resumed."""
    model = {
        key: value
        for key, value in json.loads(config.to_json_string(use_diff=False)).items()
        if not key.startswith("_") and key not in ("transformers_version", "dtype", "torch_dtype", "architectures")
    }
    text = ""
    if tokenizer is not None:
        vocabulary = sorted(tokenizer.get_vocab().items())
        text = json.dumps([vocabulary, str(tokenizer.chat_template), tokenizer.eos_token_id])
    own_flags += flags(args)
    shared = (name for name in SETTINGS if name in args.shared_flags)
    settings = {name: getattr(args, name) for name in (*shared, *own_flags)}
    settings["mixed_precision"] = accelerator.mixed_precision
    identity = {
        "model": model,
        "tokenizer": hashlib.sha256(text.encode()).hexdigest()[:16],
        "dataset": samples.fingerprint,
        "validation": None if held_out is None else held_out.fingerprint,
        "settings": settings,
    }
    if "train_file" in args.shared_flags and not (args.train_file or args.dataset_name):
        identity["standard_library"] = platform.python_version()  # its standard library is the training text
    if args.shared("lora_rank") is not None:  # a checkpoint of an adapter does not contain the weights of its base
        from common.data.hub import identify_pretrained

        identity["base"] = identify_pretrained(args.model_name_or_path)
    return identity | getattr(samples, "identity", {})
