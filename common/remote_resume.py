"""Downloads the newest valid checkpoint of a run whose --output_dir is a URL, for --resume. Only rank 0 does this."""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.checkpoint.format import MANIFEST
from common.checkpoint.read import find_best, find_damage, list_checkpoints, read_manifest
from common.errors import UserError
from common.files import LOCK, PARTIAL, remove, replace_directory
from common.remote import Storage, explain, is_inside

ID = "remote.json"  # an id of the run, in the storage and in the local directory
NAME = re.compile(r"update-(\d{6,})")  # of a checkpoint


def fetch(storage: Storage, local: Path, keep_best: bool) -> None:
    """Downloads the newest valid checkpoint with the records, if the local directory does not have it.

    With keep_best, also the best checkpoint. Damaged checkpoints are printed and skipped.

    Raises UserError: the storage cannot be read, or the local directory holds a different run.
    """
    try:
        _fetch(storage, local, keep_best)
    except UserError:
        raise
    except Exception as error:  # the type depends on the library
        raise UserError(explain(f"--resume {storage.url}", error)) from error


def _fetch(storage: Storage, local: Path, keep_best: bool) -> None:
    _check_id(storage, local)
    here = {path.name: (path, manifest) for path, manifest in list_checkpoints(local)[0]}
    remote = _manifests(storage)
    newest = None
    for name in sorted({*here, *remote}, key=lambda name: (len(name), name), reverse=True):
        is_same = name not in remote or name in here and here[name][1]["sha256"] == remote[name]["sha256"]
        if name in here and is_same and find_damage(*here[name]) is None:
            newest = name
        elif name in remote and _download(storage, local, name, remote[name], with_records=True):
            newest = name
        if newest:
            break
    best = find_best([(Path(name), manifest) for name, manifest in remote.items()])
    if keep_best and best is not None and best.name not in (newest, *here):
        _download(storage, local, best.name, remote[best.name], with_records=False)


def _check_id(storage: Storage, local: Path) -> None:
    """Raises UserError if the local directory holds a different run than the storage."""
    remote, own = storage.read(ID), local / ID
    if not remote or not own.is_file():
        return
    if json.loads(remote)["run"] != json.loads(own.read_bytes())["run"]:
        raise UserError(
            f"--resume: {local} holds a different run than {storage.url}, which was started anew on another "
            "machine; remove this directory"
        )


def _manifests(storage: Storage) -> dict[str, dict[str, Any]]:
    """Returns the valid manifests in the storage, by the name of the checkpoint."""
    found = {}
    for path in storage.sizes("checkpoints"):
        name, _, file = path.removeprefix("checkpoints/").partition("/")
        if file == MANIFEST and NAME.fullmatch(name):
            with tempfile.TemporaryDirectory() as directory:
                (Path(directory) / MANIFEST).write_bytes(storage.read(path) or b"")
                try:
                    found[name] = read_manifest(Path(directory))
                except UserError as error:
                    print(f"{storage.url}/checkpoints/{name}: {error}", file=sys.stderr, flush=True)
    return found


def _download(storage: Storage, local: Path, name: str, manifest: dict[str, Any], with_records: bool) -> bool:
    """Downloads a checkpoint; returns whether all its files match the manifest."""
    folder, final = f"checkpoints/{name}", local / "checkpoints" / name
    partial = final.with_name(name + PARTIAL)
    print(f"downloading {storage.url}/{folder} ...", flush=True)
    remove(partial)
    try:
        for file in [*filter(is_inside, manifest["files"]), MANIFEST]:
            storage.get(f"{folder}/{file}", partial / file)
        problem = find_damage(partial, read_manifest(partial))
    except (FileNotFoundError, UserError) as error:
        problem = str(error)
    if problem:
        print(f"{storage.url}/{folder}: {problem}", file=sys.stderr, flush=True)
        remove(partial)
        return False
    for record in storage.sizes() if with_records else []:
        if is_record(record) and not record.startswith("model/"):
            storage.get(record, (copy := local / record).with_name(copy.name + PARTIAL))
            os.replace(copy.with_name(copy.name + PARTIAL), copy)
    replace_directory(partial, final)
    return True


def is_record(name: str) -> bool:
    """Returns whether a file of an output directory is complete and belongs to no checkpoint. name: relative path."""
    parts = name.split("/")
    return parts[0] not in ("checkpoints", LOCK) and not any(part.endswith(PARTIAL) or part[0] == "." for part in parts)
