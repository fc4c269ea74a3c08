"""A run that was stopped goes on: bit for bit in one layout, and with the same losses on other layouts."""

import pytest
from conftest import make_model_dir, read_metrics, run_specs
from safetensors.torch import load_file
from test_checkpoint import flags, outcome

pytestmark = pytest.mark.usefixtures("extensions")


@pytest.fixture(scope="module")
def dropout_model(functions_file, tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"), functions_file, attention_dropout=0.1)


def mode(config, processes):
    return config, "--mixed_precision", "no", "--num_processes", processes


# Config, processes, and more flags: with accumulation, but for two processes that take a whole global batch at once. In
# the other modes: tests/test_resume.py.
CUTS = {
    "cpu": (1, ["--micro_batch_size", 2, "--num_workers", 2]),
    "multi_cpu": (2, ["--micro_batch_size", 4, "--num_workers", 2]),
    "fsdp2": (2, ["--micro_batch_size", 1, "--num_workers", 2]),
    "zero2": (2, ["--micro_batch_size", 1]),
    "zero3": (2, ["--micro_batch_size", 1]),
}
# Where it is asked to stop, in the updates done then: within an epoch, at its end, and one later; by which rank.
STOPS = [(5, 0, "SIGTERM", 1), (8, -1, "SIGUSR1", 2), (9, 0, "SIGINT", 1)]


@pytest.mark.parametrize("config", CUTS)
def test_a_stopped_run_goes_on_bit_for_bit(config, functions_file, dropout_model, tmp_path):
    """Stopped and resumed three times: losses, weights, optimizer and random states of the run that never stopped.

    So is what goes on from a checkpoint whose state was still being copied when the next update was ready.
    """
    processes, more = CUTS[config]
    whole, again, stopped = (tmp_path / name for name in ("whole", "again", "stopped"))
    specs = [(flags(functions_file, dropout_model, whole, *more), {"slow_copy": [0.5, True]})]
    resumed = flags(functions_file, dropout_model, again, *more, "--resume")
    specs.append((resumed, {"copy_run": [str(whole), str(again), 10]}))
    for number, (done, rank, name, times) in enumerate(STOPS):
        given = flags(functions_file, dropout_model, stopped, *more, *(["--resume"] if number else []))
        specs.append((given, {"signal_at": [done - 1, rank % processes, name, times]}))
    specs.append((flags(functions_file, dropout_model, stopped, *more, "--resume"), {}))
    result = run_specs("lm", specs, tmp_path, *mode(config, processes))
    assert outcome(stopped) == outcome(whole)
    assert outcome(again) == outcome(whole)
    for done, *_ in STOPS:
        assert result.stdout.count(f"stopped after update {done}, checkpoint written") == 1


def test_what_a_resume_forgets_is_noticed(functions_file, dropout_model, tmp_path):
    """The controls of the test above: each part of the state, left out, changes the outcome."""
    specs = []
    sources = {"plain": {}, "scaled": {"loss_scaler": 3}, "copied late": {"slow_copy": [0.5, False]}}
    for name, changes in sources.items():
        specs.append((flags(functions_file, dropout_model, tmp_path / name, "--micro_batch_size", 2), changes))
    forgotten = ("random", "optimizer", "learning_rate", "samples")
    resumed = {name: ("plain", {"forget": name}) for name in forgotten} | {"nothing": ("plain", {})}
    resumed["scaler"] = ("scaled", {"loss_scaler": 3, "forget": "scaler"})
    resumed["nothing scaled"] = ("scaled", {"loss_scaler": 3})
    resumed["to wait for the copy"] = ("copied late", {})
    for name, (source, changes) in resumed.items():
        changes = {"copy_run": [str(tmp_path / source), str(tmp_path / name), 10]} | changes
        more = ["--micro_batch_size", 2, "--resume"]
        specs.append((flags(functions_file, dropout_model, tmp_path / name, *more), changes))
    run_specs("lm", specs, tmp_path)
    same = {name for name, (source, _) in resumed.items() if outcome(tmp_path / name) == outcome(tmp_path / source)}
    assert same == {"nothing", "nothing scaled"}


# Config, processes, and after which update it stops; None: the end.
CHAINS = {
    "float64": [
        ("multi_cpu", 4, 4),
        ("fsdp2", 2, 8),
        ("cpu", 1, 12),
        ("sequence_parallel", 2, 16),
        ("fsdp2_sequence_parallel", 4, 17),
        ("tensor_parallel", 2, 18),
        ("pipeline", 2, 19),
        ("fsdp2_tensor_parallel", 4, None),
    ],
    "float32": [("zero3", 2, 5), ("zero1", 4, 9), ("cpu", 1, 12), ("zero2", 2, None)],
}


@pytest.mark.parametrize("dtype", CHAINS)
def test_a_run_goes_on_with_other_processes_and_in_another_mode(dtype, functions_file, model_dir, tmp_path):
    """The same samples and learning rates, and the losses of one process, through all changes of the layout."""
    changes = {"float64": 1} if dtype == "float64" else {}  # no dropout: its streams are the ranks'
    more = ["--micro_batch_size", 1]
    copied = [str(tmp_path / "whole"), str(tmp_path / "forgetful"), 10]
    forgetful = changes | {"copy_run": copied, "forget": "optimizer"}
    specs = [(flags(functions_file, model_dir, tmp_path / "whole", *more), changes)]
    specs.append((flags(functions_file, model_dir, tmp_path / "forgetful", *more, "--resume"), forgetful))
    run_specs("lm", specs, tmp_path)
    chained = flags(functions_file, model_dir, tmp_path / "chained", *more)
    for number, (config, processes, stop) in enumerate(CHAINS[dtype]):
        change = changes | ({"signal_at": [stop - 1, 0, "SIGTERM", 1]} if stop else {})
        runs = [([*chained, *(["--resume"] if number else [])], change)]
        run_specs("pipeline" if config == "pipeline" else "lm", runs, tmp_path, *mode(config, processes))
    tolerance = 1e-10 if dtype == "float64" else 1e-5
    lines, expected = read_metrics(tmp_path / "chained"), read_metrics(tmp_path / "whole")
    for line, other in zip(lines, expected, strict=True):
        for key in ("update", "sample_digest", "learning_rate"):
            assert line[key] == other[key], line["update"]
        assert line["loss"] == pytest.approx(other["loss"], rel=tolerance), line["update"]
    weights = load_file(tmp_path / "whole/model/model.safetensors")
    for name, weight in load_file(tmp_path / "chained/model/model.safetensors").items():
        assert (weight - weights[name]).abs().max() < tolerance, name
    # Control: a run that lost only its optimizer state is outside the tolerance.
    control = [line["loss"] for line in read_metrics(tmp_path / "forgetful")]
    assert control[10:] != pytest.approx([other["loss"] for other in expected[10:]], rel=tolerance)
