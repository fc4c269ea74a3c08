"""Saving and resuming: what a run goes on from and forgets, a disk that fails or is slow, a kill within a save."""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import torch

from changes import RANK, after, before, change
from common import output_dirs
from common.checkpoint import host_copy, layouts, resume, save, write
from common.data import hub
from common.files import PAGE
from common.parallel import rank_store
from common.training import batching, optimizers


def copy_run(paths):
    """The run begins with what another one had after an update: [from, to, update]."""
    source, target, update = paths
    if RANK == 0:
        shutil.copytree(source, target)
        for path in Path(target, "checkpoints").iterdir():
            if path.name > f"update-{update:06}":
                shutil.rmtree(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def pretend_versions(versions):
    """A resume with these versions of packages."""
    change(resume, "versions", lambda: versions)


def forget(what):
    """A resume that leaves something out."""
    if what == "random":
        change(resume, "restore_generators", lambda *_: None)
    elif what == "scaler":
        change(resume, "restore_scaler", lambda *_: None)
    elif what == "optimizer":
        pieces = layouts.Layout.pieces
        change(resume, "create_state", lambda *_: None)
        only_weights = lambda layout: (one for one in pieces(layout) if one.name.startswith("weight/"))  # noqa: E731
        change(layouts.Layout, "pieces", only_weights)
    elif what == "buffers":
        change(layouts.Layout, "_buffers", lambda _: iter(()))
    elif what == "learning_rate":
        rate, updates = optimizers.learning_rate, itertools.count()
        change(optimizers, "learning_rate", lambda update, *schedule: rate(next(updates), *schedule))
    elif what == "samples":
        sample_ids, first = batching.sample_ids_of, []

        def from_start(update, *args, **settings):
            first.append(update)
            return sample_ids(update - min(first[1:] or [update]), *args, **settings)

        change(batching, "sample_ids_of", from_start)


def hide(how):
    """[rank, pattern, whole]: that rank sees no file of such a name when it lists a directory; if whole, in no way."""
    rank, pattern, whole = how
    if RANK != rank:
        return
    listdir, scandir, stat = os.listdir, os.scandir, os.stat

    def is_hidden(path):
        return isinstance(path, str | os.PathLike) and re.fullmatch(pattern, os.path.basename(path)) is not None

    @contextlib.contextmanager
    def scan(path="."):
        with scandir(path) as entries:
            yield (entry for entry in entries if not is_hidden(entry.name))

    def look(path, *args, **kwargs):
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return stat(path, *args, **kwargs)

    change(os, "listdir", lambda path=".": [name for name in listdir(path) if not is_hidden(name)])
    change(os, "scandir", scan)
    if whole:
        change(os, "stat", look)
        change(rank_store, "SHARED_TIMEOUT", 1)


def note_reads_of_base(file):
    """Every rank that hashes the weights of a base leaves FILE-RANK."""
    before(hub, "fingerprint", lambda *_: Path(f"{file}-{RANK}").touch())


def memory_of_rank(how):
    """[rank, bytes, file]: what that rank's host has left; the others have enough. Who copies its state touches it."""
    rank, left, file = how
    change(host_copy, "available_memory", lambda: left if RANK == rank else 2**60)
    before(host_copy.HostCopy, "_copy", lambda *_: Path(f"{file}-{RANK}").touch())


def fill_disk(room):
    """[update, directory, bytes]: something else fills the disk while that update's checkpoint is written."""
    update, directory, left = room
    ballast = Path(directory, "ballast")

    def fill(path, _):
        if f"update-{update:06}" in str(path) and not ballast.exists():
            ballast.write_bytes(bytes(max(0, shutil.disk_usage(directory).free - left)))

    before(write, "write_file", fill)


def failing_write(at):
    """[rank, update]: the disk of one process refuses that update's checkpoint."""
    rank, update = at

    def refuse(path, _):
        if f"update-{update:06}" in str(path) and Path(path).name == f"rank-{rank:05}.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    before(write, "write_file", refuse)


def slow_copy(how):
    """[seconds, wait]: a save's copy beside the next update takes so long; whether the optimizer waits for it."""
    seconds, wait = how

    def delay(*_):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)

    before(host_copy.HostCopy, "_copy", delay)
    if not wait:
        change(host_copy.HostCopy, "_wait_for_copy", lambda self: None)


def save_waits_for(path):
    """A save is not on the disk before there is such a file."""

    def wait(*_):
        while not Path(path).exists():
            time.sleep(0.05)

    before(write, "write_file", wait)


def lock_timeout(seconds):
    """How long a run waits for another one in its output directory."""
    change(output_dirs, "LOCK_TIMEOUT", seconds)


def kill_in_save(when):
    """[rank, step, file]: the rank kills itself at that step of its second save or a later one; it leaves the file.

    A step is a moment before, in the middle of or after a write, flush, rename or removal. Without a step every rank
    writes the names of all of its own to FILE-RANK.
    """
    rank, kill_at, file = when
    saves, seen, removing = [], {}, []

    def step(name):
        name = re.sub(r"update-\d+", "update", name)
        if kill_at is None:
            if name not in seen:
                seen[name] = True
                Path(f"{file}-{RANK}").write_text(json.dumps(list(seen)))
        elif len(saves) >= 2 and (RANK, name) == (rank, kill_at):
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner, name, describe):
        """`describe`, given the arguments: what is done, or nothing where it is no step."""
        before(owner, name, lambda *args, **_: (what := describe(*args)) and step(f"before {what}"))
        after(owner, name, lambda done, *args, **_: (what := describe(*args)) and step(f"after {what}"))

    def is_of_a_save(path):
        return "checkpoints" in Path(path).parts or Path(path).name == "metrics.jsonl"

    def flushing(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        return is_of_a_save(path) and f"flushing {path.name}"

    def renaming(path, target):
        return is_of_a_save(path) and f"renaming {path.name} to {target.name}"

    write_file, rmtree = write.write_file, shutil.rmtree

    def write_halting(path, parts):
        def halting():
            for number, part in enumerate(parts):
                half = len(part) // 2 // PAGE * PAGE or len(part) // 2
                yield part[:half]
                step(f"within {'a later' if number else 'the first'} part of {path.name}")
                yield part[half:]

        return write_file(path, halting())

    def remove(path, *args, **kwargs):
        if is_of_a_save(path):
            removing.append(path)
            step(f"before removing {path.name}")
        rmtree(path, *args, **kwargs)
        removing.clear()

    def removed(_, path, **__):
        if removing:
            step(f"after removing {Path(path).name}")

    around(save.Checkpoints, "save", lambda *_: "the start of a save")
    before(save.Checkpoints, "save", lambda *_, **__: saves.append(1))
    around(host_copy.HostCopy, "_copy", lambda *_: "the copy")
    around(os, "fsync", flushing)
    around(Path, "rename", renaming)
    change(write, "write_file", write_halting)
    change(shutil, "rmtree", remove)
    after(os, "unlink", removed)
    after(os, "rmdir", removed)
