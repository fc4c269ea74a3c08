"""Requests to stop at any moment, several starts at once, and runs that were killed: no work is lost or hidden."""

import hashlib
import json

import pytest
from conftest import read_metrics, run_specs, write_rows

FLAGS = ["--num_updates", 10, "--global_batch_size", 8, "--micro_batch_size", 2, "--warmup_updates", 2]
FLAGS += ["--sequence_length", 32, "--eval_every", 2, "--save_every", 4, "--keep_best", "--patience", 3]
FLAGS += ["--learning_rate", 3e-3]
EXACT = ("update", "loss", "grad_norm", "learning_rate", "sample_digest", "validation_loss", "accuracy")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 40)


def outcome(output_dir):
    """What a run leaves that must not depend on where it was stopped."""
    metrics = [{name: line.get(name) for name in EXACT} for line in read_metrics(output_dir)]
    (weights,) = (path.read_bytes() for path in (output_dir / "model").glob("*.safetensors"))
    results = json.loads((output_dir / "run.json").read_text())["results"]
    paths = sorted((output_dir / "checkpoints").glob("update-*/manifest.json"))
    position = json.loads(paths[-1].read_text())["position"]
    best = {"checkpoint": results["best"]["checkpoint"].rpartition("/")[2], "loss": results["best"]["loss"]}
    return metrics, hashlib.sha256(weights).hexdigest(), results["validation_loss"], best, position


def status_of(output_dir):
    return json.loads((output_dir / "run.json").read_text())["status"]


@pytest.mark.parametrize(("recipe", "config"), [("lm", "fsdp2"), ("classify", "multi_cpu"), ("lm", "cpu")])
def test_a_stop_within_an_evaluation_saves_at_once_and_loses_no_figure(recipe, config, rows, tmp_path):
    """After an update, in the evaluation that the resumed run repeats, and in the one at the end; asked of one rank."""
    last = 0 if config == "cpu" else 1
    stops = [
        (3, 2, 0, "SIGTERM", 4),
        (3, 3, last, "SIGHUP", 4),
        (5, 1, last, "SIGTERM", 6),
        ("end", 2, last, "SIGINT", 10),
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = ["--train_file", rows, "--validation_file", rows, *FLAGS]
    specs = [([*given, "--output_dir", whole], {})]
    names = []
    for number, (*when, done) in enumerate(stops):
        # The repeated evaluation comes before the first update.
        at = [None, *when[1:]] if number == 1 else when
        names.append(
            ([*given, "--output_dir", parts, *(["--resume"] * (number > 0))], {"signal_in_evaluation": at}, done)
        )
    for flags, changes, done in names:
        specs.append((flags, changes | {"expect_status": [str(parts), f"stopped after update {done}"]}))
    specs.append(([*given, "--output_dir", parts, "--resume"], {}))
    run_specs(recipe, specs, tmp_path, config, "--mixed_precision", "no")
    assert status_of(parts) == status_of(whole) == "finished"
    assert outcome(parts) == outcome(whole)
