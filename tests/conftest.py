"""Fixtures: a command line to the real recipes through `accelerate launch`, and small data and models to feed them."""

import ast
import atexit
import functools
import json
import math
import os
import re
import select
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """All caches in one temporary directory: the tests neither use nor leave what is in the user's.

    But for what DeepSpeed compiles, which takes minutes.
    """
    from torch.utils.cpp_extension import _get_build_directory

    os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(_get_build_directory("deepspeed_shm_comm", verbose=False)).parent)
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"


class Server:
    """tests/recipe_server.py, which runs scripts in processes that need not import torch first."""

    def __init__(self):
        command = [BIN / "python", ROOT / "tests/recipe_server.py"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.directory = tempfile.TemporaryDirectory()
        atexit.register(self.close)

    def run(self, command, env, timeout):
        files = [Path(self.directory.name, name) for name in ("stdout", "stderr")]
        request = {"command": command, "env": env, "stdout": str(files[0]), "stderr": str(files[1])}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        ended, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not ended:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        status = int(self.process.stdout.readline())
        result = subprocess.CompletedProcess(command, status, *(path.read_text() for path in files))
        if not ended:
            raise subprocess.TimeoutExpired(command, timeout, result.stdout, result.stderr)
        return result

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)
        self.directory.cleanup()


@functools.cache
def server():
    return Server()


def run(command, cwd=ROOT, timeout=300, **env):
    """The finished process of a command, its output as text. Past `timeout` seconds it ends with all its children."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "5"} | {k: str(v) for k, v in env.items()}
    command = [str(part) for part in command]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # Workers of a launcher lead sessions of their own: a signal to its process group would not reach them.
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def run_recipe_alone(name, *flags, **env):
    """A recipe by itself, with its own exit status: `accelerate launch` reports 1 for any failure of the script."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in env.items()}
    return server().run([f"recipes/{name}", *map(str, flags)], env, timeout=300)


def assert_mistake(result, *patterns, lines=1):
    """A recipe that ended with a user's mistake: our own lines, status 2."""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert len(errors) == lines, result.stderr
    for pattern in patterns:
        assert re.search(pattern, "\n".join(errors)), f"{pattern} is not in: {errors}"


def launch_command(config, *options):
    """`accelerate launch` with a shipped config, by its name, or with one at a path; then comes the script."""
    path = config if isinstance(config, Path) else ROOT / f"accelerate_configs/{config}.yaml"
    return [BIN / "accelerate", "launch", "--config_file", path, *options]


def launch(*flags, config="cpu", script="recipes/lm.py", processes=None, cwd=ROOT, **env):
    """Runs a recipe as a user does, with a shipped config, and expects success."""
    command = launch_command(config, *(["--num_processes", processes] if processes else []))
    result = run([*command, script, *flags], cwd=cwd, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def assert_refused(result, *patterns, lines=1):
    """A launch that ended with our own lines: `accelerate launch` reports 1, whatever the script's status is."""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode != 0 and errors, result.stdout + result.stderr
    assert lines is None or len(errors) == lines, errors
    for pattern in patterns:
        assert re.search(pattern, "\n".join(errors)), f"{pattern} is not in: {errors}"


def read_metrics(output_dir):
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]


def relative_difference(gradients, reference):
    """Norm of the difference of two lists of tensors, as a share of the reference's."""
    difference = sum((a - b).square().sum() for a, b in zip(gradients, reference, strict=True))
    return math.sqrt(difference / sum(b.square().sum() for b in reference))


def stdlib_functions(limit):
    """Source text of functions of the standard library, of many lengths."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                texts.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if len(texts) >= limit:
            return texts[:limit]


@pytest.fixture(scope="session")
def functions_file(tmp_path_factory):
    """JSONL of 60 functions: rows of very different lengths."""
    path = tmp_path_factory.mktemp("data") / "functions.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in stdlib_functions(60)))
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, functions_file):
    """A Llama of 2 layers and width 32 with dropout 0 and its tokenizer, as `save_pretrained` leaves them."""
    return make_model_dir(tmp_path_factory.mktemp("model"), functions_file)


def make_model_dir(path, text_file, **settings):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from common.data import Source, train_tokenizer

    tokenizer = train_tokenizer(Source(files=(str(text_file),)), 384)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def extensions():
    """DeepSpeed's extensions, built before a test waits for them; `make test` has done it."""
    result = run([BIN / "python", "-m", "common.extensions"], timeout=1500)
    assert result.returncode == 0, result.stdout + result.stderr


def equivalence_flags(functions_file, model_dir, output_dir, *more):
    """Ten updates with accumulation, and with clipping and weight decay that count."""
    base = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--shape", "examples"]
    base += ["--sequence_length", 64, "--num_updates", 10, "--global_batch_size", 8, "--micro_batch_size", 2]
    base += ["--learning_rate", 1e-3, "--weight_decay", 1.0, "--max_grad_norm", 0.5, "--output_dir", output_dir]
    return [str(part) for part in [*base, *more]]


@pytest.fixture(scope="session")
def reference(functions_file, model_dir, tmp_path_factory):
    """One process in float32: its metrics and its final weights."""
    from safetensors.torch import load_file

    out = tmp_path_factory.mktemp("reference") / "run"
    launch(*equivalence_flags(functions_file, model_dir, out))
    return read_metrics(out), load_file(out / "model/model.safetensors")
