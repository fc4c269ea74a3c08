"""--micro_batch_tokens auto: memory that really runs out, at any update, on any rank, changes no update."""

import json
import re
import shlex
import shutil

import pytest
from conftest import BIN, ROOT, assert_refused, launch, launch_command, read_metrics, run, run_specs, told, write_rows
from safetensors.torch import load_file

from common.auto_micro_batch import _Search

# Freed memory goes back to the system at once: the limit is then what counts. (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD.)
GIVE_BACK = "for name in (-1, -3): ctypes.CDLL(None).mallopt(name, 65536)"
# The recipe, for whom the memory of one rank becomes short in update 2: so many MiB more than it has there.
SHORT = """import ctypes, os, re, resource, runpy, sys
GIVE_BACK
sys.path.insert(0, {root!r})
import torch
from accelerate import Accelerator
from common import auto_micro_batch
from common.checkpoint import host_copy
from common.process import this_process
# The same budget on any machine, because twice as many tokens are never fast enough.
auto_micro_batch.default_tokens, auto_micro_batch.MIN_SPEEDUP = lambda *_: {tokens}, 1e9
if not {copies}:
    host_copy.has_memory = lambda *_: False
begin, limit = Accelerator.no_sync, resource.getrlimit(resource.RLIMIT_DATA)
def short(*args, **kwargs):
    if this_process().update == 4:  # OpenBLAS, which classify.py's baseline needs, asks for memory until it gets it
        resource.setrlimit(resource.RLIMIT_DATA, limit)
    if this_process().update != 2 or int(os.environ.get("RANK", 0)) != {rank} or short.is_set:
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
MIB = {"lm": 48, "moe": 64, "classify": 40, "seq2seq": 56}  # too little for what a run begins with, enough for less
WITH_DROPOUT = ("classify", "seq2seq")  # whose numbers depend on the micro-batches, from where these differ


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
    tokens = 1024 if copies else 2048  # what is too little for these tokens is enough for half of them, or these alone
    values = {"root": str(ROOT), "rank": rank, "mib": MIB[recipe], "recipe": recipe_path}
    path.write_text(SHORT.replace("GIVE_BACK", GIVE_BACK).format(**values, copies=copies, tokens=tokens))
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
    how["script"], more = f"recipes/{recipe}.py", ()
    more += ("--global_batch_size", 64) if config == "multi_cpu" else ()  # two micro-batches per process
    command = launch_command(config, "--mixed_precision", "no")
    result = run([*command, short, *flags(text, out, *more)])
    assert result.returncode == 0, told(result)
    (start, most), (update, fewer), *_ = learned(out)
    assert (start, update) == (0, 2) and 128 <= fewer < most
    what = f"process {rank} in update 2, which is retried: {most // 2:,} tokens at once, not {most:,}"
    assert f"memory ran out on {what}" in result.stdout, told(result)
    assert json.loads((out / "run.json").read_text())["arguments"]["micro_batch_tokens"] == "auto"
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
    assert learned(resumed) == learned(out) and "tokens at once; as in the run before" in result.stdout
    figures = ("loss", "grad_norm", "validation_loss")
    lines, expected = ([[x.get(name) for name in figures] for x in read_metrics(path)] for path in (resumed, out))
    assert lines == expected
    weights, expected = (load_file(path / "model/model.safetensors") for path in (resumed, out))
    assert all((weights[name] == expected[name]).all() for name in expected)


def test_the_copy_of_a_save_goes_before_a_token_does(text, tmp_path):
    """Control: the tests above, in which the same shortage halves the tokens of a run without such a copy."""
    short, out = script(tmp_path / "short", 0, copies=True), tmp_path / "run"
    result = run([*launch_command("cpu", "--mixed_precision", "no"), short, *flags(text, out)])
    assert result.returncode == 0, told(result)
    assert "in update 2, which is retried: without a copy of the state to save" in result.stdout, told(result)
    ((start, tokens),) = learned(out)
    assert start == 0
    launch(*flags(text, tmp_path / "plenty", tokens=tokens), config="cpu")
    for one, other in zip(read_metrics(out), read_metrics(tmp_path / "plenty"), strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
    names = [{path.name for path in (one / "checkpoints").iterdir()} for one in (out, tmp_path / "plenty")]
    assert names[0] == names[1]


def test_the_trial_is_no_update_of_a_profile(text, tmp_path):
    """Control: the profile of a run without one, in tests/test_profile.py, has the same updates."""
    launch(*flags(text, tmp_path / "run", "--profile", "--num_updates", 6), config="cpu")
    assert json.loads((tmp_path / "run/run.json").read_text())["profile"]["updates"] == [3, 4, 5]


@pytest.mark.parametrize(("config", "rank"), [("cpu", 0), ("multi_cpu", 1)])
def test_a_run_that_dies_of_memory_says_what_would_have_helped(config, rank, text, tmp_path):
    """The order is that of the savings, and the command plans this run. Control: the tests above, which do not die."""
    asked = flags(text, tmp_path / "run", tokens=1024)
    command = launch_command(config, "--mixed_precision", "no")
    result = run([*command, script(tmp_path / "short", rank), *asked])
    assert result.returncode != 0, told(result)
    messages = result.stderr.split("Memory ran out. Peak resident memory: ")[1:]
    assert len(messages) == 1, told(result)
    listed = re.findall(r"^(?:\[rank1\]: )?  (--\S+ \S+)$", messages[0], re.MULTILINE)
    expected = ["--activation_checkpointing full", "--micro_batch_tokens 512"]  # which save 0.9 and 0.5 of activations
    assert [flag for flag in listed if flag in expected] == expected, messages[0]
    assert ("--config_file accelerate_configs/fsdp2.yaml" in listed) == (config == "multi_cpu")
    words = shlex.split(re.search(r"What fits this machine: (.+)", messages[0])[1])
    assert words[0] == "python" and words[-1] == "--plan" and "--output_dir" not in words
    assert ["--micro_batch_tokens", "1024"] == words[words.index("--micro_batch_tokens") :][:2]
    if config == "cpu":  # the same command in both
        planned = run([BIN / "python", ROOT / "recipes/lm.py", *words[2:]], CUDA_VISIBLE_DEVICES="", timeout=300)
        assert planned.returncode == 0 and "accelerate launch --config_file" in planned.stdout, told(planned)


def trial_outcomes(tokens, longest, limit, outcomes, is_known=False):
    """The budgets that a search tries, by what each trial finds, and the one it ends with."""
    search, tried = _Search(tokens, longest, limit, is_known), []
    while search.tokens:
        tried.append(search.tokens)
        search.note(*outcomes(search.tokens))
    return tried, search.best


@pytest.mark.parametrize(
    ("limit", "outcomes", "tried", "best"),
    [
        # fits, has room for twice as many, seconds
        (1 << 20, lambda t: (t < 5000, True, 1.0), [1024, 2048, 4096, 8192, 6144, 5120, 4608], 4608),
        (1 << 20, lambda t: (True, True, t / 1000 if t > 2048 else 1.0), [1024, 2048, 4096], 2048),
        (1 << 20, lambda t: (True, t < 4000, 1.0), [1024, 2048, 4096], 4096),
        (3000, lambda t: (True, True, 1.0), [1024, 2048, 3000], 3000),
        (1 << 20, lambda t: (t <= 300, True, 1.0), [1024, 512, 256, 384], 256),
    ],
    ids=["memory", "no faster", "no room", "whole share", "default too large"],
)
def test_the_budget_doubles_while_it_fits_and_gains(limit, outcomes, tried, best):
    longest = 128 if limit > 3000 else 1
    assert trial_outcomes(1024, longest, limit, outcomes) == (tried, best)
    assert trial_outcomes(256, longest, limit, outcomes, is_known=True) == ([256], 256)


def test_trials_are_compared_by_the_tokens_of_their_rows():
    """1, 3, 6 and 13 rows of 5,000 tokens; divided by the budgets, the first would be the fastest."""
    seconds = {8192: 1.5, 16384: 3.5, 32768: 6.5, 65536: 13.5}
    tried, best = trial_outcomes(8192, 5000, 1 << 16, lambda tokens: (True, True, seconds[tokens]))
    assert (tried, best) == ([*seconds], 32768)


def test_memory_that_runs_out_before_the_first_batch_is_told(text, tmp_path):
    """There is no loader yet. Control: the tests above, where there is one."""
    runs = [(flags(text, tmp_path / "run", tokens=1024), {"no_memory_for_optimizer": 1})]
    result = run_specs("lm", runs, tmp_path, check=False)
    assert result.returncode == 1 and result.stderr.count("Memory ran out. Peak resident memory: ") == 1, told(result)
    assert "can't allocate memory" in result.stderr and "AttributeError" not in result.stderr


def test_the_budget_is_found_under_an_enforced_limit(text, tmp_path):
    """The largest that fits, if speed does not matter. Control: without a limit, the whole share of 8,192 fits."""
    asked = [*flags(text, tmp_path / "limited"), "--global_batch_size", 64]
    asked += ["--num_updates", 2, "--warmup_updates", 1, "--save_every", 0]
    limits = f"import ctypes\n{GIVE_BACK}\n"
    limits += "import resource, re, runpy, sys; sys.path.insert(0, 'recipes'); sys.argv = sys.argv[1:]\n"
    limits += f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom common import auto_micro_batch as auto\n"
    limits += "def limited(*args):\n"
    limits += "    used = int(re.search(r'VmData:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
    limits += "    resource.setrlimit(resource.RLIMIT_DATA, (used + 100 * 2**20, resource.RLIM_INFINITY))\n"
    limits += "    return trials(*args)\n"
    limits += "trials, auto._trials = auto._trials, limited\nauto._has_room = lambda *_: True\nauto.MIN_SPEEDUP = 0\n"
    limits += "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    (tmp_path / "limited.py").write_text(limits)
    command = launch_command("cpu", "--mixed_precision", "no")
    result = run([*command, tmp_path / "limited.py", ROOT / "recipes/lm.py", *asked])
    assert result.returncode == 0, told(result)
    first, *_ = learned(tmp_path / "limited")
    assert 128 <= first[1] < 64 * 128
    assert re.search(rf"--micro_batch_tokens auto: {first[1]:,} tokens at once; [\d,]+ do not fit", result.stdout)


@pytest.mark.parametrize("config", ["fsdp2", "zero2", "tensor_parallel"])
def test_where_processes_share_a_forward_it_is_refused(config, text, tmp_path):
    result = launch(*flags(text, tmp_path / "run"), config=config, check=False)
    assert_refused(result, rf"--micro_batch_tokens auto: in .*{config}.yaml the processes communicate in each forward")
    assert not (tmp_path / "run").exists()
