"""Reads checkpoints in full or in part, and detects corrupted or forged files."""

import hashlib
import json
import math
import os
import random
import stat
from base64 import b64decode
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import safe_open

from common.checkpoint.format import DTYPE_NAMES, DTYPES, FORMAT, MANIFEST, hash_of
from common.checkpoint.training_state import TrainingState
from common.errors import UserError, one_line
from common.files import PARTIAL, remove
from common.reading import as_user_error
from common.training.optimizers import OPTIMIZERS

# Hash functions of the files; format 1 uses SHA-256.
DIGESTS: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
MASTER_DTYPES = (torch.float32, torch.float64)  # dtypes of trained weights, independent of the matmul precision
# Class names of the optimizers that keep the same state for each weight.
UNIFORM = [name for info in OPTIMIZERS.values() for name in info.class_names]


def own_file(directory: Path, name: str) -> Path:
    """Returns the path of a file in the manifest. Raises UserError for links, pipes, and paths outside `directory`."""
    root = os.path.realpath(directory)
    path = os.path.join(root, name)
    if os.path.realpath(path) != path or not path.startswith(root + os.sep):
        raise UserError(f"{name} lies outside, or is a link")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UserError(f"{name} is not a file")
    return directory / name


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns the manifest. Raises UserError if it is missing or malformed; callers add the directory."""
    try:
        manifest = json.loads(own_file(directory, MANIFEST).read_text())
    except OSError as error:
        raise UserError(f"{MANIFEST}: {error.strerror}") from error
    except (UserError, ValueError, RecursionError) as error:
        raise UserError(f"{MANIFEST} is damaged: {one_line(error)}") from error
    if not isinstance(manifest, dict) or manifest.get("sha256") != hash_of(manifest):
        raise UserError(f"{MANIFEST} is damaged: its own SHA-256 differs")
    try:
        _check_manifest(manifest)
    except Exception as error:  # the type depends on the forged value
        raise as_user_error(error, MANIFEST, "use an earlier checkpoint") from error
    return manifest


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise UserError(problem)


def is_number(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _is_total(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers)


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raises an error if a part is malformed, because the hash shows only that the manifest is complete."""
    for name, least in {"format": 1, "update": 0, "world_size": 1}.items():
        require(is_number(manifest[name], least=least), f"{MANIFEST} is malformed: its {name} is {manifest[name]!r}")
    if manifest["format"] > FORMAT:
        return  # this version does not know a newer format
    texts = (manifest["mode"], manifest["architecture"], *manifest["files"])
    require(all(text.isprintable() for text in texts), f"{MANIFEST} is malformed: a name is not printable")
    for entry in manifest["files"].values():
        digests = [entry[name] for name in DIGESTS if name in entry]
        is_valid = is_number(entry["bytes"]) and len(digests) == 1 and isinstance(digests[0], str)
        require(is_valid, f"{MANIFEST} is malformed: its files")
    state, identity = TrainingState.of(manifest), manifest["identity"]
    is_valid = state.update == manifest["update"] and is_number(state.samples)
    is_valid &= is_number(state.validation_since) and isinstance(identity.get("validation"), str | None)
    counts = state.skipped_updates, state.skipped_in_a_row, state.evaluations_since_best
    is_valid &= all(map(is_number, counts))
    is_valid &= all(isinstance(manifest.get(name, {}), dict) for name in ("versions", "scaler", "training"))
    for loss in (state.best_validation_loss, state.validation_loss):
        is_valid &= loss is None or isinstance(loss, float)
    is_valid &= all(isinstance(run, str) for run in state.tracker_runs.values())
    is_valid &= all(isinstance(value, bool | int | float) for value in manifest["scaler"].values())
    is_valid &= all(_is_total(value) for value in state.training.values())
    is_valid &= all(isinstance(name, str) for name in manifest.get("untrained", []))
    is_valid &= all(isinstance(identity[name], dict) for name in ("model", "settings"))
    is_valid &= all(isinstance(identity[name], str) for name in ("tokenizer", "dataset"))
    require(is_valid, f"{MANIFEST} is malformed: its position, scaler or identity")


def newer_line(manifest: dict[str, Any]) -> str:
    return f"its format is {manifest['format']}, newer than this code's {FORMAT}; use a newer version of this code"


def find_damage(directory: Path, manifest: dict[str, Any], rank: int = 0, world: int = 1) -> str | None:
    """Returns the first problem in this rank's share of the files, or None."""
    name = MANIFEST
    try:
        for name, entry in list(manifest["files"].items())[rank::world]:
            path = own_file(directory, name)
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            kind = next(kind for kind in DIGESTS if kind in entry)
            with open(path, "rb") as file:
                if hashlib.file_digest(file, DIGESTS[kind]).hexdigest() != entry[kind]:
                    return f"{name} is damaged: its {kind} differs"
        if manifest["format"] <= FORMAT:
            Reader(directory, manifest).check(rank, world)
    except OSError as error:
        return f"{name}: {error.strerror}"
    except UserError as error:
        return str(error)
    return None


def list_checkpoints(output_dir: Path) -> tuple[list[tuple[Path, dict[str, Any]]], list[str]]:
    """Returns the checkpoints with a valid manifest, newest first, and a line per directory without such a manifest."""
    found, problems = [], []
    directory = output_dir / "checkpoints"
    for path in sorted(directory.iterdir(), reverse=True) if directory.is_dir() else []:
        if path.name.endswith(PARTIAL) or not path.is_dir():
            continue
        try:
            found.append((path, read_manifest(path)))
        except UserError as error:
            problems.append(f"{path}: {error}")
    return sorted(found, key=lambda item: item[1]["update"], reverse=True), problems


def find_best(found: Iterable[tuple[Path, dict[str, Any]]]) -> Path | None:
    """Returns the checkpoint with the lowest validation loss; None if no checkpoint has a finite loss.

    Losses on a different held-out set than that of the newest checkpoint are ignored.
    """
    positions = {path: manifest["position"] for path, manifest in found}
    since = max((position.get("validation_since", 0) for position in positions.values()), default=0)
    losses = {path: at["validation_loss"] for path, at in positions.items() if at["update"] > since or not since}
    measured = [path for path, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return min(measured, key=losses.__getitem__, default=None)


def remove_older(output_dir: Path, corrupted: set[Path], keep_last: int, keep_best: bool) -> None:
    """Removes all checkpoints except the newest `keep_last`, and the best with `keep_best`; `corrupted` never count.

    Directories with other names remain.
    """
    found, _ = list_checkpoints(output_dir)
    found = [(path, manifest) for path, manifest in found if path.name == f"update-{manifest['update']:06}"]
    valid = [(path, manifest) for path, manifest in found if path not in corrupted]
    kept = {path for path, _ in valid[:keep_last]} | {find_best(valid) if keep_best else None}
    for path, _ in found:
        if path not in kept:
            removed = path.with_name(path.name + ".old" + PARTIAL)
            remove(removed)
            path.rename(removed)  # an interrupted removal must not look like a corrupted checkpoint
            remove(removed)


WHOLE = (0, -1)  # columns of a range over full rows


class _Range(NamedTuple):
    """A range of a tensor's elements, or of the elements of some of its columns, in a file."""

    first: int
    last: int  # exclusive
    file: str
    columns: tuple[int, int]

    def are_rows(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the columns are valid for the shape, and the range consists of full rows of these columns."""
        is_pair = len(self.columns) == 2 and all(is_number(column) for column in self.columns)
        if len(shape) != 2 or not is_pair or not self.columns[0] < self.columns[1] <= shape[1]:
            return False
        width = self.columns[1] - self.columns[0]
        return self.first % width == 0 and self.last % width == 0


def _fill(ranges: Iterable[tuple[int, int]], name: str, unit: str) -> int:
    """Returns the end of contiguous ranges that begin at 0; raises UserError if there is a gap or an overlap."""
    filled = 0
    for first, last in sorted(ranges):
        require(first == filled, f"{name} has a gap or an overlap at its {unit} {min(first, filled)}")
        filled = last
    return filled


def _check_cover(name: str, shape: tuple[int, ...], parts: list[_Range]) -> None:
    """Raises UserError unless the ranges cover a tensor of this shape, with each element once."""
    sizes = {part.columns: math.prod(shape[:-1]) * (part.columns[1] - part.columns[0]) for part in parts}
    if sizes.keys() <= {WHOLE}:
        sizes = {WHOLE: math.prod(shape)}
    else:
        filled = _fill(sizes, name, "column")
        require(filled == shape[-1], f"{name} has {filled} of {shape[-1]} columns")
    for columns, elements in sizes.items():
        filled = _fill(((part.first, part.last) for part in parts if part.columns == columns), name, "element")
        require(filled == elements, f"{name} has {filled} of {elements} elements")


class Reader:
    """Reads the tensors of a checkpoint, in full or in part, for any sharding with which it was saved.

    Raises UserError: the files of the ranks do not form complete tensors.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory, self.manifest = directory, manifest
        self.ranks: list[dict[str, Any]] = []
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.scalar_state: dict[str, Any] = {}
        self.scalar_dtypes: dict[str, str] = {}
        self._parts: dict[str, list[_Range]] = {}
        self._open: dict[str, Any] = {}
        for number in range(manifest["world_size"]):
            name = f"rank-{number:05}"
            try:
                self._add_rank(name)
            except Exception as error:  # the type depends on the forged value
                raise UserError(f"{name}.json is malformed: {one_line(error)}") from error
        for name, (_, shape) in self.tensors.items():
            _check_cover(name, shape, self._parts[name])
        self._require_training_state()

    def _require_training_state(self) -> None:
        """Raises UserError if a trained weight lacks optimizer state, or is not float32 or float64."""
        kept: dict[str, set[str]] = {}
        for name in (*self.tensors, *self.scalar_state):
            kind, _, weight = name.partition("/")
            if kind.startswith("optimizer."):
                kept.setdefault(weight, set()).add(kind)
        trained = {name.removeprefix("weight/") for name in self.tensors if name.startswith("weight/")}
        if "untrained" in self.manifest:
            trained -= set(self.manifest["untrained"])
        elif self.manifest["mode"] != "FSDP":  # older checkpoints lack this list; only FSDP could lose state
            trained &= kept.keys()
        all_kinds = set().union(*kept.values())
        optimizer, state = self.manifest["identity"]["settings"].get("optimizer"), TrainingState.of(self.manifest)
        # A user's own optimizer may keep different states for some weights.
        info = OPTIMIZERS.get(str(optimizer))
        is_uniform = info is not None and self.manifest.get("optimizer", "AdamW") in UNIFORM
        # Older versions saved no state before the first update, or if a wrapping optimizer hid the state.
        if not kept and "training" not in self.manifest:
            is_lost = state.update > state.skipped_updates and info is not None and info.state_bytes > 0
            trained = trained if is_lost else set()
        for name in sorted(trained):
            dtype = self.tensors[f"weight/{name}"][0]
            require(dtype in MASTER_DTYPES, f"weight/{name} is {DTYPE_NAMES[dtype]}, but a trained weight must be F32")
            missing = sorted(all_kinds - kept.get(name, set())) if is_uniform or name not in kept else []
            require(not missing, f"weight/{name} lacks its {', '.join(missing)}")
            require(name in kept, f"weight/{name} lacks its optimizer state")

    def _add_rank(self, name: str) -> None:
        listed = self.manifest["files"]
        require({f"{name}.json", f"{name}.safetensors"} <= listed.keys(), "the manifest does not name its files")
        rank = json.loads(own_file(self.directory, f"{name}.json").read_text())
        for number, value in rank["numbers"].items():
            require(value is None or isinstance(value, int | float), f"{number} is not a number")
            is_step = number.startswith("optimizer.step/")
            require(not is_step or value is None or 0 <= value <= self.manifest["update"] + 1, f"{number} is {value}")
        self.ranks.append(rank)
        self.scalar_state |= rank["numbers"]
        require(set(rank.get("number_dtypes", {}).values()) <= DTYPES.keys(), "a dtype of its numbers")
        self.scalar_dtypes |= rank.get("number_dtypes", {})
        for tensor, entry in rank["tensors"].items():
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            sizes = (*shape, entry["start"], entry["elements"])
            require(all(is_number(size) for size in sizes), f"{tensor}: its sizes")
            is_same = self.tensors.setdefault(tensor, (dtype, shape)) == (dtype, shape)
            require(is_same, f"{tensor} differs between ranks")
            columns = tuple(entry.get("columns", WHOLE))
            part = _Range(entry["start"], entry["start"] + entry["elements"], f"{name}.safetensors", columns)
            require(columns == WHOLE or part.are_rows(shape), f"{tensor}: its columns")
            parts = self._parts.setdefault(tensor, [])
            if entry["elements"]:
                parts.append(part)

    def check(self, rank: int = 0, world: int = 1) -> None:
        """Raises UserError if the contents of a file of this rank's share differ from its JSON."""
        for number in range(rank, len(self.ranks), world):
            name, json_file = f"rank-{number:05}", self.ranks[number]
            try:
                file = self._file(f"{name}.safetensors")
                slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}
                tensors = {tensor: (part.get_dtype(), part.get_shape()) for tensor, part in slices.items()}
                entries = json_file["tensors"].items()
                listed = {tensor: (entry["dtype"], [entry["elements"]]) for tensor, entry in entries}
                require(tensors == listed, f"its tensors are not those of {name}.json")
            except Exception as error:  # SafetensorError and others, depending on the header
                raise UserError(f"{name}.safetensors is malformed: {one_line(error)}") from error
            try:
                _set_random_states(json_file["random"], random.Random(), np.random.RandomState(0), torch.Generator())
            except Exception as error:  # KeyError, TypeError, RuntimeError, ...
                raise UserError(f"{name}.json is malformed: its random states ({one_line(error)})") from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(own_file(self.directory, name), "pt")
        return self._open[name]

    def read(
        self, name: str, start: int = 0, elements: int | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Returns a range of a tensor's flattened elements, or of elements of `columns`; by default the full tensor."""
        dtype, shape = self.tensors[name]
        if elements is None:
            return self.read(name, 0, math.prod(shape)).view(shape)
        if columns is None and all(part.columns == WHOLE for part in self._parts[name]):
            return self._read_range(name, start, start + elements)
        width = shape[-1]
        first, last = columns or (0, width)
        # Rows that contain the range.
        top, bottom = start // (last - first), -(-(start + elements) // (last - first))
        block = torch.empty(bottom - top, width, dtype=dtype)
        for part in self._parts[name]:
            if part.columns == WHOLE:
                continue
            left, right = part.columns
            low, high = max(part.first // (right - left), top), min(part.last // (right - left), bottom)
            if low < high:
                values = self._slice(name, part, low * (right - left), high * (right - left))
                block[low - top : high - top, left:right] = values.view(high - low, right - left)
        if any(part.columns == WHOLE for part in self._parts[name]):
            block.view(-1).copy_(self._read_range(name, top * width, bottom * width))
        skipped = start - top * (last - first)
        return block[:, first:last].reshape(-1)[skipped : skipped + elements]

    def _read_range(self, name: str, start: int, stop: int) -> torch.Tensor:
        result, filled = torch.empty(stop - start, dtype=self.tensors[name][0]), 0
        for part in self._parts[name]:
            low, high = max(part.first, start), min(part.last, stop)
            if low < high:
                result[low - start : high - start] = self._slice(name, part, low, high)
                filled += high - low
        assert filled == stop - start, f"{self.directory}: {name} has {filled} of the elements {start} to {stop}"
        return result

    def _slice(self, name: str, part: _Range, start: int, stop: int) -> torch.Tensor:
        return self._file(part.file).get_slice(name)[start - part.first : stop - part.first]


def _set_random_states(states: dict[str, Any], python: Any, numpy: Any, torch_cpu: torch.Generator) -> None:
    version, internal, gauss = states["python"]
    python.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    if not 0 <= position <= len(keys):
        raise ValueError("numpy's position")  # numpy would read beyond its keys
    numpy.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    torch_cpu.set_state(_decode(states["torch"]))


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(b64decode(text), np.uint8).copy())


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restores the RNG states of a rank, which `save.random_states` returned."""
    _set_random_states(states, random, np.random, torch.default_generator)
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_decode(states[device.type]))
