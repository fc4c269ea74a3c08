"""Writes the models and samples of benchmarks/throughput.py once for all arms, as each recipe selects them."""

import hashlib
import json
import runpy
import shutil
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.data.source_types import Source  # noqa: E402
from common.data.sources import open_source  # noqa: E402
from common.parallel.connect import seed_everything  # noqa: E402
from common.tasks.classify.labels import read_packages  # noqa: E402
from common.tasks.seq2seq.pairs import docstring_corpus  # noqa: E402
from common.tasks.vision.images import collate_images  # noqa: E402
from common.training.batching import sample_ids_of  # noqa: E402

SEED = 0
LM_ARMS = ("recipe", "plain", "tuned", "trainer", "grouped", "sft", "packed")
# flags: the recipe's. global_batch and micro_batch: samples of an update, and of a peer's micro-batch. warmup and
# measured: updates of a run. arms: those for which the data make a difference. medium: what the larger shape changes.
DATA = {
    "functions": {
        "recipe": "lm",
        "flags": ["--shape", "examples", "--sequence_length", "512"],
        **{"global_batch": 128, "micro_batch": 8, "warmup": 1, "measured": 1, "arms": LM_ARMS},
        "medium": {"global_batch": 32},
        "1b": {"global_batch": 512, "micro_batch": 64, "warmup": 3, "measured": 4},
    },
    "blocks": {
        "recipe": "lm",
        "flags": ["--shape", "blocks", "--sequence_length", "512"],
        **{"global_batch": 16, "micro_batch": 4, "warmup": 1, "measured": 4},
        "arms": ("recipe", "plain", "tuned", "trainer", "sft", "compiled", "trainer_compiled"),
        "medium": {"global_batch": 8, "measured": 1},
        "1b": {"flags": ["--shape", "blocks", "--sequence_length", "4096"], "global_batch": 16, "micro_batch": 2}
        | {"warmup": 3, "measured": 4},
        "8b": {"flags": ["--shape", "blocks", "--sequence_length", "4096"], "global_batch": 8, "micro_batch": 2}
        | {"warmup": 2, "measured": 4, "more": ["--lora_rank", "16"], "arms": ("recipe", "sft")},
    },
    "adapter": {
        "recipe": "lm",
        "flags": ["--shape", "blocks", "--sequence_length", "512"],
        **{"global_batch": 16, "micro_batch": 4, "warmup": 1, "measured": 4, "more": ["--lora_rank", "16"]},
        "arms": ("recipe", "plain", "tuned", "trainer", "sft", "compiled"),
        "rows": "blocks",
        "medium": {"global_batch": 8, "measured": 1},
    },
    "classify": {
        "recipe": "classify",
        "flags": [],
        **{"global_batch": 32, "micro_batch": 8, "warmup": 1, "measured": 8},
        "arms": ("recipe", "plain", "tuned", "trainer", "grouped"),
        "medium": {"measured": 2},
    },
    "seq2seq": {
        "recipe": "seq2seq",
        "flags": [],
        **{"global_batch": 16, "micro_batch": 8, "warmup": 1, "measured": 8},
        "arms": ("recipe", "plain", "tuned", "trainer", "grouped"),
        "medium": {"measured": 2},
    },
    "vision": {
        "recipe": "vision",
        "flags": ["--augment", "none", "--drop_last_window"],
        **{"global_batch": 64, "micro_batch": 64, "warmup": 10, "measured": 100},
        "arms": ("recipe", "plain", "trainer"),
        "medium": {},
    },
}
PIECE = 8000  # characters
GPU_UPDATES = {"warmup": 5, "measured": 30}
QUICK = {"global_batch": 8, "micro_batch": 4, "warmup": 1, "measured": 1}
# Rows of MODEL_CONFIGS that no recipe has: the shape of Llama 3.1 8B, with a smaller vocabulary.
MORE_SIZES = {"lm": {"8b": (32, 4096, 32, 8, 14336, 32768, 3e-4)}}
# What each recipe calls the sizes, and the class that loads the model in all arms.
MODELS = {
    "lm": ({"small": "small", "medium": "medium", "quick": "tiny", "1b": "large", "8b": "8b"}, "AutoModelForCausalLM"),
    "classify": ({"small": "small", "medium": "base", "quick": "tiny"}, "AutoModelForSequenceClassification"),
    "seq2seq": ({"small": "small", "medium": "medium", "quick": "tiny"}, "AutoModelForSeq2SeqLM"),
    "vision": ({"small": "vit", "quick": "vit"}, "AutoModelForImageClassification"),
}


def settings_of(name, size, on_gpu):
    """The settings of one data set in one size."""
    settings = {key: value for key, value in DATA[name].items() if key not in ("medium", "1b", "8b")}
    changes = QUICK if size == "quick" else DATA[name].get(size, {})
    return settings | (GPU_UPDATES if on_gpu and size != "quick" else {}) | changes


def rows_of(name):
    """The training rows, from Python's standard library, as the recipe would take them from there; no held-out files.

    In a file they have no held-out part, whose evaluation the benchmark does not wait for.
    """
    if name == "classify":
        return ({"text": example.texts[0], "label": example.label} for example in read_packages()[0])
    if name == "two packages":  # the two with most functions
        examples = read_packages()[0]
        labels = [label for label, _ in Counter(example.label for example in examples).most_common(2)]
        return ({"text": one.texts[0], "label": one.label} for one in examples if one.label in labels)
    corpus = open_source(Source(embedded="train"))
    if name == "pieces":  # each longer than 512 tokens; its label: whether its file comes before "m"
        files = ((row.where, row.values["text"]) for row in corpus.rows(corpus.columns, True))
        cut = ((where, text[at : at + PIECE]) for where, text in files for at in range(0, len(text) - PIECE, PIECE))
        return ({"text": text, "label": "first half" if where < "m" else "second half"} for where, text in cut)
    if name == "seq2seq":
        corpus = docstring_corpus(corpus, "text", ("source", "target"))
    return (row.values for row in corpus.rows(corpus.columns, name == "blocks"))


def prepare(work, name, size, settings):
    """Writes rows, model and every update's samples below `work`, or finds them there; returns the facts about them.

    settings: as in DATA. Where they are there, `rows` names others (of `rows_of`), `model_flags` another model, and
    `more_sizes` are further rows of the recipe's MODEL_CONFIGS.

    Below work/NAME-SIZE: rows.jsonl, model/ (with what is saved beside it: a tokenizer, or how pixels are normalised),
    batches.jsonl (a sample a line, in the order in which the recipe draws them) and facts.json.
    """
    folder, settings = work / f"{name}-{size}", json.loads(json.dumps(settings))  # as facts.json has them
    if (folder / "facts.json").exists():
        facts = json.loads((folder / "facts.json").read_text())
        if facts["settings"] == settings:
            return facts
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    if settings["recipe"] != "vision":
        with open(folder / "rows.jsonl", "w") as file:
            for row in islice(rows_of(settings.get("rows", name)), 0, None, 100 if size == "quick" else 1):
                file.write(json.dumps(row) + "\n")
    recipe = runpy.run_path(str(ROOT / f"recipes/{settings['recipe']}.py"))
    sizes, model_class = MODELS[settings["recipe"]]
    recipe["MODEL_CONFIGS"].update(settings.get("more_sizes", MORE_SIZES.get(settings["recipe"], {})))
    chosen = settings.get("model_flags") or ["--model_config", sizes[size]]
    flags = [*chosen, *data_flags(folder, settings)]
    with mock.patch.object(sys, "argv", ["", *flags]):
        processing, config, samples, *_ = recipe["load_data"](recipe["parse_arguments"]())
    seed_everything(SEED)
    adapted = "--lora_rank" in settings.get("more", [])  # the base is not trained, and kept in bf16
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        kind = {"dtype": torch.bfloat16 if adapted else torch.float32}
        model = getattr(transformers, model_class).from_config(config, **kind)
    model.save_pretrained(folder / "model")
    processing.save_pretrained(folder / "model")
    updates = settings["warmup"] + settings["measured"]
    facts = {"settings": settings, "parameters": model.num_parameters(), "lengths": [], "digests": []}
    with open(folder / "batches.jsonl", "w") as file:
        for update in range(updates):
            ids = sample_ids_of(update, len(samples), settings["global_batch"], SEED, "--drop_last_window" in flags)
            # Without padding, as the recipe counts them.
            facts["lengths"].append(samples.lengths(ids).reshape(len(ids), -1).tolist())
            facts["digests"].append(hashlib.blake2b(np.sort(ids).astype("<i8").tobytes(), digest_size=8).hexdigest())
            for number in ids:
                file.write(json.dumps(to_row(settings["recipe"], samples[number], processing)) + "\n")
    (folder / "facts.json").write_text(json.dumps(facts))
    return facts


def data_flags(folder, settings):
    """The recipe's flags for its data."""
    return ([] if settings["recipe"] == "vision" else ["--train_file", str(folder / "rows.jsonl")]) + settings["flags"]


def to_row(recipe, sample, processing):
    """A sample of the recipe's as what transformers' models and collators take."""
    if recipe == "lm":
        input_ids, targets, _ = sample
        ids = np.append(input_ids, targets[-1]).tolist()  # the model shifts: it predicts n of n + 1
        return {"input_ids": ids, "labels": ids}
    if recipe == "vision":
        batch = collate_images([sample], processing)
        return {"pixel_values": batch["pixel_values"][0].tolist(), "labels": int(batch["targets"][0])}
    target = sample[-1]
    return {"input_ids": sample[0].tolist(), "labels": target.tolist() if recipe == "seq2seq" else int(target)}
