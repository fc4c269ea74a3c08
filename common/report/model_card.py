"""Writes model/README.md: a description of the model, its data and its training, from the record of the run."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from common.files import replace_text
from common.models.saved_model import loading_call
from common.redaction import on_one_line, redact

# Tags of the hub's demo widgets, by the Auto class that loads the model.
PIPELINE_TAGS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForImageClassification": "image-classification",
}
# The metrics to show, in this order, if the run has them.
METRICS = {
    "validation_loss": "held-out loss",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte of held-out text",
    "accuracy": "accuracy",
    "macro_f1": "macro-F1",
    "r2": "R²",
    "chrf": "chrF",
    "exact": "exact matches",
    "tokens_per_second": "tokens per second of training",
    "training_seconds": "seconds of training, over all starts",
    "repeated_seconds": "of these for repeated updates",
    "evaluation_seconds": "seconds of evaluations between updates",
    "saving_seconds": "seconds of saving checkpoints between updates",
    "peak_memory_bytes": "most memory of a process, GiB",
}
HIDDEN_IF_0 = ("repeated_seconds", "evaluation_seconds", "saving_seconds")
# Flags that do not affect the model, only the output and the processes of the run.
HIDDEN_FLAGS = "output_dir overwrite resume dry_run plan save_every keep_last report_to num_workers connect_timeout"
HIDDEN_FLAGS += " profile allow_changed"


def write_model_card(directory: Path, run: dict[str, Any], model_class: str) -> None:
    """Writes README.md into model/."""
    arguments, results = run["arguments"], run["results"]
    name, base = directory.parent.name, arguments.get("model_name_or_path")
    is_adapter = arguments.get("lora_rank") is not None
    card = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=PIPELINE_TAGS.get(model_class),
        base_model=base if base and not Path(base).expanduser().exists() else None,  # a path would not be a valid link
        tags=["accelerate", Path(run["command"][0]).name.removesuffix(".py")],
    )
    if is_adapter:
        from common.models.adapter_files import describe_adapter

        model = describe_adapter(directory)
    else:
        model = as_code(json.loads((directory / "config.json").read_text())["architectures"][0])
    origin = f"fine-tuned from {as_code(base)}" if base else "trained from scratch"
    length = f"{results['updates']:,} updates"
    if (best := results.get("best")) and best["is_model"]:
        update = int(best["checkpoint"].rpartition("-")[2])
        length += f"; the weights are those after update {update:,}, which had the lowest held-out loss"
    data = [(f"trained on, until update {entry['until']:,}", entry["data"]) for entry in run.get("earlier_data") or []]
    data += [("trained on", run["data"]), ("held out", run["held_out"])]
    resumed = f", resumed at update {run['resumed_at']}" if run["resumed_at"] else ""
    parts = [
        f"# {_text(name)}",
        f"{model}, {origin} in {length}; `{loading_call(directory, model_class, 'PATH')}` loads it.",
        "## Data",
        *(_list(part, text) for part, text in data if text),
        "## Figures",
        _table(dict(_metrics(run))),
        "## Settings",
        f"{run['mode']}, {run['world_size']} process{'es' * (run['world_size'] > 1)} on {run['device']}, "
        f"mixed precision: {run['mixed_precision']}{resumed}.",
        *_settings(run),
        "## Command",
        *_commands(run),
        "## Versions",
        ", ".join(f"{package} {version}" for package, version in run["versions"].items()),
    ]
    replace_text(directory / "README.md", redact(f"---\n{card}\n---\n\n" + _short("\n\n".join(parts)) + "\n"))


def _metrics(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields name and value of each metric, including the loss of each separately evaluated held-out source."""
    sources = [entry["source"] for entry in run.get("held_out_sources") or []]
    names = METRICS | {f"validation_loss/{source}": f"held-out loss of {as_code(source)}" for source in sources}
    for key, name in names.items():
        value = run["results"].get(key)
        if value or (value is not None and key not in HIDDEN_IF_0):
            yield name, f"{value / (2**30 if key == 'peak_memory_bytes' else 1):,.6g}"


def _list(part: str, text: str) -> str:
    """Returns a list item for a part of the data; mixed data has a sub-item per source."""
    first, *others = map(_text, text.split("\n"))
    return "\n  - ".join([f"- {part}:", first, *map(str.strip, others)]) if others else f"- {part}: {first}"


def _settings(run: dict[str, Any]) -> Iterator[str]:
    """Yields a table of the settings passed at any start of the run, then the default settings."""
    hidden = HIDDEN_FLAGS.split()
    # --num_epochs replaces --num_updates; without an adapter, --lora_dropout has no effect.
    hidden += ["num_updates"] if run["arguments"].get("num_epochs") else []
    hidden += [] if run["arguments"].get("lora_rank") else ["lora_dropout"]
    settings = {
        f"--{key}": " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in run["arguments"].items()
        if key not in hidden and value not in (None, []) and value is not False  # 0 is a value
    }
    given = {word.partition("=")[0] for command in run["commands"] for word in command}
    if requested := {as_code(flag): as_code(words) for flag, words in settings.items() if flag in given}:
        yield _table(requested)
    defaults = [f"{flag} {words}" for flag, words in settings.items() if flag not in given]
    yield f"Defaults: {', '.join(map(as_code, defaults))}."


def _commands(run: dict[str, Any]) -> Iterator[str]:
    """Yields the distinct commands of all starts, in Markdown, and a note if the launcher is unknown."""
    first, *others = dict.fromkeys(f"    {on_one_line(shlex.join(map(str, command)))}" for command in run["commands"])
    yield first
    if others:
        yield "Continued by:"
        yield from others
    if run["commands"][-1][0] not in ("accelerate", "python"):
        yield "Another launcher than `accelerate launch` started it in each process."


def _short(text: str) -> str:
    """Shortens paths below the current and the home directory, which readers of the card do not have."""
    for path, replacement in ((Path.cwd(), ""), (Path.home(), "~/")):
        if path.parent != path:
            text = re.sub(rf"(?<![\w.~/-]){re.escape(str(path))}/", replacement, text)
    return text


def _text(text: str) -> str:
    """Returns a text that Markdown shows as it is, without markup, links or HTML."""
    return re.sub(r"[\\`*\[\]<>|~$&]", r"\\\g<0>", on_one_line(text))


def as_code(text: str) -> str:
    """Returns a text as inline code; it may contain backticks, and be a cell of a table."""
    marks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " * (len(marks) > 1)
    return f"{marks}{space}{on_one_line(text)}{space}{marks}".replace("|", r"\|")


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())])
