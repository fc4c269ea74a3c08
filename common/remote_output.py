"""A run whose --output_dir is a URL: it works in a local directory, whose files are copied to the storage.

    checkpoints/update-N/...        the files of a checkpoint; then the records; its manifest last, which commits it
    metrics.jsonl, run.json, ...    records: sent at each save and at the end, run.json last
    model/                          sent at the end
    remote.json                     an id of the run, also in the local directory

Rank 0 does all of it, in a thread. A checkpoint without a manifest is absent.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.checkpoint.format import MANIFEST
from common.checkpoint.read import list_checkpoints
from common.data.cache import cache_path
from common.errors import UserError, raise_errors
from common.files import replace_text
from common.process import this_process
from common.remote import ATTEMPTS, Storage, endpoint, explain, find_url_problems, is_url
from common.remote_resume import ID, NAME, fetch, is_record

FAILURE_TIMEOUT = 10  # seconds to send the records of a failed run, while the other ranks wait for the end


def use_urls(args: argparse.Namespace) -> None:
    """Replaces a URL in --output_dir by the local directory of the run; on rank 0, checks that it can be written.

    Raises UserError: one line per URL that cannot be used, or the URL holds a run already.
    """
    urls = [("--output_dir", args.output_dir or "")]
    for name in ("train_file", "validation_file"):
        urls += [(f"--{name}", path) for path in vars(args).get(name) or []]
    urls = [(flag, url) for flag, url in urls if is_url(url)]
    raise_errors(line for flag, url in urls for line in find_url_problems(flag, url))
    if not is_url(args.output_dir or ""):
        return
    url = args.output_dir.rstrip("/")
    args.output_dir = str(local_directory(url))
    if os.environ.get("RANK", "0") == "0" and args.plan is None:
        output = RemoteOutput(url, Path(args.output_dir), args.keep_best)
        output.check(args.resume, args.overwrite)
        this_process().remote = output


def local_directory(url: str) -> Path:
    """Returns the directory in which a run works whose --output_dir is a URL."""
    digest = hashlib.blake2b(json.dumps([url, endpoint()]).encode(), digest_size=6).hexdigest()
    label = re.sub(r"[^\w.-]", "_", url.rpartition("/")[2])[:60]
    return cache_path("", []).parent / f"run-{label}-{digest}"


class RemoteOutput:
    """Copies the output directory of a run to the storage; exists only on rank 0."""

    def __init__(self, url: str, local: Path, keep_best: bool):
        self.url, self.local, self.keep_best = url, local, keep_best
        try:
            self.storage = Storage(url)
        except Exception as error:  # the type depends on the library
            raise UserError(explain(f"--output_dir {url}", error)) from error
        self.is_fetched = self.is_started = self.is_over = self.must_empty = False
        self.thread: threading.Thread | None = None  # the upload
        self.problem: str | None = None  # of the last upload, which is then incomplete
        self.sent: dict[str, tuple[int, int]] = {}  # size and modification time of each record in the storage
        self.committed: dict[str, str] = {}  # hash of the manifest of each checkpoint in the storage

    def check(self, resume: bool | str, overwrite: bool) -> None:
        """Raises UserError: the storage cannot be written, holds a run already, or no checkpoint to resume."""
        self.storage.attempts = 2  # so that a wrong address is reported soon
        probe = f".write-test-{uuid.uuid4().hex[:8]}"
        try:
            with tempfile.NamedTemporaryFile() as empty:
                self.storage.put(Path(empty.name), probe)
            self.storage.remove([probe])
            names = {name for name in self.storage.sizes() if not name.startswith(".")}  # a killed run's test file
        except Exception as error:  # the type depends on the library
            raise UserError(explain(f"--output_dir {self.url}", error)) from error
        self.storage.attempts = ATTEMPTS
        has_checkpoint = any(name.endswith(f"/{MANIFEST}") for name in names) or list_checkpoints(self.local)[0]
        is_here = (self.local / "run.json").is_file()  # a run that was killed before its first checkpoint
        if resume == "auto" and (has_checkpoint or is_here or not names):
            self.local.mkdir(parents=True, exist_ok=True)
        elif resume is True:
            if not has_checkpoint:
                raise UserError(
                    f"--resume: {self.url} has no checkpoints; name the --output_dir of the run to continue, or start "
                    "anew without --resume"
                )
            self.local.mkdir(parents=True, exist_ok=True)
        elif names and not {"run.json", ID} & names:
            raise UserError(f"--output_dir {self.url} is not empty and holds no run; name another directory")
        elif names and not overwrite:
            raise UserError(
                f"--output_dir {self.url} holds a run; continue it with --resume, delete it with --overwrite, or name "
                "another directory"
            )

    def fetch(self) -> None:
        """Downloads the newest valid checkpoint, if it is not here (`remote_resume.fetch`); only at the first call."""
        if not self.is_fetched:
            fetch(self.storage, self.local, self.keep_best)
            self.is_fetched = True

    def start(self, overwrite: bool) -> None:
        """Starts to send files; all checks have passed, and run.json is written. With --overwrite, empties the URL."""
        if not (self.local / ID).is_file():
            replace_text(self.local / ID, json.dumps({"run": uuid.uuid4().hex, "url": self.url}) + "\n")
        self.is_started, self.must_empty = True, overwrite
        process = this_process()
        write = process.note_failure

        def note(status: str) -> None:
            self.is_over = True
            if write is not None:
                write(status)
            thread = threading.Thread(target=self._try_to_send, args=[False], daemon=True)
            thread.start()
            thread.join(FAILURE_TIMEOUT)

        process.note_failure = note
        print(f"    remote  {self.url}; its files are written to {self.local} first", flush=True)
        self.send_soon(checkpoints=False)

    def send_soon(self, checkpoints: bool = True) -> None:
        """Starts to send what is new. Waits for the previous upload first, so that no more than one save is behind."""
        if self.thread is not None:
            self.thread.join()
        # A daemon, because Python would wait for another thread after an error.
        self.thread = threading.Thread(target=self._try_to_send, args=[checkpoints], daemon=True, name="upload")
        self.thread.start()

    def finish(self) -> None:
        """Sends the rest, at the end of the run. Raises UserError: a file could not be sent."""
        if not self.is_started:
            return
        if self.thread is not None:
            self.thread.join()
        self.is_over = True
        self._try_to_send(True)
        if self.problem:
            this_process().note_failure = None  # it would try once more
            raise UserError(
                f"{self.problem}; not all files of the run were sent; they are in {self.local}, and the same command "
                "with --resume on this machine sends them"
            )
        print(f"uploaded   {self.url}", flush=True)

    def _try_to_send(self, checkpoints: bool) -> None:
        self.storage.attempts = 1 if self.problem and not self.is_over else ATTEMPTS  # while it is down, no save waits
        try:
            self._send(checkpoints)
            self.problem = None
        except Exception as error:  # the type depends on the library
            self.problem = explain(f"--output_dir {self.url}", error)
            if not self.is_over:
                later = "the run continues with local files, and sends them at the next save"
                print(f"{self.problem}; {later}", file=sys.stderr, flush=True)

    def _send(self, checkpoints: bool) -> None:
        if self.must_empty:
            self._empty()
            self.must_empty = False
        found = list_checkpoints(self.local)[0] if checkpoints else []
        for path, manifest in found:  # the newest first
            if self._sent_manifest(path.name) != manifest["sha256"]:
                self._send_checkpoint(path, manifest)
        self._send_records()
        if found:
            local = {path.name for path, _ in found}
            in_storage = {name.split("/")[1] for name in self.storage.sizes("checkpoints")}
            for name in sorted(in_storage - local):
                if NAME.fullmatch(name):
                    self._remove_checkpoint(name)

    def _sent_manifest(self, name: str) -> str | None:
        """Returns the hash of a checkpoint's manifest in the storage, or None."""
        if name not in self.committed:
            with suppress(ValueError, TypeError, KeyError):
                self.committed[name] = json.loads(self.storage.read(f"checkpoints/{name}/{MANIFEST}") or "")["sha256"]
        return self.committed.get(name)

    def _send_checkpoint(self, path: Path, manifest: dict[str, Any]) -> None:
        """Sends the files of a checkpoint, then the records, so that they reach its update, and its manifest."""
        folder = f"checkpoints/{path.name}"
        self._remove_checkpoint(path.name)  # what an interrupted upload, or a damaged checkpoint, has left
        try:
            for name in manifest["files"]:
                self.storage.put(path / name, f"{folder}/{name}")
        except FileNotFoundError:
            if path.is_dir():
                raise
            return  # removed meanwhile, because there are newer checkpoints
        sizes = self.storage.sizes(folder)
        for name, entry in manifest["files"].items():
            if sizes.get(f"{folder}/{name}") != entry["bytes"]:
                raise OSError(f"{folder}/{name} has {sizes.get(f'{folder}/{name}')} bytes instead of {entry['bytes']}")
        self._send_records()
        self.storage.put(path / MANIFEST, f"{folder}/{MANIFEST}")
        self.committed[path.name] = manifest["sha256"]

    def _remove_checkpoint(self, name: str) -> None:
        """Removes a checkpoint from the storage, its manifest first."""
        self.committed.pop(name, None)
        names = list(self.storage.sizes(f"checkpoints/{name}"))
        manifest = f"checkpoints/{name}/{MANIFEST}"
        self.storage.remove([manifest] if manifest in names else [])
        self.storage.remove([file for file in names if file != manifest])

    def _send_records(self) -> None:
        """Sends new and changed files except checkpoints, run.json last; removes shards of an older model/."""
        files = {path.relative_to(self.local).as_posix(): path for path in self.local.rglob("*") if path.is_file()}
        files = {name: path for name, path in files.items() if is_record(name)}
        for name, path in sorted(files.items(), key=lambda item: (item[0] == "run.json", item[0] != ID, item[0])):
            with suppress(FileNotFoundError):  # replaced or removed meanwhile
                status = path.stat()
                if self.sent.get(name) != (state := (status.st_size, status.st_mtime_ns)):
                    self.storage.put(path, name)
                    self.sent[name] = state
        if "model/config.json" in files:
            self.storage.remove([name for name in self.storage.sizes("model") if name not in files])

    def _empty(self) -> None:
        """Removes a run, the manifests of its checkpoints first and run.json last."""
        names = list(self.storage.sizes())
        first = [name for name in names if name.startswith("checkpoints/") and name.endswith(f"/{MANIFEST}")]
        last = [name for name in names if name in ("run.json", ID)]
        for part in (first, [name for name in names if name not in (*first, *last)], last):
            self.storage.remove(part)
