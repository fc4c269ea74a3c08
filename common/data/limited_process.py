"""Runs code on untrusted data in a process with limits of the operating system on memory, time, files and processes.

The process is started anew, so that it has no copy of the training process's memory. It gets requests and sends answers
as JSON, a line each, over pipes; it ends when its input is closed, also because the training process was killed. After
a block it waits some seconds for the next block with the same module and limits, because its imports take a second.

    with LimitedProcess("common.data.chat_rendering") as process:  # in the training process
        for text, spans in process.ask(request): ...

    serve(answer)  # in the other process; answer(request) yields values
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from common.errors import UserError
from common.process import this_process

MEMORY_BYTES = 512 << 20  # in addition to the modules, and to REQUEST_FACTOR times the size of a request
REQUEST_FACTOR = 32
SECONDS = 20  # processor time per answer
ANSWER_BYTES = 64 << 20  # largest answer, in addition to the size of a request
IDLE_SECONDS = 5  # without a request, the process ends
IDLE_STATUS = 75  # its exit status then
# Other variables, such as access tokens, are hidden from the process.
ENVIRONMENT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONDONTWRITEBYTECODE",
    "VIRTUAL_ENV",
    "LANG",
    "LC_ALL",
    "TZ",
)


class LimitExceeded(Exception):
    """The process reached a limit; the message, such as "needs more than 20 s", has the data as its subject."""


class LimitedProcess:
    """A process that runs `serve` of a module; it starts at the first request.

    Args:
        module: its full name, such as "common.data.chat_rendering".
        memory_bytes, seconds, answer_bytes, idle_seconds: the limits.
    """

    def __init__(
        self,
        module: str,
        memory_bytes: int = MEMORY_BYTES,
        seconds: int = SECONDS,
        answer_bytes: int = ANSWER_BYTES,
        idle_seconds: int = IDLE_SECONDS,
    ) -> None:
        self.module, self.limits = module, [memory_bytes, seconds, answer_bytes, idle_seconds]
        self.process: subprocess.Popen[bytes] | None = None
        self.is_asked = False  # and has not given all answers

    def __enter__(self) -> "LimitedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        waiting = this_process().waiting
        if self.process is not None and not self.is_asked and self._key() not in waiting:
            waiting[self._key()], self.process = self.process, None
        self.close()

    def _key(self) -> Any:
        return os.getpid(), self.module, *self.limits

    def close(self) -> None:
        """Ends the process, if it was started."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()

    def ask(self, request: Any) -> Iterator[Any]:
        """Yields the answers to a request, JSON values. Ends the process if the caller does not read all answers.

        Raises UserError that the module raised, and LimitExceeded.
        """
        line = _to_line(request)
        most = self.limits[2] + len(line) + 64
        self.is_asked = True
        try:
            answer = self._first_answer(line, most)
            while answer.endswith(b"\n"):
                kind, value = json.loads(answer)
                if kind == "end":
                    self.is_asked = False
                    return
                if kind != "value":
                    raise (UserError if kind == "error" else LimitExceeded)(value)
                yield value
                answer = self._read(most)
            raise LimitExceeded(_larger(most) if answer else self._death())
        finally:
            if self.is_asked:
                self.close()

    def _first_answer(self, line: bytes, most: int) -> bytes:
        """Sends a request and returns the first answer. A process that ended for want of requests is replaced."""
        while True:
            process = self.process = self.process or this_process().waiting.pop(self._key(), None) or self._start()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has died
                process.stdin.write(line)
                process.stdin.flush()
            if (answer := self._read(most)) or process.wait() != IDLE_STATUS:
                return answer
            self.close()

    def _read(self, most: int) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.readline(most)

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"}
        # Each thread would reserve memory, and on some machines there are hundreds.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"
        command = [sys.executable, "-m", self.module, json.dumps(self.limits)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _death(self) -> str:
        assert self.process is not None
        status = self.process.wait()
        if status == -signal.SIGXCPU:
            return f"needs more than {self.limits[1]} s"
        cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"ended the process that has at most {self.limits[0] >> 20} MiB ({cause})"


def _larger(size: int) -> str:
    return f"writes more than {size >> 20} MiB"


def _type_of(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _to_line(value: Any, default: Callable[[Any], Any] = _type_of) -> bytes:
    """Returns a value as a line of JSON, with `default(object)` for an object that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def serve(
    answer: Callable[[Any], Iterator[Any]], threads: bool = False, default: Callable[[Any], Any] = _type_of
) -> None:
    """Answers requests until standard input ends; the imports must be complete, because the limits do not count them.

    Args:
        answer: yields the answers to a request. Its UserErrors are reported; other errors are bugs.
        threads: whether libraries may start threads; otherwise no thread or process can be started.
        default: returns a JSON value for an object of an answer that JSON does not have.
    """
    import resource  # not on Windows, where only this process would need it
    import select
    import threading

    memory_bytes, seconds, answer_bytes, idle_seconds = json.loads(sys.argv[1])

    def end_with_input() -> None:
        watched = select.poll()
        watched.register(0, 0)
        watched.poll()
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # only `send` writes answers
    os.dup2(1, 2)
    used = psutil.Process().memory_info().vms

    def limit(kind: int, most: int) -> None:
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))

    limits = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 32}
    for kind, most in (limits | ({} if threads else {resource.RLIMIT_NPROC: 0})).items():
        limit(kind, most)

    def send(kind: str, value: Any, most: int) -> None:
        if len(line := _to_line([kind, value], default)) > most:
            line = _to_line(["limit", _larger(most)])
        answers.write(line)
        answers.flush()  # so that the number of answers identifies the data that exceeds a limit
        limit(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + 1 + seconds)

    while line := _next_request(requests, idle_seconds):
        memory, size = memory_bytes + REQUEST_FACTOR * len(line), answer_bytes + len(line)
        limit(resource.RLIMIT_AS, used + memory)
        limit(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + 1 + seconds)
        try:
            for value in answer(json.loads(line)):
                send("value", value, size)
        except UserError as error:
            send("error", str(error), size)
        except MemoryError:
            limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)  # the traceback still holds the memory
            send("limit", f"needs more than {memory >> 20} MiB of memory", size)
        else:
            send("end", None, size)
        limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)  # the next request may be larger


def _next_request(requests: Any, idle_seconds: int) -> bytes:
    import select

    watched = select.poll()
    watched.register(0, select.POLLIN)
    if not watched.poll(idle_seconds * 1000):
        os._exit(IDLE_STATUS)
    return requests.readline()
