"""Checkpoints through damage, mistakes, signals and full disks; the best one; and the export."""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import (
    BIN,
    ROOT,
    assert_mistake,
    assert_refused,
    example_flags,
    launch,
    launch_command,
    quick_python,
    quickly,
    read_metrics,
    run,
    run_specs,
    specs_command,
)
from running import Run, children, find_rank, paths_in, wait_for_updates, wait_until
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.checkpoint.format import DTYPE_NAMES, FORMAT, hash_of
from common.checkpoint.read import DIGESTS, find_best, find_damage, list_checkpoints
from common.checkpoint.training_state import TrainingState
from common.report.records import read_run
from common.training.optimizers import learning_rate

LM = [*launch_command("cpu"), "recipes/lm.py"]
# What of a line of metrics.jsonl does not depend on the clock.
EXACT = ("update", "loss", "grad_norm", "learning_rate", "target_tokens", "skipped_updates", "sample_digest")
EXACT += ("validation_loss",)  # where there was an evaluation
NUM_UPDATES = 20  # 60 functions, 8 an update: an epoch is 8 updates, the last one of 4 samples


pytestmark = pytest.mark.usefixtures("extensions")


def flags(functions_file, model_dir, output_dir, *more):
    base = ["--num_updates", NUM_UPDATES, "--global_batch_size", 8, "--warmup_updates", 2, "--learning_rate", 1e-3]
    return example_flags(functions_file, model_dir, output_dir, *base, "--save_every", 10, *more)


def exact_metrics(output_dir):
    return [{key: line.get(key) for key in EXACT} for line in read_metrics(output_dir)]


def manifest_of(output_dir, update=NUM_UPDATES):
    return json.loads((Path(output_dir) / f"checkpoints/update-{update:06}/manifest.json").read_text())


def outcome(output_dir, update=NUM_UPDATES):
    """All that a run leaves that must not depend on where it stopped, weights and optimizer state as hashes."""
    manifest = manifest_of(output_dir, update)
    kept = ("update", "position", "scaler", "files", "samples")
    (weights,) = (path.read_bytes() for path in (Path(output_dir) / "model").glob("*.safetensors"))
    return exact_metrics(output_dir), {key: manifest[key] for key in kept}, hashlib.sha256(weights).hexdigest()


@pytest.fixture(scope="module")
def finished(functions_file, model_dir, tmp_path_factory):
    """A run with the checkpoints of updates 10, 15 and 20."""
    out = tmp_path_factory.mktemp("finished") / "run"
    launch(*flags(functions_file, model_dir, out, "--save_every", 5, "--keep_last", 3))
    return out


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_manifest(checkpoint, **facts):
    """Made anew, with a hash that is right; a fact that is None is left out."""
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | facts
    manifest = {name: value for name, value in manifest.items() if value is not None}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"sha256": hash_of(manifest)}))


def change_files(checkpoint, change):
    """What the manifest says of each file."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    for facts in files.values():
        change(facts)
    change_manifest(checkpoint, files=files)


def rewrite(change_tensors=lambda *_: None, **facts):
    """Makes another checkpoint of one, whole by every hash: its tensors, and these facts of its manifest, changed."""

    def change(checkpoint):
        tensors = load_file(checkpoint / "rank-00000.safetensors")
        rank = json.loads((checkpoint / "rank-00000.json").read_text())
        change_tensors(tensors, rank["numbers"])
        rank["tensors"] = {
            name: rank["tensors"][name] | {"dtype": DTYPE_NAMES[tensors[name].dtype]} for name in tensors
        }
        save_file(tensors, checkpoint / "rank-00000.safetensors")
        (checkpoint / "rank-00000.json").write_text(json.dumps(rank))
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        digest = "sha256" if facts.get("format") == 1 else "xxh3_128"
        for name in files:
            content = (checkpoint / name).read_bytes()
            files[name] = {"bytes": len(content), digest: DIGESTS[digest](content).hexdigest()}
        change_manifest(checkpoint, files=files, **facts)

    return change


EMBEDDING = "model.embed_tokens.weight"


def without_moments(tensors, numbers):
    for key in ("exp_avg", "exp_avg_sq"):
        del tensors[f"optimizer.{key}/{EMBEDDING}"]
    del numbers[f"optimizer.step/{EMBEDDING}"]


def without_one(tensors, _):
    del tensors[f"optimizer.exp_avg_sq/{EMBEDDING}"]


def without_count(_, numbers):
    del numbers[f"optimizer.step/{EMBEDDING}"]


def rounded(tensors, _):
    tensors[f"weight/{EMBEDDING}"] = tensors[f"weight/{EMBEDDING}"].bfloat16()


# What is done to a checkpoint, and what is said of it. Before a manifest named what is not trained, FSDP lost the state
# of what an evaluation had gathered; in other modes a weight without state was one that is not trained.
OLDER, OLDER_FSDP = {"format": 1, "untrained": None}, {"format": 1, "untrained": None, "mode": "FSDP"}
MISSING = f"weight/{EMBEDDING} lacks its optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.step"
DAMAGE = {
    "flipped bit": (lambda path: flip_bit(path / "rank-00000.safetensors"), "its xxh3_128 differs"),
    "flipped bit, by an older version": (
        lambda path: (rewrite(**OLDER)(path), flip_bit(path / "rank-00000.safetensors")),
        "its sha256 differs",
    ),
    "flipped bit in the configuration": (lambda path: flip_bit(path / "model/config.json"), "its xxh3_128 differs"),
    "no hash": (lambda path: change_files(path, lambda facts: facts.pop("xxh3_128")), "is malformed: its files"),
    "another hash": (
        lambda path: change_files(path, lambda facts: facts.update(md5=facts.pop("xxh3_128"))),
        "is malformed: its files",
    ),
    "flipped bit in the manifest": (lambda path: flip_bit(path / "manifest.json"), "manifest.json is damaged"),
    "truncated": (lambda path: os.truncate(path / "rank-00000.safetensors", 1000), "has 1000 bytes instead of"),
    "truncated to nothing": (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json is damaged"),
    "missing": (lambda path: (path / "rank-00000.json").unlink(), "rank-00000.json: No such file"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file"),
    "no moments": (rewrite(without_moments), MISSING),
    "one moment": (rewrite(without_one), "its optimizer.exp_avg_sq"),
    "no count": (rewrite(without_count), "its optimizer.step"),
    "rounded": (rewrite(rounded), "is BF16, but a trained weight must be F32"),
    "no moments, by an older version": (rewrite(without_moments, **OLDER_FSDP), MISSING),
    "rounded, by an older version": (rewrite(rounded, **OLDER_FSDP), "is BF16"),
    "frozen": (rewrite(without_moments, untrained=[EMBEDDING]), None),
    "frozen, by an older version": (rewrite(without_moments, **OLDER), None),
    "nothing": (rewrite(), None),
    "nothing, by an older version": (rewrite(**OLDER_FSDP), None),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_damage_is_found(kind, finished, tmp_path):
    """Of files, and of what a checkpoint must hold."""
    change, told = DAMAGE[kind]
    path = tmp_path / "checkpoints/update-000020"
    shutil.copytree(finished / "checkpoints/update-000020", path)
    change(path)
    found, problems = list_checkpoints(tmp_path)
    lines = problems + [line for path, manifest in found if (line := find_damage(path, manifest))]
    assert len(found) + len(problems) == 1 and len(lines) == (told is not None)
    assert told is None or told in lines[0]


def checkpoint_command(*arguments):
    """The result of `python -m tools.checkpoint`."""
    return run([BIN / "python", "-m", "tools.checkpoint", *arguments])


def test_the_newest_sound_checkpoint_is_taken(finished, functions_file, model_dir, tmp_path):
    """Damaged ones are told and passed; the lines of metrics.jsonl after the one that is taken are made again.

    None of them is listed as sound or exported; nor do they, of higher numbers, take the places of the new ones.
    """
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.copytree(out / "checkpoints/update-000010", out / "checkpoints/my-own")  # another name: it stays
    rewrite(without_moments)(out / "checkpoints/update-000020")
    flip_bit(out / "checkpoints/update-000015/rank-00000.safetensors")
    listed = checkpoint_command("list", out)
    lines = listed.stdout.splitlines()
    assert listed.returncode == 1 and [line.endswith(", valid") for line in lines] == [False, False, True, True]
    for line, update, damage in zip(lines, (20, 15), (MISSING, "its xxh3_128 differs"), strict=False):
        exported = checkpoint_command("export", out / f"checkpoints/update-{update:06}", tmp_path / "model")
        assert damage in line and damage in exported.stderr and exported.returncode == 2
    assert not (tmp_path / "model").exists()
    exported = checkpoint_command("export", out / "checkpoints/update-000010", "/proc/model")
    assert_mistake(exported, "/proc/model cannot be written: .+ in /proc; name a different directory")

    shutil.copytree(out / "checkpoints/update-000015", out / "checkpoints/update-000016")
    os.truncate(out / "checkpoints/update-000016/manifest.json", 100)
    (out / "checkpoints/update-000030.partial").mkdir()  # left by a killed save
    (out / "checkpoints/update-000025").mkdir()  # a name alone is no checkpoint
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"update": 20, "lo')  # torn
    more = flags(functions_file, model_dir, out, "--resume", "--save_every", 2)
    result = run_specs("lm", [(more, {"signal_at": [13, 0, "SIGTERM", 1]})], tmp_path)
    assert "resuming from" in result.stdout and "update-000010, after update 10" in result.stdout
    assert f"update-000020: {MISSING}" in result.stderr
    assert "update-000015: rank-00000.safetensors is damaged: its xxh3_128 differs" in result.stderr
    assert "update-000016: manifest.json is damaged" in result.stderr
    left = {path.name for path in (out / "checkpoints").iterdir()} - {"update-000016", "update-000025"}
    assert left == {"update-000012", "update-000014", "my-own"}
    launch(*flags(functions_file, model_dir, out, "--resume"))
    assert outcome(out) == outcome(finished)
    assert checkpoint_command("list", finished).returncode == 0


def test_what_is_not_the_runs_own_is_refused(finished, functions_file, model_dir, tmp_path):
    """In one line each, with both values; nothing is written. What can be meant passes with --allow_changed."""
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    changed = ["--global_batch_size", 4, "--learning_rate", 2e-3, "--num_updates", 22, "--sequence_length", 48]
    changed = flags(functions_file, model_dir, finished, "--resume", *changed)
    result = launch(*changed, check=False)
    patterns = ["--global_batch_size is 4, the checkpoint's is 8; pass 8\n"]
    patterns += ["--learning_rate is 0.002, the checkpoint's is 0.001", "--num_updates is 22, the checkpoint's is 20"]
    assert_refused(result, *patterns, "the training data differs: its fingerprint is", lines=4)
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before

    other = tmp_path / "run"
    shutil.copytree(finished, other)
    newest = other / "checkpoints/update-000020"
    identity = json.loads((newest / "manifest.json").read_text())["identity"]
    model = identity["model"] | {"attention_dropout": 0.1}
    change_manifest(newest, identity=identity | {"tokenizer": "0" * 16, "model": model})
    result = launch(*flags(functions_file, model_dir, other, "--resume", "--optimizer", "sgd"), check=False)
    patterns = [
        "the model differs: its attention_dropout is 0.0, the checkpoint's is 0.1",
        "the tokenizer differs: .* is 0{16};",
    ]
    assert_refused(result, *patterns, "--optimizer is sgd, the checkpoint's is adamw; pass adamw$", lines=3)

    change_manifest(newest, format=FORMAT + 1)
    result = launch(*flags(functions_file, model_dir, other, "--resume"), check=False)
    assert_refused(result, f"its format is {FORMAT + 1}, newer than this code's {FORMAT}")

    shutil.rmtree(newest)
    changed[changed.index(str(finished))] = str(other)
    changed[changed.index("--global_batch_size", changed.index("--resume")) + 1] = "8"
    launch(*changed, "--allow_changed", "learning_rate", "num_updates", "dataset")
    assert len(read_metrics(other)) == 22
    fewer = ["--num_updates", 15, "--resume", "--allow_changed", "num_updates"]
    result = launch(*flags(functions_file, model_dir, finished, *fewer), check=False)
    assert_refused(result, "has completed 20 updates, more than --num_updates 15")


def test_the_text_elsewhere_and_a_damaged_line_of_metrics_do_no_harm(finished, functions_file, model_dir, tmp_path):
    out, text = tmp_path / "run", tmp_path / "copied.jsonl"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints/update-000020")
    text.write_bytes(functions_file.read_bytes())  # a path and a time of its own
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "metrics.jsonl").write_bytes(b"".join([*lines[:3], b"\0\xff\n", *lines[4:]]))
    result = launch(*flags(text, model_dir, out, "--resume"))
    assert "the line of update 3 before update 15 are lost or damaged" in result.stdout
    expected = exact_metrics(finished)
    assert exact_metrics(out) == expected[:3] + expected[4:]


def test_a_loss_that_is_not_finite_is_never_the_best(finished, tmp_path):
    for update, loss in {10: 3.0, 15: math.nan, 20: math.nan}.items():
        path = tmp_path / f"checkpoints/update-{update:06}"
        shutil.copytree(finished / f"checkpoints/update-{update:06}", path)
        position = json.loads((path / "manifest.json").read_text())["position"]
        change_manifest(path, position=position | {"validation_loss": loss})
    found, problems = list_checkpoints(tmp_path)
    assert len(found) == 3 and not problems
    assert find_best(found).name == "update-000010" and find_best(found[:2]) is None
    position = TrainingState()
    for loss in (math.nan, 0.0, 1.0, math.inf):
        position.record_loss(loss)
    assert position.best_validation_loss == 0.0


def test_a_longer_run_keeps_the_warm_up_that_it_began_with(functions_file, model_dir, tmp_path):
    """Its default follows from --num_updates: whoever changes that has not asked for another warm-up."""
    given = flags(functions_file, model_dir, tmp_path / "run", "--save_every", 20)
    at = given.index("--warmup_updates")
    del given[at : at + 2]
    longer = [*given, "--num_updates", "60", "--resume", "--allow_changed", "num_updates"]
    asked = [*longer, "--warmup_updates", "3"]
    result = run_specs("lm", [(one, {}) for one in (given, longer, asked)], tmp_path, check=False)
    assert_refused(result, "--warmup_updates is 3, the checkpoint's is 1; pass 1, or --allow_changed warmup_updates")
    for done in (40, 60):
        assert manifest_of(tmp_path / "run", done)["identity"]["settings"]["warmup_updates"] == 1
    metrics = read_metrics(tmp_path / "run")
    settings = {"schedule": "cosine", "peak": 1e-3, "warmup_updates": 1}
    expected = [learning_rate(n, num_updates=20 if n < 20 else 60, **settings) for n in range(60)]
    assert [line["learning_rate"] for line in metrics] == expected


def test_nothing_to_resume_is_refused(functions_file, model_dir, tmp_path):
    arguments = flags(functions_file, model_dir, tmp_path / "none", "--resume", "--keep_last", 1)
    patterns = ["none has no checkpoints; name the --output_dir of the run", "--keep_last 1: a single checkpoint"]
    result = run([*launch_command("cpu"), "recipes/lm.py", *arguments])
    assert_refused(result, *patterns, lines=2)
    assert not (tmp_path / "none").exists()


BEST = {"cpu": 1, "fsdp2": 2, "zero2": 2, "zero3": 2}


@pytest.mark.parametrize("config", BEST)
def test_the_best_one_is_named_or_loaded_at_the_end(config, functions_file, model_dir, tmp_path):
    """The first evaluation is the best one, and is kept. Its weights are what is written, and what the figures are of.

    The end is evaluated too, where it is no multiple: it may be the best.
    """
    more = ["--save_every", 2, "--eval_every", 2, "--num_updates", 5, "--keep_best", "--lr_schedule", "constant"]
    more += ["--learning_rate", 5, "--warmup_updates", 4, "--validation_file", functions_file]
    specs = [(flags(functions_file, model_dir, tmp_path / "loaded", *more, "--load_best_at_end"), {})]
    if config == "cpu":
        specs.append((flags(functions_file, model_dir, tmp_path / "last", *more), {}))
    # In bf16 DeepSpeed's model/ is in bf16 too, and not comparable with the export's float32.
    mode = (config, "--mixed_precision", "bf16" if config == "fsdp2" else "no", "--num_processes", BEST[config])
    result = run_specs("lm", specs, tmp_path, *mode)
    for name in ["loaded", "last"][: len(specs)]:
        out = tmp_path / name
        evaluated = [line for line in read_metrics(out) if "validation_loss" in line]
        losses = {line["update"] + 1: line["validation_loss"] for line in evaluated}
        best = min(losses, key=losses.get)
        assert list(losses) == [2, 4, 5] and losses[best] < 0.99 * losses[5] and best == 2  # else this shows nothing
        kept = {path.name for path in (out / "checkpoints").iterdir()}
        assert kept == {"update-000002", "update-000004", "update-000005"}  # of which --keep_last 2 alone keeps two
        assert manifest_of(out, 5)["position"]["best_validation_loss"] == losses[best]
        checkpoint = out / f"checkpoints/update-{best:06}"
        assert checkpoint_command("export", checkpoint, out / "best").returncode == 0
        weights, exported = (load_file(out / f"{model}/model.safetensors") for model in ("model", "best"))
        is_same = exported.keys() == weights.keys() and all(weights[key].equal(exported[key]) for key in exported)
        assert is_same == (name == "loaded")
        measured = losses[best] if name == "loaded" else losses[5]
        results = json.loads((out / "run.json").read_text())["results"]
        assert results["validation_loss"] == pytest.approx(measured, rel=1e-6)
        assert f"held-out loss {measured:.4f}" in result.stdout
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"best       {checkpoint}")]
        told = "is this one" if name == "loaded" else f"python -m tools.checkpoint export {checkpoint} {out / 'best'}"
        assert f"validation loss {losses[best]:.4f}" in line and told in line
        for update, loss in losses.items():
            lowest = ", the lowest so far" if loss == min(losses[one] for one in losses if one <= update) else ""
            assert result.stdout.splitlines().count(f"update {update}: validation loss {loss:.4f}{lowest}") >= 1


# --- export


def test_an_exported_checkpoint_is_the_model(finished, model_dir, tmp_path):
    """Bit for bit the weights that the run wrote itself, with tokenizer and generation settings; over nothing else."""
    checkpoint, exported = finished / "checkpoints/update-000020", tmp_path / "exported"
    assert checkpoint_command("export", checkpoint, exported).returncode == 0
    weights, values = (load_file(path / "model.safetensors") for path in (finished / "model", exported))
    assert values.keys() == weights.keys() and all(values[name].equal(weights[name]) for name in weights)
    names = {path.name for path in (finished / "model").iterdir()}
    assert {path.name for path in exported.iterdir()} == names - {"README.md"}  # which tells of the whole run
    AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    # Control: the model that training began with is another one.
    begun = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert not all(value.equal(begun[name]) for name, value in model.state_dict().items())
    (tmp_path / "mine.partial").mkdir()
    for target in (exported, ".", tmp_path / "mine"):
        result = checkpoint_command("export", checkpoint, target)
        assert result.returncode == 2 and result.stderr.startswith("error: ") and "already exists" in result.stderr
    assert (tmp_path / "mine.partial").is_dir()


# --- asked to stop


# Config, the signal, who gets it, and more flags.
SIGNALLED = {
    "one process, SIGINT": ("cpu", signal.SIGINT, children, []),
    "one rank, twice, SIGUSR1, during saves": (
        "multi_cpu",
        signal.SIGUSR1,
        lambda process: [find_rank(process, 1)] * 2,
        ["--save_every", 1],
    ),
    "all processes, SIGTERM": ("multi_cpu", signal.SIGTERM, children, ["--num_workers", 1]),
    "without a launcher, SIGTERM": (None, signal.SIGTERM, lambda process: [process], []),
}


@pytest.mark.parametrize("case", SIGNALLED)
def test_a_signal_ends_the_update_and_leaves_a_checkpoint(case, functions_file, model_dir, tmp_path):
    config, number, targets, more = SIGNALLED[case]
    out = tmp_path / "run"
    launcher = launch_command(config) if config else [quick_python()]
    with Run(tmp_path) as started:
        given = flags(functions_file, model_dir, out, "--num_updates", 5000, *more)
        process = started.start([*launcher, "recipes/lm.py", *given])
        wait_for_updates(out, 5)
        for target in targets(process):
            target.send_signal(number)
        (status,) = started.wait(120)
    printed = started.output()
    assert f"{number.name}: saving and stopping" in printed
    if config:  # `accelerate launch` reports 1, whatever the script's status is
        is_quiet = config == "cpu"  # whose launcher prints nothing of its own
        assert status == 1 and (is_quiet or re.search(r"exitcode *: 75", printed)), printed
    else:
        assert status == 75
    done = len(read_metrics(out))
    assert 5 <= done < 5000
    assert json.loads((out / "run.json").read_text())["status"] == f"stopped after update {done}"
    assert manifest_of(out, done)["update"] == done
    assert not list((out / "checkpoints").glob("*.partial")) and not (out / "model").exists()


@pytest.mark.parametrize("config", [None, "multi_cpu"])
def test_ctrl_c_that_also_ends_what_reads_the_output_leaves_a_checkpoint(config, functions_file, model_dir, tmp_path):
    """It goes to the recipe and to what its output is piped into, and a write to that fails from then on."""
    out = tmp_path / "run"
    launcher = launch_command(config) if config else [quick_python()]
    given = flags(functions_file, model_dir, out, "--num_updates", 5000)
    command = shlex.join(map(str, quickly([*launcher, "recipes/lm.py", *given])))
    with Run(tmp_path) as started:
        process = started.start(["setsid", "bash", "-c", f"{command} 2>&1 | cat"])
        wait_for_updates(out, 5)
        os.killpg(process.pid, signal.SIGINT)
        started.wait(120)
        done = len(read_metrics(out))
        wait_until(lambda: json.loads((out / "run.json").read_text())["status"] != "running", 60)
    assert 5 <= done < 5000
    assert json.loads((out / "run.json").read_text())["status"] == f"stopped after update {done}"
    assert manifest_of(out, done)["update"] == done


@pytest.mark.parametrize("more", [1, 2])
def test_a_signal_is_kept_until_training_begins_and_the_third_one_ends_it(more, tmp_path):
    (tmp_path / "stop.py").write_text(f"""
import os, signal
from common.training.stop_signals import StopRequests
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})  # as launchers/meet.py leaves it
os.kill(os.getpid(), signal.SIGUSR1)
with StopRequests() as stop:
    assert stop.is_requested
    for _ in range({more}):
        os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)  # what comes later is kept again, and does no harm
""")
    result = run([BIN / "python", tmp_path / "stop.py"], PYTHONPATH=ROOT)
    assert result.returncode == (0 if more == 1 else -signal.SIGUSR1), result.stderr


def test_a_sigusr1_at_the_start_waits_for_the_first_update(functions_file, model_dir, tmp_path):
    """As soon as the recipe runs: else it would end the process, with nothing saved."""

    def is_caught():
        states = [Path(f"/proc/{one.pid}/status").read_text() for one in children(launcher)]
        return any(int(re.search(r"SigCgt:\s*(\w+)", state)[1], 16) >> signal.SIGUSR1 - 1 & 1 for state in states)

    with Run(tmp_path) as started:
        launcher = started.start([*LM, *flags(functions_file, model_dir, tmp_path / "run")], quick=False)
        wait_until(is_caught)
        assert not (tmp_path / "run").exists()  # long before the loop, which catches it in any case
        (script,) = children(launcher)
        script.send_signal(signal.SIGUSR1)
        started.wait(120)
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "stopped after update 1"
    assert manifest_of(tmp_path / "run", 1)["samples"] == 8


def test_a_resume_waits_for_the_run_that_still_writes_its_checkpoint(functions_file, model_dir, tmp_path):
    """The launcher of one process dies of SIGTERM, and the script saves alone."""
    out, saved = tmp_path / "run", tmp_path / "saved"
    given = flags(functions_file, model_dir, out, "--num_updates", 5000, "--save_every", 0)
    try:
        with Run(tmp_path) as started:
            command = specs_command("lm", [(given, {"save_waits_for": str(saved)})], tmp_path)
            launcher = started.start(command, quick=False)
            wait_for_updates(out, 3)
            (script,) = children(launcher)
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=30) == -signal.SIGTERM and script.is_running()
            more = ["--num_updates", len(read_metrics(out)) + 20, "--resume", "--allow_changed", "num_updates"]
            again = started.start([*LM, *given, *more])
            wait_until(lambda: "waiting for another process" in started.output(1))
            saved.touch()
            assert again.wait(timeout=240) == 0
        stopped = json.loads((out / "run.json").read_text())["resumed_at"]
        assert f"resuming from {out}/checkpoints/update-{stopped:06}, after" in started.output(1)
    finally:
        saved.touch()  # which ends the script


def test_overwrite_deletes_nothing_of_a_run_that_still_writes(functions_file, model_dir, tmp_path):
    """Control: the same command, when nobody writes there any more."""
    out = tmp_path / "run"
    overwriting = [(flags(functions_file, model_dir, out, "--num_updates", 3, "--overwrite"), {"lock_timeout": 0.5})]
    with Run(tmp_path) as started:
        launcher = started.start([*LM, *flags(functions_file, model_dir, out, "--num_updates", 5000)])
        wait_for_updates(out, 12)
        before = {path for path in paths_in(out) if "update-0" not in path and not path.endswith(".partial")}
        result = run_specs("lm", overwriting, tmp_path, check=False)
        assert_refused(result, "another run writes there; end it, or use a different directory")
        wait_for_updates(out, len(read_metrics(out)) + 2)
        assert before <= paths_in(out) and list_checkpoints(out)[0]
        (script,) = children(launcher)
        script.send_signal(signal.SIGTERM)
        started.wait(60)
    run_specs("lm", overwriting, tmp_path)
    assert len(read_metrics(out)) == 3


# --- the disk


# Bytes left when the disk fills up within a save: for nothing, for a part of the tensors.
@pytest.mark.parametrize("left", [0, 300_000])
def test_a_disk_that_fills_up_within_a_save(left, functions_file, model_dir, small_disk, tmp_path):
    """One line with path, needed and free bytes; the checkpoint before is sound, and with room the run goes on."""
    disk = small_disk(tmp_path / "disk", "4M")
    arguments = flags(functions_file, model_dir, disk / "run", "--num_updates", 12, "--save_every", 5)
    changes = {"fill_disk": [10, str(disk), left], "slow_updates": 0.1}
    result = run_specs("lm", [(arguments, changes)], tmp_path, check=False)
    assert_refused(result, r"^error: disk: .*[\d,]+ (bytes )?free")
    assert read_run(disk / "run")["status"].startswith("failed at update 1")
    found, problems = list_checkpoints(disk / "run")
    assert [manifest["update"] for path, manifest in found if not find_damage(path, manifest)] == [5] and not problems
    (disk / "ballast").unlink()
    launch(*arguments, "--resume")
    assert len(read_metrics(disk / "run")) == 12


def test_a_save_that_cannot_fit_is_refused_before_it_starts(functions_file, model_dir, small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", "1300K")
    result = launch(*flags(functions_file, model_dir, disk / "run", "--save_every", 5), check=False)
    pattern = r"No space left on device \(.*update-000010.partial\); ([\d,]+) bytes needed, ([\d,]+) free"
    assert_refused(result, pattern)
    needed, free = (int(number.replace(",", "")) for number in re.search(pattern, result.stderr).groups())
    assert needed > free > 0
    assert [manifest["update"] for _, manifest in list_checkpoints(disk / "run")[0]] == [5]
    assert not list((disk / "run/checkpoints").glob("*.partial"))


def test_a_disk_without_room_for_the_model_is_one_line(functions_file, model_dir, small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", "100K")
    result = launch(*flags(functions_file, model_dir, disk / "run", "--save_every", 0), check=False)
    assert_refused(result, "disk: .*run/model could not be written: No space left on device")
    assert len(read_metrics(disk / "run")) == NUM_UPDATES
    assert not list((disk / "run").glob("model*"))


def test_a_disk_that_became_read_only(finished, functions_file, model_dir, small_disk, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out, ignore=shutil.ignore_patterns("checkpoints"))
    checkpoints = small_disk(out / "checkpoints", "4M")
    shutil.copytree(finished / "checkpoints/update-000010", checkpoints / "update-000010")
    subprocess.run(["mount", "-o", "remount,ro", checkpoints], check=True)
    result = launch(*flags(functions_file, model_dir, out, "--resume", "--save_every", 5), check=False)
    assert_refused(result, "disk: .*Read-only file system .*update-000015.partial")
    assert "resuming from" in result.stdout  # the old one still loads


def test_what_stands_in_a_checkpoints_place_is_put_away(finished, functions_file, model_dir, tmp_path):
    """Files where directories should be, and a directory in the place of a file."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "checkpoints/update-000015")
    shutil.rmtree(out / "checkpoints/update-000020")
    (out / "checkpoints/update-000015").write_text("a file")
    (out / "checkpoints/update-000015.partial").write_text("a file")
    (out / "checkpoints/update-000020.partial/rank-00000.safetensors").mkdir(parents=True)
    launch(*flags(functions_file, model_dir, out, "--resume", "--save_every", 5))
    assert outcome(out) == outcome(finished)
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").mkdir()
    result = launch(*flags(functions_file, model_dir, out, "--resume"), check=False)
    assert_refused(result, "disk: .*metrics.jsonl is not a file")
