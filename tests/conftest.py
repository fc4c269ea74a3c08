"""Fixtures: a command line to the real recipes through `accelerate launch`, and small data and models to feed them."""

import ast
import atexit
import functools
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from recipe_server import TOOLS, kill_all

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(os.environ.get("PYTEST_REAL_PYTHON", sys.executable)).parent


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """All caches in one temporary directory: the tests neither use nor leave what is in the user's.

    But for what DeepSpeed compiles, which takes minutes.
    """
    from torch.utils.cpp_extension import _get_build_directory

    os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(_get_build_directory("deepspeed_shm_comm", verbose=False)).parent)
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tests run in several processes: if each had more threads, these would spend most of the time waiting."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def environment():
    """A test leaves the environment as it found it: another test of the same process would read what it set.

    Accelerate's state too, which refuses an Accelerator with other settings. A test without one does not import it.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if "accelerate.state" in sys.modules:
        from common.internals.accelerate_state import forget_state

        forget_state()


# The files that take longest come first, so that at the end no worker has one alone.
LONG = """resume token_budget plan checkpoint rows modes multi_node layouts adapters stops profile plan_limits slurm
    precision long_sequence copies quantization push docs activation_checkpointing vision check malformed lm liveness
    epochs sequence_parallel embed classify moe report kills use mixed metric meta tensor_parallel waits techniques
    benchmarks launch""".split()


# Of `make quick`, which skips what has not begun in time; there the long files come last.
TIME_IS_OVER = float(os.environ.get("NO_TEST_BEGINS_AFTER", "inf"))


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.stem.removeprefix("test_")
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place, reverse=TIME_IS_OVER < math.inf)


def pytest_runtest_setup():
    if time.time() > TIME_IS_OVER:
        pytest.skip("no time left for it in make quick")


class FileProgress:
    """A line for each file of tests that is done: its time, its failures, and how many files are left."""

    def __init__(self, terminal):
        self.terminal = terminal
        self.left, self.seconds, self.failed = Counter(), Counter(), Counter()

    def pytest_collection_finish(self, session):
        self.left = Counter(item.nodeid.partition("::")[0] for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):  # every worker collects all
        self.left = self.left or Counter(name.partition("::")[0] for name in ids)

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("::")[0]
        self.seconds[name] += report.duration
        self.failed[name] += report.failed
        self.left[name] -= report.when == "teardown"
        if report.when == "teardown" and self.left[name] == 0:
            failed = f", {self.failed[name]} failed" if self.failed[name] else ""
            files = f"{sum(not left for left in self.left.values())} of {len(self.left)} files"
            self.terminal.write(f"\n{name}: {self.seconds[name]:.0f} s{failed} ({files})\n")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a job in the background; what tests start inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):  # not in a worker
        config.pluginmanager.register(FileProgress(terminal))


# Debian's packages without which tests are skipped; .ci/run installs them.
PACKAGES = ("chromium", "chromium-driver", "g++", "iproute2", "libaio-dev", "munge", "openssh-server", "slurm-wlm")

BROWSER = {"chromium": "chromium", "chromium-driver": "chromedriver"}  # the programs of two of them


def pytest_terminal_summary(terminalreporter):
    """What was skipped and why, and what would bring it."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    if not reasons:
        return
    told = "\n".join(f"{count} x {reason.removeprefix('Skipped: ')}" for reason, count in sorted(reasons.items()))
    missing = [package for package in PACKAGES if re.search(rf"(?<![\w-]){re.escape(package)}(?![\w-])", told)]
    terminalreporter.section("skipped on this machine")
    terminalreporter.line(told)
    if missing:
        terminalreporter.line(f"to run them, as root: apt install {' '.join(missing)}")
    if packages := [name for name in REQUIREMENTS if re.search(rf"needs (.*, )?{name}(,|$)", told, re.MULTILINE)]:
        terminalreporter.line(f"to run them: pip install {' '.join(packages)}")
    if "CUDA" in told:
        terminalreporter.line("to run those of GPUs, on a machine with one: make gpu")


REQUIREMENTS = re.findall(r"^([\w-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)


def missing_package(text):
    """The package of requirements.txt that an error says is not installed, if it is not; otherwise None."""
    names = re.findall(r"No module named '(\w+)|pip3? install ([\w-]+)", text)
    names = [name.replace("sklearn", "scikit-learn") for pair in names for name in pair]
    return next((name for name in names if name in REQUIREMENTS and not is_installed(name)), None)


@functools.cache
def is_installed(package):
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def skip_for_package(report, path):
    """Of a test, or a file of tests, that failed because a package is not installed."""
    if report.failed and (package := missing_package(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: needs {package}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return skip_for_package((yield), collector.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return skip_for_package((yield), item.path)


@functools.cache
def is_missing(package):
    """Whether what DeepSpeed and torch.compile build with is missing, "g++" or "libaio-dev", or a browser's package."""
    if package in REQUIREMENTS:
        return not is_installed(package)
    if package in BROWSER:
        return shutil.which(BROWSER[package]) is None
    if package == "g++":
        return shutil.which(os.environ.get("CXX", "c++")) is None
    command = [os.environ.get("CC", "cc"), "-E", "-include", "libaio.h", "-x", "c", "/dev/null"]
    return is_missing("g++") or subprocess.run(command, capture_output=True).returncode != 0


def need(*packages):
    if missing := [package for package in packages if is_missing(package)]:
        pytest.skip(f"needs {', '.join(missing)}")


@functools.cache
def quick_python():
    """A Python whose programs need not import torch first: see tests/recipe_server.py."""
    if Path(sys.executable).parent != BIN:  # this program was itself started so
        return sys.executable
    directory = tempfile.TemporaryDirectory()
    command = [BIN / "python", ROOT / "tests/recipe_server.py", directory.name]
    server = subprocess.Popen(command, env=base_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert b"ready\n" in server.stdout  # libraries, too, may print a line

    def close():
        server.stdin.close()
        server.wait()
        directory.cleanup()

    atexit.register(close)
    return f"{directory.name}/python"


def base_env(**env):
    """This process's environment with these variables, and without one that is None."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "5"} | env
    return {name: str(value) for name, value in env.items() if value is not None}


def without(*packages):
    """The variables of a process that finds these packages not installed. It is a real Python, which starts slowly."""
    return {"PYTHONPATH": ROOT / "tests/without", "WITHOUT_PACKAGES": " ".join(packages)}


def is_script(word):
    """Whether it is the path of one of our own scripts, and not of a copy."""
    return word.endswith(".py") and (ROOT / word).parent in (ROOT / "recipes", ROOT / "benchmarks", ROOT / "tests")


def quickly(command):
    """The words of a command, by `quick_python` where it is `accelerate launch`, a tool, a recipe or a benchmark.

    `accelerate launch` goes by its other name, under which it does not import what else `accelerate` can do.
    """
    words = [str(part) for part in command]
    if words[:2] == [str(BIN / "accelerate"), "launch"]:
        return [quick_python(), str(BIN / "accelerate-launch"), *words[2:]]
    if words[:1] == [str(BIN / "accelerate-launch")]:
        return [quick_python(), *words]
    if words[0] == str(BIN / "python"):
        is_ours = words[2] in TOOLS if words[1] == "-m" else is_script(words[1])
        return [quick_python() if is_ours else words[0], *words[1:]]
    return words


def run(command, cwd=ROOT, timeout=300, **env):
    """The finished process of a command, its output as text. Past `timeout` seconds it ends with all its children."""
    command = quickly(command)
    env, pipe = base_env(**env), subprocess.PIPE
    with subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_all([psutil.Process(process.pid)])
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def told(result):
    """What a failed command printed last, of a launch without the launcher's own traceback: a report may be cut."""
    scripts_own, *_ = result.stderr.split('Traceback (most recent call last):\n  File "' + str(BIN / "accelerate"))
    return result.stdout[-2000:] + scripts_own[-8000:]


def run_recipe_alone(name, *flags, **env):
    """A recipe by itself, with its own exit status: `accelerate launch` reports 1 for any failure of the script."""
    return run([quick_python(), f"recipes/{name}", *flags], **env)


def assert_mistake(result, *patterns, lines=1):
    """A recipe that ended with a user's mistake: our own lines, status 2."""
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert_refused(result, *patterns, lines=lines)


def launch_command(config, *options):
    """`accelerate launch` with a shipped config, by its name, or with one at a path; then comes the script."""
    path = config if isinstance(config, Path) else ROOT / f"accelerate_configs/{config}.yaml"
    return [BIN / "accelerate", "launch", "--config_file", path, *options]


def launch(*flags, config="cpu", script="recipes/lm.py", check=True, **env):
    """Runs a recipe as a user does, with a shipped config, and expects success unless told otherwise."""
    result = run([*launch_command(config), script, *flags], **env)
    assert not check or result.returncode == 0, told(result)
    return result


def assert_refused(result, *patterns, lines=1):
    """A launch that ended with our own lines: `accelerate launch` reports 1, whatever the script's status is.

    With several processes, the launcher's traceback follows; that of a recipe ends with our line too.
    """
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    if "traceback : none, because this is a user error" in result.stderr:
        last = result.stderr.rstrip("=\n").splitlines()[-1]
        assert last.startswith("  error: ") and last.removeprefix("  error: ") in "\n".join(errors), result.stderr
    assert result.returncode != 0 and errors, result.stdout + result.stderr
    assert lines is None or len(errors) == lines, errors
    for pattern in patterns:
        assert re.search(pattern, "\n".join(errors)), f"{pattern} is not in: {errors}"


def recipe_arguments(*flags):
    """The flags that every recipe shares, as one that reads text has them when it checks its launch."""
    from common import argument_checks, arguments
    from common.parallel.launch import started_world_size
    from common.training.process_grid import ProcessGrid
    from common.training.recipe_traits import Traits

    parser = arguments.recipe_parser("")
    args = parser.parse_args([str(flag) for flag in ("--learning_rate", 1e-3, *flags)])
    assert argument_checks.check_arguments(args, True, Traits(size_flags=()), ProcessGrid(started_world_size())) == []
    return args


def read_metrics(output_dir):
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]


def our_collectives(path, processes):
    """For each update, where the repository's own collectives were called, as `count_collectives` of a launch wrote it.

    Equal on all ranks; with the mode's own they are all that the process groups counted.
    """
    ranks = [json.loads(Path(f"{path}-{rank}.json").read_text()) for rank in range(processes)]
    assert all(len(update["ours"]) + update["others"] == update["all"] for updates in ranks for update in updates)
    ours = [[update["ours"] for update in updates] for updates in ranks]
    assert ours == ours[:1] * processes
    return ours[0]


def relative_difference(gradients, reference):
    """Norm of the difference of two lists of tensors, as a share of the reference's."""
    difference = sum((a - b).square().sum() for a, b in zip(gradients, reference, strict=True))
    return math.sqrt(difference / sum(b.square().sum() for b in reference))


def specs_script(recipe, runs, directory, name="specs"):
    """The script and its argument for several runs, one after the other.

    runs: of each its flags, changes, and recipe if it is another. name: of the file in `directory`.
    """
    specs = [
        {"recipe": f"recipes/{(*own, recipe)[0]}.py", "flags": [str(flag) for flag in flags], "changes": changes}
        for flags, changes, *own in runs
    ]
    path = Path(directory) / f"{name}.json"
    path.write_text(json.dumps(specs))
    return [ROOT / "tests/run_recipe.py", path]


def specs_command(recipe, runs, directory, config="cpu", *options):
    """A launch of `specs_script`."""
    return [*launch_command(config, *options), *specs_script(recipe, runs, directory, f"{recipe}-{Path(config).stem}")]


def run_specs(recipe, runs, directory, config="cpu", *options, check=True, **env):
    """Runs what `specs_command` makes, without a GPU, and expects success unless told otherwise."""
    env = {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": 1, "timeout": 900} | env
    result = run(specs_command(recipe, runs, directory, config, *options), **env)
    assert not check or result.returncode == 0, told(result)
    return result


def run_in_float64(recipe, cuts, directory):
    """(gradients of the first update, metrics, output directory) by name, of a launch for each layout.

    cuts: by name, the layout, the flags and the changes of a run, and its recipe if it is another. A layout: a number
    of processes, or a config and one. A change that is None leaves it out, such as float64 itself.
    """
    import torch

    def mode(layout):
        if isinstance(layout, int):
            layout = ("cpu" if layout == 1 else "multi_cpu", layout)
        config, processes = layout
        return config, "--num_processes", processes, "--mixed_precision", "no"

    for layout in sorted({layout for layout, *_ in cuts.values()}, key=str):
        runs = []
        for name, (other, flags, changes, *own) in cuts.items():
            changes = {"float64": 1, "save_gradients": str(directory / f"{name}.pt"), **changes}
            changes = {change: value for change, value in changes.items() if value is not None}
            if other == layout:
                runs.append(([*flags, "--output_dir", directory / name], changes, *own))
        run_specs(recipe, runs, directory, *mode(layout))
    return {
        name: (torch.load(directory / f"{name}.pt"), read_metrics(directory / name), directory / name) for name in cuts
    }


def assert_same_update(runs, reference, *names, rel=1e-11):
    """Law 1: gradients of `run_in_float64` are those of another cut, to the twelfth digit. rel: of the losses."""
    expected, metrics, _ = runs[reference]
    for name in names:
        gradients, lines, _ = runs[name]
        assert str(gradients[0].dtype) == "torch.float64"
        assert relative_difference(gradients, expected) < 1e-12, name
        assert [line["sample_digest"] for line in lines] == [line["sample_digest"] for line in metrics]
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in metrics], rel=rel), name


def assert_same_losses(output_dir, reference, rel=1e-5):
    """The losses and norms of one process in float32, on the same samples. rel: how far a loss may be off."""
    for line, expected in zip(read_metrics(output_dir), read_metrics(reference), strict=True):
        assert line["sample_digest"] == expected["sample_digest"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=rel)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def results_of(output_dir):
    return json.loads((Path(output_dir) / "run.json").read_text())["results"]


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
            break
    return texts[:limit]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(path, rows):
    from common.data.source_types import Source

    return Source(files=(str(write_jsonl(path, rows)),))


def write_rows(path, limit):
    """JSONL of functions, in which each recipe that reads text finds its columns: a text, a label, a pair, answers."""
    rows = [
        {"text": text, "label": "long" if len(text) > 700 else "short", "source": text, "target": text[4:40]}
        | {"prompt": text[:40], "chosen": text[40:], "rejected": text[:40:-1]}
        for text in stdlib_functions(limit)
    ]
    return write_jsonl(path, rows)


@pytest.fixture(scope="session")
def functions_file(tmp_path_factory):
    """JSONL of 60 functions: rows of very different lengths."""
    path = tmp_path_factory.mktemp("data") / "functions.jsonl"
    return write_jsonl(path, [{"text": text} for text in stdlib_functions(60)])


TEXTS = [
    "def f(x):\n    return x\n",
    "hello",
    "zwölf Boxkämpfer 🥊 – jagen\u2028 Viktor\r\n",
    "a b c d e f g h i j k l m",
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Trained on them."""
    from common.data.source_types import Source
    from common.data.tokenizer import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "a.txt"
    path.write_text("\n".join(TEXTS) * 20)
    return train_tokenizer(Source(files=(str(path),)), 300, path.parent / "cache")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def work(monkeypatch):
    """A list that grows by one each time that a source is really tokenised."""
    from common.data import text

    done, write = [], text._write_samples
    monkeypatch.setattr(text, "_write_samples", lambda *args: (done.append(args[0]), write(*args))[1])
    return done


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, functions_file):
    """A Llama of 2 layers and width 32 with dropout 0 and its tokenizer, as `save_pretrained` leaves them."""
    return make_model_dir(tmp_path_factory.mktemp("model"), functions_file)


def save_models(directory, configs, tokenizer_dir):
    """The directory, with a model in float64 of each configuration, by name, and the tokenizer beside it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    return directory


def make_model_dir(path, text_file, intermediate_size=64, **settings):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from common.data.source_types import Source
    from common.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(Source(files=(str(text_file),)), 384)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=intermediate_size,
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


@pytest.fixture
def small_disk():
    """Mounts a tmpfs of so many bytes on a directory; needs the right to mount."""
    mounted = []

    def mount(path, size):
        path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        mounted.append(path)
        return path

    yield mount
    for path in reversed(mounted):
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(scope="session")
def extensions():
    """DeepSpeed's extensions, built before a test waits for them; `make test` has done it."""
    need("g++", "deepspeed")
    result = run([BIN / "python", "-m", "common.parallel.extensions"], timeout=1500)
    assert result.returncode == 0, told(result)


def example_flags(file, model, output_dir, *more):
    """Of lm.py or moe.py: each row of the file is a sample, of up to 64 tokens."""
    base = ["--train_file", file, "--model_name_or_path", model, "--shape", "examples", "--sequence_length", 64]
    return [str(part) for part in [*base, "--output_dir", output_dir, *more]]


def equivalence_flags(functions_file, model_dir, output_dir, *more):
    """Ten updates with accumulation, and with clipping and weight decay that count."""
    base = ["--num_updates", 10, "--global_batch_size", 8, "--micro_batch_size", 2, "--learning_rate", 1e-3]
    base += ["--weight_decay", 1.0, "--max_grad_norm", 0.5]
    return example_flags(functions_file, model_dir, output_dir, *base, *more)


@pytest.fixture(scope="session")
def reference(functions_file, model_dir, tmp_path_factory):
    """One process in float32: its metrics and its final weights."""
    from safetensors.torch import load_file

    out = tmp_path_factory.mktemp("reference") / "run"
    launch(*equivalence_flags(functions_file, model_dir, out))
    return read_metrics(out), load_file(out / "model/model.safetensors")
