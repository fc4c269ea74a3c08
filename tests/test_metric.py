"""--metric: modules of the package `evaluate`, which see each held-out sample once, and are refused before training."""

import argparse
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import BIN, assert_mistake, assert_refused, launch, results_of, run, run_recipe_alone, run_specs

from common.errors import UserError
from common.report.evaluate_metrics import MOST_VALUES, Metrics, flatten, parse

HELD_OUT = 37  # no multiple of two ranks
MODULE = """
import datasets
import evaluate

class Module(evaluate.Metric):
    def _info(self):
        features = datasets.Features({FEATURES})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references{SETTINGS}):
        {BODY}
"""
FEATURES = {
    "labels": '{"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}',
    "numbers": '{"predictions": datasets.Value("float"), "references": datasets.Value("float")}',
    "texts": '{"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}',
    "sources": '{"predictions": datasets.Value("string"), "sources": datasets.Value("string")}',
}
SHARE = "return {'share': sum(map(int.__eq__, predictions, references)) / len(predictions), 'count': len(predictions)}"
ERROR = "return {'mse': sum((p - r) ** 2 for p, r in zip(predictions, references)) / len(references)}"
EXACT = "return {'exact': [float(p in r) for p, r in zip(predictions, references)], 'count': len(references)}"


def write_module(directory, name, features, body, settings=""):
    """directory/NAME.py, as users write it."""
    text = MODULE.replace("{FEATURES}", FEATURES[features]).replace("{SETTINGS}", settings).replace("{BODY}", body)
    path = directory / f"{name}.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Paths of good and broken modules, by name."""
    directory = tmp_path_factory.mktemp("modules")
    (directory / "share").mkdir()
    write_module(directory / "share", "share", "labels", SHARE)
    write_module(directory, "broken", "labels", "raise ArithmeticError('no result')")
    write_module(directory, "mse", "numbers", ERROR)
    write_module(directory, "exact", "texts", EXACT)
    write_module(directory, "sourced", "sources", EXACT)
    write_module(directory, "scaled", "labels", "return {'scale': scale}", ", *, scale")
    write_module(directory, "averaged", "labels", "return {average: 1}", ", average='binary'")
    write_module(directory, "syntax", "labels", "return {")
    module = write_module(directory, "package", "labels", SHARE)
    module.write_text(f"import no_such_package\n{module.read_text()}")
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Training and held-out rows with a label, a number, a source and a target."""
    directory = tmp_path_factory.mktemp("rows")
    for name, number in (("train", 64), ("held_out", HELD_OUT)):
        rows = [
            {"text": f"word{i % 5} " * (1 + i % 9), "label": "abc"[i % 3], "number": i % 4 / 3, "source": f"n{i % 7}"}
            for i in range(number)
        ]
        lines = [json.dumps(row | {"target": f"m{index % 7}"}) for index, row in enumerate(rows)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def flags(files, output_dir, *more):
    base = ["--train_file", files / "train.jsonl", "--validation_file", files / "held_out.jsonl"]
    base += ["--num_updates", 2, "--global_batch_size", 8, "--sequence_length", 32, "--save_every", 2]
    return [*base, "--num_workers", 0, "--output_dir", output_dir, *more]


@pytest.fixture(scope="module", params=[1, 2])
def trained(request, files, modules, tmp_path_factory):
    """What a launch with one or two processes printed, and its output directories, a folder for each run."""
    out = tmp_path_factory.mktemp("runs")
    labels = ["--metric", modules / "share", modules / "broken.py"]
    numbers = ["--label_column", "number", "--metric", modules / "mse.py"]
    texts = ["--target_length", 8, "--metric", modules / "exact.py"]
    images = ["--num_updates", 2, "--global_batch_size", 8, "--num_workers", 0, "--save_every", 0]
    runs = [
        (flags(files, out / "labels", *labels), {}),
        (flags(files, out / "labels", "--resume", "--metric", modules / "share"), {}),
        (flags(files, out / "numbers", *numbers), {}),
        (flags(files, out / "texts", *texts), {}, "seq2seq"),
        ([*images, "--output_dir", out / "images", "--metric", modules / "share"], {}, "vision"),
    ]
    launched = ("cpu",) if request.param == 1 else ("multi_cpu", "--mixed_precision", "no")
    return run_specs("classify", runs, out, *launched).stdout, out


def test_a_module_sees_each_held_out_sample_once(trained):
    """Its values are those that the recipe computes itself. Control: a module that is handed more counts more."""
    printed, out = trained
    for name, number in (("labels", HELD_OUT), ("images", 360)):
        results = results_of(out / name)
        assert results["share/share"] == pytest.approx(results["accuracy"]) and results["share/count"] == number
    line = f"metric     share: share {results_of(out / 'labels')['share/share']:.4f}, count {HELD_OUT}\n"
    assert printed.count(line) == 2  # next to a module that fails, and after --resume
    numbers, texts = results_of(out / "numbers"), results_of(out / "texts")
    assert numbers["mse/mse"] == pytest.approx(numbers["validation_loss"], rel=1e-5)
    assert texts["exact/exact/mean"] == pytest.approx(texts["exact"])
    assert texts["exact/count"] == texts["num_generated"] == HELD_OUT


def test_more_samples_than_there_are_are_counted(modules):
    """The control of the test above: what `share` counts is what it is given."""
    metrics = Metrics(asked(modules / "share"), int, 3)
    results, _ = metrics.compute([0, 1] * HELD_OUT, [0, 2] * HELD_OUT)
    assert results == {"share/share": 0.5, "share/count": 2 * HELD_OUT}


def test_a_module_that_fails_costs_one_line_and_the_finished_run_computes_again(trained):
    """Control: the same run with --resume and without that module has no such line."""
    printed, out = trained
    line = "missing    --metric .*broken.py: ArithmeticError: no result .*; model/ and the rest are complete\n"
    assert len(re.findall(line, printed)) == printed.count("missing") == 1 and "Traceback" not in printed
    assert printed.count("nothing was left to train") == 1
    assert "error_after_training" not in results_of(out / "labels")


# --- refused before training


def asked(*metrics, trust_remote_code=False):
    return argparse.Namespace(metric=[str(one) for one in metrics], trust_remote_code=trust_remote_code, seed=0)


REFUSED = {
    "nothing.py": (int, "there is no file .*nothing.py; correct the path"),
    ".": (int, "there is no file .*.py; correct the path, or rename the module"),
    "nothing": (int, "a metric of the hub is remote code; correct the path, or pass --trust_remote_code"),
    "syntax.py": (int, "it cannot be loaded: SyntaxError"),
    "package.py": (int, "it cannot be loaded: ImportError: .*no_such_package"),
    "sourced.py": (str, "it needs sources, and there are predictions and references only"),
    "exact.py": (int, "it compares predictions: .*string.*, and this run's predictions are the numbers of labels"),
    "share": (float, "it compares predictions: .*int32.*, and this run's predictions are numbers"),
    "mse.py": (str, "it compares predictions: .*float32.*, and this run's predictions are texts"),
    "share:weight=2": (int, "it has no setting weight; use one of: none"),
    "scaled.py": (int, "it needs the setting scale; pass NAME_OR_PATH:scale=VALUE"),
    "averaged.py": (int, "it compares two labels, and there are 3; pass NAME_OR_PATH:average=macro, or micro"),
}
ACCEPTED = {"share": int, "mse.py": int, "exact.py": str, "scaled.py:scale=2": int, "averaged.py:average=macro": int}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_cannot_be_used_is_refused_in_one_line(name, modules):
    kind, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern) as refused:
        Metrics(asked(modules / name), kind, 3)
    assert str(refused.value).startswith(f"--metric {modules / name}: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_same_modules_are_accepted_where_they_fit(name, modules):
    """The control."""
    metrics = Metrics(asked(modules / name), ACCEPTED[name], 3)
    results, (line,) = metrics.compute(*[["a", "b"] if ACCEPTED[name] is str else [0, 1]] * 2)
    assert "error_after_training" not in results and line.startswith(f"metric     {parse(str(modules / name)).name}: ")


def test_two_modules_of_one_name_are_refused(modules, tmp_path):
    """Control: the same module with two settings has two names."""
    write_module(tmp_path, "mse", "numbers", ERROR)
    with pytest.raises(UserError, match="several modules are called mse; rename all but one"):
        Metrics(asked(modules / "mse.py", tmp_path / "mse.py"), float, 0)
    two = Metrics(asked(*(f"{modules / 'scaled.py'}:scale={scale}" for scale in (1, 2))), int, 2)
    assert two.compute([0], [0])[0] == {"scaled:scale=1/scale": 1, "scaled:scale=2/scale": 2}


def test_a_recipe_ends_before_it_writes_anything(files, modules, tmp_path):
    """With one process, and with two, of which one prints. Control: the runs of `trained`, with other modules."""
    out = tmp_path / "run"
    both = flags(files, out, "--metric", modules / "nothing.py", "accuracy")
    assert_mistake(run_recipe_alone("classify.py", *both), "nothing.py: there is no file")
    unknown = flags(files, out, "--metric", "accuracy")
    result = launch(*unknown, script="recipes/classify.py", config="multi_cpu", check=False)
    assert_refused(result, "--metric accuracy: .*a metric of the hub is remote code")
    missing = [flag for flag in flags(files, out) if flag not in ("--validation_file", files / "held_out.jsonl")]
    result = run_recipe_alone("classify.py", *missing, "--metric", modules / "share")
    assert_mistake(result, "--metric needs held-out data")
    texts = flags(files, out, "--metric", modules / "exact.py", "--generate", 0)
    assert_mistake(run_recipe_alone("seq2seq.py", *texts), "--metric compares the texts that --generate N writes")
    assert not out.exists()


def test_a_plan_loads_no_module(files, modules, tmp_path):
    """Control: a dry run of the same command ends at the module."""
    command = ["classify.py", *flags(files, tmp_path / "run", "--metric", modules / "syntax.py")]
    planned = run_recipe_alone(*command, "--plan", "8 x 80GiB")
    assert planned.returncode == 0 and "accelerate launch" in planned.stdout, planned.stderr
    assert_mistake(run_recipe_alone(*command, "--dry_run"), "syntax.py: it cannot be loaded: SyntaxError")


# --- the hub

LOADS = """
import argparse, sys
from common.errors import UserError
from common.report.evaluate_metrics import Metrics

for text in sys.argv[1:]:
    name, _, trust = text.partition(" ")
    try:
        metrics = Metrics(argparse.Namespace(metric=[name], trust_remote_code=trust == "trusted", seed=0), int, 3)
        print(metrics.compute([1, 0], [1, 2])[0])
    except UserError as error:
        print("error:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """Has one metric, `share`, without a tag for this version of `evaluate`."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.asked.append(self.path)
        body = {
            "/api/spaces/evaluate-metric/share": b'{"id": "evaluate-metric/share", "sha": "1"}',
            "/spaces/evaluate-metric/share/resolve/main/share.py": self.server.module,
        }.get(self.path.partition("?")[0])
        self.send_response(404 if body is None else 200)
        for name, value in {"ETag": '"1"', "Content-Length": len(body or b"")}.items():
            self.send_header(name, str(value))
        if body is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET" and body:
            self.wfile.write(body)


def test_a_module_of_the_hub_is_loaded_only_if_its_code_is_trusted(modules, tmp_path):
    """And from the cache, once the hub is gone. Control: the same name without --trust_remote_code asks for nothing."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.module = [], (modules / "share/share.py").read_bytes()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": 0, "HF_HOME": tmp_path / "home"}

    def load(*texts):
        result = run([BIN / "python", "-c", LOADS, *texts], **hub)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    (refused,) = load("share")
    assert "error: --metric share: " in refused and "remote code" in refused and server.asked == []
    loaded, unknown = load("share trusted", "other trusted")
    assert loaded == "{'share/share': 0.5, 'share/count': 2}"
    assert unknown.startswith("error: --metric other: it is neither a directory here nor known to the hub")
    server.shutdown()
    server.server_close()
    cached, other, untrusted = load("share trusted", "other trusted", "share")
    assert cached == loaded and untrusted == refused
    assert (
        other.startswith("error: --metric other: it is not in the cache, and ") and "the hub does not answer" in other
    )


# --- what becomes of a result


def test_a_result_of_any_form_is_kept_as_json():
    import numpy as np

    result = {"f1": np.float32(0.5), "by": {"label": np.array([1, 2])}, "each": [0.0, 1.0, 0.5], "what": object}
    flat = dict(flatten(result | {"many": np.zeros((MOST_VALUES, 2))}, 3))
    assert flat.pop("what") == "<class 'object'>"
    assert flat == {"f1": 0.5, "by/label": [1, 2], "each/mean": 0.5, "many": "2,000 values, more than are kept"}
    assert json.loads(json.dumps(flat)) == flat


@pytest.mark.parametrize(
    ("text", "place", "settings", "name"),
    [
        ("f1", "f1", {}, "f1"),
        ("f1:average=macro,zero=0", "f1", {"average": "macro", "zero": 0}, "f1:average=macro,zero=0"),
        ("a/b:x=true", "a/b", {"x": True}, "a/b:x=true"),
        ("here/mine.py:x=1e-3", "here/mine.py", {"x": 1e-3}, "mine:x=1e-3"),
        ("c:/mine.py", "c:/mine.py", {}, "mine"),
    ],
)
def test_the_settings_of_a_metric_follow_its_name(text, place, settings, name):
    assert parse(text) == (text, place, settings, name)
