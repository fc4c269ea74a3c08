"""Lengths in epochs are updates of the same run, and --patience ends a run where a resume ends it too."""

import argparse
import json
import re
import shutil

import pytest
from conftest import (
    assert_mistake,
    launch,
    read_metrics,
    recipe_arguments,
    run_recipe_alone,
    run_specs,
    told,
    write_rows,
)
from test_resume import RECIPES, data  # noqa: F401  a fixture

from common.training import epochs


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    write_rows(directory / "held_out.jsonl", 20)
    return write_rows(directory / "rows.jsonl", 60)


def flags(text, out, *more):
    base = ["--train_file", text, "--validation_file", text.with_name("held_out.jsonl"), "--sequence_length", 64]
    return [*base, "--model_config", "tiny", "--global_batch_size", 8, "--output_dir", out, *more]


def checkpoints(out):
    return sorted(int(path.name.removeprefix("update-")) for path in (out / "checkpoints").iterdir())


def evaluated(out):
    return [line["update"] + 1 for line in read_metrics(out) if "validation_loss" in line]


def losses(out):
    names = ("loss", "grad_norm", "learning_rate", "validation_loss")
    return [[line.get(name) for name in names] for line in read_metrics(out)]


@pytest.mark.parametrize(("asked", "updates"), [(1, 10), (3, 30), (1.1, 11), (0.25, 3), (0.001, 1)])
def test_epochs_are_updates(asked, updates):
    """Rounded up; 1.1 x 10 is a little above 11 in floats. Control: what is told in updates stays."""
    args = argparse.Namespace(num_epochs=asked, eval_every="2epochs", save_every=7, num_updates=None)
    epochs.resolve(args, 10)
    assert (args.num_updates, args.eval_every, args.save_every) == (updates, 20, 7)


def test_what_is_told_in_updates_is_settled_before_the_data_are_known():
    """A DeepSpeed file that names the warm-up is compared with it. Control: of epochs it is not known yet."""
    assert recipe_arguments("--num_updates", 40, "--eval_every", "1epoch").warmup_updates == 2
    assert recipe_arguments("--num_epochs", 2).warmup_updates is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_counts_in_epochs(recipe, data, tmp_path):  # noqa: F811
    """Whole epochs with a short last global batch. Control: the second epoch has another order."""
    out, own = tmp_path / "run", [data.get(part, part) for part in RECIPES[recipe]]
    own += ["--num_epochs", 2, "--eval_every", "1epoch", "--save_every", "1epoch", "--keep_best", "--keep_last", 9]
    own += ["--global_batch_size", 16, "--micro_batch_size", 1]
    config = "pipeline" if recipe == "pipeline" else "cpu"
    result = launch(*own, "--output_dir", out, config=config, script=f"recipes/{recipe}.py")
    length = int(re.search(r"2.00 epochs; ([\d,]+) updates per epoch", result.stdout)[1].replace(",", ""))
    digests = [line["sample_digest"] for line in read_metrics(out)]
    assert length > 1 and len(digests) == 2 * length and digests[:length] != digests[length:]
    assert evaluated(out) == checkpoints(out) == [length, 2 * length]
    assert "epoch 2.00 of 2.00:" in result.stderr


def test_a_run_in_epochs_is_the_run_in_updates_and_resumes(text, tmp_path):
    """Bit for bit, from one unit to the other too. Control: another number of updates is refused."""
    asked = ["--num_epochs", 1.5, "--eval_every", "1epoch", "--save_every", "1epoch", "--keep_last", 9]
    run_specs("lm", [(flags(text, tmp_path / "epochs", *asked), {})], tmp_path, "multi_cpu")
    expected = losses(tmp_path / "epochs")
    (length,) = evaluated(tmp_path / "epochs")
    assert len(expected) == -(-3 * length // 2)
    same = ["--num_updates", len(expected), "--eval_every", length, "--save_every", length, "--keep_last", 9]
    copied = {"copy_run": [str(tmp_path / "updates"), str(tmp_path / "again"), length]}
    runs = [
        (flags(text, tmp_path / "updates", *same), {}),
        (flags(text, tmp_path / "again", "--resume", *asked), copied),
    ]
    run_specs("lm", runs, tmp_path, "multi_cpu")
    assert losses(tmp_path / "updates") == losses(tmp_path / "again") == expected
    result = launch("--resume", *flags(text, tmp_path / "again", "--num_epochs", 3), check=False)
    assert f"the checkpoint's is {len(expected)}" in result.stderr, told(result)


@pytest.mark.parametrize("config", ["multi_cpu", "fsdp2"])
def test_patience_ends_a_run_and_a_resume_where_it_ended(config, text, tmp_path):
    """Resumed between two evaluations that it counts. Controls: without --patience it goes on; with more, too."""
    rising = ["--learning_rate", 3, "--lr_schedule", "constant", "--num_updates", 14, "--warmup_updates", 1]
    rising += ["--eval_every", 2, "--save_every", 2, "--keep_last", 9, "--keep_best"]
    whole, out, resumed, longer = (tmp_path / name for name in ("whole", "run", "resumed", "longer"))
    runs = [(flags(text, whole, *rising), {}), (flags(text, out, *rising, "--patience", 2), {})]
    printed = run_specs("lm", runs, tmp_path, config).stdout
    measured = [loss for *_, loss in losses(whole) if loss is not None]
    best = measured.index(min(measured))
    end = 2 * (best + 3)
    assert end < 14, measured
    told_end = f"update {end}: 2 evaluations in a row without a lower validation loss than {min(measured):.4f}"
    assert printed.count(told_end) == 1  # by one process
    assert losses(out) == losses(whole)[:end] and checkpoints(out)[-1] == end
    assert (out / "model/model.safetensors").is_file()
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    shutil.copytree(out, resumed)
    shutil.rmtree(resumed / f"checkpoints/update-{end:06}")
    shutil.copytree(out, longer)
    rising += ["--resume", "--patience"]
    runs = [(flags(text, resumed, *rising, 2), {})] * 2 + [(flags(text, longer, *rising, 99), {})]
    result = run_specs("lm", runs, tmp_path, config)
    assert result.stderr.count("--patience 99 has no effect on a run of 7 evaluations; lower it") == 1
    assert "--patience 2 has no effect" not in result.stderr
    printed = result.stdout
    assert "1 of 2 evaluations in a row" in printed and "nothing was left to train" in printed
    assert losses(resumed) == losses(out) and losses(longer) == losses(whole)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (["--num_epochs", 2, "--num_updates", 5], "--num_epochs and --num_updates are mutually exclusive"),
        (["--num_epochs=-1"], "'-1' is not a finite number > 0"),
        (["--num_epochs", 0], "'0' is not a finite number > 0"),
        (["--num_epochs", 1, "--warmup_updates", 9999], r"nothing of --num_epochs 1, which is \d+ updates; lower"),
        (["--eval_every", "0.5epoch"], "'0.5epoch' is not an integer >= 0, nor epochs such as 1epoch"),
        (["--num_epochs", 0.01, "--profile"], "--profile needs 6 updates, .* --num_epochs 0.01, which is 1 updates"),
        (["--patience", 2], "--patience needs --eval_every N"),
    ],
)
def test_what_does_not_go_together_is_refused(asked, problem, text, tmp_path):
    assert_mistake(run_recipe_alone("lm.py", *flags(text, tmp_path / "out", *asked)), problem)
    assert not (tmp_path / "out").exists()
