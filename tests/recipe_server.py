"""Starts Python programs in processes that need not import torch first: a launch takes a moment, and not ten seconds.

    python tests/recipe_server.py DIRECTORY

writes DIRECTORY/python, which is run as Python is. It hands its script or module, its environment and its streams to
this server, which forks a process that is this program from its first line on. DIRECTORY/python passes signals on to
that process and ends as it does; the link DIRECTORY/PID leads from its number to that of the process. What such a
process starts with its `sys.executable` starts in the same way: workers of a launcher, the planner of a dry run. The
other programs of DIRECTORY are those beside the real Python. It is the real Python that runs where a forked process
would differ: with most options, with another value of a variable that is read when a library is imported, for a
library's script. A test that kills a launcher alone must take the real one itself: forked workers do not know theirs.
A forked run draws no curves unless PYTEST_CURVES is set: to draw takes longer than to train so small a model. The
server ends when its stdin does.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = """accelerate.commands.launch accelerate.utils.deepspeed bitsandbytes datasets deepspeed
    matplotlib.pyplot peft sklearn.datasets torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.run
    torch.utils.tensorboard transformers.models.llama.modeling_llama""".split()
# These initialise CUDA when they are imported on a machine with a GPU, and CUDA then works in no forked process.
ASK_THE_GPU = ("bitsandbytes", "deepspeed", "peft")
# How the names of variables begin that launchers, recipes and tests set, and that nothing reads when it is imported;
# with a "=" it is the whole name. (DeepSpeed's accelerator is the one that it found here.)
READ_WHEN_USED = tuple(
    """ACCELERATE_ CHECK= COMET_ CONFIG= CUDA_MODULE_ CUDA_VISIBLE_ DS_ACCELERATOR ENVIRONMENT= FLAGS= FSDP_
    GLOO_SOCKET_ GROUP_ HF_ENDPOINT= HF_TOKEN HOSTNAME= JOB_COMPLETION_INDEX= KMP_ LAUNCH_ LOCAL_ MAIN_IP=
    MASTER_ MV2_ NCCL_DEBUG NEPTUNE_ NODES= OLDPWD= OMPI_ OUTPUT_DIR= PARALLELISM_ PATH PET_ PMI_ PORT= PROCESSES
    PWD= PYTEST_ PYTHON= PYTHONPATH RANK ROLE_ SHLVL= SKYPILOT_ SLURM SRUN_ TIMEOUT= TMPDIR= TRAIN_FILE=
    TOKENIZERS_PARALLELISM TORCHELASTIC_ TORCH_NCCL_ TQDM_DISABLE WANDB_ WORLD_SIZE XDG_CACHE_HOME= _=
    http_proxy=""".split()
)
TOOLS = ("tools.check", "tools.checkpoint", "tools.compare", "tools.plan")
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

words, env, usual, options = sys.argv[1:], dict(os.environ), {env!r}, []
while words[:1] in (["-u"], ["-P"]):
    options.append(words.pop(0))
if words[:2] == ["-m", "accelerate.commands.launch"]:
    words[:2] = [{launcher!r}]
is_ours = words[:1] == ["-m"] and words[1].startswith(("common.", "tools."))
if words[:1] == [{launcher!r}]:  # which computes nothing itself, and sets the variable for its workers
    usual["OMP_NUM_THREADS"] = env.get("OMP_NUM_THREADS")
if words and not words[0].startswith("-"):
    is_ours = not words[0].startswith({libraries!r}) or os.path.basename(words[0]) == "accelerate-launch"
other = [name for name in env.keys() | usual.keys() if env.get(name) != usual.get(name)]
server = socket.socket(socket.AF_UNIX)
try:
    if not is_ours or any(not f"{{name}}=".startswith({read_when_used!r}) for name in other):
        raise OSError
    server.connect({socket!r})
except OSError:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
passed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)]
ignored = [int(number) for number in passed_on if signal.getsignal(number) == signal.SIG_IGN]
for number in passed_on:  # also one that is ignored: a program may have reasons to change that
    signal.signal(number, lambda number, _: server.send(bytes([number])))
request = json.dumps([os.getpid(), blocked, ignored, options, words, os.getcwd(), env]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
status = int(server.recv(8) or b"1")
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
ACCELERATE = """#!/bin/sh
[ "$1" = launch ] || exec {python} -m accelerate.commands.accelerate_cli "$@"
shift
exec "$(dirname "$0")/python" {launcher} "$@"
"""


def import_installed(name):
    """Imports a module, if the packages that it needs are installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if find_spec(error.name.partition(".")[0]) is not None:
            raise


def import_all():
    sys.path.insert(0, str(ROOT))
    import common
    from common.parallel.process_checks import find_unseen_gpu

    skipped = ASK_THE_GPU if find_unseen_gpu() else ()
    for name in IMPORTED:
        if name not in skipped:
            import_installed(name)
    names = [module.name for module in pkgutil.walk_packages(common.__path__, "common.")]
    for name in TOOLS:
        names += [module.name for module in pkgutil.iter_modules(importlib.import_module(name).__path__, f"{name}.")]
    for name in names:
        if not name.endswith("__main__"):
            import_installed(name)
    if "deepspeed" in sys.modules:
        import cpuinfo

        from common.internals.deepspeed import measure_cpu_once

        measure_cpu_once()
        cpuinfo.get_cpu_info()
    from common.models.load import write_sample
    from common.versions import versions

    write_sample.__wrapped__.__defaults__ = (4,)  # tokens; 100 take as long as all else that a short run does
    versions.cache_clear()  # a test may have installed others
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, and keeps them
    del sys.path[0]
    gc.freeze()


def write_client(directory, env, env_of_imports):
    beside = Path(sys.executable).parent
    facts = {"python": sys.executable, "socket": f"{directory}/socket", "libraries": sys.prefix + os.sep}
    facts |= {"launcher": str(beside / "accelerate-launch")}
    facts |= {"env": env, "read_when_used": (*READ_WHEN_USED, *env_of_imports)}
    for name, text in {"python": CLIENT.format(**facts), "accelerate": ACCELERATE.format(**facts)}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o700)
    for path in beside.iterdir():
        if not (directory / path.name).exists():
            (directory / path.name).symlink_to(path)


def kill_all(processes):
    """With their children. Workers of a launcher lead sessions of their own: no signal to its group reaches them."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):  # it may be ending by itself
                    child.kill()


def read_request(client):
    """What it asks for, None if it was killed before it had done so; and its streams."""
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    size, text, more = int.from_bytes(head, "big"), b"", b"more"
    while more and len(text) < size:
        text += (more := client.recv(size - len(text)))
    return json.loads(text) if more and len(streams) == 3 else None, streams


def serve(directory):
    """Forks processes and waits for their ends, until stdin ends. In a forked one, returns its request."""
    listener, events = socket.socket(socket.AF_UNIX), selectors.DefaultSelector()
    listener.bind(f"{directory}/socket")
    listener.listen(64)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients, links = {}, {}  # by the process that was forked for it
    for source in (listener, woken, 0):
        events.register(source, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in events.select():
            source = key.fileobj
            if source == 0:
                for pid in clients:
                    kill_all([psutil.Process(pid)])
                os._exit(0)
            elif source == woken:
                os.read(woken, 4096)
                while clients and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    client = clients.pop(ended[0])
                    links.pop(ended[0]).unlink(missing_ok=True)
                    if client in events.get_map():
                        events.unregister(client)
                    with contextlib.suppress(OSError):  # it may have been killed
                        client.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())
                    client.close()
            elif source is listener:
                client, _ = listener.accept()
                request, streams = read_request(client)
                pid = os.fork() if request else None
                if pid != 0:
                    for stream in streams:
                        os.close(stream)
                    if pid:
                        clients[pid], links[pid] = client, directory / str(request[0])
                        links[pid].unlink(missing_ok=True)
                        links[pid].symlink_to(str(pid))
                        events.register(client, selectors.EVENT_READ)
                    continue
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                for number in (woken, wakes, *streams):
                    os.close(number)
                for one in (listener, events, client, *clients.values()):
                    one.close()
                return request
            elif source in clients.values():
                pid = next(pid for pid, client in clients.items() if client is source)
                signals = b""
                with contextlib.suppress(ConnectionResetError):
                    signals = source.recv(16)
                for number in signals:
                    os.kill(pid, number)
                if not signals:  # it was killed
                    kill_all([psutil.Process(pid)])
                    events.unregister(source)


def be_child_of(pid):
    """The ancestors of this process are those of its `python`: recipes ask them which launch is theirs."""
    asked_by = os.environ["PYTEST_ASKED_BY"] = f"{pid} {os.environ.get('PYTEST_ASKED_BY', '')}"
    parents = psutil.Process.parents

    def and_those_of_python(process):
        return parents(process) + [one for pid in asked_by.split() for one in with_parents(psutil.Process(int(pid)))]

    def with_parents(process):
        return [process, *parents(process)]

    psutil.Process.parents = and_those_of_python


def enter_namespaces_of(pid):
    """Its network and its host name: a test may have given it others."""
    for kind in ("net", "uts"):
        with open(f"/proc/{pid}/ns/{kind}") as theirs, open(f"/proc/self/ns/{kind}") as ours:
            if not os.path.sameopenfile(theirs.fileno(), ours.fileno()):
                assert ctypes.CDLL(None).setns(theirs.fileno(), 0) == 0


def set_signals(blocked, ignored):
    """As they were set for the process that asked."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    for number in ignored:
        if number != signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def leave(code):
    """Ends with what `sys.exit` was given, as Python does, but frees nothing: to take apart all that the server has
    imported takes a second of processor time. Returns if a stream cannot be flushed; then Python says so."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit((code or 0) & 0xFF)
    sys.exit(code)


def become(directory, paths, pid, blocked, ignored, options, words, cwd, env):
    """The program that a new Python with these words would be, started by a process."""
    os.setsid()
    enter_namespaces_of(pid)
    set_signals(blocked, ignored)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    be_child_of(pid)
    if "PYTEST_CURVES" not in env:
        from common.report import progress

        progress.FEWEST_TO_DRAW = math.inf
    os.environ["PYTEST_REAL_PYTHON"], sys.executable = sys.executable, f"{directory}/python"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="-u" in options)
    is_module = words[0] == "-m"
    places = [] if "-P" in options else [str(Path(cwd) if is_module else Path(words[0]).resolve().parent)]
    places += filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if places and not Path(places[0]).is_relative_to(ROOT):  # a copy may have a common/ of its own
        for name in [name for name in sys.modules if name.partition(".")[0] in ("common", "tools")]:
            del sys.modules[name]
    sys.path[:] = [*places, *paths]
    sys.argv = words[is_module:]
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        leave(end.code)
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        leave(1)
    leave(0)


def main():
    directory, paths, env = Path(sys.argv[1]), sys.path[1:], dict(os.environ)
    import_all()
    env_of_imports = {name: value for name, value in os.environ.items() if env.get(name) != value}
    write_client(directory, env, env_of_imports)
    *request, env = serve(directory)
    become(directory, paths, *request, env_of_imports | env)


if __name__ == "__main__":
    main()
