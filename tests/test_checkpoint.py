"""Stop and resume: bit for bit in one layout, on other layouts, through damage and mistakes; and the export."""

import json
import os
from pathlib import Path

import pytest
from conftest import launch_command, make_model_dir, read_metrics, run

# What of a line of metrics.jsonl does not depend on the clock.
EXACT = ("update", "loss", "grad_norm", "learning_rate", "target_tokens", "skipped_updates", "sample_digest")
NUM_UPDATES = 20  # 60 functions, 8 an update: an epoch is 8 updates, the last one of 4 samples


@pytest.fixture(scope="module")
def dropout_model(functions_file, tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"), functions_file, attention_dropout=0.1)


@pytest.fixture(scope="module", autouse=True)
def extensions():
    """DeepSpeed's extensions are the user's, built once; the other caches are the tests' own."""
    home = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(home)


def flags(functions_file, model_dir, output_dir, *more):
    base = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--shape", "examples"]
    base += ["--sequence_length", 64, "--num_updates", NUM_UPDATES, "--global_batch_size", 8, "--warmup_updates", 2]
    base += ["--learning_rate", 1e-3, "--output_dir", output_dir, "--save_every", 10]
    return [str(part) for part in [*base, *more]]


def run_specs(specs, directory, config="cpu", processes=1):
    """Several runs, one after the other, in one launch; each is (flags, changes)."""
    path = Path(directory) / f"{config}-{processes}.json"
    path.write_text(json.dumps([{"flags": flags, "changes": changes} for flags, changes in specs]))
    command = launch_command(config, "--mixed_precision", "no", "--num_processes", processes)
    result = run([*command, "tests/run_recipe.py", path], CUDA_VISIBLE_DEVICES="", TQDM_DISABLE=1, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def exact_metrics(output_dir):
    return [{key: line[key] for key in EXACT} for line in read_metrics(output_dir)]


def manifest_of(output_dir, update=NUM_UPDATES):
    return json.loads((Path(output_dir) / f"checkpoints/update-{update:06}/manifest.json").read_text())


def outcome(output_dir):
    """All that a run leaves that must not depend on where it stopped, weights and optimizer state as hashes."""
    manifest = manifest_of(output_dir)
    kept = ("update", "position", "scaler", "files", "samples")
    weights = (Path(output_dir) / "model/model.safetensors").read_bytes()
    return exact_metrics(output_dir), {key: manifest[key] for key in kept}, weights


# Config, processes, and per kind of run: more flags.
CUTS = {
    "cpu": (1, {"accumulated": ["--micro_batch_size", 2, "--num_workers", 2], "whole": ["--micro_batch_size", 8]}),
    "multi_cpu": (
        2,
        {"accumulated": ["--micro_batch_size", 1], "whole": ["--micro_batch_size", 4, "--num_workers", 2]},
    ),
    "fsdp2": (2, {"accumulated": ["--micro_batch_size", 1, "--num_workers", 2]}),
    "zero1": (2, {"accumulated": ["--micro_batch_size", 1]}),
    "zero2": (2, {"accumulated": ["--micro_batch_size", 1]}),
    "zero3": (2, {"accumulated": ["--micro_batch_size", 1]}),
    "zero3_offload_cpu": (2, {"accumulated": ["--micro_batch_size", 1]}),
}
# Where it is asked to stop, in the updates done then: within an epoch, at its end, and one later; by which rank.
STOPS = [(5, 0, "SIGTERM", 1), (8, -1, "SIGUSR1", 2), (9, 0, "SIGINT", 1)]


@pytest.mark.parametrize("config", CUTS)
def test_a_stopped_run_goes_on_bit_for_bit(config, functions_file, dropout_model, tmp_path):
    """Stopped and resumed three times: losses, weights, optimizer and random states of the run that never stopped."""
    processes, kinds = CUTS[config]
    specs = []
    for kind, more in kinds.items():
        specs.append((flags(functions_file, dropout_model, tmp_path / kind, *more), {}))
        stopped = flags(functions_file, dropout_model, tmp_path / f"{kind}-stopped", *more)
        for number, (done, rank, name, times) in enumerate(STOPS):
            change = {"signal_at": [done - 1, rank % processes, name, times]}
            specs.append(([*stopped, *(["--resume"] if number else [])], change))
        specs.append(([*stopped, "--resume"], {}))
    result = run_specs(specs, tmp_path, config, processes)
    for kind in kinds:
        assert outcome(tmp_path / f"{kind}-stopped") == outcome(tmp_path / kind), kind
    for done, *_ in STOPS:
        assert result.stdout.count(f"stopped after update {done}, checkpoint written") == len(kinds)


FORGOTTEN = {"random": {}, "optimizer": {}, "learning_rate": {}, "samples": {}, "scaler": {"loss_scaler": 3}}


def test_what_a_resume_forgets_is_noticed(functions_file, dropout_model, tmp_path):
    """The controls of the test above: each part of the state, left out, changes the outcome."""
    specs = []
    for name, changes in {"plain": {}, "scaled": {"loss_scaler": 3}}.items():
        specs.append((flags(functions_file, dropout_model, tmp_path / name, "--micro_batch_size", 2), changes))
    resumed = {
        name: ("scaled" if changes else "plain", changes | {"forget": name}) for name, changes in FORGOTTEN.items()
    }
    resumed |= {"nothing": ("plain", {}), "nothing scaled": ("scaled", {"loss_scaler": 3})}
    for name, (source, changes) in resumed.items():
        changes = {"copy_run": [str(tmp_path / source), str(tmp_path / name), 10]} | changes
        more = ["--micro_batch_size", 2, "--resume"]
        specs.append((flags(functions_file, dropout_model, tmp_path / name, *more), changes))
    run_specs(specs, tmp_path)
    same = {name for name, (source, _) in resumed.items() if outcome(tmp_path / name) == outcome(tmp_path / source)}
    assert same == {"nothing", "nothing scaled"}
