"""curves.png: drawn at an evaluation and at the end, of what metrics.jsonl says, by a process of its own."""

import json

import numpy as np
import pytest
from conftest import BIN, ROOT, launch, read_metrics, run, write_rows
from PIL import Image

from common.report import curves

ORANGE = (221, 132, 82)  # of the held-out loss


def pixels_of(path, colour):
    image = np.asarray(Image.open(path).convert("RGB")).astype(int)
    assert image.shape[0] > 400 and image.shape[1] > 800
    return int((np.abs(image - colour).sum(-1) < 12).sum())


def metrics(directory, number, held_out=True):
    lines = [
        {
            "update": k,
            "loss": 5 / (k + 1),
            "grad_norm": 1.0 + 0.1 * (k % 3),
            "learning_rate": 1e-3,
            "skipped_updates": 1,
        }
        | {"tokens_per_second": 900.0, "peak_memory_bytes": 2**29}
        | ({"validation_loss": 5 / (k + 1)} if held_out and k % 10 == 9 else {})
        for k in range(number)
    ]
    lines[3]["loss"] = None  # it was not finite
    directory.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + '{"update": 99, "lo')  # is just being written
    return directory


@pytest.mark.parametrize("number", [10, 300])
def test_it_shows_what_was_measured(number, tmp_path):
    """Control: without evaluations there is no curve of the held-out loss."""
    for name, held_out in (("with", True), ("without", False)):
        curves.draw(metrics(tmp_path / name, number, held_out), "tokens")
    assert pixels_of(tmp_path / "with/curves.png", ORANGE) > 100
    assert pixels_of(tmp_path / "without/curves.png", ORANGE) == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"validation_loss": 0.4, "accuracy": 0.9}),
        ({"updates": 11}, {}),  # the results of another length
        ({"best": None}, {}),  # --keep_best: what was measured may be an earlier update
        ({"validation_loss": float("nan")}, {"accuracy": 0.9}),
    ],
)
def test_the_end_of_a_run_is_a_point_of_its_curves(change, expected, tmp_path):
    """Control: where the last update was evaluated, its own figures stay."""
    results = {"updates": 12, "validation_loss": 0.4, "accuracy": 0.9, "loss": 7.0} | change
    lines = curves.read(metrics(tmp_path / "run", 12) / "metrics.jsonl")
    assert curves.with_end(lines, results) == [*lines[:-1], lines[-1] | expected]
    assert curves.with_end(lines[:10], results | {"updates": 10}) == lines[:10] and curves.with_end([], results) == []


def test_a_mean_of_many_updates_is_drawn_of_a_noisy_figure():
    assert curves.smoothed([1.0, 3.0] * 2) == [1.0, 3.0] * 2
    values = curves.smoothed([0.0, 2.0] * 500)
    assert len(values) == 1000 and all(abs(value - 1) < 0.1 for value in values[20:-20])


def test_a_run_draws_itself(tmp_path, monkeypatch):
    """Control: a run with too few updates for a curve does not. The process that trains loads no matplotlib."""
    monkeypatch.setenv("PYTEST_CURVES", "1")
    rows = write_rows(tmp_path / "rows.jsonl", 40)
    flags = ["--train_file", rows, "--validation_file", rows, "--sequence_length", 32, "--eval_every", 5]
    result = launch(*flags, "--num_updates", 11, "--output_dir", tmp_path / "run", config="multi_cpu")
    assert f"curves     {tmp_path / 'run/curves.png'}" in result.stdout
    orange = pixels_of(tmp_path / "run/curves.png", ORANGE)
    assert orange > 60 and len(read_metrics(tmp_path / "run")) == 11
    (tmp_path / "run/run.json").unlink()  # the held-out loss after the last update, the 11th, is there
    curves.draw(tmp_path / "run", "tokens")
    assert pixels_of(tmp_path / "run/curves.png", ORANGE) < orange - 10
    code = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__'); print('matplotlib' in sys.modules)"
    command = [BIN / "python", "-c", f"import sys; sys.argv = sys.argv[1:]; {code}", ROOT / "recipes/lm.py", *flags]
    result = run([*command, "--num_updates", 10, "--output_dir", tmp_path / "more"])
    assert result.stdout.splitlines()[-1] == "False" and (tmp_path / "more/curves.png").is_file(), result.stderr
    result = launch(*flags, "--num_updates", 9, "--output_dir", tmp_path / "few")
    assert "curves" not in result.stdout and not (tmp_path / "few/curves.png").exists()
