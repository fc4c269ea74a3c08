"""The benchmark's command runs, and its page holds what it measured."""

import copy
import importlib.util
import json
import math
import re
import statistics
import sys

import pytest
from conftest import ROOT, run


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Output folder of a smoke run of the recipe and the plain loop, and what its JSON file holds."""
    folder = tmp_path_factory.mktemp("results")
    flags = ["--quick", "--arms", "recipe", "plain", "--data", "functions", "--output_dir", folder]
    finished = run([sys.executable, "benchmarks/throughput.py", *flags])
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (data,) = folder.glob("throughput-*.json")
    return data, json.loads(data.read_text())


def cells(page, start):
    """The cells of the one table row that begins with these cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    (row,) = [row for row in rows if row[: len(start)] == start]
    return row[len(start) :]


def test_page_holds_the_measured_figures(results):
    data, measured = results
    page = data.with_suffix(".md").read_text()
    assert [(run["arm"], run["round"]) for run in measured["runs"]] == [
        ("recipe", 0),
        ("plain", 0),
        ("plain", 1),
        ("recipe", 1),
    ]
    speed = {}
    for arm, label in (("recipe", "recipes/lm.py"), ("plain", "padded Accelerate loop")):
        runs = [run for run in measured["runs"] if run["arm"] == arm]
        # The first update is the warm-up: counting it would give another figure.
        speed[arm] = [run["tokens"][1] / run["seconds"][1] for run in runs]
        with_warmup = [sum(run["tokens"]) / sum(run["seconds"]) for run in runs]
        assert f"{statistics.median(speed[arm]):,.0f} (" in cells(page, [label])[0]
        assert f"{statistics.median(with_warmup):,.0f} (" not in cells(page, [label])[0]
        growth = statistics.median(run["memory_growth_bytes"] for run in runs)
        assert growth > 0 and cells(page, [label])[2].startswith(f"{growth / 1e6:,.0f} (")
    # Ratios are taken within a round, and not of the medians.
    ratio = statistics.median(recipe / plain for recipe, plain in zip(speed["recipe"], speed["plain"], strict=True))
    assert cells(page, ["functions", "tokens/s", "recipe / plain"])[1].startswith(f"{ratio:,.2f} (")
    assert cells(page, ["functions", "tokens/s", "recipe / trainer"])[1] == "not measured"
    assert cells(page, ["blocks", "tokens/s", "recipe / trainer"])[1] == "not measured"
    assert data.with_suffix(".png").exists() == bool(importlib.util.find_spec("matplotlib"))


def test_arms_train_on_the_same_samples(results):
    """The same tokens in each update. The losses of the first: the weights are the same, the normalisation is not."""
    _, measured = results
    recipe, plain = (next(run for run in measured["runs"] if run["arm"] == arm) for arm in ("recipe", "plain"))
    assert recipe["tokens"] == plain["tokens"]
    assert recipe["tokens"][0] != recipe["tokens"][1]  # control: other samples would have been another number
    assert recipe["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-2)
    again = [run["losses"][0] for run in measured["runs"] if run["arm"] == "recipe"]
    assert again[0] == pytest.approx(again[1], rel=1e-6)


def test_results_name_the_machine_but_not_its_paths(results):
    data, measured = results
    page = data.with_suffix(".md").read_text()
    for fact in (measured["machine"], measured["date"], measured["versions"]["torch"], measured["command"]):
        assert fact in page
    assert measured["command"].endswith("throughput.py --quick --arms recipe plain --data functions")
    for text in (page, data.read_text()):
        assert str(ROOT) not in text and str(data.parent) not in text and not re.search(r"/(home|root|tmp|work)/", text)


# --- the default learning rates --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def defaults():
    """benchmarks/defaults.py as a module, and what it has measured."""
    spec = importlib.util.spec_from_file_location("defaults_benchmark", ROOT / "benchmarks/defaults.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, json.loads((ROOT / "benchmarks/results/defaults-cpu.json").read_text())


def test_the_page_of_the_default_rates_is_made_from_its_measurements(defaults):
    """Control: another loss is another page."""
    module, measured = defaults
    page = (ROOT / "benchmarks/results/defaults-cpu.md").read_text()
    assert page == module.page(measured)
    changed = copy.deepcopy(measured)
    changed["cases"][0]["runs"][0]["validation_loss"] += 1
    assert module.page(changed) != page


def test_the_default_rates_are_those_that_the_page_calls_so_and_every_recipe_is_there(defaults):
    module, measured = defaults
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert {case["recipe"] for case in measured["cases"]} == recipes - {"moe"}
    assert "moe.py" in module.page(measured)  # says that it was not measured
    for case in measured["cases"]:
        assert case["default"] == module.default_rate(case["recipe"], case["size"]), case["recipe"]
    assert module.default_rate("lm", "large") == 3e-4  # a size that was not swept


def test_the_sweep_of_the_default_rates_runs(tmp_path):
    """Two runs of two updates, through the launcher; then none, since they are there."""
    command = [sys.executable, "benchmarks/defaults.py", "--quick", "--output_dir", tmp_path, "--work_dir"]
    finished = run([*command, tmp_path / "runs"])
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (case,) = json.loads((tmp_path / "defaults-cpu.json").read_text())["cases"]
    assert [one["rate"] for one in case["runs"]] == [5e-4, 1e-3]
    for one in case["runs"]:
        (path,) = (tmp_path / "runs").glob(f"*-{one['rate']:g}-0/run.json")
        assert json.loads(path.read_text())["results"]["validation_loss"] == one["validation_loss"]
    again = run([*command, tmp_path / "runs"])
    assert again.returncode == 0 and "trained in" in finished.stdout and "trained in" not in again.stdout


# --- the plan of a batch ----------------------------------------------------------------------------------------------


def test_the_page_of_the_plan_is_made_from_its_measurements_which_hold_the_bounds():
    """Ranks of a real run wait at most 2 % for the slowest. Control: another figure is another page."""
    spec = importlib.util.spec_from_file_location("plan_benchmark", ROOT / "benchmarks/plan_of_a_batch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    measured = json.loads((ROOT / "benchmarks/results/plan-of-a-batch.json").read_text())
    page = (ROOT / "benchmarks/results/plan-of-a-batch.md").read_text()
    assert page == module.page(measured) and measured["run"]["idle"] <= 0.02
    row = measured["simulated"][0]
    again = module.measure_plan(row["lengths"], row["samples"], row["ranks"], row["budget"], math.inf)
    assert {**again, "milliseconds": row["milliseconds"]} == row
    row["padding"] += 1
    assert module.page(measured) != page
