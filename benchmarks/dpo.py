"""Compares recipes/dpo.py with TRL's DPOTrainer on the same pairs: loss of every update, tokens per second and memory.

    .venv/bin/python benchmarks/dpo.py                                             the committed results
    .venv/bin/python benchmarks/dpo.py --quick --output_dir runs/benchmarks        a smoke test with a toy model

All arms have the same initial weights, tokenizer, pairs of every update (in the peer also their order), beta, AdamW
(fused, same betas, constant learning rate, no weight decay), clipping at 1.0, precision (float32) and number of
threads. All activations are kept, and nothing is compiled.

    recipe       as shipped, with its default micro-batches
    trl          trl.DPOTrainer; its gradient checkpointing, on by default, is off here
    precomputed  the same with precompute_ref_log_probs, which does not keep a second model either

The pairs are functions of Python's standard library (see the recipe) that fit --sequence_length. The line break after a
prompt belongs to the answer, so that a token ends where the prompt ends: TRL tokenises prompt and answer together, the
recipe separately, as a model is used.

Each arm is a new process; a round runs all arms, and every second round runs them in reverse order. Tokens per second
count prompts and answers without padding, in all updates except the first, so a precomputed reference does not count.
Memory growth is measured as in benchmarks/throughput.py: the peak minus the memory before the recipe's loop or before
the peer's trainer is created, so that a second model counts.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from flags import output_dir, positive
from machine import describe_machine
from peers import Recorder, trainer_settings
from throughput import begin, launch, num_threads, this_command
from throughput_data import ROOT, SEED

from common.data.preferences import embedded_preferences
from common.data.source_types import Source
from common.data.sources import open_source
from common.data.tokenizer import special_token_ids, train_tokenizer
from common.report.tracking import versions
from common.tasks.dpo.preferences import Preferences, tokenize_preferences
from common.training.batching import sample_ids_of
from recipes import dpo

ARMS = ("recipe", "trl", "precomputed")
LENGTH, BATCH, MICRO_BATCH, BETA, RATE = 256, 16, 4, 0.1, 1e-4
MOST = 1e-4  # how far the losses of an update may be apart


def prepare(folder: Path, size: str, updates: int) -> list[int]:
    """Writes rows.jsonl, model/ and batches.jsonl (the pairs of every update, in order); tokens of every update."""
    source = Source(embedded="train")
    *shape, vocabulary, _ = dpo.MODEL_CONFIGS[size]
    tokenizer = train_tokenizer(source, vocabulary)
    shape = dict(zip(dpo.SHAPE, shape, strict=True), vocab_size=vocabulary, max_position_embeddings=LENGTH)
    config = transformers.LlamaConfig(**shape, **special_token_ids(tokenizer), tie_word_embeddings=True)
    torch.manual_seed(SEED)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    rows = []
    for row in embedded_preferences(open_source(source), "text").rows((), False):
        names = "prompt", "chosen", "rejected"
        prompt, *answers = texts = [row.values["prompt"][:-1], *("\n" + row.values[name] for name in names[1:])]
        both = [ids(prompt + answer) for answer in answers]
        apart = [ids(prompt) + ids(answer)[1:] for answer in answers]  # but for the token that begins a text
        if both == apart and both[0] != both[1] and max(map(len, both)) < LENGTH:
            rows.append(dict(zip(names, texts, strict=True)))
        if len(rows) == 2 * updates * BATCH:
            break
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs: Preferences = tokenize_preferences(Source(files=(str(folder / "rows.jsonl"),)), tokenizer, LENGTH)
    assert len(pairs) == len(rows) and not pairs.meta["truncated"]
    orders = [sample_ids_of(update, len(pairs), BATCH, SEED) for update in range(updates)]
    with open(folder / "batches.jsonl", "w") as file:
        file.writelines(json.dumps(rows[number]) + "\n" for order in orders for number in order)
    return [int(pairs.sequence_lengths(order).sum()) for order in orders]


def run_arm(arm: str, folder: Path, tokens: list[int]) -> dict:
    """One fresh process: seconds and losses of its updates, seconds before, memory growth."""
    out = folder / "run"
    if arm == "recipe":
        given = ["--train_file", folder / "rows.jsonl", "--model_name_or_path", folder / "model", "--output_dir", out]
        given += [
            "--sequence_length",
            LENGTH,
            "--global_batch_size",
            BATCH,
            "--num_updates",
            len(tokens),
            "--beta",
            BETA,
        ]
        given += ["--learning_rate", RATE, "--lr_schedule", "constant", "--warmup_updates", 0, "--seed", SEED]
        shutil.rmtree(folder / "cache", ignore_errors=True)  # no reference from an earlier round
        launch("float32", ["recipes/dpo.py", *given], config="cpu")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seconds = [count / line["tokens_per_second"] for count, line in zip(tokens, lines, strict=True)]
        found = json.loads((out / "run.json").read_text())["results"]
        found |= {"losses": [line["loss"] for line in lines], "seconds": seconds}
    else:
        launch("float32", ["benchmarks/dpo.py", "--peer", arm, "--work_dir", folder], config="cpu")
        found = json.loads((out / "results.json").read_text())
        assert found["num_threads"] == num_threads(), "an arm ran with another number of threads"
    shutil.rmtree(out)
    rate = sum(tokens[1:]) / sum(found["seconds"][1:])
    return {"tokens_per_second": rate} | {name: found[name] for name in ("memory_growth_bytes", "losses", "seconds")}


def train_peer(arm: str, folder: Path) -> None:
    """In a process of its own: TRL's trainer on batches.jsonl."""
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in (folder / "batches.jsonl").read_text().splitlines()]
    args = argparse.Namespace(output_dir=folder / "run", num_updates=len(rows) // BATCH, micro_batch_size=MICRO_BATCH)
    args.accumulation_steps, args.learning_rate = BATCH // MICRO_BATCH, RATE
    args.weight_decay, args.max_grad_norm = 0.0, 1.0
    args.output_dir.mkdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    own = {"beta": BETA, "max_length": LENGTH + 1, "gradient_checkpointing": False}
    own |= {"precompute_ref_log_probs": arm == "precomputed", "precompute_ref_batch_size": MICRO_BATCH}
    recorder, parts = Recorder(), []

    class Trainer(DPOTrainer):
        """Which keeps its losses in full; its log rounds them."""

        def compute_loss(self, *given, **named):
            loss = super().compute_loss(*given, **named)
            parts.append(loss.item())
            return loss

    recorder.start()  # what a second model takes counts
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    settings = DPOConfig(**trainer_settings(args, **own))
    start, recorder.on_train_begin = (
        recorder.memory_at_start,
        lambda *_, **__: setattr(recorder, "last", time.perf_counter()),
    )
    Trainer(
        model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[recorder]
    ).train()
    assert recorder.memory_at_start == start and len(parts) == len(rows) // MICRO_BATCH
    steps = args.accumulation_steps
    recorder.losses = [statistics.fmean(parts[at : at + steps]) for at in range(0, len(parts), steps)]
    recorder.write(args.output_dir)


def page(results: dict) -> str:
    """In Markdown: the table, and how far the losses are apart."""
    rows, size = [], results["size"]
    for arm in ARMS:
        runs = [run for run in results["runs"] if run["arm"] == arm]
        ours = [run for run in results["runs"] if run["arm"] == "recipe"]
        ratio = statistics.median(
            one["tokens_per_second"] / other["tokens_per_second"] for one, other in zip(runs, ours, strict=True)
        )
        rate, memory = (
            statistics.median(run[name] for run in runs) for name in ("tokens_per_second", "memory_growth_bytes")
        )
        apart = max(abs(a - b) for run in runs for a, b in zip(run["losses"], ours[0]["losses"], strict=True))
        rows.append(f"| {arm} | {rate:,.0f} | {ratio:.2f} | {memory / 1e6:,.0f} | {apart:.1e} |")
    software = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    losses = ", ".join(f"{loss:.4f}" for loss in results["runs"][0]["losses"])
    count = f"{len(results['tokens'])} updates of {BATCH} pairs, {sum(results['tokens']):,} tokens"
    lines = [
        "# Preference tuning compared with TRL",
        f"{results['date']}. {results['machine']}; {results['threads']} threads. {software}. Command: "
        f"`{results['command']}`.",
        f"The model `{size}` of `recipes/dpo.py` from scratch, float32, {count}; medians of {results['rounds']} "
        "rounds, the ratio within a round. `benchmarks/dpo.py` describes the arms.",
        "\n".join(
            [
                "| arm | tokens/s | of the recipe's | memory growth, MB | losses apart from the recipe's, at most |",
                "| --- | ---: | ---: | ---: | ---: |",
                *rows,
            ]
        ),
        f"The recipe's losses: {losses}.",
        "Load average of the machine at the start of each arm, near 1 if no other program runs: "
        f"{', '.join(f'{load:.1f}' for load in results['loads'])}.",
    ]
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=2, help="each runs every arm once (default: 2)")
    parser.add_argument("--updates", type=int, default=6, help="of a run (default: 6)")
    parser.add_argument("--quick", action="store_true", help="a toy model, one round of three updates")
    parser.add_argument("--peer", choices=ARMS[1:], help=argparse.SUPPRESS)
    parser.add_argument("--work_dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    if args.peer:
        train_peer(args.peer, args.work_dir)
        return
    size, rounds, updates = ("tiny", 1, 3) if args.quick else ("small", args.rounds, args.updates)
    with tempfile.TemporaryDirectory() as temporary:
        folder = begin(Path(temporary))
        tokens, runs, loads = prepare(folder, size, updates), [], []
        for number in range(rounds):
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                loads.append(os.getloadavg()[0])
                runs.append({"arm": arm, "round": number} | run_arm(arm, folder, tokens))
                print(number, arm, f"{runs[-1]['tokens_per_second']:,.0f} tokens/s", runs[-1]["losses"], flush=True)
    facts = {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "threads": num_threads()}
    facts |= {"versions": versions() | {"trl": version("trl")}, "command": this_command(), "size": size}
    facts |= {"rounds": rounds, "tokens": tokens, "runs": runs, "loads": loads}
    (args.output_dir / "dpo-cpu.json").write_text(json.dumps(facts, indent=1) + "\n")
    (args.output_dir / "dpo-cpu.md").write_text(page(facts))
    print(page(facts))
    ours = next(run["losses"] for run in runs if run["arm"] == "recipe")
    apart = max(abs(a - b) for run in runs for a, b in zip(run["losses"], ours, strict=True))
    if apart > MOST:
        sys.exit(f"error: the losses of an update differ by {apart:.1e}, more than {MOST:g}")


if __name__ == "__main__":
    main()
