"""model/README.md: what the model is, what it was trained on and how, by a run's own record."""

import json
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from common.checkpoint.adapter import loading_call

# What the hub lets people try a model for, by the Auto class that loads it.
PIPELINE_TAGS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForImageClassification": "image-classification",
}
# The figures that are shown, in this order, where a run has them.
FIGURES = {
    "validation_loss": "held-out loss",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte of held-out text",
    "accuracy": "accuracy",
    "macro_f1": "macro-F1",
    "r2": "R²",
    "chrf": "chrF",
    "exact": "exact matches",
    "tokens_per_second": "tokens a second",
    "training_seconds": "seconds of training",
    "peak_memory_bytes": "most memory of a process, bytes",
}
# That say nothing about the model: where and how the run was kept.
KEPT = "output_dir overwrite resume dry_run plan report_to num_workers connect_timeout profile".split()


def write_model_card(directory: Path, run: dict[str, Any], model_class: str) -> None:
    """Writes README.md into model/.

    run: as run.json has it, without secrets. model_class: an Auto class, or a recipe's own.
    """
    arguments, data = run["arguments"], {"trained on": run["data"], "held out": run["held_out"]}
    name, base = directory.parent.name, arguments.get("model_name_or_path")
    is_adapter = arguments.get("lora_rank") is not None
    card = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=PIPELINE_TAGS.get(model_class),
        base_model=base if base and not Path(base).expanduser().exists() else None,  # a path would be no link
        tags=["accelerate", run["command"][0].rpartition("/")[2].removesuffix(".py")],
    )
    origin = f"fine-tuned from `{base}`" if base else "trained from scratch"
    if is_adapter:
        what = f"An adapter (LoRA) of rank {arguments['lora_rank']}"
    else:
        what = f"`{json.loads((directory / 'config.json').read_text())['architectures'][0]}`"
    settings = {key: value for key, value in arguments.items() if key not in KEPT and value not in (None, [])}
    settings = {key: value for key, value in settings.items() if value is not False}
    results = run["results"]
    figures = {words: results[key] for key, words in FIGURES.items() if results.get(key) is not None}
    apart = [one["source"] for one in run.get("held_out_sources") or []]
    figures |= {f"held-out loss of `{source}`": results[f"validation_loss/{source}"] for source in apart}
    resumed = f", resumed at update {run['resumed_at']}" if run["resumed_at"] else ""
    lines = [
        f"---\n{card}\n---",
        f"# {name}",
        f"{what}, {origin} in {run['results']['updates']:,} updates; "
        f"`{loading_call(directory, model_class)}` loads it.",
        "## Data",
        *(f"- {part}: {' '.join(text.split())}" for part, text in data.items() if text),
        "## Figures",
        _table({words: f"{value:,.6g}" for words, value in figures.items()}),
        "## Settings",
        f"{run['mode']}, {run['world_size']} process{'es' * (run['world_size'] > 1)} on {run['device']}, "
        f"mixed precision: {run['mixed_precision']}{resumed}.",
        _table({f"`--{key}`": f"`{_words(value)}`" for key, value in settings.items()}),
        "## Command",
        f"    {shlex.join(map(str, run['command']))}",
        "## Versions",
        ", ".join(f"{package} {version}" for package, version in run["versions"].items()),
    ]
    ModelCard("\n\n".join(lines) + "\n").save(directory / "README.md")


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())])


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
