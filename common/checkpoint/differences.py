"""Lists the differences of a resumed run to its checkpoint: model, tokenizer, data and settings."""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from common.checkpoint.identity import SETTINGS
from common.models.adapters import FLAGS, with_default_alpha


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


def differences(saved: dict, now: dict, args: argparse.Namespace, size_flags: Iterable[str] = ()) -> Iterator[str]:
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
