"""Restores a run from its newest valid checkpoint, after checking that the checkpoint belongs to the run."""

import argparse
import hashlib
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from common.checkpoint.agreement import Agreement
from common.checkpoint.block_states import local_shape
from common.checkpoint.differences import differences
from common.checkpoint.format import DTYPES, FORMAT, MANIFEST
from common.checkpoint.layouts import Layout
from common.checkpoint.read import (
    Reader,
    find_best,
    find_damage,
    is_number,
    list_checkpoints,
    newer_line,
    read_manifest,
    restore_random_states,
)
from common.checkpoint.training_state import TrainingState
from common.errors import UserError, raise_errors
from common.files import lock_output_dir
from common.parallel.connect import seed_everything
from common.parallel.liveness import wait_for_all
from common.parallel.main_decisions import decided_by_main
from common.parallel.rank_store import is_soon
from common.process import this_process
from common.versions import versions


def find_own(checkpoints: Any, identity: dict[str, Any], size_flags: Iterable[str]) -> Reader:
    """Returns the newest valid checkpoint of the output directory, after checking that it belongs to the run.

    The output directory is locked first, because a stopping run may still be writing its last checkpoint.

    Raises UserError: see `Checkpoints.find`.
    """
    args, ranks, accelerator = checkpoints.args, checkpoints.ranks, checkpoints.accelerator
    if not args.dry_run:
        ranks.together(lambda: lock_output_dir(ranks.output_dir), only_main=True)
    decided_by_main("remote", lambda: this_process().remote and this_process().remote.fetch())
    reader = find_valid(ranks, checkpoints.writer.corrupted)
    if line := keep_warmup(args, reader.manifest, identity):
        accelerator.print(line)
    check_is_own(reader, args, identity, size_flags)
    accelerator.print(f"resuming from {reader.directory}, after update {reader.manifest['update']}", flush=True)
    saved, now = reader.manifest.get("versions", {}), versions()
    if changed := [name for name in saved if name in now and now[name] != saved[name]]:
        packages = ", ".join(f"{name} {now[name]} instead of {saved[name]}" for name in changed)
        accelerator.print(f"versions differ from the checkpoint's: {packages}; so updates may differ too", flush=True)
    return reader


def list_on_main(ranks: Agreement) -> tuple[list[tuple[Path, dict[str, Any]]], list[str]]:
    """Returns rank 0's `list_checkpoints` on all ranks, so that all resume from the same checkpoint."""

    listed = list_checkpoints(ranks.output_dir) if ranks.rank == 0 else None
    wait_for_all()  # because the broadcast has a time limit
    return ranks.share(listed)  # not through the store, because manifests are megabytes with thousands of ranks


def _require_seen(path: Path, manifest: dict[str, Any], ranks: Agreement) -> None:
    """Raises UserError on all ranks if a rank does not see the same manifest and files of a checkpoint as rank 0.

    Each rank looks for its share of the files, because with all files the requests would grow with ranks squared.
    """
    names = [MANIFEST, *manifest["files"]]
    absent = decided_by_main(f"files of {path}", lambda: [name for name in names if not os.path.exists(path / name)])
    expected = {*names[ranks.rank :: ranks.world]} - {*absent}

    def is_seen() -> bool:
        with suppress(UserError):
            is_same = read_manifest(path)["sha256"] == manifest["sha256"]
            return is_same and all(os.path.exists(path / name) for name in expected)
        return False

    line = (
        f"--resume {path}: chosen by rank 0, and rank {ranks.rank} on host {socket.gethostname()} does not see it, or "
        "sees a different one; make all hosts share the directory, and start again"
    )
    ranks.raise_first(None if is_soon(is_seen) else line)


def is_valid(path: Path, manifest: dict[str, Any], ranks: Agreement) -> bool:
    """Returns whether all files match the manifest. Each rank checks its share, and prints any problem.

    Raises UserError: a rank does not see the checkpoint as rank 0 does.
    """
    _require_seen(path, manifest, ranks)
    problem = find_damage(path, manifest, ranks.rank, ranks.world)
    if problem:
        print(f"{path}: {problem}", file=sys.stderr, flush=True)
    return ranks.sum(problem is not None)[0] == 0


def find_valid(ranks: Agreement, corrupted: set[Path]) -> Reader:
    """Returns the newest valid checkpoint. Corrupted checkpoints are printed, added to `corrupted` and skipped.

    Raises UserError: there is no valid checkpoint, or its format is newer.
    """
    found, problems = list_on_main(ranks)
    for path, manifest in found:
        if manifest["format"] > FORMAT:
            raise UserError(f"--resume {path}: {newer_line(manifest)}")
        if is_valid(path, manifest, ranks):
            if ranks.rank == 0:
                for line in problems:
                    print(line, file=sys.stderr, flush=True)
            return Reader(path, manifest)
        corrupted.add(path)
    reason = f"none of its {len(found) + len(problems)} is valid" if found or problems else "there is none"
    raise UserError(
        f"--resume: {ranks.directory} has no complete checkpoint ({reason}); pass the --output_dir of the run, or "
        "start anew with --overwrite instead of --resume"
    )


def keep_warmup(args: argparse.Namespace, manifest: dict[str, Any], identity: dict[str, Any]) -> str | None:
    """Sets a missing --warmup_updates to its value at the start of the run, also if --num_updates has changed.

    Returns a line to print if more than half of the run is warm-up, otherwise None.
    """
    if args.warmup_updates is not None:
        return None
    warmup_at_start = manifest["identity"]["settings"].get("warmup_updates")
    warmup_at_start = warmup_at_start if is_number(warmup_at_start) else args.num_updates // 20
    args.warmup_updates = min(warmup_at_start, args.num_updates - 1)
    identity["settings"]["warmup_updates"] = warmup_at_start
    if 2 * warmup_at_start <= args.num_updates:
        return None
    text = f"--num_updates {args.num_updates} is half warm-up: the run began with {warmup_at_start} updates"
    return f"{text} of it; --warmup_updates with --allow_changed changes that"


def begin_state(reader: Reader, identity: dict[str, Any], allowed: list[str]) -> tuple[TrainingState, str]:
    """Returns the training state of a checkpoint, and a line to print, or "".

    If --allow_changed accepts a different held-out set, the losses on the previous set are reset.
    """
    state, saved = TrainingState.of(reader.manifest), reader.manifest["identity"]
    is_known = "validation" in saved
    if "validation" not in allowed or (is_known and saved["validation"] == identity["validation"]):
        return state, ""
    state.best_validation_loss = state.validation_loss = None
    state.evaluations_since_best, state.validation_since = 0, state.update
    reason = "the held-out data differs" if is_known else "the checkpoint does not name its held-out data"
    return state, f"{reason}: --keep_best and --patience start anew after update {state.update}\n"


def check_is_own(reader: Reader, args: argparse.Namespace, identity: dict[str, Any], size_flags: Iterable[str]) -> None:
    """Raises UserError: one line per difference from the start of the run. size_flags: see `Traits`."""
    path, manifest = reader.directory, reader.manifest
    raise_errors(f"--resume {path}: {line}" for line in differences(manifest["identity"], identity, args, size_flags))
    if manifest["update"] > args.num_updates:
        raise UserError(
            f"--resume {path}: it has completed {manifest['update']} updates, more than --num_updates "
            f"{args.num_updates}; pass a higher number, or export it as a model"
        )


def load_run(reader: Reader, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, seed: int) -> None:
    """Restores weights, optimizer, scaler and RNG states."""
    load_state(reader, accelerator, model, optimizer)
    restore_scaler(reader.manifest["scaler"], accelerator, optimizer)
    restore_generators(reader, accelerator, seed)


def find_best_at_end(
    checkpoints: Any, state: TrainingState, model: torch.nn.Module, optimizer: Any
) -> dict[str, Any] | None:
    """Returns the best checkpoint for the run's results, or None; loads it if --load_best_at_end is set."""
    load_best = checkpoints.args.load_best_at_end
    found = dict(list_on_main(checkpoints.ranks)[0])
    path = find_best(found.items())
    # Files are checked only if the checkpoint is loaded.
    while load_best and path and not is_valid(path, found[path], checkpoints.ranks):
        del found[path]
        path = find_best(found.items())
    if path is None:
        return None
    if load_best:
        load_state(Reader(path, found[path]), checkpoints.accelerator, model, optimizer)
    best = found[path]["position"]
    entry = {"checkpoint": str(path), "loss": best["validation_loss"]}
    entry["is_model"] = load_best or best["update"] == state.update
    lowest = state.best_validation_loss
    # The checkpoint with the lowest loss was not kept, or is corrupted.
    if lowest is not None and lowest < best["validation_loss"]:
        entry["lowest_measured"] = lowest
    return entry


@torch.no_grad()
def load_state(reader: Reader, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:
    """Loads weights, buffers and optimizer state saved in any mode with any world size; each rank reads its part."""
    layout = Layout(accelerator, model, optimizer)
    create_state(layout, reader)
    for piece in layout.pieces():
        if piece.name not in reader.tensors or reader.tensors[piece.name][1] != tuple(piece.shape):
            saved: Any = reader.tensors.get(piece.name, (None, "not there"))[1]
            raise UserError(f"--resume {reader.directory}: {piece.name} is {tuple(piece.shape)}, and {saved} in it")
        values = reader.read(piece.name, piece.start, piece.tensor.numel(), piece.columns)
        piece.tensor.copy_(values.view(piece.tensor.shape))
    wait_for_all()  # because ranks may read at different speeds
    if layout.is_sharded:
        from common.checkpoint.sharded_layouts import copy_master_weights

        copy_master_weights(optimizer)


def create_state(layout: Layout, reader: Reader) -> None:
    """Creates the state tensors of a new optimizer, into which `load_state` reads the saved values."""
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in (reader.tensors | reader.scalar_state).items():
        kind, _, parameter = name.partition("/")
        if kind.startswith("optimizer."):
            by_parameter.setdefault(parameter, {})[kind.removeprefix("optimizer.")] = value
    for part in layout.parts:
        if part.state_key is None or layout.state.of(part.state_key):
            continue
        keeper, group = layout.state.keeper(part.state_key)
        state: dict[str, Any] = {}
        for key, value in by_parameter.get(part.name, {}).items():
            if isinstance(value, tuple):
                dtype, shape = value
                if shape == part.shape:
                    state[key] = torch.zeros_like(part.state_key, dtype=dtype, requires_grad=False)
                else:
                    shape = local_shape(key, shape, part)
                    state[key] = torch.zeros(shape, dtype=dtype, device=part.state_key.device)
            elif dtype := _scalar_dtype(key, part.name, keeper, reader.scalar_dtypes):
                # The device on which torch expects a step. (ZeRO-3 has empty groups between steps, and its steps on the
                # device.)
                on_device = key != "step" or not group or group.get("fused") or group.get("capturable")
                device = part.state_key.device if on_device else "cpu"
                state[key] = torch.tensor(value, dtype=dtype, device=device)
            else:
                state[key] = int(value) if key == "step" else value
        if state:
            keeper.state[part.state_key] = state
    if hasattr(layout.state.outer, "ds_opt_adam"):
        from common.internals.deepspeed import replay_steps

        replay_steps(layout.state.outer)


def _scalar_dtype(key: str, name: str, keeper: torch.optim.Optimizer, saved: dict[str, str]) -> torch.dtype | None:
    """Returns the dtype of a scalar state that the optimizer keeps in a tensor; None for a plain number.

    torch's optimizers and their subclasses count steps in a tensor, others (DeepSpeed's CPU Adam) in an int. saved:
    dtypes in the checkpoint; older checkpoints have none.
    """
    classes = [kind for kind in type(keeper).mro() if kind is not torch.optim.Optimizer]
    if key == "step" and any(kind in vars(torch.optim).values() for kind in classes):
        return torch.float32
    if hasattr(keeper, "ds_opt_adam"):  # the checkpoint's mode may differ
        return None
    dtype = saved.get(f"optimizer.{key}/{name}")
    return DTYPES[dtype] if dtype else None


def restore_generators(reader: Reader, accelerator: Accelerator, seed: int) -> None:
    """Restores this rank's RNG states; if the number of ranks has changed, creates new RNG states."""
    manifest = reader.manifest
    if manifest["world_size"] == accelerator.num_processes:
        restore_random_states(reader.ranks[accelerator.process_index]["random"], accelerator.device)
    else:  # new RNG states for all current ranks; dropout differs, everything else is the same
        key = hashlib.blake2b(f"{seed}/{manifest['update']}".encode(), digest_size=4).digest()
        seed_everything(int.from_bytes(key, "little") >> 2, accelerator)


def restore_scaler(state: dict[str, Any], accelerator: Accelerator, optimizer: Any) -> None:
    """Sets the loss scale to the state in a manifest; a run with a different precision keeps its own."""
    if accelerator.scaler is not None:
        if state:
            accelerator.scaler.load_state_dict(state)
    elif scaler := getattr(getattr(optimizer, "optimizer", None), "loss_scaler", None):
        vars(scaler).update({key: value for key, value in state.items() if key in vars(scaler)})
