"""Runs that write to and read from object storage, on a bad network, and after a kill in the middle of an upload."""

import json
import re
import sys
from pathlib import Path

import fsspec
import pytest
from conftest import (
    assert_mistake,
    assert_same_losses,
    launch_command,
    quick_python,
    read_metrics,
    recipe_arguments,
    run,
)
from object_storage import object_storage
from recipe_server import kill_all
from running import Run, program_of

from common.checkpoint.read import find_damage, list_checkpoints
from common.errors import UserError
from common.remote import local_files
from common.remote_output import RemoteOutput

FLAGS = "--sequence_length 64 --global_batch_size 4 --num_updates 12 --save_every 3 --learning_rate 1e-3".split()


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """(proxy, environment) of a storage with the empty bucket "bucket"."""
    for package in ("moto", "s3fs"):
        pytest.importorskip(package, reason=f"needs {package}")
    with object_storage(tmp_path_factory.mktemp("storage"), "bucket") as (proxy, env):
        yield proxy, env


@pytest.fixture(scope="module")
def undisturbed(model_dir, functions_file, tmp_path_factory):
    """A directory with two data files, and with `run`, which was trained on them without object storage."""
    directory = tmp_path_factory.mktemp("undisturbed")
    lines = functions_file.read_text().splitlines(keepends=True)
    (directory / "a.jsonl").write_text("".join(lines[:30]))
    (directory / "b.jsonl").write_text("".join(lines[30:]))
    flags = ["--model_name_or_path", model_dir, *FLAGS, "--train_file", directory / "[ab].jsonl"]
    result = run([quick_python(), "recipes/lm.py", *flags, "--output_dir", directory / "run"])
    assert result.returncode == 0, result.stderr
    return directory


@pytest.fixture(autouse=True)
def good_network(request):
    if "storage" in request.fixturenames:
        proxy, _ = request.getfixturevalue("storage")
        proxy.fail_every, proxy.delay, proxy.is_down, proxy.on_put = 0, 0.0, False, None


def bucket(env):
    """The storage as another machine sees it."""
    keys = {"key": env["AWS_ACCESS_KEY_ID"], "secret": env["AWS_SECRET_ACCESS_KEY"]}
    return fsspec.filesystem("s3", endpoint_url=env["AWS_ENDPOINT_URL"], use_listings_cache=False, **keys)


def remote_checkpoints(env, run_name, directory):
    """Names of the checkpoints of a run in the storage, all of which are valid; copies everything to `directory`."""
    bucket(env).get(f"bucket/{run_name}", str(directory), recursive=True)
    found, problems = list_checkpoints(directory)
    assert [find_damage(*item) for item in found] == [None] * len(found)
    return sorted(path.name for path, _ in found), problems


def assert_no_secrets(env, *places):
    """No key of the storage is in these texts and directories."""
    secrets = [env["AWS_ACCESS_KEY_ID"].encode(), env["AWS_SECRET_ACCESS_KEY"].encode()]
    texts = [place.encode() for place in places if isinstance(place, str)]
    files = [file for place in places if isinstance(place, Path) for file in place.rglob("*") if file.is_file()]
    for text in [*texts, *(file.read_bytes() for file in files)]:
        assert not any(secret in text for secret in secrets)
    assert files


def test_a_killed_upload_is_absent_and_the_run_resumes_from_the_storage_alone(
    storage, undisturbed, model_dir, tmp_path
):
    """Each third request fails, and two processes are killed while they upload; all updates are those without."""
    proxy, env = storage
    for name in ("a.jsonl", "b.jsonl"):
        bucket(env).put_file(str(undisturbed / name), f"bucket/data/{name}")
    script = ["recipes/lm.py", "--model_name_or_path", model_dir, *FLAGS, "--train_file"]
    script += ["s3://bucket/data/[ab].jsonl", "--output_dir", "s3://bucket/runs/killed", "--resume", "auto"]
    proxy.fail_every, proxy.delay = 3, 0.01
    with Run(tmp_path) as runs:
        command = [*launch_command("multi_cpu", "--num_processes", 2), *script]
        killed = runs.start(command, env | {"XDG_CACHE_HOME": tmp_path / "first"})

        def kill(path):
            if "update-000006/rank-00001.safetensors" in path:
                kill_all([program_of(killed)])

        proxy.on_put = kill
        killed.wait(timeout=300)
        assert proxy.failed and killed.returncode != 0
    proxy.on_put, proxy.fail_every = None, 0
    names, problems = remote_checkpoints(env, "runs/killed", tmp_path / "seen")
    assert names == ["update-000003"] and "update-000006: manifest.json: No such file" in problems[0]

    proxy.fail_every = 3
    resumed = run([quick_python(), *script], **env, XDG_CACHE_HOME=tmp_path / "second")
    assert resumed.returncode == 0, resumed.stderr
    assert "after update 3" in resumed.stdout and "uploaded   s3://bucket/runs/killed" in resumed.stdout
    (output,) = (tmp_path / "second").glob("accelerate_recipes/run-killed-*/")
    assert len(read_metrics(output)) == 12
    assert_same_losses(output, undisturbed / "run")
    proxy.fail_every = 0
    names, problems = remote_checkpoints(env, "runs/killed", tmp_path / "end")
    assert (names, problems) == (["update-000009", "update-000012"], [])
    assert read_metrics(tmp_path / "end") == read_metrics(output)
    assert json.loads((tmp_path / "end/run.json").read_text())["status"] == "finished"
    assert (tmp_path / "end/model/model.safetensors").read_bytes() == (output / "model/model.safetensors").read_bytes()
    assert_no_secrets(env, resumed.stdout, resumed.stderr, tmp_path)


def test_a_storage_that_goes_away_does_not_end_training(storage, model_dir, functions_file, tmp_path):
    """The rest is sent by --resume, from the local files. --overwrite removes the run that was there before."""
    proxy, env = storage
    old = [f"bucket/runs/away/{name}" for name in ("run.json", "model/old", "checkpoints/update-000099/manifest.json")]
    for name in old:
        bucket(env).pipe_file(name, b"old")
    command = [quick_python(), "recipes/lm.py", "--model_name_or_path", model_dir, *FLAGS, "--train_file"]
    command += [functions_file, "--output_dir", "s3://bucket/runs/away"]
    env = env | {"XDG_CACHE_HOME": tmp_path, "AWS_MAX_ATTEMPTS": 1}

    def leave(path):
        proxy.is_down |= path.endswith("update-000009/rank-00000.safetensors")

    proxy.on_put = leave
    result = run([*command, "--overwrite"], **env)
    (output,) = tmp_path.glob("accelerate_recipes/run-away-*/")
    assert_mistake(result, f"not all files of the run were sent; they are in {output}")
    assert "the run continues with local files, and sends them at the next save" in result.stderr
    assert len(read_metrics(output)) == 12 and (output / "model/model.safetensors").is_file()
    proxy.is_down, proxy.on_put = False, None
    names, problems = remote_checkpoints(env, "runs/away", tmp_path / "seen")
    assert names == ["update-000003", "update-000006"] and not any(map(bucket(env).exists, old[1:]))
    result = run([*command, "--resume"], **env)
    assert result.returncode == 0 and "downloading" not in result.stdout, result.stderr
    names, _ = remote_checkpoints(env, "runs/away", tmp_path / "end")
    assert names == ["update-000009", "update-000012"] and (tmp_path / "end/model/model.safetensors").is_file()
    assert_no_secrets(env, result.stdout, result.stderr, tmp_path)


MISTAKES = {
    "s3://bucket/run AWS_SECRET_ACCESS_KEY=wrong-secret-key": "access is denied .* check the credentials",
    "s3://bucket/run AWS_ENDPOINT_URL=http://127.0.0.1:1": "s3://bucket/run: cannot be used .* check the network",
    "s3://missing/run": "--output_dir s3://missing/run: does not exist .* create the bucket, or correct the URL",
    "s3://bucket/data": "is not empty and holds no run",
    "s3://bucket/old": "s3://bucket/old holds a run; continue it with --resume, delete it with --overwrite",
    "s3://bucket/none --resume": "s3://bucket/none has no checkpoints",
    "s3://KEY-ID:SECRET@bucket/run": "--output_dir: the s3:// URL contains credentials",
    "s3:///": "names no bucket",
    "https://bucket/run": "can only be read",
    "xyz://bucket/run": "xyz:// is not a known protocol",
    "gs://bucket/run": "gs:// needs a package that cannot be imported; pip install gcsfs",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_url_that_cannot_be_used_is_one_line(given, storage, monkeypatch):
    _, env = storage
    bucket(env).pipe({"bucket/data/mine": b"x", "bucket/old/run.json": b"{}"})
    url, *words = given.split()
    changed = dict(word.split("=") for word in words if "=" in word)
    for name, value in (env | {"AWS_MAX_ATTEMPTS": "1"} | changed).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(UserError, match=MISTAKES[given]) as error:
        recipe_arguments("--output_dir", url, *(word for word in words if "=" not in word))
    text = str(error.value)
    assert "\n" not in text and "SECRET" not in text and "wrong-secret-key" not in text


def test_files_behind_urls(storage, monkeypatch, tmp_path):
    """Weights, wildcards, and files that do not exist. A file that has changed is downloaded again."""
    _, env = storage
    for name, value in (env | {"XDG_CACHE_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    bucket(env).pipe({"bucket/text/a.txt": b"one", "bucket/text/b.txt": b"two"})
    given = ["s3://bucket/text/a.txt:0.7", "s3://bucket/text/*.txt", "here.txt"]
    first, *both, here = local_files("--train_file", given)
    assert first == f"{both[0]}:0.7" and here == "here.txt"
    assert [Path(path).read_bytes() for path in both] == [b"one", b"two"]
    assert local_files("--train_file", given) == [first, *both, here]
    bucket(env).pipe_file("bucket/text/a.txt", b"new")
    assert Path(local_files("--train_file", given)[1]).read_bytes() == b"new"
    for url, line in (
        ("s3://bucket/text/c.txt", "--train_file s3://bucket/text/c.txt: does not exist"),
        ("s3://bucket/text/*.csv", "no file matches"),
        ("s3://bucket/text/*.txt:2", "a weight is for one file, and 2 match"),
    ):
        with pytest.raises(UserError, match=re.escape(line)):
            local_files("--train_file", [url])


def test_a_damaged_or_unfinished_checkpoint_is_not_resumed(storage, monkeypatch, undisturbed, tmp_path):
    """The next older one is downloaded instead, with the records, and nothing that is here already."""
    _, env = storage
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    bucket(env).put(str(undisturbed / "run"), "bucket/runs/damaged", recursive=True)
    bucket(env).pipe_file("bucket/runs/damaged/checkpoints/update-000012/rank-00000.safetensors", b"other")
    RemoteOutput("s3://bucket/runs/damaged", tmp_path / "here", keep_best=False).fetch()
    assert [path.name for path, _ in list_checkpoints(tmp_path / "here")[0]] == ["update-000009"]
    assert read_metrics(tmp_path / "here") == read_metrics(undisturbed / "run")
    before = bucket(env).find("bucket/runs/damaged")
    (tmp_path / "here/checkpoints/update-000009/rank-00000.json").write_text("damaged here")
    RemoteOutput("s3://bucket/runs/damaged", tmp_path / "here", keep_best=False).fetch()  # the next start
    assert find_damage(*list_checkpoints(tmp_path / "here")[0][0]) is None
    assert bucket(env).find("bucket/runs/damaged") == before
    bucket(env).rm_file("bucket/runs/damaged/checkpoints/update-000009/manifest.json")
    RemoteOutput("s3://bucket/runs/damaged", tmp_path / "new", keep_best=False).fetch()
    assert list_checkpoints(tmp_path / "new")[0] == []
