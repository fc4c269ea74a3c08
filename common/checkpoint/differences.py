"""Lists the differences between a resumed run and its checkpoint: model, tokenizer, data and settings."""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from common.checkpoint.identity import SETTINGS
from common.models.adapters import FLAGS
from common.models.lora import resolve_alpha


def differences(saved: dict, now: dict, args: argparse.Namespace, size_flags: Iterable[str] = ()) -> Iterator[str]:
    """Yields one line per difference between run and checkpoint.

    Args:
        saved, now: results of `identity.identify` at the start of the run and at the resume.
        size_flags: names of the flags that determine the size of a sample, from `Traits`.
    """
    allowed = args.allow_changed
    yield from _model_differences(saved["model"], now["model"])
    yield from _data_differences(saved, now, allowed, " and ".join(["", *(f"--{name}" for name in size_flags)]))
    if saved.get("base") and now.get("base") and saved["base"] != now["base"]:
        yield (
            f"the base of the adapter differs, or its files have changed: its fingerprint is {now['base']}, the "
            f"checkpoint's is {saved['base']}; pass the run's own --model_name_or_path, with the original files"
        )
    if saved.get("reference") != now.get("reference"):
        yield (
            f"the reference model differs: its fingerprint is {now.get('reference')}, the checkpoint's is "
            f"{saved.get('reference')}; use the model that the run began with, or its --seed if it was from scratch"
        )
    was, is_now = (identity["settings"].get("teacher_weights") for identity in (saved, now))
    if was != is_now:
        fix = "pass the run's own --teacher, with the original files" if was else "remove --teacher"
        yield (
            f"the teacher differs, or its files have changed: its fingerprint is {is_now or 'none'}, the checkpoint's "
            f"is {was or 'none'}; {fix}"
        )
    yield from _different_settings(saved, now, allowed)


def _model_differences(saved: dict, now: dict) -> Iterator[str]:
    keys = sorted(saved.keys() | now.keys(), key=lambda key: (key != "model_type", key))
    values = {key: (now.get(key), saved.get(key)) for key in keys if now.get(key) != saved.get(key)}
    if values:
        shown = [f"its {key} is {is_now}, the checkpoint's is {was}" for key, (is_now, was) in values.items()]
        more = f"; {len(shown) - 3} more differ" if len(shown) > 3 else ""
        yield f"the model differs: {'; '.join(shown[:3])}{more}; use the run's own model"


def _data_differences(saved: dict, now: dict, allowed: list[str], and_flags: str) -> Iterator[str]:
    """Yields at most one line about tokenizer and training data, and one about the held-out data."""
    if line := _different_library(saved, now):
        yield line
    elif saved["tokenizer"] != now["tokenizer"]:
        yield (
            f"the tokenizer differs: its fingerprint is {now['tokenizer']}, the checkpoint's is {saved['tokenizer']}; "
            "use the run's own tokenizer. A tokenizer that was trained on the text needs the same text, and without "
            "--train_file the text differs between versions of Python. To train on a different text, pass the output "
            "of `python -m tools.checkpoint export` as --model_name_or_path"
        )
    # Older checkpoints of image files contain only the part before the hyphen: names and sizes.
    elif saved["dataset"] not in (now["dataset"], now["dataset"].partition("-")[0]) and "dataset" not in allowed:
        # For mixed data, the weights follow an @.
        files, _, weights = now["dataset"].partition("@")
        saved_files, _, saved_weights = saved["dataset"].partition("@")
        if files == saved_files:
            yield (
                f"the weights differ: --train_file is mixed {weights}, the checkpoint's was {saved_weights}; pass the "
                "same weights, or --allow_changed dataset to continue with these"
            )
        else:
            same = "the same files"
            if now.get("standard_library"):
                same = "the same installation of Python, whose standard library is the text without --train_file,"
            yield (
                f"the training data differs: its fingerprint is {now['dataset']}, the checkpoint's is "
                f"{saved['dataset']}; pass {same}{and_flags}, or --allow_changed dataset to continue with these"
            )
    was = saved.get("validation", now["validation"])  # missing in older checkpoints
    if was != now["validation"] and saved["tokenizer"] == now["tokenizer"] and "validation" not in allowed:
        yield (
            f"the held-out data differs: its fingerprint is {now['validation'] or 'none'}, the checkpoint's is "
            f"{was or 'none'}; pass the same files{and_flags}, or --allow_changed validation: --keep_best and "
            "--patience then start anew"
        )


def _different_library(saved: dict, now: dict) -> str | None:
    """Returns one line if the text differs because the Python version differs; None otherwise."""
    version, saved_version = now.get("standard_library"), saved.get("standard_library")
    is_same = [saved["tokenizer"], saved["dataset"]] == [now["tokenizer"], now["dataset"]]
    if is_same or not (version and saved_version and version != saved_version):
        return None
    return (
        "the training text differs: without --train_file it is the standard library of the running Python, version "
        f"{version}, and the run began with {saved_version}; resume with Python {saved_version}, or, if rows are "
        "plain text, pass --train_file 'DIR/train/**/*.txt' --validation_file 'DIR/validation/**/*.txt' with the files "
        f"of the first run, which `python -m common.data.standard_library DIR` writes under Python {saved_version}"
    )


def _different_settings(saved: dict, now: dict, allowed: list[str]) -> Iterator[str]:
    """Yields one line per setting that differs from the checkpoint."""
    saved_settings, settings = _with_default_alpha(saved["settings"]), _with_default_alpha(now["settings"])
    if settings.get("head_learning_rate"):  # older runs trained a new head at the common learning rate
        saved_settings = {"head_learning_rate": saved_settings["learning_rate"]} | saved_settings
    own_flags = dict.fromkeys(sorted(now["settings"].keys() - SETTINGS.keys()), False)
    if own_flags.pop("teacher_weights", None) is not None and "teacher_weights" not in saved_settings:
        own_flags = {name: False for name in own_flags if name in saved_settings}  # the flags of the teacher differ too
    if ("lora_rank" in saved_settings) != ("lora_rank" in settings):  # the other adapter flags then differ too
        own_flags = {name: False for name in ("lora_rank", *own_flags) if name not in FLAGS}
    for name, can_change in (SETTINGS | own_flags).items():
        was, is_now = saved_settings.get(name), settings.get(name)
        if was != is_now and name not in allowed:
            flag = "--mixed_precision of the launch" if name == "mixed_precision" else f"--{name}"
            advice = flag if was is True else _format_value(was)
            problem = f"is {_format_value(was)}; pass {advice}" if advice else "run had none; remove it"
            alternative = f", or --allow_changed {name}" if can_change else ""
            yield f"{flag} is {_format_value(is_now) or 'not set'}, the checkpoint's {problem}{alternative}"


def _format_value(value: Any) -> str:
    """Returns a flag's value as text for a message; "" if the flag is not set."""
    if value is None or value is False:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else "set" if value is True else str(value)


def _with_default_alpha(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings, with the default alpha if --lora_alpha is not set."""
    if not settings.get("lora_rank"):
        return settings
    return settings | {"lora_alpha": resolve_alpha(settings.get("lora_alpha"), settings["lora_rank"])}
