"""A user's own optimizer: its checkpoint is complete, and resumes bit for bit, or none is saved."""

import json
import shutil

import pytest
import torch
import xxhash
from conftest import BIN, assert_refused, example_flags, run, run_specs
from safetensors.torch import save_file

from common.checkpoint.format import hash_of
from common.checkpoint.read import find_damage, list_checkpoints
from common.checkpoint.save import random_states

KEPT = ["mean", "sgd", "no_state", "nadam", "adafactor", "transformers", "two", "two_states", "matrices", "moves"]


def flags(functions_file, model_dir, output_dir, *more):
    base = ["--num_updates", 4, "--global_batch_size", 8, "--warmup_updates", 1, "--learning_rate", 1e-3]
    return example_flags(functions_file, model_dir, output_dir, *base, "--save_every", 2, "--keep_last", 3, *more)


def outcome(output_dir):
    """The weights, and the content of the last checkpoint."""
    (_, manifest), *_ = list_checkpoints(output_dir)[0]
    assert manifest["update"] == 4
    return (output_dir / "model/model.safetensors").read_bytes(), manifest["files"], manifest["untrained"]


def check_resume(names, functions_file, model_dir, tmp_path, *options):
    specs = [(flags(functions_file, model_dir, tmp_path / name), {"own_optimizer": name}) for name in names]
    run_specs("lm", specs, tmp_path, *options)
    before = {name: outcome(tmp_path / name) for name in names}
    for name in names:
        assert find_damage(*list_checkpoints(tmp_path / name)[0][0]) is None
        shutil.rmtree(tmp_path / name / "checkpoints/update-000004")
        shutil.rmtree(tmp_path / name / "model")
    specs = [([*spec, "--resume"], changes) for spec, changes in specs]
    result = run_specs("lm", specs, tmp_path, *options)
    assert result.stdout.count("update-000002, after update 2") == len(names)
    for name in names:
        assert outcome(tmp_path / name) == before[name], name


def test_own_optimizers_resume_bit_for_bit(functions_file, model_dir, tmp_path):
    """Subclasses; optimizers that wrap two; no state for some parameters, or for none."""
    names = KEPT
    try:
        import bitsandbytes  # noqa: F401

        names = [*KEPT, "8bit"]
    except ImportError:
        pass
    check_resume(names, functions_file, model_dir, tmp_path)
    for name in ("two", "two_states"):
        manifest = list_checkpoints(tmp_path / name)[0][0][1]
        assert manifest["untrained"] == []


def test_own_optimizers_resume_when_they_are_sharded(functions_file, model_dir, tmp_path):
    check_resume(["mean", "no_state"], functions_file, model_dir, tmp_path, "fsdp2", "--num_processes", 2)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("apart", "optimizer Two: the learning rate does not reach the Muon inside; share the groups"),
        ("hidden", "no checkpoint can be saved: optimizer Hidden changes its momenta in its steps"),
        ("grows", "no checkpoint can be saved: optimizer Grows changes its groups' d, its groups' k in its steps"),
        ("counts", "no checkpoint can be saved: optimizer Counts changes its count in its steps"),
        ("averages", "no checkpoint can be saved: optimizer Averages changes its mean in its steps"),
        ("replaces", "no checkpoint can be saved: optimizer Replaces changes its tables in its steps"),
    ],
)
def test_a_state_that_would_be_lost_is_refused(name, problem, functions_file, model_dir, tmp_path):
    spec = (flags(functions_file, model_dir, tmp_path / "run"), {"own_optimizer": name})
    assert_refused(run_specs("lm", [spec], tmp_path, check=False), problem)
    assert not list_checkpoints(tmp_path / "run")[0]


@pytest.mark.parametrize(
    ("optimizer", "skipped", "is_sound"), [("adamw", 0, False), ("adamw", 4, True), ("own", 0, True)]
)
def test_a_checkpoint_of_an_older_version_without_state_is_invalid(optimizer, skipped, is_sound, tmp_path):
    """Unless no update was made, or the optimizer is none of the recipe's."""
    weight = {"weight/head": torch.ones(2)}
    directory = tmp_path / "checkpoints/update-000004"
    (directory / "model").mkdir(parents=True)
    save_file(weight, directory / "rank-00000.safetensors")
    tensor = {"dtype": "F32", "shape": [2], "start": 0, "elements": 2}
    facts = {"numbers": {}, "random": random_states(torch.device("cpu")), "tensors": {"weight/head": tensor}}
    (directory / "rank-00000.json").write_text(json.dumps(facts))
    files = {}
    for path in directory.glob("rank-*"):
        content = path.read_bytes()
        files[path.name] = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    identity = {"model": {}, "settings": {"optimizer": optimizer}, "tokenizer": "", "dataset": ""}
    manifest = {"format": 3, "update": 4, "samples": 32, "mode": "plain", "world_size": 1, "architecture": "Own"}
    manifest |= {"position": {"update": 4, "samples": 32, "skipped_updates": skipped, "validation_loss": None}}
    manifest |= {"scaler": {}, "untrained": [], "identity": identity, "files": files}
    (directory / "manifest.json").write_text(json.dumps(manifest | {"sha256": hash_of(manifest)}))
    result = run([BIN / "python", "-m", "tools.checkpoint", "list", tmp_path])
    assert result.returncode == (0 if is_sound else 1), result.stderr
    assert ("weight/head lacks its optimizer state" in result.stdout) == (not is_sound)
