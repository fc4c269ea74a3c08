"""Checkpoints: complete or absent, the same for every mode, resumed bit for bit, and exported as a model.

    python -m common.checkpoint list OUTPUT_DIR
    python -m common.checkpoint export OUTPUT_DIR/checkpoints/update-000100 DIR

A checkpoint is a directory of safetensors and JSON. Nothing in it is ever executed, whoever wrote it: what is read is
checked for its form too, files that the manifest does not name are not looked at, and links are not followed.

    manifest.json           format, update, settings, fingerprints, versions, and size and SHA-256 of every other file
    rank-00000.safetensors  the ranges of weights and optimizer state that rank 0 writes, flattened (see common.shards)
    rank-00000.json         where in which tensor these ranges lie; counts of the optimizer; the rank's random states
    model/                  configuration and tokenizer, for the export

It is written under another name (`.partial`), flushed, and renamed when its manifest is on the disk: a killed save
leaves nothing that could be taken for a checkpoint. The loop waits only for a copy in memory; a thread writes it.
"""

import argparse
import base64
import errno
import hashlib
import json
import math
import os
import random
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import _TYPES as DTYPES  # the format's names of types
from safetensors.torch import save_file

from common import shards
from common.corpus import one_line
from common.launch import running_mode, seed_everything
from common.sharding import offload_devices
from common.stopping import StopRequests

FORMAT = 1
MANIFEST, PARTIAL = "manifest.json", ".partial"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LOCK = ".lock"
# Seconds to wait for it: data workers of a killed run hold it for some, ranks that lost their launcher for an update.
LOCK_TIMEOUT = 60
CHUNK = 16 << 20  # bytes written and hashed at a time
# Files of model/ that an export takes: settings, and the tokenizer's own formats, but never code or pickles.
EXPORTED = (".json", ".jinja", ".txt", ".model", ".spm", ".bpe", ".codes", ".tiktoken")

# What an update depends on besides samples and weights; another value than the checkpoint's is refused. False: also
# with --allow_changed, since the saved state would not fit.
SETTINGS = {
    "global_batch_size": True,
    "num_updates": True,
    "seed": True,
    "drop_last_window": True,
    "optimizer": False,
    "learning_rate": True,
    "weight_decay": True,
    "warmup_updates": True,
    "lr_schedule": True,
    "max_grad_norm": True,
    "mixed_precision": True,
}
CHANGEABLE = ("dataset", *(name for name, can_change in SETTINGS.items() if can_change))


@dataclass
class Position:
    """Where a run stands, and what it counts; the same on all ranks."""

    update: int = 0  # updates done: the number of the next one
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    best_validation_loss: float | None = None
    validation_loss: float | None = None  # where the last update ended with an evaluation
    tracker_runs: dict[str, str] = field(default_factory=dict)  # by which a tracker continues its own run


# --- what a run is ---------------------------------------------------------------------------------------------------


def identify(
    args: argparse.Namespace, accelerator: Accelerator, config: Any, tokenizer: Any, dataset: str, *own_flags: str
) -> dict:
    """What must be the same when a run is continued.

    Args:
        config: the model's configuration. tokenizer: of transformers, or None. dataset: a fingerprint of the samples.
        own_flags: names of the recipe's own flags that an update depends on.
    """
    model = {
        key: value
        for key, value in json.loads(config.to_json_string(use_diff=False)).items()
        if not key.startswith("_") and key not in ("transformers_version", "dtype", "torch_dtype", "architectures")
    }
    words = ""
    if tokenizer is not None:
        words = json.dumps(
            [sorted(tokenizer.get_vocab().items()), str(tokenizer.chat_template), tokenizer.eos_token_id]
        )
    settings = {name: getattr(args, name) for name in (*SETTINGS, *own_flags) if hasattr(args, name)}
    settings["mixed_precision"] = accelerator.mixed_precision
    return {
        "model": model,
        "tokenizer": hashlib.sha256(words.encode()).hexdigest()[:16],
        "dataset": dataset,
        "settings": settings,
    }


def _differences(saved: dict, now: dict, allowed: Iterable[str]) -> Iterator[str]:
    """One line for each thing that is not what the checkpoint was made with."""
    for key in sorted(saved["model"].keys() | now["model"].keys()):
        was, is_now = saved["model"].get(key), now["model"].get(key)
        if was != is_now:
            yield f"another model: its {key} is {is_now}, the checkpoint's is {was}; give the run's own model"
    if saved["tokenizer"] != now["tokenizer"]:
        yield (
            f"another tokenizer: its fingerprint is {now['tokenizer']}, the checkpoint's is {saved['tokenizer']}; give "
            "the tokenizer that the run began with"
        )
    elif saved["dataset"] != now["dataset"] and "dataset" not in allowed:
        yield (
            f"other training data: their fingerprint is {now['dataset']}, the checkpoint's is {saved['dataset']}; give "
            "the same files and --sequence_length, or --allow_changed dataset to go on with these"
        )
    own_flags = dict.fromkeys(now["settings"].keys() - SETTINGS.keys(), False)
    for name, can_change in (SETTINGS | own_flags).items():
        was, is_now = saved["settings"].get(name), now["settings"].get(name)
        if was != is_now and name not in allowed:
            how = f", or --allow_changed {name}" if can_change else ""
            flag = "--mixed_precision of the launch" if name == "mixed_precision" else f"--{name}"
            yield f"{flag} is {is_now}, the checkpoint's is {was}; give {was}{how}"


# --- files -----------------------------------------------------------------------------------------------------------


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, parts: Iterable[Any]) -> dict[str, Any]:
    """Writes and flushes a file; its size and SHA-256, computed on the way: reading it again would take as long."""
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _safetensors(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[Any]:
    """The bytes of a safetensors file, in chunks.

    Not `safetensors.torch.save_file`: it keeps Python's lock while it writes, so that training would wait for the
    thread that writes, and the hash would need a second pass. The library reads what this writes.
    """
    header, offset = {}, 0
    for name, tensor in tensors:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": [tensor.numel()],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in tensors:
        content = memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(content), CHUNK):
            yield content[start : start + CHUNK]


def _disk_line(error: OSError, directory: Path, needed: int) -> str:
    existing = next(path for path in [directory, *directory.absolute().parents] if path.is_dir())
    where = error.filename or directory
    return (
        f"disk: no checkpoint could be written: {error.strerror} ({where}); {needed:,} bytes needed, "
        f"{shutil.disk_usage(existing).free:,} free; make room or mend it, then start again with --resume: the last "
        "complete checkpoint is untouched"
    )


@contextmanager
def complete_or_absent(directory: Path) -> Iterator[Path]:
    """A directory to write into, which takes its name, and the place of what had it, when all in it is on the disk."""
    partial = directory.with_name(directory.name + PARTIAL)
    remove(partial)
    partial.mkdir(parents=True)
    yield partial
    for path in [*partial.rglob("*"), partial]:
        _fsync(path)
    _replace(partial, directory)


_locks: dict[Path, FileLock] = {}  # held until this process ends


def lock_output_dir(directory: Path) -> None:
    """Takes an output directory for this process, until it ends; harmless twice.

    Raises:
        ValueError: another process writes there.
    """
    lock = _locks.setdefault(directory.absolute(), FileLock(directory / LOCK))
    if lock.is_locked:
        return
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("waiting for another process that writes to this output directory ...", flush=True)
        try:
            lock.acquire(timeout=LOCK_TIMEOUT)
        except Timeout:
            raise ValueError(
                f"--output_dir {directory}: another run writes there; end it, or name another directory"
            ) from None


def remove(path: Path) -> None:
    """A directory with all in it, or a file that stands in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replace(partial: Path, directory: Path) -> None:
    """Renames a directory that is complete; what has the name already goes away."""
    if directory.exists():
        old = directory.with_name(directory.name + ".old" + PARTIAL)
        remove(old)
        directory.rename(old)
        partial.rename(directory)
        remove(old)
    else:
        partial.rename(directory)
    _fsync(directory.parent)


def _hash_of(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _own_file(directory: Path, name: str) -> Path:
    """A file of the checkpoint by its name in the manifest; an error of one line for a link, a pipe, another place."""
    root = os.path.realpath(directory)
    path = os.path.join(root, name)
    if os.path.realpath(path) != path or not path.startswith(root + os.sep):
        raise ValueError(f"{name} lies outside, or is a link")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{name} is no file")
    return directory / name


def _read_manifest(directory: Path) -> dict[str, Any]:
    """Raises ValueError, one line without the directory's name, where it is not there, not whole or malformed."""
    try:
        manifest = json.loads(_own_file(directory, MANIFEST).read_text())
    except OSError as error:
        raise ValueError(f"{MANIFEST}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("sha256") != _hash_of(manifest):
        raise ValueError(f"{MANIFEST} is damaged: its own SHA-256 differs")
    try:
        _check_manifest(manifest)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{MANIFEST} is malformed: {one_line(error)}") from error
    return manifest


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _is_number(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Its hash shows that it is whole, not who wrote it: raises an error where a part is not of the form expected."""
    for name, least in {"format": 1, "update": 0, "world_size": 1}.items():
        _require(_is_number(manifest[name], least=least), f"{MANIFEST} is malformed: its {name} is {manifest[name]!r}")
    if manifest["format"] > FORMAT:
        return  # of which we cannot judge
    texts = (manifest["mode"], manifest["architecture"], *manifest["files"])
    _require(all(text.isprintable() for text in texts), f"{MANIFEST} is malformed: a name is not printable")
    for facts in manifest["files"].values():
        _require(_is_number(facts["bytes"]) and isinstance(facts["sha256"], str), f"{MANIFEST} is malformed: its files")
    position, identity = Position(**manifest["position"]), manifest["identity"]
    is_sound = position.update == manifest["update"]
    is_sound &= _is_number(position.skipped_updates) and _is_number(position.skipped_in_a_row)
    for loss in (position.best_validation_loss, position.validation_loss):
        is_sound &= loss is None or isinstance(loss, float)
    is_sound &= all(isinstance(run, str) for run in position.tracker_runs.values())
    is_sound &= all(isinstance(value, bool | int | float) for value in manifest["scaler"].values())
    is_sound &= all(isinstance(identity[name], dict) for name in ("model", "settings"))
    is_sound &= all(isinstance(identity[name], str) for name in ("tokenizer", "dataset"))
    _require(is_sound, f"{MANIFEST} is malformed: its position, scaler or identity")


def _newer(manifest: dict[str, Any]) -> str:
    return f"its format is {manifest['format']}, newer than this code's {FORMAT}; take the code that wrote it, or newer"


def _damage(directory: Path, manifest: dict[str, Any], rank: int = 0, world: int = 1) -> str | None:
    """What is wrong with this rank's share of the files, or None."""
    name = MANIFEST
    try:
        for name, facts in list(manifest["files"].items())[rank::world]:
            path = _own_file(directory, name)
            if path.stat().st_size != facts["bytes"]:
                return f"{name} has {path.stat().st_size} bytes in the place of {facts['bytes']}"
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
                    return f"{name} is damaged: its SHA-256 differs"
        if manifest["format"] <= FORMAT:
            Reader(directory, manifest).check(rank, world)
    except OSError as error:
        return f"{name}: {error.strerror}"
    except ValueError as error:
        return str(error)
    return None


def list_checkpoints(output_dir: Path) -> tuple[list[tuple[Path, dict[str, Any]]], list[str]]:
    """The checkpoints whose manifest is whole, the newest first; and a line for each directory without one."""
    found, problems = [], []
    directory = output_dir / "checkpoints"
    for path in sorted(directory.iterdir(), reverse=True) if directory.is_dir() else []:
        if path.name.endswith(PARTIAL) or not path.is_dir():
            continue
        try:
            found.append((path, _read_manifest(path)))
        except ValueError as error:
            problems.append(f"{path}: {error}")
    return sorted(found, key=lambda one: one[1].get("update", -1), reverse=True), problems


# --- reading ---------------------------------------------------------------------------------------------------------


class Reader:
    """The tensors of a checkpoint, whole or in part, however they were cut when they were saved.

    Raises ValueError, one line, where the files of the ranks do not make whole tensors.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory, self.manifest = directory, manifest
        self.ranks: list[dict[str, Any]] = []
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.numbers: dict[str, Any] = {}
        self._where: dict[str, list[tuple[int, int, str]]] = {}
        self._open: dict[str, Any] = {}
        for number in range(manifest["world_size"]):
            name = f"rank-{number:05}"
            try:
                self._add_rank(name)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"{name}.json is malformed: {one_line(error)}") from error
        for name, (_, shape) in self.tensors.items():
            filled = 0
            for first, last, _ in sorted(one for one in self._where[name] if one[0] < one[1]):
                _require(first == filled, f"{name} has a gap or an overlap at its element {min(first, filled)}")
                filled = last
            _require(filled == math.prod(shape), f"{name} has {filled} of {math.prod(shape)} elements")

    def _add_rank(self, name: str) -> None:
        listed = self.manifest["files"]
        _require({f"{name}.json", f"{name}.safetensors"} <= listed.keys(), "the manifest does not name its files")
        rank = json.loads(_own_file(self.directory, f"{name}.json").read_text())
        for number, value in rank["numbers"].items():
            _require(isinstance(value, int | float), f"{number} is no number")
            is_step = number.startswith("optimizer.step/")
            _require(not is_step or 0 <= value <= self.manifest["update"] + 1, f"{number} is {value}")
        self.ranks.append(rank)
        self.numbers |= rank["numbers"]
        for tensor, one in rank["tensors"].items():
            facts = (DTYPES[one["dtype"]], tuple(one["shape"]))
            sizes = (*facts[1], one["start"], one["elements"])
            _require(all(_is_number(size) for size in sizes), f"{tensor}: its sizes")
            _require(self.tensors.setdefault(tensor, facts) == facts, f"{tensor} is another one than in other ranks")
            where = (one["start"], one["start"] + one["elements"], f"{name}.safetensors")
            self._where.setdefault(tensor, []).append(where)

    def check(self, rank: int = 0, world: int = 1) -> None:
        """Raises ValueError where a file of this rank's share holds something else than its JSON says."""
        for number in range(rank, len(self.ranks), world):
            name, facts = f"rank-{number:05}", self.ranks[number]
            try:
                file = self._file(f"{name}.safetensors")
                slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}
                found = {tensor: (one.get_dtype(), one.get_shape()) for tensor, one in slices.items()}
                told = {tensor: (one["dtype"], [one["elements"]]) for tensor, one in facts["tensors"].items()}
                _require(found == told, f"its tensors are not those of {name}.json")
            except Exception as error:  # SafetensorError, by what the header says
                raise ValueError(f"{name}.safetensors is malformed: {one_line(error)}") from error
            try:
                _check_random_states(facts["random"])
            except Exception as error:  # KeyError, TypeError, RuntimeError, ...
                raise ValueError(f"{name}.json is malformed: its random states ({one_line(error)})") from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(_own_file(self.directory, name), "pt")
        return self._open[name]

    def read(self, name: str, start: int = 0, elements: int | None = None) -> torch.Tensor:
        """A range of a tensor's flattened elements, on the CPU; without a range, the tensor in its shape."""
        dtype, shape = self.tensors[name]
        stop = start + (math.prod(shape) if elements is None else elements)
        result, filled = torch.empty(stop - start, dtype=dtype), 0
        for first, last, file in self._where[name]:
            low, high = max(first, start), min(last, stop)
            if low < high:
                result[low - start : high - start] = self._file(file).get_slice(name)[low - first : high - first]
                filled += high - low
        assert filled == stop - start, f"{self.directory}: {name} has {filled} of the elements {start} to {stop}"
        return result.view(shape) if elements is None else result


# --- random states and scalers ---------------------------------------------------------------------------------------


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())


def random_states(device: torch.device) -> dict[str, Any]:
    """This rank's generators: Python's, numpy's, torch's on the CPU and on the device; as JSON."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type != "cpu":
        states[device.type] = _encode(torch.get_device_module(device).get_rng_state())
    return states


def _check_random_states(states: dict[str, Any]) -> None:
    """Raises an error where `restore_random_states` would: here on generators that nobody uses."""
    version, internal, gauss = states["python"]
    random.Random().setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    _require(0 <= position <= len(keys), "numpy's position")  # numpy itself would read beyond its keys
    np.random.RandomState(0).set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    torch.Generator().set_state(_decode(states["torch"]))


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Sets the generators to what `random_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(states["torch"]))
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_decode(states[device.type]))


def scaler_state(accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
    """The loss scale of fp16 and its counts, Accelerate's or DeepSpeed's; empty for other precisions."""
    if accelerator.scaler is not None:
        return accelerator.scaler.state_dict()
    scaler = getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None)
    return {key: value for key, value in vars(scaler).items() if isinstance(value, int | float)} if scaler else {}


def restore_scaler(state: dict[str, Any], accelerator: Accelerator, optimizer: Any) -> None:
    """Sets the loss scale to what `scaler_state` gave; a run of another precision keeps its own."""
    if accelerator.scaler is not None:
        if state:
            accelerator.scaler.load_state_dict(state)
    elif scaler := getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None):
        vars(scaler).update({key: value for key, value in state.items() if key in vars(scaler)})


# --- saving and resuming ---------------------------------------------------------------------------------------------


class Checkpoints:
    """Saves and resumes the run of one output directory; every method is called by all ranks together.

    Errors of the disk are a ValueError of one line, on all ranks.
    """

    def __init__(self, args: argparse.Namespace, accelerator: Accelerator):
        self.accelerator, self.output_dir = accelerator, Path(args.output_dir)
        self.directory = self.output_dir / "checkpoints"
        self.save_every, self.keep_last, self.keep_best = args.save_every, args.keep_last, args.keep_best
        self.wants_resume, self.allow_changed = args.resume, args.allow_changed
        self.seed = args.seed
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.group = None  # the ranks agree over the network between the hosts: the GPU is never waited for
        if self.world > 1 and torch.distributed.get_backend() != "gloo":
            self.group = torch.distributed.new_group(backend="gloo")
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future | None = None  # this rank's files
        self.committing: Future | None = None  # rank 0: manifest, rename, removal of older ones
        self.is_saving = False  # from the start of a save until all ranks know that all files are written
        self.last_saved = -1
        self.needed = 0  # bytes of the newest save, over all ranks
        self.stall_seconds: list[float] = []
        self.copies: dict[str, torch.Tensor] = {}
        self.cannot = _cannot_save(accelerator)
        if self.cannot and (self.wants_resume or 0 < self.save_every <= args.num_updates):
            raise ValueError(self.cannot)

    # The ranks agree on each outcome, so that none goes on alone where another failed.

    def _sum(self, *values: float) -> list[float]:
        if self.world == 1:
            return [float(value) for value in values]
        sums = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(sums, group=self.group)
        return sums.tolist()

    def _together(self, action: Callable[[], Any], only_main: bool = False) -> None:
        """Runs it on all ranks, or on the main one; raises ValueError on all if it failed on any."""
        problem = None
        try:
            if self.rank == 0 or not only_main:
                action()
        except OSError as error:
            problem = _disk_line(error, self.directory, self.needed)
        except ValueError as error:
            problem = str(error)
        self._raise_first(problem)

    def _raise_first(self, problem: str | None) -> None:
        if self._sum(problem is not None)[0] == 0:
            return
        problems = [problem]
        if self.world > 1:
            problems = [None] * self.world
            torch.distributed.all_gather_object(problems, problem, group=self.group)
        raise ValueError(next(one for one in problems if one is not None))

    # --- resuming

    def find(self, identity: dict[str, Any]) -> Reader | None:
        """The newest checkpoint that its manifest confirms; None without --resume. A damaged one is told and passed.

        Raises:
            ValueError: nothing to resume, or a line for each thing that is not what the run began with.
        """
        self.identity = identity
        if not self.wants_resume:
            return None
        found, problems = list_checkpoints(self.output_dir)
        for path, manifest in found:
            if manifest["format"] > FORMAT:
                raise ValueError(f"--resume {path}: {_newer(manifest)}")
            problem = _damage(path, manifest, self.rank, self.world)
            damaged = self._sum(problem is not None)[0] > 0
            if damaged:
                if problem:
                    print(f"{path}: {problem}", file=sys.stderr, flush=True)
                continue
            if self.rank == 0:
                for line in problems:
                    print(line, file=sys.stderr, flush=True)
            if differences := list(_differences(manifest["identity"], identity, self.allow_changed)):
                raise ValueError("\n".join(f"--resume {path}: {line}" for line in differences))
            self.accelerator.print(f"resuming from {path}, after update {manifest['update']}", flush=True)
            return Reader(path, manifest)
        reason = f"none of its {len(found) + len(problems)} is sound" if found or problems else "there is none"
        raise ValueError(
            f"--resume: {self.directory} has no complete checkpoint ({reason}); name the --output_dir of the run, or "
            "start anew without --resume"
        )

    def resume(self, reader: Reader | None, model: torch.nn.Module, optimizer: Any) -> None:
        """Puts weights, optimizer, scaler and random states where the checkpoint has them; `reader` is `find`'s.

        Call it last before the loop: what draws random numbers after it would shift the stream.
        """
        if reader is None:
            return
        manifest, device = reader.manifest, self.accelerator.device
        load_state(reader, self.accelerator, model, optimizer)
        restore_scaler(manifest["scaler"], self.accelerator, optimizer)
        if manifest["world_size"] == self.world:
            restore_random_states(reader.ranks[self.rank]["random"], device)
        else:  # as many new streams as there are ranks now; dropout is another one, all else is the same
            key = hashlib.blake2b(f"{self.seed}/{manifest['update']}".encode(), digest_size=4).digest()
            seed_everything(int.from_bytes(key, "little") >> 2, self.accelerator)
        self.last_saved = manifest["update"]

    # --- saving

    def start(self, *pretrained: Any, model: torch.nn.Module, **facts: Any) -> None:
        """Takes the output directory for this run, and clears what killed saves left there.

        Args:
            pretrained: what the export needs besides the weights, each with a `save_pretrained`.
            facts: go into every manifest.

        Raises:
            ValueError: another process writes there.
        """
        self.facts = facts | {"architecture": type(self.accelerator.unwrap_model(model)).__name__}
        generation = getattr(self.accelerator.unwrap_model(model), "generation_config", None)
        pretrained += () if generation is None else (generation,)
        self.model_files = _pretrained_files(*pretrained) if self.rank == 0 else {}

        def take() -> None:
            lock_output_dir(self.output_dir)
            for stale in self.directory.glob(f"*{PARTIAL}"):
                remove(stale)

        self._together(take, only_main=True)

    def update_done(
        self, position: Position, model: torch.nn.Module, optimizer: Any, stop: StopRequests | None = None
    ) -> bool:
        """Ends an update: a checkpoint where one is due. True if any rank was asked to stop; it is complete then."""
        problem = self._failure()
        asked, failed, written = self._sum(bool(stop and stop.asked), problem is not None, self._is_written())
        if failed:
            self._raise_first(problem)
        if self.is_saving and written == self.world:
            self._commit_soon()
        if asked or (self.save_every and position.update % self.save_every == 0):
            self.save(position, model, optimizer)
        if asked:
            self.finish()
        return bool(asked)

    def save(self, position: Position, model: torch.nn.Module, optimizer: Any) -> None:
        """Copies the state, and starts to write it; call it between two updates only.

        Raises:
            ValueError: the disk has no room for it, or refused the one before.
        """
        if position.update == self.last_saved:
            return
        if self.cannot:
            raise ValueError(self.cannot)
        started = time.perf_counter()
        self.finish()  # one at a time
        owned = [piece for piece in shards.pieces(self.accelerator, model, optimizer) if piece.is_owner]
        size = shards.num_bytes(owned)
        (self.needed,) = (int(total) for total in self._sum(size + 65536 * (1 + len(self.model_files))))
        partial = self.directory / f"update-{position.update:06}{PARTIAL}"

        def make_room() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.needed > shutil.disk_usage(self.directory).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))
            remove(partial)
            partial.mkdir()

        self._together(make_room, only_main=True)
        rank_facts = {
            "numbers": shards.numbers(self.accelerator, model, optimizer),
            "random": random_states(self.accelerator.device),
            "tensors": {
                piece.name: {
                    "dtype": DTYPE_NAMES[piece.tensor.dtype],
                    "shape": piece.shape,
                    "start": piece.start,
                    "elements": piece.tensor.numel(),
                }
                for piece in owned
            },
        }
        self.manifest = {
            "format": FORMAT,
            "update": position.update,
            "samples": position.update * self.identity["settings"]["global_batch_size"],
            "position": asdict(position),
            "mode": running_mode(self.accelerator),
            "world_size": self.world,
            "scaler": scaler_state(self.accelerator, optimizer),
            "identity": self.identity,
            **self.facts,
        }
        # The copy needs as much memory on the host as the state of all ranks of this machine.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        has_memory = bool(self.copies) or psutil.virtual_memory().available > 1.25 * size * local
        tensors = [(piece.name, self._copy(piece) if has_memory else piece.tensor) for piece in owned]
        self.writing = self.pool.submit(self._write_rank, partial, tensors, rank_facts)
        self.is_saving, self.last_saved = True, position.update
        if not has_memory:
            self._together(self.writing.result)
        self.stall_seconds.append(time.perf_counter() - started)

    def _copy(self, piece: shards.Piece) -> torch.Tensor:
        """On the host, in the memory of the save before: fresh pages take several times as long as the copy."""
        copy = self.copies.get(piece.name)
        if copy is None or (copy.shape, copy.dtype) != (piece.tensor.shape, piece.tensor.dtype):
            is_cuda = piece.tensor.device.type == "cuda"
            copy = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=is_cuda)
            self.copies[piece.name] = copy
        return copy.copy_(piece.tensor)

    def _write_rank(self, partial: Path, tensors: list[tuple[str, torch.Tensor]], facts: dict[str, Any]) -> None:
        name = f"rank-{self.rank:05}"
        files = {f"{name}.safetensors": _write(partial / f"{name}.safetensors", _safetensors(tensors))}
        if self.rank == 0:
            (partial / "model").mkdir()
            for file, content in self.model_files.items():
                files[f"model/{file}"] = _write(partial / "model" / file, [content])
            _fsync(partial / "model")
        _write(partial / f"{name}.json", [json.dumps(facts | {"files": files}).encode()])

    def _is_written(self) -> bool:
        return self.is_saving and self.writing is not None and self.writing.done()

    def _failure(self) -> str | None:
        """The line that tells what the thread of this rank met, or None."""
        for future in (self.writing, self.committing):
            if future is not None and future.done() and (error := future.exception()) is not None:
                if not isinstance(error, OSError):
                    raise error
                return _disk_line(error, self.directory, self.needed)
        return None

    def _commit_soon(self) -> None:
        """All ranks have written: the main one makes it a checkpoint."""
        self.is_saving, self.writing = False, None
        if self.rank == 0:
            self.committing = self.pool.submit(self._commit, self.manifest)

    def _commit(self, manifest: dict[str, Any]) -> None:
        final = self.directory / f"update-{manifest['update']:06}"
        partial = final.with_name(final.name + PARTIAL)
        files = {}
        for rank in range(self.world):
            name = f"rank-{rank:05}.json"
            content = (partial / name).read_bytes()
            files |= json.loads(content)["files"]
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = manifest | {"files": files}
        manifest = json.loads(json.dumps(manifest))  # as it will be read: tuples are lists, keys are text
        manifest["sha256"] = _hash_of(manifest)
        _write(partial / MANIFEST, [json.dumps(manifest, indent=1).encode()])
        _fsync(partial)
        if (metrics := self.output_dir / "metrics.jsonl").is_file():
            _fsync(metrics)  # the lines up to this update are there after a power cut too
        _replace(partial, final)
        self._remove_older()

    def _remove_older(self) -> None:
        found, _ = list_checkpoints(self.output_dir)
        kept = {path for path, _ in found[: self.keep_last]}
        if self.keep_best:
            losses = {path: manifest["position"]["validation_loss"] for path, manifest in found}
            measured = [path for path, loss in losses.items() if loss is not None]
            kept |= {min(measured, key=lambda path: losses[path])} if measured else set()
        for path, _ in found:
            if path not in kept:
                going = path.with_name(path.name + ".old" + PARTIAL)
                remove(going)
                path.rename(going)  # half removed, it must not look like a damaged checkpoint
                remove(going)

    def finish(self) -> None:
        """Waits until the save that was started is a checkpoint, on all ranks."""
        if self.is_saving:
            self._together(self.writing.result)
            self._commit_soon()
        if self.last_saved >= 0:
            self._together(lambda: self.committing and self.committing.result(), only_main=True)
            self.committing = None


@torch.no_grad()
def load_state(reader: Reader, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:
    """Weights, buffers and optimizer state from a checkpoint of any mode and world size; each rank reads its part."""
    shards.make_state(accelerator, model, optimizer, reader.tensors, reader.numbers)
    for piece in shards.pieces(accelerator, model, optimizer):
        if piece.name not in reader.tensors or reader.tensors[piece.name][1] != tuple(piece.shape):
            saved = reader.tensors.get(piece.name, (None, "not there"))[1]
            raise ValueError(f"--resume {reader.directory}: {piece.name} is {tuple(piece.shape)}, and {saved} in it")
        values = reader.read(piece.name, piece.start, piece.tensor.numel())
        piece.tensor.copy_(values.view(piece.tensor.shape))
    shards.refresh(optimizer)


def _cannot_save(accelerator: Accelerator) -> str | None:
    """Why this run's state cannot be saved, or None."""
    plugin = accelerator.deepspeed_plugin
    zero = plugin.deepspeed_config.get("zero_optimization", {}) if plugin is not None else {}
    if offload_devices(zero)["offload_optimizer"] == "nvme":
        return (
            "--save_every, --resume: checkpoints do not hold an optimizer state that lies in files (nvme_path); give "
            "--save_every 0, or take zero3_offload_cpu.yaml"
        )
    return None


def _pretrained_files(*pretrained: Any) -> dict[str, bytes]:
    """What `save_pretrained` of each writes, by name."""
    with tempfile.TemporaryDirectory() as directory:
        for one in pretrained:
            one.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}


# --- export ----------------------------------------------------------------------------------------------------------


def export(directory: Path, target: Path) -> None:
    """Writes the weights of a checkpoint as a model that `from_pretrained` loads, with its tokenizer; or nothing.

    Raises:
        ValueError: no sound checkpoint there, or something else where the model should go; one line.
    """
    import transformers

    try:
        manifest = _read_manifest(directory)
    except ValueError as error:
        raise ValueError(f"{directory} is no checkpoint: {error}; name one of OUTPUT_DIR/checkpoints") from error
    if manifest["format"] > FORMAT:
        raise ValueError(f"{directory}: {_newer(manifest)}")
    if damage := _damage(directory, manifest):
        raise ValueError(f"{directory}: {damage}; export another checkpoint")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there already; name another directory")
    reader = Reader(directory, manifest)
    model_class = getattr(transformers, manifest["architecture"], None)
    weights = {
        name.partition("/")[2]: reader.read(name) for name in reader.tensors if name.startswith(("weight/", "buffer/"))
    }
    # Not what merely lies there: only what the manifest names, and of that no code.
    files = [name.removeprefix("model/") for name in manifest["files"] if name.startswith("model/")]
    files = [name for name in files if "/" not in name and name.endswith(EXPORTED) and ".index." not in name]
    if model_class is None:  # a recipe's own class: its configuration, and the weights under its own names

        def write(partial: Path) -> None:
            shutil.copyfile(_own_file(directory, "model/config.json"), partial / "config.json")
            save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})

    else:
        try:
            write = _whole_model(directory, weights, model_class).save_pretrained
        except Exception as error:  # of transformers and torch, by what does not fit
            raise ValueError(
                f"{directory}: its weights and model/config.json do not make a {manifest['architecture']} "
                f"({one_line(error)}); export another checkpoint"
            ) from error
    try:
        with complete_or_absent(target) as partial:
            write(partial)
            for name in files:
                if name != "config.json":
                    shutil.copyfile(_own_file(directory, f"model/{name}"), partial / name)
    except OSError as error:
        raise ValueError(_disk_line(error, target.parent, sum(w.nbytes for w in weights.values()))) from error


def _whole_model(directory: Path, weights: dict[str, torch.Tensor], model_class: Any) -> Any:
    """A checkpoint's weights in the model of transformers that they belong to; no code that the checkpoint brings."""
    import transformers

    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    _require(is_model, "that is no model of transformers")
    dtype = next(value.dtype for value in weights.values() if value.is_floating_point())
    config = model_class.config_class.from_pretrained(directory / "model", local_files_only=True)
    with torch.device("meta"):  # no memory, and no time, for weights that are replaced
        model = model_class._from_config(config, dtype=dtype)
    _, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = sorted(name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta)
    _require(not unexpected and not missing, f"unexpected: {unexpected[:3]}, missing: {missing[:3]}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m common.checkpoint", description="Looks at and exports checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("list", help="the checkpoints of a run, and whether they are sound")
    one.add_argument("output_dir", type=Path)
    one = commands.add_parser("export", help="one checkpoint as a model that from_pretrained loads")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("target", type=Path)
    args = parser.parse_args()
    try:
        if args.command == "export":
            export(args.checkpoint, args.target)
            print(f"{args.target} (from_pretrained loads it)")
            return
        found, problems = list_checkpoints(args.output_dir)
        for path, manifest in found:
            size = sum(facts["bytes"] for facts in manifest["files"].values())
            state = _damage(path, manifest) or "sound"
            print(f"{path}: {manifest['mode']}, {manifest['world_size']} processes, {size:,} bytes, {state}")
        for line in problems or ([] if found else [f"{args.output_dir}: no checkpoint"]):
            print(line)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
