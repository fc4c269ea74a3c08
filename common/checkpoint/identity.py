"""What must be the same when a run is continued: model, tokenizer, data and settings."""

import argparse
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator

from common.checkpoint import adapter
from common.models.adapters import FLAGS, flags, with_default_alpha

# What an update depends on besides samples and weights; another value than the checkpoint's is refused. False: also
# with --allow_changed, since the saved state would not fit.
SETTINGS = {
    "global_batch_size": False,  # by which an update's samples are found
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
CHANGEABLE = ("dataset", *(name for name, can_change in SETTINGS.items() if can_change))


def identify(
    args: argparse.Namespace, accelerator: Accelerator, config: Any, tokenizer: Any, samples: Any, *own_flags: str
) -> dict:
    """What must be the same when a run is continued.

    Args:
        config: the model's configuration. tokenizer: of transformers, or None. samples: `training.batching.Samples`,
            perhaps with an `identity` of their own beside their fingerprint.
        own_flags: names of the recipe's own flags that an update depends on.
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
    settings = {name: getattr(args, name) for name in (*SETTINGS, *own_flags) if hasattr(args, name)}
    settings["mixed_precision"] = accelerator.mixed_precision
    identity = {
        "model": model,
        "tokenizer": hashlib.sha256(words.encode()).hexdigest()[:16],
        "dataset": samples.fingerprint,
        "settings": settings,
    }
    return identity | adapter.identity(args) | getattr(samples, "identity", {})


def differences(saved: dict, now: dict, args: argparse.Namespace) -> Iterator[str]:
    """One line for each thing that is not what the checkpoint was made with."""
    allowed = args.allow_changed
    cut_by = [f"--{name}" for name in ("sequence_length", "target_length", "image_size") if hasattr(args, name)]
    keys = sorted(saved["model"].keys() | now["model"].keys(), key=lambda key: (key != "model_type", key))
    pairs = {key: (now["model"].get(key), saved["model"].get(key)) for key in keys}
    if different := [
        f"its {key} is {is_now}, the checkpoint's is {was}" for key, (is_now, was) in pairs.items() if is_now != was
    ]:
        more = f"; {len(different) - 3} more differ" if len(different) > 3 else ""
        yield f"another model: {'; '.join(different[:3])}{more}; give the run's own model"
    if saved["tokenizer"] != now["tokenizer"]:
        yield (
            f"another tokenizer: its fingerprint is {now['tokenizer']}, the checkpoint's is {saved['tokenizer']}; give "
            "the run's own; one that was trained on the text needs the same text (on another text, train what "
            "`python -m common.checkpoint export` makes, with --model_name_or_path)"
        )
    # Older checkpoints have of image files what stands before the hyphen: names and sizes.
    elif saved["dataset"] not in (now["dataset"], now["dataset"].partition("-")[0]) and "dataset" not in allowed:
        # Of mixed data the weights stand behind an @.
        (files, _, weights), (files_then, _, weights_then) = (one["dataset"].partition("@") for one in (now, saved))
        if files == files_then:
            yield (
                f"other weights: --train_file is mixed {weights}, the checkpoint's was {weights_then}; give the same, "
                "or --allow_changed dataset to go on with these"
            )
        else:
            yield (
                f"other training data: their fingerprint is {now['dataset']}, the checkpoint's is {saved['dataset']}; "
                f"give the same files{' and '.join(['', *cut_by])}, or --allow_changed dataset to go on with these"
            )
    if saved.get("base") and now.get("base") and saved["base"] != now["base"]:
        yield (
            f"another base of the adapter, or its files have changed: their fingerprint is {now['base']}, the "
            f"checkpoint's is {saved['base']}; give the run's own --model_name_or_path, with the files it had"
        )
    if saved.get("reference") != now.get("reference"):
        yield (
            f"another reference model: its fingerprint is {now.get('reference')}, the checkpoint's is "
            f"{saved.get('reference')}; give the model that the run began with, or of one from scratch the --seed"
        )
    was_given, is_given = (with_default_alpha(one["settings"]) for one in (saved, now))
    if is_given.get("head_learning_rate"):  # older runs trained a new head at the rate of all
        was_given = {"head_learning_rate": was_given["learning_rate"]} | was_given
    own_flags = dict.fromkeys(sorted(now["settings"].keys() - SETTINGS.keys()), False)
    if ("lora_rank" in was_given) != ("lora_rank" in is_given):  # the others follow from it
        own_flags = {name: False for name in ("lora_rank", *own_flags) if name not in FLAGS}
    for name, can_change in (SETTINGS | own_flags).items():
        was, is_now = was_given.get(name), is_given.get(name)
        if was != is_now and name not in allowed:
            how = f", or --allow_changed {name}" if can_change else ""
            flag = "--mixed_precision of the launch" if name == "mixed_precision" else f"--{name}"
            advice = flag if was is True else _words(was)
            what = f"is {_words(was)}; give {advice}" if advice else "run had none; take it out"
            yield f"{flag} is {_words(is_now) or 'not given'}, the checkpoint's {what}{how}"


def _words(value: Any) -> str:
    """A flag's value, for a message; empty for one that is not given."""
    if value is None or value is False:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else "given" if value is True else str(value)
