"""Handles stop requests: after SIGTERM, SIGINT, SIGUSR1 or SIGHUP, the current update ends and a checkpoint is written.

The ranks exchange requests once per update, after the last backward; a request after this exchange takes effect one
update later. During an evaluation, which may be long, they exchange requests about once per second, and interrupt it.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from common import launcher

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# Exit status of a run that stopped on request, to be continued with --resume: EX_TEMPFAIL of sysexits.h, "try again".
STOPPED = 75
NOTHING_TRAINED = 1  # exit status of a run that completed no update


class EarlyRequest:
    """Signal handler that records a SIGUSR1 before the loop. After the loop it has no effect, because the run ends."""

    is_received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.is_received = True


def keep_early_requests() -> None:
    """Records SIGUSR1 for the loop; called at the start of a recipe, which SIGTERM and SIGINT still end at once."""
    signal.signal(signal.SIGUSR1, EarlyRequest())


def _ignores_hangup() -> bool:
    """Returns whether this process was started to survive the end of its terminal, for example by nohup.

    torchrun ends its processes on SIGHUP even if nohup started it. A SIGHUP from torchrun is then a request to stop.
    """
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGHUP") if "TORCHELASTIC_RUN_ID" in os.environ else ""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and "SIGHUP" not in handled


class StopRequests:
    """Context in which the signals only set `is_requested`. A third signal of the same kind acts as outside of it.

    The death of the launcher also counts as a request: otherwise its ranks would continue alone. If the launcher
    blocked a signal, as launchers/meet.py does, a signal sent before the context counts in the context.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        for number in SIGNALS:
            if number != signal.SIGHUP or not _ignores_hangup():
                self.before[number] = signal.signal(number, self._note)
        early = self.before[signal.SIGUSR1]
        if isinstance(early, EarlyRequest) and early.is_received:
            self.counts[signal.SIGUSR1] = 1
            early.is_received = False
        self.blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if error is not None:  # a launcher sends SIGTERM when a rank fails; this rank must first report its error
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.counts[number] = self.counts.get(number, 0) + 1
        again = ""
        if self.counts[number] == 2:
            before = self.before[number]
            signal.signal(number, signal.SIG_DFL if isinstance(before, EarlyRequest) else before)
            again = "; a third signal ends the run at once" if before != signal.SIG_IGN else ""
        # Not print, because the signal may have interrupted a print.
        line = f"{signal.Signals(number).name}: saving and stopping{again}\n"
        with suppress(OSError):  # the same signal may have ended the reader of a pipe
            os.write(sys.stderr.fileno(), line.encode())

    @property
    def is_requested(self) -> bool:
        """Whether this rank received a request or its launcher died; other ranks may not have."""
        return bool(self.counts) or launcher.has_died()
