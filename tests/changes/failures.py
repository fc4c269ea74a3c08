"""What happens to a process: it is asked to stop, late, slow, silent or broken, and nobody watches or waits."""

import ctypes
import importlib
import os
import shutil
import signal
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker

from changes import RANK, after, before, before_reduce, change
from common import argument_checks, redaction, run
from common.checkpoint import resume, shared_files
from common.data import text
from common.models import decisions, model_setup, parallel_setup
from common.parallel import failures, rank_connection, rank_store, rank_watch, shutdown
from common.process import this_process
from common.report import answers, model_card, records, settings, trackers
from common.report.progress import Progress
from common.training import accumulation, optimizers, stop_votes

END_RUN = shutdown.end_run  # which tests/run_recipe.py replaces


def signal_at(when):
    """[update, rank, signal, times, "late"]: the rank sends itself a signal while it computes the update.

    late: after the collective by which the ranks agree in it.
    """
    update, rank, name, times, *late = when

    def send(*_, **__):
        if (this_process().update, RANK) == (update, rank):
            for _ in range(times):
                os.kill(os.getpid(), getattr(signal, name))

    if late:
        before(Progress, "update", send)
    else:
        before(accumulation, "loss_scale", send)


def signal_in_evaluation(when):
    """[update, micro-batch, rank, signal]: sent in the evaluation after the update, before it computes a micro-batch.

    update: "end" for the evaluation after the loop. The ranks agree before each micro-batch.
    """
    update, number, rank, name = when
    counts = {}

    def send(*_, **__):
        if torch.is_grad_enabled():
            return
        place = this_process().update if this_process().in_loop else "end"
        counts[place] = counts.get(place, 0) + 1
        if (place, counts[place], RANK) == (update, number, rank):
            os.kill(os.getpid(), getattr(signal, name))

    before(run, "send_to_device", send)
    change(stop_votes.StopVotes, "SECONDS", 0.0)


def signal_in_answers(when):
    """[number, rank, signal]: sent before the answers to a batch of --generate, counted from 1."""
    number, rank, name = when
    counts = {}

    def send(*_, **__):
        counts[rank] = counts.get(rank, 0) + 1
        if (counts[rank], RANK) == (number, rank):
            os.kill(os.getpid(), getattr(signal, name))

    before(answers.Answers, "_answer", send)
    change(stop_votes.StopVotes, "SECONDS", 0.0)


def start_together(how):
    """[path, number]: a run takes its output directory when so many are about to; each adds a byte to the file."""
    path, number = how

    def wait(*_, **__):
        with open(path, "ab") as file:
            file.write(b".")
        while os.path.getsize(path) < number:
            time.sleep(0.01)

    before(argument_checks, "make_output_dir", wait)


def default_output_dir(path):
    """The default of --output_dir, as if all runs began in one second."""
    strftime = time.strftime
    change(time, "strftime", lambda how, *when: path if how.startswith("runs/") else strftime(how, *when))


def silence(seconds):
    """How long a process may be silent; a number, or "inf"."""
    change(rank_watch, "SILENCE", float(seconds))


def hold_lock(at):
    """One process holds Python's lock: `at` is [rank, update, seconds]."""
    before_reduce(lambda _, update: at[:2] == [RANK, update] and ctypes.PyDLL(None).sleep(at[2]))


def hold_lock_in_profile(at):
    """One process holds Python's lock when it has recorded its profile: `at` is [rank, seconds]."""
    from common.report import profiling  # which most runs do not load

    before(profiling, "_write", lambda *_: RANK == at[0] and ctypes.PyDLL(None).sleep(at[1]))


def broken_steps(names):
    """Functions that raise an error: of each the name of its module and its own; on one rank if `RANK:` is in front."""
    for name in names:
        rank, _, path = name.rpartition(":")
        module, _, function = path.rpartition(".")

        def fail(*_, **__):
            raise RuntimeError("this step is broken")

        if rank in ("", str(RANK)):
            change(importlib.import_module(module), function, fail)


def broken_tracker(update):
    """TensorBoard takes no figures from an update on, and cannot be closed."""

    def log(self, values, step=None, **_):
        if step >= update:
            raise RuntimeError("this tracker is broken")

    change(TensorBoardTracker, "log", log)


def short_wait(seconds):
    """How long a rank with an error waits for the others to leave a step that a run can do without."""
    change(rank_store, "OPTIONAL_TIMEOUT", seconds)


def broken_rank(at):
    """One process fails at an update: `at` is [rank, update]."""

    def fail(_, update):
        if at == [RANK, update]:
            raise RuntimeError("this rank is broken")

    before_reduce(fail)


def no_memory_for_optimizer(_):
    """Asks for a petabyte where the optimizer is made, before there is a loader."""
    before(optimizers, "make_optimizer", lambda *_, **__: torch.empty(1 << 50, dtype=torch.uint8))


def slow_updates(seconds):
    """Updates that last long enough to be met by a kill."""
    before_reduce(lambda *_: time.sleep(seconds))


def slow_note(seconds):
    """A disk that takes so long for what a run says about its own failure."""
    before(failures, "note", lambda reason: time.sleep(seconds))


def no_watch(_):
    """Processes that do not watch each other."""
    change(rank_watch, "start", lambda *_: None)
    change(rank_connection, "connecting", lambda _: nullcontext())


def late(at):
    """One process comes later than the others: `at` is [rank, seconds]."""
    before(rank_watch, "start", lambda *_: time.sleep(at[1] * (RANK == at[0])))


def no_wait(_):
    """Ranks meet in collectives only."""
    for module in (shutdown, resume, shared_files, model_setup, parallel_setup, decisions, run):
        change(module, "wait_for_all", lambda: None)


def slow_rank(how):
    """[where, seconds, limit]: one rank works alone for so long, the collectives of the others end after the limit.

    where: "tokenize", rank 1 before the model is built; "write", rank 0 at the end, which then is the recipe's own.
    """
    where, seconds, limit = how

    def time_limit(seconds):
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), torch.distributed.group.WORLD)

    def work(rank):
        time_limit(limit)
        time.sleep(seconds * (RANK == rank))

    if where == "write":
        change(shutdown, "end_run", END_RUN)
        after(Accelerator, "get_state_dict", lambda *_: work(0))
    else:
        before(text, "tokenize", lambda *_, **__: work(1))
        after(Accelerator, "prepare", lambda *_: time_limit(1800))


def no_redaction(_):
    """Secrets are written and printed as they come."""
    for module in (redaction, records, trackers, settings, model_card):
        change(module, "redact", lambda value: value)


def lose_output_dir(how):
    """[directory, update, new path]: somebody moves it while rank 0 computes the update; deletes it without a path."""
    directory, update, target = how

    def lose(_, number):
        if (number, RANK) == (update, 0):
            shutil.move(directory, target) if target else shutil.rmtree(directory)

    before_reduce(lose)
