"""Killed with SIGKILL, at random and at the steps of a save: no checkpoint is lost and the end is the same."""

import json

import pytest
from conftest import BIN, run

# The long form: python tests/kill_runs.py --kills 200 --config multi_cpu --processes 2
CAMPAIGNS = {"cpu": (1, 3), "multi_cpu": (2, 3), "tensor_parallel": (2, 2), "pipeline": (2, 2)}


@pytest.mark.parametrize("config", CAMPAIGNS)
def test_killed_runs_come_to_the_same_end(config, functions_file, model_dir, tmp_path):
    processes, kills = CAMPAIGNS[config]
    command = [BIN / "python", "tests/kill_runs.py", "--kills", kills, "--config", config, "--processes", processes]
    command += ["--num_updates", 30, "--save_every", 5, "--window", 0.8, "--directory", tmp_path]
    command += ["--train_file", functions_file, "--model_name_or_path", model_dir, "--shape", "examples"]
    command += ["--sequence_length", 64, "--global_batch_size", 8, "--micro_batch_size", 2]
    command += ["--recipe", "pipeline"] if config == "pipeline" else []
    result = run(command, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["kills"] == kills and report["killed"]["in a save"] >= 1
    assert report["complete checkpoints lost"] == report["hangs"] == 0 and report["same end"]
