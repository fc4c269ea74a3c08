"""Checks that model, tokenizer, data and settings of a resumed run match the checkpoint."""

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator
from typing import Any

from accelerate import Accelerator

from common.errors import refuse
from common.models.adapters import FLAGS, flags, with_default_alpha
from common.parallel.liveness import decided_by_main
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
SUBJECTS = {
    "model": "the model's configuration",
    "tokenizer": "the tokenizer",
    "dataset": "the training data",
    "validation": "the held-out data",
    "settings": "the settings",
    "base": "the base of the adapter",
    "reference": "the reference model",
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


def _other_library(saved: dict, now: dict) -> str | None:
    """Returns one line if the text differs because the Python version differs; None otherwise."""
    here, then = now.get("standard_library"), saved.get("standard_library")
    is_other = [saved["tokenizer"], saved["dataset"]] != [now["tokenizer"], now["dataset"]]
    if not (here and then and here != then and is_other):
        return None
    return (
        f"other training text: without --train_file it is the standard library of the Python that runs, {here}, and "
        f"the run began with {then}; resume with Python {then}, or, where rows are plain text, give --train_file "
        "'DIR/train/**/*.txt' --validation_file 'DIR/validation/**/*.txt' with the files of the first run, which "
        f"`python -m common.data.standard_library DIR` writes under Python {then}"
    )


def refuse_other_views(identity: dict) -> None:
    """Raises UserError, one line per difference, if this rank's files or directory listing differ from rank 0's."""
    main = decided_by_main("identity", lambda: identity)
    mine = json.loads(json.dumps(identity))
    texts = [{name: json.dumps(one.get(name), sort_keys=True) for name in main | mine} for one in (main, mine)]
    refuse(
        f"{SUBJECTS.get(name, name)}: this rank and rank 0 see different ones; give all hosts the same files"
        for name, text in texts[0].items()
        if text != texts[1][name]
    )


def differences(saved: dict, now: dict, args: Arguments, size_flags: Iterable[str] = ()) -> Iterator[str]:
    """Yields one line per difference to the checkpoint. size_flags: names of flags, from `Traits`."""
    allowed = args.allow_changed
    cut_by = [f"--{name}" for name in size_flags]
    keys = sorted(saved["model"].keys() | now["model"].keys(), key=lambda key: (key != "model_type", key))
    pairs = {key: (now["model"].get(key), saved["model"].get(key)) for key in keys}
    if different := [
        f"its {key} is {is_now}, the checkpoint's is {was}" for key, (is_now, was) in pairs.items() if is_now != was
    ]:
        more = f"; {len(different) - 3} more differ" if len(different) > 3 else ""
        yield f"another model: {'; '.join(different[:3])}{more}; give the run's own model"
    if line := _other_library(saved, now):
        yield line
    elif saved["tokenizer"] != now["tokenizer"]:
        yield (
            f"another tokenizer: its fingerprint is {now['tokenizer']}, the checkpoint's is {saved['tokenizer']}; give "
            "the run's own; one that was trained on the text needs the same text, and the text that a run without "
            "--train_file reads is another one in each version of Python (on another text, train what "
            "`python -m tools.checkpoint export` makes, with --model_name_or_path)"
        )
    # For image files, older checkpoints contain only the part before the hyphen: names and sizes.
    elif saved["dataset"] not in (now["dataset"], now["dataset"].partition("-")[0]) and "dataset" not in allowed:
        # For mixed data, the weights follow an @.
        (files, _, weights), (files_then, _, weights_then) = (one["dataset"].partition("@") for one in (now, saved))
        if files == files_then:
            yield (
                f"other weights: --train_file is mixed {weights}, the checkpoint's was {weights_then}; give the same, "
                "or --allow_changed dataset to continue with these"
            )
        else:
            same = "the same files"
            if now.get("standard_library"):
                same = "the same installation of Python, whose standard library is the text without --train_file,"
            yield (
                f"other training data: their fingerprint is {now['dataset']}, the checkpoint's is {saved['dataset']}; "
                f"give {same}{' and '.join(['', *cut_by])}, or --allow_changed dataset to continue with these"
            )
    was = saved.get("validation", now["validation"])  # missing in older checkpoints
    if was != now["validation"] and saved["tokenizer"] == now["tokenizer"] and "validation" not in allowed:
        is_now, was = (one["validation"] or "that of none" for one in (now, saved))
        yield (
            f"other held-out data: their fingerprint is {is_now}, the checkpoint's is {was}; give the same files"
            f"{' and '.join(['', *cut_by])}, or --allow_changed validation: --keep_best and --patience then begin anew"
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
    yield from _different_settings(saved, now, allowed)


def _different_settings(saved: dict, now: dict, allowed: list[str]) -> Iterator[str]:
    """Yields one line per setting that differs from the checkpoint."""
    was_given, is_given = (with_default_alpha(one["settings"]) for one in (saved, now))
    if is_given.get("head_learning_rate"):  # older runs trained a new head at the common learning rate
        was_given = {"head_learning_rate": was_given["learning_rate"]} | was_given
    own_flags = dict.fromkeys(sorted(now["settings"].keys() - SETTINGS.keys()), False)
    if ("lora_rank" in was_given) != ("lora_rank" in is_given):  # the other adapter flags follow from it
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
    """Returns a flag's value as text for a message; "" if the flag is not set."""
    if value is None or value is False:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else "given" if value is True else str(value)
