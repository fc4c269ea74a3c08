"""--micro_batch_tokens auto: memory that really runs out, at any update, on any rank, changes no update."""

import json
import re
import shutil

import pytest
from conftest import ROOT, assert_refused, launch, launch_command, read_metrics, run, told, write_rows
from safetensors.torch import load_file

# The recipe, for whom the memory of one rank becomes short in update 2: so many MiB more than it has there.
SHORT = """import os, re, resource, runpy, sys
sys.path.insert(0, {root!r})
import torch
from accelerate import Accelerator
from common.checkpoint import write
from common.parallel import liveness
if not {copies}:
    write.has_memory = lambda *_: False
begin, limit = Accelerator.no_sync, resource.getrlimit(resource.RLIMIT_DATA)
def short(*args, **kwargs):
    if liveness.update != 2 or int(os.environ.get("RANK", 0)) != {rank} or short.is_set:
        return begin(*args, **kwargs)
    short.is_set = True
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        size = torch.cuda.memory_reserved() + {mib} * 2**20
        torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])
    else:
        used = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + {mib} * 2**20, limit[1]))
    return begin(*args, **kwargs)
short.is_set = False
Accelerator.no_sync = short  # before the forward of each micro-batch but the last
runpy.run_path({recipe!r}, run_name="__main__")
"""
MIB = {"lm": 48, "moe": 64, "classify": 150, "seq2seq": 56}  # too little for what a run begins with, enough for less
WITH_DROPOUT = ("classify", "seq2seq")  # whose numbers depend on the micro-batches, from where these differ
# Freed memory goes back to the system at once: the limit is then what counts.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    write_rows(directory / "held_out.jsonl", 40)
    return write_rows(directory / "rows.jsonl", 400)


def flags(text, out, *more, tokens="auto"):
    base = ["--train_file", text, "--sequence_length", 128, "--num_updates", 5, "--global_batch_size", 32]
    base += ["--learning_rate", 1e-3, "--save_every", 2, "--keep_last", 4, "--micro_batch_tokens", tokens]
    base += ["--validation_file", text.with_name("held_out.jsonl"), "--eval_every", 2, "--keep_best"]
    return [*base, "--output_dir", out, *more]


def script(directory, rank, recipe="lm", copies=False):
    """copies: whether a save may hold a copy of the state, which gives way before the tokens at once do."""
    directory.mkdir()
    path, recipe_path = directory / "short.py", str(ROOT / f"recipes/{recipe}.py")
    path.write_text(SHORT.format(root=str(ROOT), rank=rank, mib=MIB[recipe], recipe=recipe_path, copies=copies))
    return path


def learned(out):
    return json.loads((out / "run.json").read_text())["micro_batch_tokens"]


@pytest.mark.parametrize(
    ("recipe", "config", "rank"),
    [("lm", "cpu", 0), ("lm", "multi_cpu", 1), ("moe", "cpu", 0), ("classify", "cpu", 0), ("seq2seq", "cpu", 0)],
)
def test_an_update_that_ran_out_of_memory_is_made_again(recipe, config, rank, text, tmp_path):
    """On one rank only. Controls: the run in plenty; and the next test, where the same shortage ends a run."""
    short, out, how = script(tmp_path / "short", rank, recipe), tmp_path / "run", {"config": config}
    how["script"], more = f"recipes/{recipe}.py", ("--model_config", "small") if recipe == "classify" else ()
    command = launch_command(config, "--mixed_precision", "no")
    result = run([*command, short, *flags(text, out, *more)], **GIVE_BACK)
    assert result.returncode == 0, told(result)
    (start, most), (update, fewer), *_ = learned(out)
    assert (start, update) == (0, 2) and 128 <= fewer < most
    what = f"process {rank} in update 2, which is made again: {most // 2:,} tokens at once, not {most:,}"
    assert f"memory ran out on {what}, predicted peak" in result.stdout, told(result)
    known = json.loads((out / "run.json").read_text())
    assert known["arguments"]["micro_batch_tokens"] == "auto" and known["predicted_peak_bytes"] > 0
    launch(*flags(text, tmp_path / "plenty", *more, tokens=most), **how)
    for one, other in zip(read_metrics(out), read_metrics(tmp_path / "plenty"), strict=True):
        assert one["sample_digest"] == other["sample_digest"]
        if recipe in WITH_DROPOUT and one["update"] >= 2:
            continue
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert ("validation_loss" in one) == ("validation_loss" in other) == (one["update"] in (1, 3, 4))
        assert one.get("validation_loss", 0) == pytest.approx(other.get("validation_loss", 0), rel=2e-5)
    # What was learned is where a resume begins: the same bits, without running out again.
    resumed = tmp_path / "resumed"
    shutil.copytree(out, resumed)
    shutil.rmtree(resumed / "model")
    for checkpoint in ("update-000004", "update-000005"):
        shutil.rmtree(resumed / "checkpoints" / checkpoint)
    result = launch("--resume", *flags(text, resumed, *more), **how)
    assert learned(resumed) == learned(out) and "as the run before has learned" in result.stdout
    figures = ("loss", "grad_norm", "validation_loss")
    lines, expected = ([[x.get(name) for name in figures] for x in read_metrics(path)] for path in (resumed, out))
    assert lines == expected
    weights, expected = (load_file(path / "model/model.safetensors") for path in (resumed, out))
    assert all((weights[name] == expected[name]).all() for name in expected)


def test_the_copy_of_a_save_goes_before_a_token_does(text, tmp_path):
    """Control: the tests above, in which the same shortage halves the tokens of a run without such a copy."""
    short, out = script(tmp_path / "short", 0, copies=True), tmp_path / "run"
    result = run([*launch_command("cpu", "--mixed_precision", "no"), short, *flags(text, out)], **GIVE_BACK)
    assert result.returncode == 0, told(result)
    assert "in update 2, which is made again: without a copy of the state to save" in result.stdout, told(result)
    assert learned(out) == [[0, 1024]]
    launch(*flags(text, tmp_path / "plenty", tokens=1024), config="cpu")
    for one, other in zip(read_metrics(out), read_metrics(tmp_path / "plenty"), strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
    names = [{path.name for path in (one / "checkpoints").iterdir()} for one in (out, tmp_path / "plenty")]
    assert names[0] == names[1]


def test_the_trial_is_no_update_of_a_profile(text, tmp_path):
    """Control: the profile of a run without one, in tests/test_profile.py, has the same updates."""
    launch(*flags(text, tmp_path / "run", "--profile", "--num_updates", 6), config="cpu")
    assert json.loads((tmp_path / "run/run.json").read_text())["profile"]["updates"] == [3, 4, 5]


def predicted(output):
    """The peak that a dry run prints, in MiB."""
    return float(re.search(r"predicted peak ([\d.]+) MiB a process", output)[1])


@pytest.mark.parametrize(("config", "rank"), [("cpu", 0), ("multi_cpu", 1)])
def test_a_run_that_dies_of_memory_says_what_would_have_helped(config, rank, text, tmp_path):
    """What it predicts is what a dry run with those flags predicts. Control: the tests above, whose runs do not die."""
    asked = flags(text, tmp_path / "run", tokens=1024)
    command = launch_command(config, "--mixed_precision", "no")
    result = run([*command, script(tmp_path / "short", rank), *asked], **GIVE_BACK)
    assert result.returncode != 0 and result.stderr.count("Memory ran out. Used: at most ") == 1, told(result)
    told_peak = float(re.search(r"Predicted: ([\d.]+) MiB of tensors at the peak", result.stderr)[1])
    knobs = dict(re.findall(r"  (--\S+ \S+) +([\d.]+) MiB less$", result.stderr, re.MULTILINE))
    assert "--activation_checkpointing full" in knobs and "--micro_batch_tokens 512" in knobs and len(knobs) == 3, knobs
    asked = flags(text, tmp_path / "dry", "--dry_run", tokens=1024)
    assert predicted(launch(*asked, config=config).stdout) == pytest.approx(told_peak, abs=0.2)
    less = predicted(launch(*asked, "--activation_checkpointing", "full", config=config).stdout)
    assert told_peak - less == pytest.approx(float(knobs["--activation_checkpointing full"]), abs=0.2)


@pytest.mark.parametrize("config", ["fsdp2", "zero2", "tensor_parallel"])
def test_where_processes_share_a_forward_it_is_refused(config, text, tmp_path):
    result = launch(*flags(text, tmp_path / "run"), config=config, check=False)
    assert_refused(result, rf"--micro_batch_tokens auto: in .*{config}.yaml the processes share each forward")
    assert not (tmp_path / "run").exists()
