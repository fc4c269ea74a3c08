"""Without a package that only some runs need: one line that names it and installs it, and nothing is written."""

import json
import re

import pytest
from conftest import BIN, run, without

# Runs each command in a fork, so that torch and transformers are imported once, and prints its status.
RUN_ALL = """
import json, os, runpy, sys, traceback
import torch, accelerate, transformers.modeling_utils

for name, words in json.loads(sys.argv[1]).items():
    print("CASE", name, file=sys.stderr, flush=True)
    if (child := os.fork()) == 0:
        is_module = words[0] == "-m"
        sys.argv, status = words[is_module:], 0
        try:
            (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print("STATUS", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
"""
MISSING = "bitsandbytes datasets deepspeed evaluate peft plotly zstandard".split()
INSTALL = r"error: .*{} is not installed; pip install {}$"
# The package, the words of the command, and its line if it is worded differently.
CASES = {
    "dataset": ("datasets", ["recipes/lm.py", "--dataset_name", "some/name"]),
    "images": ("datasets", ["recipes/vision.py", "--dataset_name", "some/name"]),
    "zst": (
        "zstandard",
        ["recipes/lm.py", "--train_file", "DIR/a.jsonl.zst"],
        "a.jsonl.zst: .*; pip install zstandard",
    ),
    "optimizer": ("bitsandbytes", ["recipes/lm.py", "--optimizer", "adamw8bit"]),
    "adapter": ("peft", ["recipes/lm.py", "--lora_rank", "4", "--model_name_or_path", "MODEL"]),
    "metric": (
        "evaluate",
        ["recipes/vision.py", "--metric", "DIR/accuracy.py"],
        "--metric: .* evaluate cannot be imported .*; pip install evaluate",
    ),
    "report": ("plotly", ["-m", "tools.compare", "DIR"]),
}
QUANTIZED = ["recipes/lm.py", "--lora_rank", "4", "--quantize", "nf4", "--model_name_or_path", "MODEL"]


def run_all(commands, directory, model_dir, **env):
    """By name, the exit status and the lines of each command. Each writes to its own directory, named like it."""
    (directory / "a.jsonl.zst").write_bytes(b"not empty")
    (directory / "accuracy.py").write_text("")
    names = {"DIR": str(directory), "MODEL": str(model_dir)}
    words = {name: [re.sub("DIR|MODEL", lambda m: names[m[0]], word) for word in command] for name, command in commands}
    for name, command in words.items():
        if command[0] != "-m":
            command += ["--output_dir", str(directory / name), "--num_updates", "2"]
    result = run([BIN / "python", "-c", RUN_ALL, json.dumps(words)], **env)
    parts = re.findall(r"CASE (\w+)\n(.*?)STATUS (-?\d+)\n", result.stderr, re.DOTALL)
    assert len(parts) == len(words), result.stderr
    return {name: (int(status), text.splitlines()) for name, text, status in parts}


@pytest.fixture(scope="module")
def endings(tmp_path_factory, model_dir):
    directory = tmp_path_factory.mktemp("missing")
    commands = [(name, command) for name, (_, command, *_) in CASES.items()]
    endings = run_all(commands, directory, model_dir, **without(*MISSING))
    return endings | run_all([("quantized", QUANTIZED)], directory, model_dir, **without("bitsandbytes")), directory


@pytest.mark.parametrize("case", [*CASES, "quantized"])
def test_a_missing_package_is_one_line_that_installs_it(case, endings):
    package, _, *pattern = CASES.get(case, ("bitsandbytes", QUANTIZED))
    status, lines = endings[0][case]
    errors = [line for line in lines if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1 and not any("Traceback" in line for line in lines), lines
    assert re.search(*(pattern or [INSTALL.format(package, package)]), errors[0])
    assert not (endings[1] / case).exists()


def test_extensions_need_deepspeed():
    """The build prints the line and goes on: a machine without it needs none of them."""
    result = run([BIN / "python", "-m", "common.parallel.extensions"], **without("deepspeed"))
    assert result.returncode == 0 and "deepspeed is not installed; pip install deepspeed" in result.stdout
