"""Runs recipes in processes of their own that need not import torch first: a mistake is told in a moment.

Reads a line of JSON for each run, {"command": [script, flags ...], "cwd", "env", "stdout", "stderr"}, forks a process
that is the script from its first line on, and answers with its exit status. `env` is what differs from its own
environment, null for what is not there. Under `accelerate launch`, the scripts are what that launches.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import datasets  # noqa: E402, F401
import transformers  # noqa: E402, F401

from common import arguments  # noqa: E402, F401
from common.data import text  # noqa: E402, F401
from common.models import load  # noqa: E402, F401
from common.parallel import connect, launch  # noqa: E402, F401
from common.report import tracking  # noqa: E402, F401


def become(request):
    """The forked process: never returns."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
        os.chdir(request["cwd"])
        for name, value in request["env"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        sys.argv = request["command"]
        sys.path[:] = [str(Path(sys.argv[0]).resolve().parent), *(p for p in sys.path if p != str(ROOT))]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
