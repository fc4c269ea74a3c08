"""--profile: a trace of three updates for Perfetto, and their time per phase, as a table and in run.json.

The table shows the main process. Each moment of the updates belongs to one phase, so the phases sum to their duration:

    data           waiting for a global batch, and copying its micro-batches to the device
    forward        the model, and the recipe's work on a micro-batch before and after its backward pass
    backward       autograd; under DeepSpeed also its engine's work on the gradients afterwards
    optimizer      clipping, the step, zero_grad; under DeepSpeed all of its engine's step
    communication  collectives and messages while nothing is computed, also those of a save; includes waiting for ranks
    evaluation     forward passes without gradients
    checkpoint     time that the updates wait for a save, without the time of the thread that writes in parallel
    other          the remaining time: the loop itself, metrics, trackers

Communication that overlaps with a computing operator is reported in a separate line. Communication during the Python
code between two operators does not count as overlapped. On a GPU, a moment belongs to the phase that launched the
running kernel, to communication if only NCCL kernels run, and to the phase of the host if no kernel runs. A second
column then shows the kernel time of each phase.

Profiled updates are slower than others, especially with many small operators. Each rank writes its own trace.
"""

import gzip
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import profile, record_function, schedule

from common.internals.torch import SCHEDULED_BACKWARD
from common.parallel import liveness
from common.process import this_process
from common.report.records import read_run, write_run
from common.training.batching import GlobalBatch

WARMUP, RECORDED = 3, 3  # updates; the profiler is on in the last warm-up update, because its start takes time
PHASES = ("data", "forward", "backward", "optimizer", "communication", "evaluation", "checkpoint", "other")
COMMUNICATION, OTHER = PHASES.index("communication"), PHASES.index("other")
COLLECTIVES = ("gloo:", "nccl:", "c10d::", "_c10d_functional::", "ucc:", "mpi:", "xccl:")
KERNELS, LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")  # categories in a trace
UPDATE = "ProfilerStep#"  # name of an update's range in a trace of torch.profiler


def profiled(run: Any, batches: Generator[GlobalBatch, None, None]) -> Generator[GlobalBatch, None, None]:
    """Yields the batches of a `common.run.Run` with --profile; records, writes and prints the updates after WARMUP."""
    if run.device.type == "cpu":  # hides Kineto's messages, which on a CPU only say that it starts and stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    steps = schedule(wait=WARMUP - 1, warmup=1, active=RECORDED, repeat=1)
    with closing(batches):
        with _named_phases(run), profile(schedule=steps, on_trace_ready=partial(_write, run)) as profiler:
            try:
                done = 0
                while done < WARMUP + RECORDED:
                    with record_function("data"):
                        batch = next(batches)
                    yield batch
                    if run.budget and run.budget.drops_update:  # the batch was a trial, or is retried
                        continue
                    done += 1
                    if run.device.type == "cuda":  # so that kernels belong to the update that launched them
                        torch.cuda.synchronize(run.device)
                    with _without_heartbeats() if done == WARMUP + RECORDED else nullcontext():
                        profiler.step()
            except GeneratorExit:
                profiler.on_trace_ready = None
                run.accelerator.print("--profile: stopped before three updates were recorded; no trace is written")
                raise
        yield from batches


@contextmanager
def _without_heartbeats() -> Iterator[None]:
    """Context in which a rank without heartbeats is not lost; all ranks enter and leave it together.

    Stopping the profiler and reading a trace hold Python's lock, for half a minute in a million operators.
    """
    liveness.wait_for_all()
    this_process().in_loop = False
    yield
    liveness.wait_for_all()
    this_process().in_loop = True


def _named_phases(run: Any) -> ExitStack:
    """Wraps the parts of an update in trace ranges named after their phases, until the returned stack is closed.

    Clipping, checkpoints and torch's optimizers create their own ranges.
    """
    names, bare_micro_batches = ExitStack(), run.micro_batches

    def replace(owner: Any, name: str, value: Any) -> None:
        undo = (setattr, owner, name, getattr(owner, name)) if name in vars(owner) else (delattr, owner, name)
        names.callback(*undo)
        setattr(owner, name, value)

    def now(phase: str) -> str:
        return "evaluation" if phase == "forward" and not torch.is_grad_enabled() else phase

    def name(owner: Any, method: str, phase: str) -> None:
        original = getattr(owner, method)

        def named(*args: Any, **kwargs: Any) -> Any:
            with record_function(now(phase)):  # a new context per call, because backward passes may be nested
                return original(*args, **kwargs)

        replace(owner, method, named)

    def micro_batches(batch: GlobalBatch) -> Iterator[Any]:
        copied = bare_micro_batches(batch)
        while True:
            with record_function("data"):
                micro_batch = next(copied, None)
            if micro_batch is None:
                return
            # This range lasts until the next micro-batch is requested; the backward pass has its own range inside.
            with record_function(now("forward")):
                yield micro_batch

    replace(run, "micro_batches", micro_batches)
    name(run.model, "forward", "forward")  # a pipeline's schedule receives its micro-batches before it starts
    name(run.accelerator, "backward", "backward")
    name(*SCHEDULED_BACKWARD, "backward")  # called by the pipeline's schedule
    if engine := getattr(run.accelerator, "deepspeed_engine_wrapped", None):
        name(engine.engine, "step", "optimizer")
    return names


def _write(run: Any, profiler: profile) -> None:
    """Writes this rank's trace; the main process prints the time per phase and adds it to run.json."""
    # The trace is kept until the run ends: freeing a trace with gloo threads has crashed the process in Kineto.
    run.trace = profiler.profiler and profiler.profiler.kineto_results
    directory = Path(run.output_dir) / "profile"
    directory.mkdir(parents=True, exist_ok=True)  # each host may have its own directory
    path = directory / f"trace-rank-{run.accelerator.process_index}.json.gz"
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        plain, unfinished = Path(temporary, "trace.json"), Path(temporary, path.name)
        profiler.export_chrome_trace(str(plain))
        # Not by torch, which takes the highest level: 9 % less in 7 times the time.
        with plain.open("rb") as file, gzip.open(unfinished, "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(file, compressed)
        events = json.loads(plain.read_bytes())["traceEvents"] if run.accelerator.is_main_process else []
        os.replace(unfinished, path)
    if run.accelerator.is_main_process:
        last, times = run.state.update, where_time_went(events)
        times = {"updates": list(range(last - RECORDED, last))} | times
        write_run(run.output_dir, read_run(run.output_dir) | {"profile": times})
        run.progress.print(describe(times) + f"\ntrace      {path} (https://ui.perfetto.dev opens it)")


def where_time_went(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns seconds of a trace's updates: in total, per phase, of overlapped communication, of kernels per phase."""
    events = [event | {"end": event["ts"] + event["dur"]} for event in events if event["ph"] == "X"]
    host = [event for event in events if event.get("cat") in ("user_annotation", "cpu_op")]
    host.sort(key=lambda event: (event["ts"], -event["dur"]))  # nested events come later
    kernels = [event for event in events if event.get("cat") in KERNELS]
    updates = [event for event in host if event["name"].startswith(UPDATE)]
    main_thread = [event for event in host if event["tid"] == updates[0]["tid"]]
    time = _Time([*host, *kernels])

    owner = np.full(len(time.seconds), OTHER)
    for event in main_thread:
        if (phase := _phase_of(event)) is not None:
            owner[time.pieces(event)] = phase
    launches = [event for event in events if event.get("cat") in LAUNCHES]
    launched = {event["args"].get("correlation"): owner[time.pieces(event).start] for event in launches}
    sent = [event for event in host if event["name"].startswith(COLLECTIVES)]
    computed = [event for event, following in pairwise(main_thread) if _computes(event, following)]
    owner[time.during(sent) & ~time.during(computed)] = COMMUNICATION

    # Memory copies, NCCL kernels, all other kernels.
    groups: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in kernels:
        is_nccl, phase = event["name"].startswith("nccl"), launched.get(event["args"].get("correlation"), OTHER)
        groups[(1, COMMUNICATION) if is_nccl else (2 * (event["cat"] == "kernel"), phase)].append(event)
    for (_, phase), some in sorted(groups.items()):
        owner[time.during(some)] = phase  # later groups override earlier groups that overlap in time

    is_update = time.during(updates)
    is_hidden = is_update & time.during(groups[1, COMMUNICATION] if kernels else sent) & (owner != COMMUNICATION)
    phases = np.bincount(owner[is_update], time.seconds[is_update], len(PHASES)).tolist()
    times = {"seconds": sum(phases), "phases": dict(zip(PHASES, phases, strict=True))}
    times["hidden_communication"] = float(time.seconds[is_hidden].sum())
    if kernels:
        ran = [
            sum(event["dur"] for (_, own), some in groups.items() if own == phase for event in some) / 1e6
            for phase in range(len(PHASES))
        ]
        times["kernels"] = dict(zip(PHASES, ran, strict=True))
    return times


class _Time:
    """The time of a trace, split at the start and end of each event. seconds: (pieces,), the length of each piece."""

    def __init__(self, events: list[dict[str, Any]]):
        self.edges = np.unique([event[side] for event in events for side in ("ts", "end")])
        self.seconds = np.diff(self.edges) / 1e6  # a trace is in microseconds

    def pieces(self, event: dict[str, Any]) -> slice:
        """Returns the range of pieces from the beginning to the end of an event."""
        start, end = np.searchsorted(self.edges, (event["ts"], event["end"]), "right") - 1
        return slice(max(0, min(start, len(self.seconds) - 1)), end)

    def during(self, events: list[dict[str, Any]]) -> np.ndarray:
        """Returns (pieces,) bool: whether at least one of the events runs during a piece."""
        changes = np.zeros(len(self.edges), np.int64)
        for side, change in (("ts", 1), ("end", -1)):
            np.add.at(changes, np.searchsorted(self.edges, [event[side] for event in events]), change)
        return changes.cumsum()[:-1] > 0


def _phase_of(event: dict[str, Any]) -> int | None:
    """Returns the index of the phase that a host event's name stands for, or None."""
    # torch.optim creates ranges such as Optimizer.step#AdamW.step and Optimizer.zero_grad#AdamW.zero_grad.
    if event["cat"] == "user_annotation" and event["name"].startswith("Optimizer."):
        return PHASES.index("optimizer")
    return PHASES.index(event["name"]) if event["cat"] == "user_annotation" and event["name"] in PHASES else None


def _computes(event: dict[str, Any], following: dict[str, Any]) -> bool:
    """Returns whether an event is a computing operator: not a collective, and without nested events."""
    is_operator = event["cat"] == "cpu_op" and not event["name"].startswith(COLLECTIVES)
    return is_operator and following["ts"] >= event["end"]


def describe(times: dict[str, Any]) -> str:
    """Returns a table as text. times: results of `where_time_went`, plus the recorded updates as `updates`."""
    first, *_, last = times["updates"]
    lines = [f"\nprofile of updates {first} to {last}, {times['seconds']:.3f} s, on the main process"]
    kernels = times.get("kernels")
    lines[0] += "; beside each share, how long its kernels ran" if kernels else ""
    for phase, seconds in times["phases"].items():
        line = f"{phase:>15}  {seconds * 1e3:>10,.1f} ms  {seconds / times['seconds']:>6.1%}"
        lines.append(line + (f"  {kernels[phase] * 1e3:>10,.1f} ms" if kernels else ""))
    if hidden := times["hidden_communication"]:
        lines.append(f"{'':>15}  {hidden * 1e3:,.1f} ms of communication ran beside computation")
    return "\n".join(lines)
