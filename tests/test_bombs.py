"""Small files that would fill the memory or never end are refused in one line: templates, rows, Parquet, YAML."""

import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, assert_mistake, run_recipe_alone, source_of, write_jsonl

from common.data import chats
from common.data.limited_process import LimitedProcess
from common.data.text import tokenize
from common.errors import UserError

BOMBS = {
    "memory": "{{ 'a' * 10**10 }}",
    "small steps": "{% set n = namespace(y='a') %}{% for i in range(40) %}{% set n.y = n.y + n.y %}{% endfor %}",
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "output": "{{ 'a' * (80 * 2**20) }}",
}
PROBLEMS = {
    "memory": r"needs more than 512 MiB of memory",
    "small steps": r"needs more than 512 MiB of memory",
    "time": r"needs more than 1 s",
    "output": r"writes more than 64 MiB",
}


def peak_mib():
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_chat_template_that_needs_too_much_is_refused_at_its_row(bomb, tokenizer, tmp_path, monkeypatch):
    """Control: the same template without that row is used."""
    seconds = 1 if bomb == "time" else 9
    monkeypatch.setattr(chats, "start_rendering", lambda: LimitedProcess("common.data.chat_rendering", seconds=seconds))
    loop = "{% for m in messages %}{{ m.role }}: {{ m.content }}</>"
    loop += "{% if m.content == 'bomb' %}" + BOMBS[bomb] + "{% endif %}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", loop)
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]}
        for content in ("b", "bomb", "c")
    ]
    before = peak_mib()
    with pytest.raises(UserError, match=rf"bombs.jsonl, line 2: the chat template {PROBLEMS[bomb]}; use") as error:
        tokenize(source_of(tmp_path / "bombs.jsonl", rows), tokenizer, 64, None, tmp_path)
    assert "\n" not in str(error.value) and peak_mib() < before + 100
    assert len(tokenize(source_of(tmp_path / "rest.jsonl", rows[::2]), tokenizer, 64, None, tmp_path)) == 2


def test_a_bomb_in_a_template_file_is_refused_before_the_run(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    path = tmp_path / "bomb.jinja"
    flags = ["--train_file", write_jsonl(tmp_path / "a.jsonl", rows), "--chat_template", path]
    path.write_text(BOMBS["memory"])
    result = run_recipe_alone("lm.py", *flags, "--output_dir", tmp_path / "run")
    assert_mistake(result, r"--chat_template .*bomb.jinja: the template needs more than 512 MiB of memory; fix it")
    assert not (tmp_path / "run").exists()


def test_a_template_is_a_regular_file_of_at_most_a_mebibyte(tmp_path):
    """Control: one byte less is read."""
    loop = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = tmp_path / "a.jinja"
    path.write_text(loop.ljust(1 << 20))
    assert chats.read_chat_template(str(path)).startswith(loop)
    os.mkfifo(tmp_path / "fifo.jinja")
    path.write_text(loop.ljust((1 << 20) + 1))
    for name in ("a.jinja", "fifo.jinja"):
        with pytest.raises(UserError, match=f"{name}: not a regular file of at most 1 MiB"):
            chats.read_chat_template(str(tmp_path / name))


def test_the_process_has_limits_and_neither_torch_nor_secrets(monkeypatch):
    """It is one process for all requests, and ends with the block."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    request = {"probe": "{{ messages[0].content }}"}
    with chats.start_rendering() as process:
        assert [*process.ask(request)] == [["abc", 0, ""]]
        child = psutil.Process(process.process.pid)
        assert [*process.ask(request)] == [["abc", 0, ""]] and process.process.pid == child.pid
        assert child.ppid() == os.getpid() and "HF_TOKEN" not in child.environ()
        assert not [mapping.path for mapping in child.memory_maps() if "/torch/" in mapping.path]
        limits = {kind: child.rlimit(getattr(psutil, f"RLIMIT_{kind}"))[0] for kind in ("FSIZE", "NPROC", "CORE")}
        assert limits == dict.fromkeys(limits, 0)
        assert child.rlimit(psutil.RLIMIT_NOFILE)[0] == 32 and child.rlimit(psutil.RLIMIT_CPU)[0] < 30
    assert not child.is_running()


ENDLESS = """
import sys
from common.data import chats
with chats.start_rendering() as process:
    print(list(process.ask({"probe": "a"})), process.process.pid, flush=True)
    list(process.ask({"probe": sys.argv[1]}))
"""


def test_the_process_ends_when_the_training_process_is_killed():
    """Amid a template that never ends. Control: until then it runs."""
    command = [sys.executable, "-c", ENDLESS, BOMBS["time"]]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline().split()[-1]))
    time.sleep(1)
    assert child.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert not psutil.wait_procs([child], timeout=5)[1]
