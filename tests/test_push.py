"""model/ has a card, and `python -m common.checkpoint push` uploads it, to a stand-in for the hub's HTTP API."""

import base64
import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from conftest import BIN, launch, results_of, run, write_rows

from common.checkpoint import push as checkpoint_push
from common.errors import UserError

TOKEN = "hf_" + "a" * 34


class Hub(BaseHTTPRequestHandler):
    """As huggingface.co answers: makes a repository, says what goes by LFS, takes blobs and a commit."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, status=200, **headers):
        data = json.dumps(body).encode()
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
            return self.answer({"error": "It is so."}, server.failure[1])
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
    command = [BIN / "python", "-m", "common.checkpoint", "push", output_dir, name, *flags]
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
    assert "| `--sequence_length` | `64` |" in text and "| `--seed` | `0` |" in text and "--overwrite" not in text
    assert "recipes/lm.py --train_file" in text
    assert "rows.jsonl (text): " in text and "torch 2" in text and TOKEN not in text


def test_a_model_is_uploaded_as_it_lies_there(finished, hub):
    """Every file of model/, byte for byte. Control: with another token the hub takes nothing."""
    result = push(finished, "me/x", hub.address, "--private")
    assert result.returncode == 0 and hub.address in result.stdout, result.stderr
    assert hub.files == {path.name: path.read_bytes() for path in (finished / "model").iterdir()}
    assert hub.made == [("me", "x", True)] and hub.metadata["library_name"] == "transformers"
    hub.files.clear()
    assert_told(push(finished, "me/x", hub.address, token="hf_" + "b" * 34), "hf auth login")
    assert hub.files == {}


def test_what_cannot_be_uploaded_is_told(finished, hub, tmp_path, monkeypatch):
    assert_told(push(tmp_path, "me/x", hub.address), "has no finished model/; name the --output_dir of a run")
    (tmp_path / "run.json").write_text(json.dumps({"status": "stopped after update 3"}))
    assert_told(push(tmp_path, "me/x", hub.address), "(status: stopped after update 3)")
    assert_told(push(finished, "me/x/y", hub.address), "give a name such as me/my-model")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(UserError, match=f"^me/x at {address}: .*; the hub gave no answer: look at the network"):
            push_here(finished, "me/x", address, monkeypatch)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE keeps .*; unset it"):
        push_here(finished, "me/x", hub.address, monkeypatch, is_offline=True)
    assert hub.files == {} and hub.made == []


# Where the hub fails, with which status, and what is to be done.
FAILURES = {
    "no login": ("/create", 401, "log in with `hf auth login`, or correct HF_TOKEN"),
    "no right": ("/create", 403, "take a name of your own, or a token that may write there"),
    "a name of others": ("/preupload/main", 403, "take a name of your own, or a token that may write there"),
    "no place": ("/create", 404, "correct the name, or HF_ENDPOINT"),
    "a name that is taken": ("/commit/main", 409, "give another name"),
    "a name that it refuses": ("/create", 400, "mend what it names"),
    "too much": ("/create", 429, "wait, then try again"),
    "its own": ("/create", 500, "the hub itself fails: try again later"),
    "a large file": ("/objects/batch", 403, "take a name of your own, or a token that may write there"),
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
