"""The state of torch's rendezvous in a directory that all hosts of an elastic launch share."""

import hashlib
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from common.errors import UserError
from common.parallel.channel import TOKEN

BEAT, MISSED = 3, 5  # seconds between two heartbeats of a host; number of missed heartbeats after which it is dead


class SharedFiles(RendezvousBackend):
    """The state of torch's rendezvous in a directory that all hosts share; the state is the newest of numbered files.

    A file is created by a hard link, which fails if the file exists: an atomic compare-and-set without a lock, which a
    frozen host could hold.
    """

    KEPT = 20  # newest files, so that a slow reader finds the file that it has listed

    def __init__(self, directory: Path):
        self.directory = directory

    @property
    def name(self) -> str:
        return "shared-files"

    def _numbers(self) -> list[int]:
        return sorted(int(path.suffix[1:]) for path in self.directory.glob("state.*") if path.suffix[1:].isdecimal())

    def get_state(self) -> tuple[bytes, int] | None:
        """Returns the newest state and its number, or None before the first."""
        while numbers := self._numbers():
            with suppress(FileNotFoundError):  # a much newer state exists by now
                return (self.directory / f"state.{numbers[-1]}").read_bytes(), numbers[-1]
        return None

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool] | None:
        """Creates the state after number `token`; returns the newest state, its number, and whether it is this one."""
        number = (token or 0) + 1
        with tempfile.NamedTemporaryFile(dir=self.directory, prefix="new.") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(file.name, self.directory / f"state.{number}")
            except FileExistsError:
                newest = self.get_state()
                return newest and (*newest, False)
        numbers = self._numbers()
        if numbers[-1] - number >= self.KEPT:  # the number was in use, and its file has been removed since
            (self.directory / f"state.{number}").unlink(missing_ok=True)
            newest = self.get_state()
            return newest and (*newest, False)
        for old in numbers[: -self.KEPT]:
            (self.directory / f"state.{old}").unlink(missing_ok=True)
        return state, number, True


def make_directory(path: Path) -> Path:
    """Creates the directory of this launch, for this user only.

    torch's rendezvous state is a pickle, so nobody else may write it.
    Raises UserError: a different user can write there, or a launch with a different token is running.
    """
    launch_id = hashlib.sha256(f"elastic {os.environ[TOKEN]}".encode()).hexdigest()[:16]
    directory = path / launch_id
    for folder in (path, directory):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = folder.stat()
        except OSError as error:
            raise UserError(
                f"--rendezvous {path} cannot be written ({error.strerror}); use another directory"
            ) from error
        is_sticky = folder == path and facts.st_mode & stat.S_ISVTX
        if facts.st_uid not in (0, os.geteuid()) or (facts.st_mode & 0o022 and not is_sticky):
            raise UserError(f"--rendezvous {folder} can be written by others; remove it, or name another directory")
    for other in path.iterdir():
        if other != directory and other.is_dir() and is_alive(SharedFiles(other)):
            raise UserError(
                f"--rendezvous {path}: a launch with a different {TOKEN} is running there; end it, or use its token"
            )
    return directory


def is_alive(files: SharedFiles) -> bool:
    """Returns whether a host of a launch has sent a heartbeat recently, or sends one now; waits for it if necessary."""
    newest = files.get_state()
    if newest is None or time.time() - (files.directory / f"state.{newest[1]}").stat().st_mtime > BEAT * MISSED:
        return False
    deadline = time.monotonic() + BEAT * MISSED
    while time.monotonic() < deadline:
        time.sleep(BEAT)
        if files.get_state() != newest:
            return True
    return False
