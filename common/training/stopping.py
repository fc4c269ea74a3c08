"""Asked to stop: SIGTERM, SIGINT or SIGUSR1 lets the current update end; then a checkpoint is written.

The ranks agree once an update, after its last backward: a request that comes later lets the next update end too.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# The status of a run that was asked to stop and can be continued with --resume: EX_TEMPFAIL of sysexits.h, "try again".
# Not 0 (finished), 1 (failed), 2 (a mistake in the command), and not 128 + n (ended by a signal, nothing saved).
STOPPED = 75
NOTHING_TRAINED = 1  # of a run to whose end no update was made
_early: list[int] = []  # SIGUSR1 that came before the loop


def _note_early(number: int, _: FrameType | None) -> None:
    _early.append(number)


def keep_requests() -> None:
    """From the start of a recipe on, SIGUSR1 waits for the loop; after the loop it does nothing: the end is near.

    Only SIGUSR1, which is never meant to end a process at once; outside the loop SIGTERM and SIGINT do that.
    """
    signal.signal(signal.SIGUSR1, _note_early)


class StopRequests:
    """A `with` block in which the signals only set `asked`. The third of the same signal acts as it would outside.

    The end of the launcher counts as a request too: its ranks would go on alone, where nobody sees or ends them. Where
    the launcher blocked a signal, as launchers/meet.py does, one that came before the block counts in it.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.before: dict[int, Any] = {}
        self.launcher: int | None = None
        self.keeps = signal.getsignal(signal.SIGUSR1) == _note_early

    def __enter__(self) -> "StopRequests":
        parent = psutil.Process().parent()
        try:
            if parent is not None and any("accelerate" in part or "torchrun" in part for part in parent.cmdline()):
                self.launcher = parent.pid
        except psutil.Error:  # ended meanwhile, or another user's
            pass
        for number in SIGNALS:
            self.before[number] = signal.signal(number, self._note)
            if self.before[number] == _note_early:
                self.before[number] = signal.SIG_DFL
                self.counts |= {number: 1} if _early else {}
                _early.clear()
        self.blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if error is not None:  # a launcher that has seen another rank end sends one: this one first says why it ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.keeps:
            keep_requests()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.counts[number] = self.counts.get(number, 0) + 1
        again = ""
        if self.counts[number] == 2:
            signal.signal(number, self.before[number])
            again = "; the third one ends it at once" if self.before[number] != signal.SIG_IGN else ""
        # Not print: the signal may have come in the middle of another one.
        line = f"{signal.Signals(number).name}: stopping after this update or the next{again}\n"
        with suppress(OSError):  # the reader of a pipe may have ended by the same signal
            os.write(sys.stderr.fileno(), line.encode())

    @property
    def asked(self) -> bool:
        """Whether this rank was asked, or its launcher is gone; the other ranks may not know."""
        return bool(self.counts) or (self.launcher is not None and os.getppid() != self.launcher)


def ignore_signals(_: int) -> None:
    """A DataLoader's worker_init_fn: the main process stops its workers; a signal to all must not end them before."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
