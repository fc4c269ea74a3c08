"""Plays the cases that a question needs, each in a process of its own, and answers it: the run at hand, or `--plan`."""

import math
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from common.host_memory import available_memory
from common.plan.cost import micro_batches_of
from common.plan.depth import depths_to_play, layers_of, set_layers
from common.plan.memory import Mode, Shape, mode_of, needs, on_host, peak, shape_of
from common.plan.profile import Parts, Profile, pieces_of, profile_of
from common.plan.rehearsal import Case, Recording, Rehearsal
from common.training.batching import Samples
from common.training.process_grid import Degrees

SECONDS = 120  # a process that takes longer is ended


class NotPlayed(Exception):
    """The recipe's update could not be played without data; says why."""


class Played(Exception):
    """Raised in a process that plays: whoever asked returns, and the recipe goes on in it."""


class Player:
    """Forks processes that play cases; `run` becomes a `Rehearsal` in each of them."""

    def __init__(self, run: Any, config: Any, samples: Samples, held_out: Samples | None):
        self.run, self.config, self.samples, self.held_out = run, config, samples, held_out

    def start(self, case: Case) -> "Playing":
        """A process that plays it. Raises Played in that process."""
        reads, writes = os.pipe()
        if child := os.fork():
            os.close(writes)
            return Playing(child, reads)
        os.close(reads)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            set_layers(self.config, case.layers)
            self.run.__class__ = Rehearsal
            self.run.set_up(case, self.samples, self.held_out, writes)
        except BaseException:
            os._exit(1)
        raise Played

    def play(self, cases: list[Case], at_once: int) -> list[Recording]:
        """What each case allocates. Raises NotPlayed, or Played in a process that plays."""
        playing: list[Playing] = []
        for number, case in enumerate(cases):
            if number >= at_once:
                playing[number - at_once].read()
            playing.append(self.start(case))
        return [one.recording() for one in playing]


class Playing:
    """A process that plays."""

    def __init__(self, child: int, pipe: int):
        self.child, self.pipe, self.told = child, pipe, b""
        self.end = time.monotonic() + SECONDS
        self.is_done = False

    def read(self) -> None:
        """Waits until it has told its recording, or has ended without, or its time is over."""
        pieces = []
        while not self.is_done:
            ready, _, _ = select.select([self.pipe], [], [], max(0, self.end - time.monotonic()))
            pieces.append(os.read(self.pipe, 1 << 20) if ready else b"")
            if not pieces[-1]:
                self.told, self.is_done = b"".join(pieces), bool(ready)
                self.close()

    def close(self) -> None:
        """Ends the process, if it has not ended."""
        os.close(self.pipe)
        if not self.is_done:
            os.kill(self.child, signal.SIGKILL)
            self.is_done = True
        os.waitpid(self.child, 0)

    def recording(self) -> Recording:
        """What it recorded. Raises NotPlayed."""
        self.read()
        if not self.told:
            raise NotPlayed("the recipe could not be played without data")
        recording: Recording = pickle.loads(self.told)
        if not any(segment == "after step" for segment, _, _ in recording.events):
            raise NotPlayed((recording.ended.strip().splitlines() or ["no whole update was played"])[-1])
        return recording


class Forecaster:
    """Profiles of any micro-batch size and mode from few cases."""

    def __init__(self, player: Player, shape: Shape, device: str):
        self.player, self.shape, self.device = player, shape, device
        has_stages = hasattr(player.run.args, "schedule")  # of which each has some of the layers
        self.depths, self.layers = depths_to_play(player.config, has_stages), layers_of(player.config)

    def cases(self, mode: Mode, rows: int, activation_checkpointing: str, optimizer: str) -> list[Case]:
        """What is to be played for one profile: the model at each depth."""
        mode_of_layers = "full" if activation_checkpointing == "offload" else activation_checkpointing
        how = {"autocast": mode.autocast, "weights": mode.weights_dtype, "device": self.device, "degrees": mode.played}
        return [Case(rows, depth, mode_of_layers, optimizer, **how) for depth in self.depths]

    def profile(self, recordings: list[Recording]) -> Profile:
        """The whole model's, from those of each depth."""
        if len(recordings) == 1:
            return profile_of(recordings[0])
        pieces = pieces_of(*recordings)
        one, other = (profile_of(recording, pieces) for recording in recordings)
        return one.at_depth(other, *self.depths, self.layers)


def rows_of(args: Any, samples: Samples, degrees: Degrees) -> int:
    """How many of the longest samples a micro-batch has, as the flags have it."""
    share = math.ceil(args.global_batch_size / degrees.data)
    if args.micro_batch_size:
        return min(args.micro_batch_size, share)
    return max(1, min(share, args.micro_batch_tokens * degrees.sequence // samples.max_length))


WORTH_A_LINE = 0.01  # of the memory there is: a model whose weights, gradients and state take less is not played


@dataclass
class Forecast:
    """What the run at hand is to need: for its first printed block, and run.json."""

    forecaster: Forecaster
    playing: list[Playing]
    mode: Mode
    micro_batches: int  # of an update, on each process
    found: tuple[str, Parts] | None = None
    reason: str = ""

    def line(self) -> dict[str, str]:
        """For the printed block: the peak of a process, by what it holds."""
        if self.found is None and not self.reason:
            try:
                profile = self.forecaster.profile([one.recording() for one in self.playing])
                segment, parts = peak(needs(profile, self.forecaster.shape, self.mode, self.micro_batches))
                if self.forecaster.device == "cpu":  # whose memory is the host's
                    parts["offloaded"] = on_host(self.forecaster.shape, self.mode)[0] / self.mode.processes
                self.found = segment, parts
            except NotPlayed as reason:
                self.reason = f"not predicted: {reason}"
        if self.found is None:
            return {"memory": self.reason}
        segment, parts = self.found
        held = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items() if size >= 0.005 * self.peak())
        where, _, when = segment.partition(", ")
        where = f"the {when} of a {where.rstrip(' 01')}"
        return {"memory": f"predicted peak {in_bytes(self.peak())} a process, at {where}: {held}"}

    def peak(self) -> float:
        """Bytes."""
        return sum(self.found[1].values()) if self.found else 0.0

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        return {"predicted_peak_bytes": round(self.peak()) or None}


def in_bytes(size: float) -> str:
    """A size in the unit that people read it in."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def foresee(
    run: Any, config: Any, make_empty: Callable[[], torch.nn.Module], samples: Samples, held_out: Samples | None
) -> Forecast | None:
    """Begins to play the run at hand, on the main process, which tells; None in a process that plays."""
    args, asked = run.args, run.asked
    shape, device = shape_of(make_empty()), "cpu" if run.device.type == "cpu" else "cuda"
    mode = mode_of(asked, asked.source, args)
    forecaster = Forecaster(Player(run, config, samples, held_out), shape, device)
    rows = rows_of(args, samples, mode.degrees)
    told = Forecast(forecaster, [], mode, micro_batches_of(args.global_batch_size, mode.degrees.data, rows))
    if not run.accelerator.is_main_process:
        told.reason = "predicted by the main process"
    elif not args.dry_run and 16 * shape.parameters < WORTH_A_LINE * available_memory():
        told.reason = "far from the limit: not predicted (--dry_run does)"
    else:
        try:
            cases = forecaster.cases(mode, rows, args.activation_checkpointing, args.optimizer)
            told.playing = [forecaster.player.start(case) for case in cases]
        except Played:
            return None
    return told
