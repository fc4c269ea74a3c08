"""Killed with SIGKILL, at random and at the steps of a save: no checkpoint is lost and the end is the same."""

import json

import pytest
from conftest import BIN, run, write_rows

# The long form: python tests/kill_runs.py --kills 200 --config multi_cpu --processes 2
# Processes, and what the first of two kills ends; the second one comes within a save.
CAMPAIGNS = {"cpu": (1, "group"), "multi_cpu": (2, "launcher"), "tensor_parallel": (2, "rank")}
CAMPAIGNS |= {"pipeline": (2, "group"), "fsdp2": (2, "rank")}
SHARDED = ["--recipe", "embed", "--lora_rank", 4, "--quantize", "nf4", "--optimizer", "muon", "--learn_temperature"]


@pytest.mark.parametrize("config", CAMPAIGNS)
def test_killed_runs_come_to_the_same_end(config, functions_file, model_dir, tmp_path):
    processes, kind = CAMPAIGNS[config]
    command = [BIN / "python", "tests/kill_runs.py", "--kills", 2, "--config", config, "--processes", processes]
    command += ["--kinds", kind]
    command += ["--num_updates", 30, "--save_every", 5, "--window", 0.8, "--directory", tmp_path]
    command += ["--model_name_or_path", model_dir, "--sequence_length", 64, "--global_batch_size", 8]
    command += ["--micro_batch_size", 2]
    if config == "fsdp2":  # pairs, a base in 4 bits and Muon's momentum are in shards
        command += ["--train_file", write_rows(tmp_path / "rows.jsonl", 60), *SHARDED]
    else:
        command += ["--train_file", functions_file, "--shape", "examples"]
    command += ["--recipe", "pipeline"] if config == "pipeline" else []
    result = run(command, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["killed"] == {"rank": 0, "group": 0, "launcher": 0, kind: 1, "in a save": 1}
    assert report["complete checkpoints lost"] == report["hangs"] == 0 and report["same end"]
