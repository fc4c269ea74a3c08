"""What comes after the last update cannot cost the result; a run that trained nothing says so, and its status is 1."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import BIN, ROOT, read_metrics, run, run_recipe_alone, run_specs, told, write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel

from common.errors import UserError
from common.models.load import load_config, write_sample

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
ALONE = [name for name in RECIPES if name != "pipeline"]  # which needs two processes
EVALUATION = ["common.training.accumulation.mean_losses", "common.report.predictions.mean_losses"]
OF_VECTORS = ["common.tasks.embed.retrieval.global_loss"]
MISSING = "missing    a figure or sample of the end: "
BROKEN = f"{MISSING}RuntimeError: this step is broken"


def short(output_dir, *more):
    base = ["--num_updates", 1, "--global_batch_size", 2, "--save_every", 0, "--num_workers", 0]
    return [str(part) for part in [*base, "--output_dir", output_dir, *more]]


def text_flags(file, output_dir, *more):
    files = ["--train_file", file, "--validation_file", file, "--sequence_length", 64]
    return short(output_dir, *files, *more)


def assert_whole(output_dir, error="None"):
    """The model, its card and the results are there; `error` is all that is missing."""
    run = json.loads((output_dir / "run.json").read_text())
    assert run["status"] == "finished" and run["results"]["tokens_per_second"] > 0
    assert (output_dir / "model/model.safetensors").is_file()
    assert (output_dir / "model/README.md").read_text().startswith("---")
    assert error in str(run["results"].get("error_after_training"))
    return run["results"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 30)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, rows):
    """Each recipe with a final evaluation that fails, then one in which all else fails: the output, and its place."""
    out = tmp_path_factory.mktemp("runs")
    runs = []
    for name in ALONE:
        flags = short(out / name) if name == "vision" else text_flags(rows, out / name)
        runs.append((flags, {"broken_steps": OF_VECTORS if name == "embed" else EVALUATION}, name))
    broken = ["common.models.load.write_sample", "common.report.drawing.start_drawing"]
    broken += ["common.report.tracking.write_model_card"]
    more = ("--report_to", "tensorboard", "--num_updates", 12, "--eval_every", 4)
    runs.append((text_flags(rows, out / "all", *more), {"broken_steps": broken, "broken_tracker": 5}, "lm"))
    runs.append(
        (text_flags(rows, out / "drawn"), {"broken_steps": ["common.report.predictions.draw_confusion"]}, "classify")
    )
    return run_specs("lm", runs, out, PYTEST_CURVES="1"), out


@pytest.mark.parametrize("recipe", ALONE)
def test_a_final_evaluation_that_fails_costs_a_line(recipe, alone):
    result, out = alone
    assert_whole(out / recipe, BROKEN)
    assert "Traceback" not in result.stderr and result.stdout.count(BROKEN) == len(ALONE) + 2


def test_sample_curves_card_and_tracker_cost_a_line_each(alone):
    result, out = alone
    run = json.loads((out / "all/run.json").read_text())
    assert run["status"] == "finished" and run["results"]["validation_loss"] > 0 and "sample" not in run["results"]
    assert len(read_metrics(out / "all")) == 12 and (out / "all/model/model.safetensors").is_file()
    printed = result.stdout + result.stderr
    for line in ("curves.png could not be drawn", "the model card could not be written"):
        assert f"{line}: RuntimeError: this step is broken" in printed
    assert printed.count("--report_to tensorboard: stopped at update 5: RuntimeError: this tracker is broken") == 1


def test_a_picture_that_fails_costs_a_line(alone):
    _, out = alone
    assert assert_whole(out / "drawn", BROKEN)["accuracy"] >= 0


def test_ranks_go_on_or_end_together(rows, model_dir, tmp_path):
    """An error of all ranks, of one that writes alone, and of one for which the others wait."""
    runs = [
        (text_flags(rows, tmp_path / "both"), {"broken_steps": EVALUATION}),
        (text_flags(rows, tmp_path / "main"), {"broken_steps": ["common.models.load.write_sample"]}),
        (short(tmp_path / "stages"), {"broken_steps": EVALUATION}, "pipeline"),
        (text_flags(rows, tmp_path / "one"), {"short_wait": 2, "broken_steps": [f"1:{EVALUATION[0]}"]}),
    ]
    result = run_specs("lm", [runs[0], runs[1]], tmp_path, "multi_cpu", "--mixed_precision", "no")
    assert result.stdout.count(BROKEN) == 2 and BROKEN not in result.stderr
    assert_whole(tmp_path / "both", BROKEN)
    assert assert_whole(tmp_path / "main", BROKEN)["validation_loss"] > 0
    run_specs("pipeline", [runs[2]], tmp_path, "pipeline", "--mixed_precision", "no")
    assert_whole(tmp_path / "stages", BROKEN)
    result = run_specs("lm", [runs[3]], tmp_path, "multi_cpu", "--mixed_precision", "no", check=False)
    assert result.returncode != 0
    run = json.loads((tmp_path / "one/run.json").read_text())
    assert run["status"].startswith("failed") and run["results"]["tokens_per_second"] > 0
    assert (tmp_path / "one/model/README.md").is_file()


GENERATION = {
    "stop_strings": {"stop_strings": ["\n"]},
    "several": {
        "num_return_sequences": 3,
        "do_sample": True,
        "return_dict_in_generate": True,
        "num_beams": 10**9,
    },
    "ids": {"bad_words_ids": [[99999]]},
}
WORKS = ("stop_strings", "several")


def with_generation(model_dir, path, name):
    shutil.copytree(model_dir, path)
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | GENERATION[name]))
    return path


def test_a_models_own_generation_settings_cannot_fail_a_run(rows, model_dir, tmp_path):
    runs, targets = [], tmp_path / "t5"
    made = run_specs("seq2seq", [(text_flags(rows, targets), {})], tmp_path)
    for name in GENERATION:
        model = with_generation(model_dir, tmp_path / f"lm-{name}-model", name)
        runs.append((text_flags(rows, tmp_path / f"lm-{name}", "--model_name_or_path", model), {}))
        model = with_generation(targets / "model", tmp_path / f"t5-{name}-model", name)
        flags = ("--model_name_or_path", model, "--generate", 2, "--target_length", 8)
        runs.append((text_flags(rows, tmp_path / f"t5-{name}", *flags), {}, "seq2seq"))
    result = run_specs("lm", runs, tmp_path)
    for text in ("[1, 2]", '{"eos_token_id": ['):
        (model / "generation_config.json").write_text(text)
        with pytest.raises(
            UserError, match="its generation_config.json(: cannot be used .JSONDecodeError| is no JSON object)"
        ):
            load_config(str(model), model_class=AutoModelForSeq2SeqLM)
    for name in GENERATION:
        for kind, figure in (("lm", "sample"), ("t5", "chrf")):
            results = assert_whole(tmp_path / f"{kind}-{name}", "None" if name in WORKS else MISSING)
            assert (figure in results) == (name in WORKS), (name, kind)
            assert results["validation_loss"] > 0
    assert "Traceback" not in result.stderr + made.stderr


@pytest.fixture(scope="module")
def nan_model(model_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("nan") / "model"
    shutil.copytree(model_dir, path)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if "embed" in name)
    weights[name] = torch.full_like(weights[name], float("nan"))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(("positions", "num_tokens"), [(20, 20), (12, 12), (200, 116)])
def test_a_sample_ends_at_the_models_last_position(positions, num_tokens, tokenizer, monkeypatch):
    """Of up to 16 tokens of data and 100 more; tests/recipe_server.py lets runs write fewer."""
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=positions)
    config.eos_token_id = config.pad_token_id = None
    monkeypatch.setattr(tokenizer, "decode", lambda tokens, **_: tokens)
    assert len(write_sample(GPT2LMHeadModel(config), tokenizer, [(np.arange(30),)])) == num_tokens


def status_of(output_dir):
    return json.loads((output_dir / "run.json").read_text())["status"]


def test_a_run_that_made_no_update_has_failed_also_after_a_resume(rows, nan_model, tmp_path):
    flags = text_flags(rows, tmp_path / "run", "--model_name_or_path", nan_model, "--save_every", 2)
    resume = ("--resume", "--allow_changed", "num_updates")
    for updates, more in ((2, ()), (4, resume), (4, resume)):  # the last one has nothing left to train
        result = run_recipe_alone("lm.py", *flags, "--num_updates", updates, *more)
        assert f"update {updates} of {updates} (100.0%)" in result.stderr or "nothing was left" in result.stdout
        assert result.returncode == 1 and "Traceback" not in result.stderr, told(result)
        assert result.stdout.splitlines()[-1].startswith(
            "failed     no update was made: loss or gradient was not finite"
        )
        assert f"\nskipped    {updates} of {updates} updates" in result.stdout
        assert status_of(tmp_path / "run").startswith("failed: no update was made")
        assert (tmp_path / "run/model/README.md").is_file()


def test_a_rate_that_spoils_the_weights_and_a_single_skip(rows, tmp_path):
    flags = text_flags(rows, tmp_path / "high", "--num_updates", 6, "--learning_rate", 1e30)
    result = run_recipe_alone("lm.py", *flags)
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1].startswith("failed     the last 5 of 6 updates were skipped")
    assert status_of(tmp_path / "high").startswith("failed: the last 5 of 6")
    one = text_flags(rows, tmp_path / "one", "--num_updates", 4, "--micro_batch_tokens", 1024)
    result = run_specs("lm", [(one, {"nan_loss": [0, 2]}), (one, {})][:1], tmp_path)
    assert "\nskipped    1 of 4 updates, whose loss or gradient was not finite\n" in result.stdout
    assert "failed" not in result.stdout and status_of(tmp_path / "one") == "finished"


def test_tqdm_disable_silences_the_bar(rows, tmp_path):
    """In a Python of its own: tqdm reads its variables when it is imported."""
    command = [BIN / "python", "-B", "recipes/lm.py", *text_flags(rows, tmp_path / "run")]
    result = run(command, CUDA_VISIBLE_DEVICES="", TQDM_DISABLE=1)
    assert result.returncode == 0 and "/1 [" not in result.stderr, told(result)
