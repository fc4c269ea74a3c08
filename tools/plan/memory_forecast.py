"""Traces cases in separate processes, and predicts the memory of a run from them, or provides profiles for `--plan`."""

import math
import os
import pickle
import select
import signal
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import psutil
import torch

from common.errors import UserError
from common.host_memory import format_bytes
from common.training.batching import Samples
from common.training.process_grid import ProcessGrid
from tools.plan.cost import count_micro_batches
from tools.plan.layer_extrapolation import choose_depths, count_layers, set_layers
from tools.plan.memory import Mode, ModelSizes, measure_model, needs, on_host, parse_mode, peak
from tools.plan.memory_profile import Parts, Profile, make_profile, split_segments
from tools.plan.process_memory import held_on_cpu, held_on_gpu
from tools.plan.traced_run import Case, Recording, TracedRun

SECONDS = 120  # time limit of a process


class TraceError(Exception):
    """The recipe's update could not be traced without data; the message contains the reason."""


class InTraceProcess(Exception):
    """Raised in a process that traces: `begin` then returns, and the recipe continues as a `TracedRun`."""


class Tracer:
    """Forks processes that trace cases of a recipe's run; `run` becomes a `TracedRun` in each of them."""

    def __init__(self, run: Any, config: Any, samples: Samples, held_out: Samples | None):
        self.run, self.config, self.samples, self.held_out = run, config, samples, held_out

    def start(self, case: Case) -> "TraceProcess":
        """Starts a process that traces a case. Raises InTraceProcess in that process."""
        reads, writes = os.pipe()
        if child := os.fork():
            os.close(writes)
            return TraceProcess(child, reads)
        os.close(reads)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            set_layers(self.config, case.layers)
            self.run.__class__ = TracedRun
            self.run.set_up(case, self.samples, self.held_out, writes)
        except BaseException:
            os._exit(1)
        raise InTraceProcess

    def trace(self, cases: list[Case], at_once: int) -> list[Recording]:
        """Returns the recording of each case. Raises TraceError, or InTraceProcess in a tracing process."""
        processes: list[TraceProcess] = []
        for number, case in enumerate(cases):
            if number >= at_once:
                processes[number - at_once].read()
            processes.append(self.start(case))
        return [process.recording() for process in processes]


class TraceProcess:
    """A process that traces a case."""

    def __init__(self, child: int, pipe: int):
        self.child, self.pipe, self.recorded = child, pipe, b""
        self.end = time.monotonic() + SECONDS
        self.is_done = False

    def read(self) -> None:
        """Waits until the process has sent its recording, has ended without it, or has reached its time limit."""
        pieces = []
        while not self.is_done:
            ready, _, _ = select.select([self.pipe], [], [], max(0, self.end - time.monotonic()))
            pieces.append(os.read(self.pipe, 1 << 20) if ready else b"")
            if not pieces[-1]:
                self.recorded, self.is_done = b"".join(pieces), True
                os.close(self.pipe)
                if not ready:
                    os.kill(self.child, signal.SIGKILL)
                os.waitpid(self.child, 0)

    def recording(self) -> Recording:
        """Returns the recording of the process. Raises TraceError: there is none, or no update is complete."""
        self.read()
        if not self.recorded:
            raise TraceError("the recipe could not be traced without data")
        recording: Recording = pickle.loads(self.recorded)
        if not any(segment == "after step" for segment, _, _ in recording.events):
            raise TraceError((recording.ended.strip().splitlines() or ["no complete update was traced"])[-1])
        return recording


class Forecaster:
    """Extrapolates a few traced cases to profiles of any micro-batch size and mode."""

    def __init__(self, tracer: Tracer, model: ModelSizes, device: str):
        self.tracer, self.model, self.device = tracer, model, device
        has_stages = bool(tracer.run.traits.pipeline_schedule)  # a pipeline stage has only some layers
        self.depths, self.layers = choose_depths(tracer.config, has_stages), count_layers(tracer.config)

    def cases(self, mode: Mode, rows: int, checkpointing: str, optimizer: str) -> list[Case]:
        """Returns the cases to trace for a profile: the model at each depth."""
        checkpointing = "full" if checkpointing == "offload" else checkpointing
        precision = (mode.autocast, mode.weights_dtype)
        return [Case(rows, d, checkpointing, optimizer, *precision, self.device, mode.traced) for d in self.depths]

    def profile(self, recordings: list[Recording]) -> Profile:
        """Returns the profile of the full model from the recordings at each depth."""
        if len(recordings) == 1:
            return make_profile(recordings[0])
        (few, more), layers = self.depths, self.layers
        assert few and more and layers, "two depths represent a known depth"
        pieces = split_segments(*recordings)
        shallow, deep = (make_profile(recording, pieces) for recording in recordings)
        return shallow.at_depth(deep, few, more, layers)

    def trace(self, modes: list[Mode], savings: tuple[str, ...], sizes: tuple[int, int], optimizer: str) -> None:
        """Traces a mode of each `_kind` with each activation-checkpointing mode, at two micro-batch sizes."""
        kinds = {_kind(mode): replace(mode, sequence=1) for mode in modes}
        keys = [(kind, checkpointing, rows) for kind in kinds for checkpointing in savings for rows in sizes]
        cases = [case for kind, saving, rows in keys for case in self.cases(kinds[kind], rows, saving, optimizer)]
        recordings = iter(self.tracer.trace(cases, at_once=psutil.cpu_count() or 1))
        self.sizes, self.profiles = sizes, {key: self.profile([*islice(recordings, len(self.depths))]) for key in keys}

    def profile_of(self, mode: Mode, checkpointing: str, rows: int) -> Profile:
        """Returns the profile of the full model for a traced kind of mode and any micro-batch size."""
        smaller, larger = self.sizes
        few, more = (self.profiles[_kind(mode), checkpointing, size] for size in self.sizes)
        return few.scaled(more, (rows / mode.sequence - smaller) / (larger - smaller))


def _kind(mode: Mode) -> tuple[str, str, int]:
    # Modes of the same kind share a recording: DeepSpeed's bf16 weights without autocast allocate the same memory as
    # FSDP2's with autocast. A part of a sequence allocates as much as an equal part of the samples.
    return (mode.precision, mode.weights_dtype, mode.tensor)


def _micro_batch_rows(args: Any, samples: Samples, grid: ProcessGrid) -> int:
    """Returns the micro-batch size that the flags imply for the longest samples."""
    share = math.ceil(args.global_batch_size / grid.data_parallel)
    if args.micro_batch_size:
        return min(args.micro_batch_size, share)
    return max(1, min(share, args.micro_batch_tokens * grid.sequence // samples.max_length))


def predict_peak(tracer: Tracer, model: torch.nn.Module, question: dict[str, Any]) -> list[str]:
    """Returns one line with the predicted peak of a process of the run, and the shortfall if it does not fit.

    Raises UserError: the recipe cannot be traced. Raises InTraceProcess in a process that traces it.
    """
    run = tracer.run
    args, launch = run.args, run.launch_config
    device = "cpu" if question["device"] == "cpu" else "cuda"
    mode = parse_mode(launch, launch.source, run.traits)
    forecaster = Forecaster(tracer, measure_model(model), device)
    rows = _micro_batch_rows(args, tracer.samples, mode.grid)
    cases = forecaster.cases(mode, rows, args.activation_checkpointing, args.optimizer)
    try:
        profile = forecaster.profile(tracer.trace(cases, at_once=len(cases)))
    except TraceError as reason:
        raise UserError(*str(reason).splitlines()) from reason
    number = count_micro_batches(args.global_batch_size, mode.grid.data_parallel, rows)
    segment, parts = peak(needs(profile, forecaster.model, mode, number))
    if device == "cpu":  # offloaded tensors are in the same memory
        parts["offloaded"] = on_host(forecaster.model, mode, args.optimizer)[0] / mode.processes
    return [describe_peak(segment, parts) + _describe_shortfall(mode, parts, question)]


def describe_peak(segment: str, parts: Parts) -> str:
    """Describes the predicted peak of a process: size, phase of the update, and parts of at least 0.5 %."""
    total = sum(parts.values())
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size >= 0.005 * total)
    phase, _, when = segment.partition(", ")
    return f"predicted peak {format_bytes(total)} per process, at the {when} of a {phase.rstrip(' 01')}: {held}"


def _describe_shortfall(mode: Mode, parts: Parts, question: dict[str, Any]) -> str:
    """Describes the shortfall of device memory or, on a CPU, of host memory and its limits; "" if the run fits."""
    per_process, *total = question["available"]  # total: only on a CPU, for all processes together
    needed = held_on_cpu(parts) if total else held_on_gpu(mode, parts)
    missing = max(needed - per_process, *(mode.processes * needed - limit for limit in total), 0)
    if not missing:
        return ""
    others = format_bytes(needed - sum(parts.values()))
    return (
        f"; with {others} for the process itself, this exceeds the available {format_bytes(per_process)} by "
        f"{format_bytes(missing)}; --plan lists what fits"
    )
