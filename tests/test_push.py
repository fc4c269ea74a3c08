"""model/ has a card, and `python -m tools.checkpoint push` uploads it, to a stand-in for the hub's HTTP API."""

import base64
import hashlib
import json
import os
import re
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from conftest import BIN, launch, results_of, run, write_rows

from common.errors import UserError
from common.report import earlier_starts
from common.report.model_card import write_model_card
from tools.checkpoint import push as checkpoint_push

TOKEN = "hf_" + "a" * 34


class Hub(BaseHTTPRequestHandler):
    """As huggingface.co answers: makes a repository, says what goes by LFS, takes blobs and a commit."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, status=200, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self):
        self.answer({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})

    def do_PUT(self):
        self.server.blobs[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self):
        body, server, path = self.body(), self.server, self.path.partition("?")[0]
        if server.failure and path.endswith(server.failure[0]):
            return self.answer(server.failure[2] if server.failure[2:] else {"error": "It is so."}, server.failure[1])
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            is_private = "private" in (asked.get("visibility"), asked.get("private") and "private")  # new, old clients
            server.made.append((asked.get("organization"), asked["name"], is_private))
            return self.answer({"url": f"{server.address}/me/{asked['name']}"})
        if path == "/api/validate-yaml":
            text = json.loads(body)["content"]
            server.metadata = yaml.safe_load(text.split("---")[1])
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = [one["path"] for one in json.loads(body)["files"]]
            kinds = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            modes = [{"path": name, "uploadMode": kind, "shouldIgnore": False} for name, kind in kinds.items()]
            return self.answer({"files": modes})
        if path.endswith("/info/lfs/objects/batch"):
            where = {one["oid"]: {"href": f"{server.address}/blob/{one['oid']}"} for one in json.loads(body)["objects"]}
            objects = [{"oid": oid, "size": 1, "actions": {"upload": at}} for oid, at in where.items()]
            return self.answer({"transfer": "basic", "objects": objects})
        assert "/commit/main" in path, path
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                server.files[value["path"]] = server.blobs[value["oid"]]
                assert hashlib.sha256(server.files[value["path"]]).hexdigest() == value["oid"]
        self.answer({"commitUrl": f"{server.address}/me/x/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None})


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    server.made, server.files, server.blobs, server.metadata, server.failure = [], {}, {}, None, None
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that has ended; its command holds a token, as a careless user's may."""
    directory = tmp_path_factory.mktemp("push")
    rows = write_rows(directory / "rows.jsonl", 40)
    flags = ["--train_file", rows, "--validation_file", rows, "--num_updates", 2, "--sequence_length", 64]
    launch(*flags, "--output_dir", directory / "books", HF_TOKEN=TOKEN)
    return directory / "books"


def push(output_dir, name, address, *flags, token=TOKEN):
    command = [BIN / "python", "-m", "tools.checkpoint", "push", output_dir, name, *flags]
    return run(command, HF_ENDPOINT=address, HF_TOKEN=token, HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0")


def push_here(output_dir, name, address, monkeypatch, is_offline=False):
    """The same in this process, which has imported the client."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return checkpoint_push.push(output_dir, name)


def assert_told(result, words):
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and words in result.stderr, result.stderr


def test_the_card_says_what_the_run_was(finished):
    """By the run's own record. Control: the figures are those of run.json."""
    _, metadata, text = (finished / "model/README.md").read_text().split("---", 2)
    metadata = yaml.safe_load(metadata)
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "text-generation"
    assert "base_model" not in metadata and "lm" in metadata["tags"]
    assert "# books" in text and "`LlamaForCausalLM`, trained from scratch in 2 updates" in text
    assert f"| held-out loss | {results_of(finished)['validation_loss']:,.6g} |" in text
    assert "| `--sequence_length` | `64` |" in text and "`--overwrite" not in text
    assert (
        "Defaults: `--seed 0`, " in text and "`--learning_rate 0.006`" in text and "`--sequence_length 64`" not in text
    )
    assert "    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/lm.py --train_file" in text
    assert "rows.jsonl, column text: " in text and "torch 2" in text and TOKEN not in text


@pytest.fixture
def card(finished, tmp_path):
    """Of the same run, where these facts and arguments were others."""
    before = json.loads((finished / "run.json").read_text())
    (tmp_path / "model").mkdir()
    shutil.copy(finished / "model/config.json", tmp_path / "model")

    def write(facts, **arguments):
        write_model_card(tmp_path / "model", before | facts | {"arguments": before["arguments"] | arguments}, "Auto")
        return (tmp_path / "model/README.md").read_text()

    return write


def test_the_card_shows_no_directory_of_its_writer(card, tmp_path, monkeypatch):
    """Control: a path that only begins alike, or lies elsewhere, stays."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    command = ["accelerate", "launch", "/home/me/lm.py", "--train_file", f"{tmp_path}/books/a.txt", "/mnt/home/me/b"]
    text = card(
        {"data": f"{tmp_path}/books/a.txt, column text: 5", "held_out": "/home/meg/c.txt: 6", "commands": [command]}
    )
    assert "- trained on: books/a.txt, column text: 5\n" in text and "- held out: /home/meg/c.txt: 6\n" in text
    assert "    accelerate launch ~/lm.py --train_file books/a.txt /mnt/home/me/b\n" in text


def test_the_card_shows_text_from_outside_as_it_is(card, tmp_path):
    """Neither markup, nor HTML, nor lines of a header. Control: plain names are not changed, as in the tests above."""
    evil = "x\n---\nlicense: evil\n# <img src=x> [a](https://evil) `b` | c \33[2J"
    text = card({"data": evil, "held_out": evil, "commands": [["python", evil]]}, model_name_or_path=evil, seed=evil)
    _, header, body = text.split("\n---\n")[0], *text.split("\n---\n", 1)
    assert yaml.safe_load(header.strip("-\n"))["base_model"] == evil and "license" not in yaml.safe_load(header[4:])
    assert "\33" not in text and "\n# <img" not in body and "\nlicense" not in body
    for line in (line for line in body.splitlines() if "img src" in line):
        assert r"\<img" in line or line.startswith("    python ") or "`` " in line, line


def test_the_card_lists_mixed_data_and_leaves_out_what_epochs_replace(card):
    """Control: without epochs the number of updates is there."""
    text = card({"data": "7/10: a.jsonl\n            3/10: b.jsonl"}, num_epochs=1.5)
    assert "- trained on:\n  - 7/10: a.jsonl\n  - 3/10: b.jsonl\n" in text
    assert "`--num_epochs 1.5`" in text and "num_updates`" not in text and "| `--num_updates` | `2` |" in card({})


def test_the_card_of_an_adapter_says_what_its_defaults_were(card, tmp_path):
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "modules_to_save": ["score"]}
    (tmp_path / "model/adapter_config.json").write_text(json.dumps(config))
    text = card({}, lora_rank=4, model_name_or_path="me/base")
    words = (
        "rank 4 and alpha 8 on `q_proj`, `v_proj`, with `score` trained whole, fine-tuned from `me/base` in 2 updates"
    )
    assert f"An adapter (LoRA) of {words}" in text and "library_name: peft" in text and "base_model: me/base" in text


def test_the_card_says_which_updates_weights_the_model_has(card, finished):
    """Control: those of the last update are told without."""
    best = {"checkpoint": "runs/books/checkpoints/update-000001", "loss": 1.5, "is_model": True}
    told = "in 2 updates; the weights are those after update 1, which had the lowest held-out loss"
    assert told in card({"results": results_of(finished) | {"best": best}})
    assert "weights are those" not in card({"results": results_of(finished) | {"best": best | {"is_model": False}}})


def test_the_card_has_the_commands_of_all_starts(finished, card, tmp_path):
    """Also of a run whose first start kept only the script's words, or that another launcher started."""
    shutil.copytree(finished, tmp_path / "books")
    record = tmp_path / "books/run.json"
    run_json = json.loads(record.read_text())
    (first,) = run_json.pop("commands")
    record.write_text(json.dumps(run_json))
    words = run_json["command"][1:-1]
    assert first[:3] == ["accelerate", "launch", "--config_file"] and first[4:] == [*run_json["command"]]
    launch(*words, tmp_path / "books", "--resume")
    assert json.loads(record.read_text())["commands"] == [
        run_json["command"],
        [*first[:-1], str(tmp_path / "books"), "--resume"],
    ]
    text = (tmp_path / "books/model/README.md").read_text()
    assert "    recipes/lm.py --train_file" in text.split("Continued by:")[0] and text.count("--resume") == 1
    assert "Another launcher" not in text and "Another launcher" in card({"commands": [["recipes/lm.py"]]})
    record.write_text("")  # as a power cut leaves it
    assert earlier_starts.read_earlier(tmp_path / "books") == {}


def test_a_model_is_uploaded_as_it_lies_there(finished, hub):
    """Every file of model/, byte for byte. Control: with another token the hub takes nothing."""
    result = push(finished, "me/x", hub.address, "--private")
    assert result.returncode == 0 and hub.address in result.stdout, result.stderr
    assert hub.files == {path.name: path.read_bytes() for path in (finished / "model").iterdir()}
    assert hub.made == [("me", "x", True)] and hub.metadata["library_name"] == "transformers"
    hub.files.clear()
    assert_told(push(finished, "me/x", hub.address, token="hf_" + "b" * 34), "hf auth login")
    assert hub.files == {}


def test_only_the_files_of_a_model_are_uploaded(finished, hub, tmp_path, monkeypatch, capsys):
    """What else lies there is named. Control: all files of the model go, as the test above says."""
    model = shutil.copytree(finished / "model", tmp_path / "run/model")
    names = sorted(path.name for path in model.iterdir())
    others = [".env", ".netrc", "id_rsa", "optimizer.pt", "notes.txt", "secrets.json", "x.safetensors", "model.py"]
    others += ["a\33b", "checkpoints/update-000001/rank-00000.safetensors", "[a-z]*.json", "sub/config.json"]
    for other in others:
        (model / other).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(model / "config.json", model / other)
    push_here(tmp_path / "run", "me/x", hub.address, monkeypatch)
    assert sorted(hub.files) == names
    printed = capsys.readouterr().out
    assert f": {', '.join(names)}\n" in printed and all(repr(other).strip("'")[:6] in repr(printed) for other in others)


def test_links_and_incomplete_models_are_not_uploaded(finished, hub, tmp_path, monkeypatch):
    def link(name):
        return lambda model: ((model / name).unlink(missing_ok=True), (model / name).symlink_to("/etc/passwd"))

    def index(text):
        return lambda model: (model / "model.safetensors.index.json").write_text(text)

    def whole(model):
        model.rename(model.with_name("elsewhere"))
        model.symlink_to("elsewhere")

    shards = json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}})
    refused = {
        "config.json is a link": link("config.json"),
        ".env is a link": link(".env"),
        "deep is a link": lambda model: (model / "deep").symlink_to(".."),
        "model is a link": whole,
        "tokenizer.json is not a regular file": lambda model: (
            (model / "tokenizer.json").unlink(),
            os.mkfifo(model / "tokenizer.json"),
        ),
        "has no config.json": lambda model: (model / "config.json").unlink(),
        "has no model.safetensors": lambda model: (model / "model.safetensors").unlink(),
        "has no model-00001-of-00002.safetensors": index(shards),
        "model.safetensors has no x; ": index(shards.replace("-00001-of-00002", "")),
        "has no passwd": index(shards.replace("model-00001-of-00002.safetensors", "../../../etc/passwd")),
        **{f"{text!r}": index(text) for text in ("[]", '{"weight_map": [1]}', "{", "[" * 50_000)},
        "are corrupted": lambda model: (model / "model.safetensors").write_text("root:x:0:0"),
    }
    for number, (words, change) in enumerate(refused.items()):
        model = shutil.copytree(finished / "model", tmp_path / f"{number}/model")
        change(model)
        with pytest.raises(UserError) as told:
            push_here(model.parent, "me/x", hub.address, monkeypatch)
        assert words in str(told.value) or (words.startswith("'") and "are corrupted" in str(told.value)), words
    assert hub.files == {} and hub.made == []
    monkeypatch.setenv("HF_ENDPOINT", (address := "http://me:canary@127.0.0.1:9"))
    with pytest.raises(UserError) as told:
        push_here(finished, "me/x", address, monkeypatch)
    assert "canary" not in str(told.value) and "127.0.0.1:9" in str(told.value)


@pytest.mark.parametrize("is_here", [True, False])
def test_an_adapter_whose_base_nobody_else_has_is_told(is_here, finished, hub, tmp_path):
    """Control: a base of the hub."""
    shutil.copytree(finished, tmp_path / "run")
    base = str(tmp_path) if is_here else "me/base"
    (tmp_path / "run/model/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (tmp_path / "run/model/model.safetensors").rename(tmp_path / "run/model/adapter_model.safetensors")
    result = push(tmp_path / "run", "me/x", hub.address)
    assert result.returncode == 0 and "adapter_config.json" in hub.files
    assert (f"adapter_config.json names its base by a path, {base}" in result.stderr) == is_here


def test_what_cannot_be_uploaded_is_told(finished, hub, tmp_path, monkeypatch):
    no_model = "has no finished model/; name the --output_dir of a run"
    assert_told(push(tmp_path, "me/x", hub.address), no_model)
    cases = [('{"bad', no_model)]
    cases.append((json.dumps({"status": "stopped after update 3"}), "(status: stopped after update 3)"))
    for record, words in cases:
        (tmp_path / "run.json").write_text(record)
        with pytest.raises(UserError, match=re.escape(words)):
            push_here(tmp_path, "me/x", hub.address, monkeypatch)
    with pytest.raises(UserError, match="give a name such as me/my-model"):
        push_here(finished, "me/x/y", hub.address, monkeypatch)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(UserError, match=f"^me/x at {address}: .*; the hub did not answer: check the network"):
            push_here(finished, "me/x", address, monkeypatch)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set; unset it"):
        push_here(finished, "me/x", hub.address, monkeypatch, is_offline=True)
    assert hub.files == {} and hub.made == []


# Where the hub fails, with which status, and what is to be done.
FAILURES = {
    "no login": ("/create", 401, "log in with `hf auth login`, or correct HF_TOKEN"),
    "no right": ("/create", 403, "use your own name, or a token with write access"),
    "a name of others": ("/preupload/main", 403, "use your own name, or a token with write access"),
    "no place": ("/create", 404, "correct the name, or HF_ENDPOINT"),
    "a name that is taken": ("/commit/main", 409, "use a different name"),
    "a name that it refuses": ("/create", 400, "fix this"),
    "too much": ("/create", 429, "wait, then try again"),
    "its own": ("/create", 500, "the hub itself fails: try again later"),
    "a large file": ("/objects/batch", 403, "use your own name, or a token with write access"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_of_the_hub_has_its_own_advice(failure, finished, hub, monkeypatch):
    """After what the hub says itself; only where the login is to blame it is blamed."""
    path, status, advice = FAILURES[failure]
    hub.failure = path, status
    with pytest.raises(UserError, match="It is so") as told:
        push_here(finished, "me/x", hub.address, monkeypatch)
    text = str(told.value)
    assert text.startswith(f"me/x at {hub.address}: ") and f"; {advice}" in text and "\n" not in text
    assert hub.files == {} and ("auth login" in text) == (status == 401)


def test_what_is_no_hub_is_told_as_such(finished, hub, monkeypatch):
    hub.failure = "/create", 200, b"<html>Welcome to this network</html>"
    with pytest.raises(UserError, match="its answer is not a hub's: check HF_ENDPOINT") as told:
        push_here(finished, "me/x", hub.address, monkeypatch)
    assert "\n" not in str(told.value)
