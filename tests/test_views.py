"""What each rank sees of a disk and of the hub: rank 0 decides, and a rank that sees something else says so."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from conftest import assert_refused, example_flags, read_metrics, results_of, run_specs

from common.checkpoint.differences import differences
from common.checkpoint.resume import begin_state
from common.data.hub import fingerprint, identify_pretrained
from common.versions import versions

BATCH = ["--global_batch_size", 8, "--warmup_updates", 1, "--learning_rate", 1e-3]


def held_out_of(functions_file, tmp_path, *numbers):
    path = tmp_path / f"held-out-{numbers[0]}.jsonl"
    lines = functions_file.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[number] for number in numbers))
    return path


def manifest_of(out, update):
    return json.loads((out / f"checkpoints/update-{update:06}/manifest.json").read_text())


def test_all_ranks_go_on_from_what_rank_0_sees(functions_file, model_dir, tmp_path):
    """Rank 1 has an old listing of the checkpoints, of the cache, and at last no sight of the newest checkpoint."""
    held_out = held_out_of(functions_file, tmp_path, 0, 1, 2, 3)
    more = [*BATCH, "--num_updates", 8, "--save_every", 2, "--keep_last", 4, "--eval_every", 2, "--keep_best"]
    more += ["--load_best_at_end", "--validation_file", held_out]
    whole, stale, blind = (tmp_path / name for name in ("whole", "stale", "blind"))
    lora = [*BATCH, "--num_updates", 2, "--save_every", 2, "--lora_rank", 2]
    old_listing = r"update-00000[68]"
    runs = [
        (example_flags(functions_file, model_dir, whole, *more), {}),
        (
            example_flags(functions_file, model_dir, stale, *more, "--resume"),
            {"copy_run": [str(whole), str(stale), 6], "hide": [1, old_listing, False]},
        ),
        (
            example_flags(functions_file, model_dir, tmp_path / "lora", *lora),
            {"note_reads_of_base": str(tmp_path / "read"), "hide": [1, r"(samples|tokenizer)-\w+", True]},
        ),
        (
            example_flags(functions_file, model_dir, blind, *more, "--resume"),
            {"copy_run": [str(whole), str(blind), 6], "hide": [1, "update-000006|manifest.json", True]},
        ),
    ]
    result = run_specs("lm", runs, tmp_path, "multi_cpu", check=False)
    assert f"resuming from {stale}/checkpoints/update-000006, after update 6" in result.stdout
    names = ("sample_digest", "loss", "grad_norm", "validation_loss")
    lines = [[[line.get(name) for name in names] for line in read_metrics(out)] for out in (whole, stale)]
    assert lines[0] == lines[1]
    assert (
        results_of(whole)["best"]["loss"] == results_of(stale)["best"]["loss"] == results_of(stale)["validation_loss"]
    )
    assert sorted(tmp_path.glob("read-*")) == [tmp_path / "read-0"]  # one rank has read the base, for all
    assert manifest_of(tmp_path / "lora", 2)["identity"]["base"] == fingerprint(model_dir)
    assert_refused(result, "update-000006: chosen by rank 0, and rank 1 on host .* does not see it")
    assert {path.name for path in (blind / "checkpoints").iterdir()} >= {"update-000006"}  # it is not taken as damaged


def test_a_rank_that_sees_other_data_ends_the_run(functions_file, model_dir, tmp_path):
    for name in ("train", "held"):
        for number in (1, 2):
            shutil.copy(functions_file, tmp_path / f"{name}-{number}.jsonl")
    given = example_flags(tmp_path / "train-*.jsonl", model_dir, tmp_path / "run", *BATCH, "--num_updates", 2)
    runs = [([*given, "--validation_file", tmp_path / "held-*.jsonl"], {"hide": [1, r"(train|held)-2.jsonl", False]})]
    result = run_specs("lm", runs, tmp_path, "multi_cpu", check=False)
    lines = [f"rank 1 on host .*: the {what} data: this rank and rank 0 differ" for what in ("training", "held-out")]
    assert_refused(result, *lines, lines=2)
    assert not (tmp_path / "run").exists()


def test_other_held_out_data_are_refused_or_begin_the_best_anew(functions_file, model_dir, tmp_path):
    """The figures of the first are the lower ones: counted still, they would name the best one."""
    easy, hard = tmp_path / "easy.jsonl", tmp_path / "hard.jsonl"
    easy.write_text(functions_file.read_text().splitlines()[0] + "\n")
    hard.write_text(json.dumps({"text": "".join(chr(0x4E00 + 37 * n % 999) for n in range(40))}) + "\n")
    more = [*BATCH, "--save_every", 2, "--eval_every", 2, "--keep_best", "--keep_last", 2, "--patience", 9]
    flags = example_flags(functions_file, model_dir, tmp_path / "run", *more)
    allowed = ["--resume", "--num_updates", "10", "--allow_changed", "num_updates", "validation"]
    runs = [
        [*flags, "--num_updates", 4, "--validation_file", easy],
        [*flags, *allowed, "--validation_file", hard],
        [*flags, "--num_updates", 10, "--resume", "--validation_file", easy],
    ]
    result = run_specs("lm", [(run, {}) for run in runs], tmp_path, check=False)
    assert "the held-out data differs: --keep_best and --patience start anew after update 4" in result.stdout
    assert_refused(
        result, "the held-out data differs: its fingerprint is .*, the checkpoint's is .*--allow_changed validation"
    )
    losses = [line["validation_loss"] for line in read_metrics(tmp_path / "run") if "validation_loss" in line]
    assert min(losses[:2]) < min(losses[2:])
    assert results_of(tmp_path / "run")["best"]["loss"] == min(losses[2:])
    position = manifest_of(tmp_path / "run", 10)["position"]
    assert (position["best_validation_loss"], position["validation_since"]) == (min(losses[2:]), 4)


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, whose main branch has another commit at each request for it."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        server.asked.append(path)
        found = re.fullmatch(r"/me/base/resolve/(\w+)/(.+)", path)
        revision, name = found.groups() if found else ("", "")
        is_main = revision == "main" or path == "/api/models/me/base"
        server.commits += is_main
        commit = f"{server.commits:040x}" if is_main else revision
        file, body = server.model_dir / name, b"{}"
        status = 200 if name and file.is_file() else 404
        if path == "/api/models/me/base":
            status, body = 200, json.dumps({"id": "me/base", "sha": commit, "siblings": []}).encode()
        elif status == 200:
            body = file.read_bytes()
        self.send_response(status)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{commit}-{name}"', "Content-Length": len(body)}
        headers |= {"X-Error-Code": "EntryNotFound"} if status == 404 else {}
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_all_ranks_load_the_revision_that_rank_0_found(functions_file, model_dir, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.commits, server.model_dir = [], 0, Path(model_dir)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    more = [*BATCH, "--num_updates", 2, "--save_every", 2, "--lora_rank", 2]
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": 0, "HF_HOME": tmp_path / "home"}
    run_specs(
        "lm", [(example_flags(functions_file, "me/base", tmp_path / "run", *more), {})], tmp_path, "multi_cpu", **hub
    )
    server.shutdown()
    asked = [re.fullmatch(r"/me/base/resolve/(\w+)/model.safetensors", path) for path in server.asked]
    (commit,) = {found[1] for found in asked if found}
    assert manifest_of(tmp_path / "run", 2)["identity"]["base"] == f"me/base@{commit}"
    assert (tmp_path / "home/hub/models--me--base/refs/main").is_file()  # a later run finds it without a hub


def test_a_resume_names_the_versions_that_have_changed(functions_file, model_dir, tmp_path):
    """Control: with the versions of the checkpoint it prints no such line."""
    given = example_flags(functions_file, model_dir, tmp_path / "run", *BATCH, "--num_updates", 2, "--resume")
    now = versions() | {"torch": "99.0", "accelerate": "98.0"}
    result = run_specs("lm", [(given[:-1], {}), (given, {"pretend_versions": now}), (given, {})], tmp_path)
    changed = [f"{name} {now[name]} instead of {versions()[name]}" for name in ("torch", "accelerate")]
    lines = [line for line in result.stdout.splitlines() if line.startswith("versions differ")]
    assert lines == [f"versions differ from the checkpoint's: {', '.join(changed)}; so updates may differ too"]


def test_checkpoints_that_do_not_say_what_they_measured_are_read():
    class Args:
        allow_changed = []

    saved = {"model": {}, "tokenizer": "t", "dataset": "d", "settings": {}}
    now = saved | {"validation": "v"}
    assert list(differences(saved, now, Args)) == []
    assert len(list(differences(now, saved | {"validation": None}, Args))) == 1
    reader = SimpleNamespace(manifest={"position": {"update": 3, "best_validation_loss": 1.0}, "identity": saved})
    state, told = begin_state(reader, now, [])
    assert (state.best_validation_loss, told) == (1.0, "")
    state, told = begin_state(reader, now, ["validation"])
    assert "does not name" in told and (state.best_validation_loss, state.validation_since) == (None, 3)


def test_a_base_is_known_by_its_weights(model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path / "base")
    assert identify_pretrained(str(tmp_path / "base")) == fingerprint(Path(model_dir)) != ""
