"""What one rank does alone, or has alone, and what becomes of the others meanwhile."""

import json

import pytest
from conftest import read_metrics, run_specs


def run_two(directory, functions_file, model_dir, *specs):
    """Runs of three updates with a checkpoint, (name, changes), one after the other on the same two processes."""
    base = ["--train_file", functions_file, "--validation_file", functions_file]
    base += ["--model_name_or_path", model_dir, "--sequence_length", 64]
    base += ["--num_updates", 3, "--save_every", 2, "--global_batch_size", 8, "--micro_batch_size", 2]
    runs = [([*base, "--output_dir", directory / name], changes) for name, changes in specs]
    run_specs("lm", runs, directory, "multi_cpu")


@pytest.fixture(scope="module")
def three_runs(functions_file, model_dir, tmp_path_factory):
    """Rank 1 reads for longer than a collective waits; DDP as it is by itself; rank 0 writes the model for as long.

    In the last one rank 1 has no memory for a copy of the state.
    """
    directory = tmp_path_factory.mktemp("runs")
    enough = {"memory_of_rank": [1, 2**60, str(directory / "copied")]}
    specs = [
        ("reads", enough | {"slow_rank": ["tokenize", 9, 5], "list_gradients": str(directory / "views")}),
        ("control", enough | {"gradients_beside_buckets": 1, "list_gradients": str(directory / "beside")}),
        ("writes", {"slow_rank": ["write", 9, 5], "memory_of_rank": [1, 0, str(directory / "copied anyway")]}),
    ]
    run_two(directory, functions_file, model_dir, *specs)
    return directory


def test_what_one_rank_does_alone_meets_no_time_limit(three_runs):
    for name in ("reads", "writes"):
        assert (three_runs / name / "model/model.safetensors").is_file()
        assert json.loads((three_runs / name / "run.json").read_text())["status"] == "finished"


def test_where_one_host_lacks_memory_no_rank_copies_its_state(three_runs):
    """They write it where it is, and the same. Control: where there is enough, both copy."""
    assert {path.name for path in three_runs.glob("copied*")} == {"copied-0", "copied-1"}
    manifests = [
        json.loads((three_runs / name / "checkpoints/update-000002/manifest.json").read_text())
        for name in ("reads", "writes")
    ]
    hashes = [
        {name: facts["xxh3_128"] for name, facts in manifest["files"].items() if name.endswith(".safetensors")}
        for manifest in manifests
    ]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 2


def test_gradients_lie_in_the_buckets_of_ddp(three_runs):
    """After an accumulation too, and they are the same. Control: by itself DDP keeps them beside its buckets."""
    facts = {}
    for name in ("views", "beside"):
        facts[name] = [json.loads(line) for line in (three_runs / f"{name}-1").read_text().splitlines()]
        assert len(facts[name]) == 3
    for num, storages, held, own in facts["views"]:
        assert storages < num and held == own
    for num, storages, held, own in facts["beside"]:
        assert storages == num and held == own
    losses = [[line["loss"] for line in read_metrics(three_runs / name)] for name in ("reads", "control", "writes")]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 3


def test_without_the_wait_it_meets_the_limit(functions_file, model_dir, tmp_path):
    """The control of the first test. (After a slow write, the evaluation's agreement to go on has no limit either.)"""
    changes = {"no_wait": 1, "slow_rank": ["tokenize", 9, 5]}
    with pytest.raises(AssertionError, match="Timed out waiting 5000ms"):
        run_two(tmp_path, functions_file, model_dir, ("run", changes))
