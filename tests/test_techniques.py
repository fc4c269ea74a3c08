"""The table of techniques: it is measured, goes on where it stopped, and its page holds what was measured."""

import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, assert_mistake, base_env, quickly, run
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(ROOT / "benchmarks"))

import techniques
import techniques_page

COMMAND = [sys.executable, "benchmarks/techniques.py"]
RESULTS = ROOT / "benchmarks/results/techniques-cpu.json"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A smoke run of a language model that is stopped after its first arm, and goes on: (folders, first run, all)."""
    folder, work = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("work")
    command = [*COMMAND, "--quick", "--recipe", "lm", "--rounds", "1", "--output_dir", folder, "--work_dir", work]
    command = quickly([*command, "--arms", "plain", "sorted", "chunked", "tf32"])
    options = {"cwd": ROOT, "env": base_env(), "stderr": subprocess.PIPE, "text": True, "process_group": 0}
    # A shell's background jobs, which tests may be, ignore the signal, and hand that on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, **options) as process:
        signal.signal(signal.SIGINT, before)
        ends = time.time() + 300
        while not (found := list(folder.glob("*.json"))) and process.poll() is None and time.time() < ends:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "the same command goes on" in told, told
    first = json.loads(found[0].read_text())
    assert len(first["runs"]) == 1
    finished = run(command)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return (folder, work), first["runs"][0], json.loads(found[0].read_text())


def test_what_was_measured_before_a_stop_is_not_measured_again(measured):
    """Control: --overwrite measures it again."""
    (folder, work), first, results = measured
    assert results["runs"][0] == first and [one["arm"] for one in results["runs"]].count(first["arm"]) == 1
    command = [*COMMAND, "--quick", "--recipe", "lm", "--rounds", "1", "--output_dir", folder, "--work_dir", work]
    again = run([*command, "--arms", "plain", "--overwrite"])
    assert again.returncode == 0, again.stderr
    (path,) = folder.glob("*.json")
    runs = json.loads(path.read_text())["runs"]
    assert [one for one in runs if one["arm"] != "plain"] == [one for one in results["runs"] if one["arm"] != "plain"]
    assert [one["seconds"] for one in runs if one["arm"] == "plain"] != [first["seconds"]]


def test_arms_make_the_same_update_and_one_that_cannot_run_says_why(measured):
    """Of a model without dropout. Control: the losses of the two updates differ."""
    folders, _, results = measured
    runs = {one["arm"]: one for one in results["runs"]}
    plain = runs["plain"]["losses"]
    for name in ("sorted", "chunked"):
        assert runs[name]["losses"] == pytest.approx(plain, rel=1e-4)
    assert plain[0] != pytest.approx(plain[1], rel=1e-4)
    assert all(runs[name]["memory_bytes"] > 0 and runs[name]["optimizer_bytes"] == 8 for name in ("plain", "sorted"))
    if not torch.cuda.is_available():
        (page,) = (path.read_text() for path in folders[0].glob("*.md"))
        assert "| TF32 | cannot run here: " in page and "failed" in runs["tf32"]
    for text in (path.read_text() for path in folders[0].glob("*.[jm][sd]*")):
        assert str(folders[0]) not in text and str(folders[1]) not in text and str(ROOT) not in text


def test_the_operations_of_an_update_are_those_that_torch_counts(measured):
    """Of a decoder torch counts attention to later tokens too. Control: without attention it is another number."""
    (_, work), _, _ = measured
    folder = work / "techniques-lm-quick"
    model = techniques.transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    length = 300
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None]).logits.sum().backward()
    facts = {"settings": {"recipe": "lm"}, "lengths": [[[length]]]}
    (ours,) = techniques.operations(facts, folder)
    attention = 6 * model.config.num_hidden_layers * model.config.hidden_size * length**2
    assert ours + attention == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert ours - attention != pytest.approx(counter.get_total_flops(), rel=0.01)


# --- what pays together


def together(effects):
    """What the rule leaves, of techniques that change speed and memory by these factors, alone and together."""
    setting = {"recipe": "classify", "flags": ["--sequence_length", "512"], "global_batch": 16}
    arms, candidates = techniques.arms_of(setting), techniques.candidates_of(512)

    def one(arm, names):
        speed, memory = 10.0, 1e9
        for name in names:
            speed, memory = speed * effects.get(name, (1, 1))[0], memory * effects.get(name, (1, 1))[1]
        return {"arm": arm, "round": 0, "label": arm, "samples_per_second": speed, "memory_bytes": memory}

    kinds = {
        kind: [name for name, one in candidates.items() if one.kind == kind]
        for kind in {one.kind for one in candidates.values()}
    }
    runs = [one("plain", ()), one("recipe", ()), *[one(name, (name,)) for name in candidates]]
    for chosen in itertools.product(*[[None, *names] for names in kinds.values()]):
        names = sorted(name for name in chosen if name)
        runs.append(one(f"together: {' + '.join(names)}", names))
    results = {"setting": setting, "runs": runs}
    bar = SimpleNamespace(update=lambda: None)
    measurements = techniques.Measurements(results, None, None, None, bar)
    final = techniques.pay_together(measurements, arms, 1)
    return final, {step["tried"]: step["kept"] for step in results["steps"]}


def test_what_pays_together_is_what_gains():
    """Of two of a kind the better one. Control: the same technique with a little less gain is left out."""
    effects = {"bf16": (2, 1), "full": (0.7, 0.5), "selective": (0.95, 0.6), "adafactor": (1, 0.9)}
    effects["compile"] = (1.06, 1)
    final, kept = together(effects)
    assert final.precision == "bf16"
    assert final.flags == ("--activation_checkpointing", "selective", "--optimizer", "adafactor", "--compile")
    assert kept["checkpointing, selective"] and not kept["checkpointing, full"] and not kept["2 workers"]
    final, _ = together(effects | {"compile": (1.04, 1)})
    assert final.flags == ("--activation_checkpointing", "selective", "--optimizer", "adafactor")


# --- the committed page, and mistakes


def test_the_page_of_the_techniques_is_made_from_its_measurements_and_has_every_row():
    """Control: another figure is another page."""
    results = json.loads(RESULTS.read_text())
    page = RESULTS.with_suffix(".md").read_text()
    assert page == techniques_page.page(results, RESULTS.with_suffix(".png").name)
    cells = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    labels = [label.strip() for number, label in cells if number.strip().isdigit()]
    rows = [techniques_page.runs_of(results, name)[0]["label"] for name in techniques.arms_of(results["setting"])]
    assert labels[:-1] == rows and labels[-1].startswith("all that pays: the recipe")
    changed = copy.deepcopy(results)
    changed["runs"][0]["samples_per_second"] *= 2
    assert techniques_page.page(changed, RESULTS.with_suffix(".png").name) != page


def test_the_labels_of_the_picture_cover_neither_each_other_nor_a_point(tmp_path, monkeypatch):
    """Control: with a label at each point they do."""

    def covered(labels):
        boxes = [label.get_window_extent() for label in labels]
        return [a for number, a in enumerate(boxes) if any(map(a.overlaps, boxes[number + 1 :]))]

    results = json.loads(RESULTS.read_text())
    labels = techniques_page.draw(results, tmp_path / "a.png")
    words = [label.get_text() for label in labels]
    assert covered(labels) == [] and any("plain padded loop" in text for text in words)
    assert any("the recipe as shipped" in text for text in words) and not any("2 workers" in text for text in words)
    everywhere = [name for name in techniques_page.names_of(results) if techniques_page.medians(results, name)]
    monkeypatch.setattr(techniques_page, "labelled", lambda _: everywhere)
    monkeypatch.setattr(
        techniques_page, "annotate", lambda axis, texts: [axis.annotate(text, point) for point, text in texts.items()]
    )
    assert covered(techniques_page.draw(results, tmp_path / "b.png"))


def test_the_well_known_setting_shows_the_published_ratios():
    """Control: other figures of ours are another page, with the same published ones."""
    results = json.loads(RESULTS.read_text())
    results["setting"]["preset"] = "bert-large"
    page = techniques_page.page(results, "a.png")
    assert "| 8.86 |" in page and "| 5,363 |" in page and f"| {10.35 / 8.86:.2f} |" in page
    for one in techniques_page.done_runs(results, "accumulation"):
        one["samples_per_second"] *= 2
    assert techniques_page.published_table(results)[2] in page
    assert techniques_page.published_table(results)[3] not in page


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--preset", "bert-small", "--recipe", "lm"], "--preset names recipe and model; leave out"),
        (["--model", "small"], "--model needs --recipe"),
        (["--recipe", "lm", "--model", "smal"], "--model smal: neither a model's directory nor one of tiny, small"),
        (["--arms", "plain", "sortd"], "--arms sortd: not among plain, accumulation, sorted"),
        (["--arms", "sorted"], "--arms: name plain too"),
    ],
)
def test_a_mistake_is_told_in_one_line(flags, told, tmp_path):
    assert_mistake(run([*COMMAND, *flags, "--output_dir", tmp_path]), told)
    assert not list(tmp_path.iterdir())
