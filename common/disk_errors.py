"""Messages for disk errors and for an output directory that was deleted or moved during the run."""

import errno
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from common.process import this_process

# Error numbers of a full, read-only, inaccessible or broken disk, and of a path of the wrong type, each with the fix.
FIXES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room in the quota",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f), or use a file system for larger ones",
    errno.EROFS: "make the disk writable",
    errno.EACCES: "change the permissions",
    errno.EIO: "repair the disk",
    errno.EISDIR: "use a different path",
    errno.ENOTDIR: "use a different path",
    errno.EBUSY: "end the program that uses it",
}

# Error numbers that cannot be caused by a wrong path or name in the code.
FULL_OR_BROKEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


def disk_line(error: BaseException, what: str, directory: Path, needed: int, advice: str) -> str:
    """Returns one line for a disk error that `disk_error_number` recognises, or for any OSError."""
    number, path = disk_error_number(error), getattr(error, "filename", None) or directory
    reason = os.strerror(number) if number else getattr(error, "strerror", None) or error
    size = f"{needed:,} bytes needed, " if needed else ""
    free = _free_bytes(directory)
    fix = FIXES.get(number or 0, "repair the disk")
    return f"disk: {what}: {reason} ({path}); {size}{free:,} free; {fix}, then {advice}"


def checkpoint_line(error: OSError, directory: Path, needed: int) -> str:
    """Returns one line for an error of a save. directory: of the checkpoints. needed: bytes of the checkpoint."""
    is_saved = any(directory.glob("update-*[0-9]"))  # not those with .partial
    advice = "start again with --resume: the last complete checkpoint is untouched" if is_saved else "start again"
    return disk_line(error, "no checkpoint could be written", directory, needed, advice)


def disk_error_number(error: BaseException) -> int | None:
    """Returns the number of a disk error, parsed from the text if safetensors raised it; None for all other errors."""
    number = getattr(error, "errno", None)
    if number is None and type(error).__name__ == "SafetensorError":
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else errno.ENOSPC if "No space left" in str(error) else None
    return number if number in FIXES else None


def _free_bytes(path: Path) -> int:
    """Returns the free bytes of the disk that contains a path, or its nearest existing parent."""
    return shutil.disk_usage(next(place for place in [path, *path.absolute().parents] if place.is_dir())).free


def write_status_in_place(output_dir: Path, status: str) -> None:
    """Changes the status in run.json, if it is "running", on a full disk: into the space that the file has already."""
    path = output_dir / "run.json"
    path.with_name(path.name + ".partial").unlink(missing_ok=True)
    run = json.loads(path.read_text())
    with open(path, "r+b") as file:
        text = json.dumps(run | {"status": status}, indent=2).encode()
        if run["status"] == "running" and len(text) < os.fstat(file.fileno()).st_blocks * 512:
            file.write(text + b"\n")
            file.truncate()


def lost_line(directory: Path) -> str:
    """Returns the message for a directory that `find_lost_directory` returned."""
    return (
        f"--output_dir {directory}: the directory was deleted or moved while the run wrote there; start again, with "
        "--resume if it was moved, and leave it in place until the run has ended"
    )


def explain_disk_error(error: BaseException, lost: Path | None) -> str | None:
    """Returns the message for an error that ends the run; None if neither output directory nor disk caused it."""
    if lost is not None and isinstance(error, Exception):
        return lost_line(lost)
    if disk_error_number(error) not in FULL_OR_BROKEN:
        return None
    # An error of a write names no file: it is then the fullest of the disks to which a run writes.
    places = [*this_process().output_locks, Path(tempfile.gettempdir()), Path(".")]
    path = Path(getattr(error, "filename", None) or min(places, key=_free_bytes))
    is_begun = this_process().update is not None
    advice = "start again" + "; with --resume a run continues from its last checkpoint" * is_begun
    return disk_line(error, "a file could not be read or written", path, 0, advice)
