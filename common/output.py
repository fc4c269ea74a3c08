"""The standard streams of a process: without secrets, without control characters, and alive without a reader."""

import errno
import io
import logging
import os
import re
import sys
from contextlib import suppress
from typing import Any

from common.redaction import cleaned

MOVES = re.compile(r"\r?(?:(?:\n|\x1b\[A)*\Z)?")  # a carriage return at the start; lines down or up, alone
COLOURS = re.compile(r"\x1b\[[\d;]*m")  # of libraries, such as trackers


class _Outliving(io.FileIO):
    """A stream that discards its output after the reader of its pipe has ended, or its terminal was closed."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.is_terminal = self.isatty()

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = os.path.realpath(f"/dev/fd/{self.fileno()}")  # for the message of a full disk
            nowhere = os.open(os.devnull, os.O_WRONLY)  # also after other errors, because Python flushes again at exit
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            is_closed_terminal = self.is_terminal and error.errno == errno.EIO
            if not is_closed_terminal and not isinstance(error, BrokenPipeError):
                raise
            return len(data)


class _Cleaned:
    """A text stream that cleans all that is written to it, and has no colours. Progress bars may move the cursor."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        start = MOVES.match(text)[0]  # type: ignore[index]  # it matches every text
        return self._stream.write(start + cleaned(COLOURS.sub("", text[len(start) :])))

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_output() -> None:
    """Cleans all further output of this process, and keeps it alive if the reader of its output ends first.

    For example, a Ctrl-C that requests the run to stop also ends `tee`.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = before = getattr(sys, name)
        if stream is None or isinstance(stream, _Cleaned):
            continue
        with suppress(OSError, AttributeError):  # a notebook's stream
            if stream.fileno() == number:
                stream.flush()
                raw = _Outliving(number, "w", closefd=False)
                buffer = raw if stream.write_through else io.BufferedWriter(raw)
                kept = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
                # A character that the terminal cannot show must not end a run whose model is written.
                kept["errors"] = "backslashreplace" if stream.errors == "strict" else stream.errors
                stream = io.TextIOWrapper(buffer, **kept)
        setattr(sys, name, _Cleaned(stream))
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):  # libraries keep the stream
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                    handler.setStream(getattr(sys, name))
