"""What a run reports at its end covers the whole run: the best model of all evaluations, the time of all starts."""

import json
import re
import shutil
from statistics import median

import pytest
from conftest import example_flags, read_metrics, run_specs

from common.checkpoint.format import hash_of
from common.checkpoint.read import list_checkpoints
from common.report.earlier_starts import add_repeated, repeated
from common.report.totals import Totals, describe_pauses


def flags(functions_file, model_dir, output_dir, *more):
    base = ["--global_batch_size", 8, "--warmup_updates", 1, "--validation_file", functions_file, "--eval_every", 1]
    return example_flags(functions_file, model_dir, output_dir, *base, *more)


def kill_after(directory, kept):
    """Leaves a run as a SIGKILL does after its last update: without results, the checkpoints from `kept` on lost."""
    for path, manifest in list_checkpoints(directory)[0]:
        if manifest["update"] > kept:
            shutil.rmtree(path)
    shutil.rmtree(directory / "model")
    facts = json.loads((directory / "run.json").read_text())
    del facts["results"]
    (directory / "run.json").write_text(json.dumps(facts | {"status": "running"}))


def results_of(directory):
    return json.loads((directory / "run.json").read_text())["results"]


@pytest.fixture(scope="module")
def runs(functions_file, model_dir, tmp_path_factory):
    """Finished runs, and what is printed when the killed ones among them are resumed."""
    out = tmp_path_factory.mktemp("totals")
    rising = ["--num_updates", 12, "--learning_rate", 5, "--lr_schedule", "constant", "--warmup_updates", 4]
    rising += ["--keep_best", "--load_best_at_end"]
    long = ["--num_updates", 8, "--save_every", 3, "--keep_last", 9]
    specs = {
        "patience": [*rising, "--patience", 3],
        "best": [*rising, "--save_every", 5],
        "none": [*rising, "--save_every", 0],
        "killed": long,
        "older": long,
    }
    specs = {name: flags(functions_file, model_dir, out / name, *more) for name, more in specs.items()}
    first = run_specs("lm", [(one, {}) for one in specs.values()], out).stdout
    for name in ("killed", "older"):
        shutil.copytree(out / name, out / f"{name}-whole")
        kill_after(out / name, 6)
    path = out / "older/checkpoints/update-000006/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["training"]
    path.write_text(json.dumps(manifest | {"sha256": hash_of(manifest)}))
    kill_after(out / "best", 5)
    again = ("killed", "older", "best")
    second = run_specs("lm", [([*specs[name], "--resume"], {}) for name in again], out).stdout
    return out, first, second


SLOW = 2.0  # seconds


def test_evaluations_and_saves_are_no_training_time(functions_file, model_dir, tmp_path):
    """Runs in which they are slow train as fast as the run without. Control: with their time, they would not."""
    changes = {"plain": {}, "evaluation": {"slow_phase": ["evaluation", SLOW]}}
    changes["saving"] = {"slow_phase": ["checkpoint", SLOW]}
    more = ["--num_updates", 8, "--eval_every", 4, "--save_every", 4]
    specs = [(flags(functions_file, model_dir, tmp_path / name, *more), change) for name, change in changes.items()]
    printed = run_specs("lm", specs, tmp_path).stdout
    results = {name: results_of(tmp_path / name) for name in changes}
    speeds = {name: [line["tokens_per_second"] for line in read_metrics(tmp_path / name)] for name in changes}
    for name in ("evaluation", "saving"):
        slow, plain = results[name], results["plain"]
        assert slow[f"{name}_seconds"] > 2 * SLOW > plain[f"{name}_seconds"]
        assert slow["training_seconds"] < plain["training_seconds"] + SLOW
        assert median(speeds[name]) > median(speeds["plain"]) / 3
        pauses = slow["evaluation_seconds"] + slow["saving_seconds"]
        with_pauses = slow["tokens_per_second"] * slow["training_seconds"] / (slow["training_seconds"] + pauses)
        assert with_pauses < median(speeds["plain"]) / 3
        parts = {"evaluation": slow["evaluation_seconds"], "saving checkpoints": slow["saving_seconds"]}
        words = " and ".join(f"{seconds:.1f} s of {what}" for what, seconds in parts.items() if seconds > 0.05)
        assert f"\nnot counted as training time: {words}\n" in printed
    card = (tmp_path / "evaluation/model/README.md").read_text()
    seconds = results["evaluation"]["evaluation_seconds"]
    assert f"| seconds of evaluations between updates | {seconds:,.6g} |" in card


@pytest.mark.parametrize("name", ["patience", "best", "none"])
def test_the_model_is_the_one_of_the_lowest_loss_that_was_printed(name, runs):
    """Also with --save_every larger than the run, no multiple of --eval_every, and 0; and after a resume."""
    out, first, second = runs
    losses = {line["update"] + 1: line["validation_loss"] for line in read_metrics(out / name)}
    best = min(losses, key=losses.get)
    assert best not in (5, 10, len(losses)), "else this shows nothing"
    results = results_of(out / name)
    assert results["best"] == {
        "checkpoint": str(out / name / f"checkpoints/update-{best:06}"),
        "loss": losses[best],
        "is_model": True,
    }
    assert results["validation_loss"] == pytest.approx(losses[best], rel=1e-6)
    printed = second if name == "best" else first
    assert f"held-out loss {losses[best]:.4f}" in printed and f"update {best}: validation loss" in first
    assert name != "patience" or len(losses) == best + 3


def test_a_killed_run_reports_all_its_starts(runs):
    out, _, printed = runs
    whole, results = results_of(out / "killed-whole"), results_of(out / "killed")
    assert (whole["updates"], whole["timed_updates"], whole["repeated_updates"]) == (8, 8, 0)
    assert (results["updates"], results["timed_updates"], results["repeated_updates"]) == (8, 8, 2)
    lines = read_metrics(out / "killed-whole")
    seconds, again = ([line["seconds"] for line in read_metrics(out / one)] for one in ("killed-whole", "killed"))
    assert whole["training_seconds"] == pytest.approx(sum(seconds))
    assert results["repeated_seconds"] == pytest.approx(sum(seconds[6:]))
    assert results["training_seconds"] == pytest.approx(sum(seconds) + sum(again[6:]))
    tokens = [line["seconds"] * line["tokens_per_second"] for line in lines]
    assert results["tokens_per_second"] * results["training_seconds"] == pytest.approx(sum(tokens) + sum(tokens[6:]))
    assert results["padding_share"] == pytest.approx(whole["padding_share"])
    # What is no training time, too: of all evaluations, and of the saves that a later line or the run's end tells.
    pauses = [sum(line["evaluation_seconds"] for line in [*lines, *read_metrics(out / "killed")[6:]])]
    assert [results["evaluation_seconds"]] == pytest.approx(pauses)
    again = read_metrics(out / "killed")
    saves = [line["saving_seconds"] for line in [*lines, *again[6:]] if "saving_seconds" in line]
    assert len(saves) == 2 and sum(saves) < results["saving_seconds"]  # after updates 3 and 6; and 8
    assert re.search(r"trained in [\d.]+ s \(2 starts; [\d.]+ s for 2 repeated updates\), ", printed)
    card = (out / "killed/model/README.md").read_text()
    assert f"| seconds of training, over all starts | {results['training_seconds']:,.6g} |" in card


def test_a_checkpoint_of_an_older_version_is_resumed_and_its_time_is_named_as_unknown(runs):
    out, _, printed = runs
    results = results_of(out / "older")
    assert (results["updates"], results["timed_updates"]) == (8, 2)
    assert "2 of 8 updates: an older version did not save the time of the rest" in printed


def test_repeated_updates_count_after_two_kills():
    """The second one comes before a checkpoint; run.json has what the first one lost."""
    totals = Totals({})
    add_repeated(totals, [{"seconds": 2.0, "tokens_per_second": 5.0}], {})
    later = Totals({})
    add_repeated(later, [{"seconds": 1.0, "tokens_per_second": 5.0}, {"loss": 1.0}], repeated(totals))
    assert repeated(later) == {"repeated_seconds": 3.0, "repeated_tokens": 15.0, "repeated_updates": 2}


def test_evaluations_and_saves_of_lost_updates_count_after_two_kills():
    """Control: checkpoints and lines of older versions have none of them."""
    line = {"seconds": 2.0, "tokens_per_second": 5.0, "evaluation_seconds": 4.0, "saving_seconds": 1.0}
    totals = Totals({"evaluation_seconds": 3.0})
    add_repeated(totals, [line], {})
    later = Totals({"seconds": 1.0})
    add_repeated(later, [line, {"loss": 1.0}], repeated(totals))
    assert (later.metrics()["evaluation_seconds"], later.metrics()["saving_seconds"]) == (8.0, 2.0)
    older = Totals({"seconds": 6.0, "tokens": 12})
    add_repeated(older, [{"seconds": 2.0, "tokens_per_second": 5.0}], {})
    assert (older.metrics()["evaluation_seconds"], older.metrics()["saving_seconds"]) == (0, 0)
    assert describe_pauses(older.metrics()) is None and older.metrics()["training_seconds"] == 8.0
