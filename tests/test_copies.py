"""A copied recipe carries what it uses and no more, and a bug that is put into it keeps its traceback."""

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import BIN, ROOT, assert_refused, launch, launch_command, run, write_rows
from test_recipes import RECIPES

from common.errors import UserError
from common.files import complete_or_absent
from common.parallel.shutdown import exit_on_user_error

# Packages that take seconds or that not everybody has.
NOBODYS = "datasets evaluate sklearn sacrebleu bitsandbytes deepspeed matplotlib tensorboard torchvision".split()
NOBODYS += ["pyarrow", "plotly"]
# What one process without such a flag must not load.
FORBIDDEN = "parallel.tensor parallel.sequence parallel.sharding parallel.deepspeed_files parallel.deepspeed_flags"
FORBIDDEN += " parallel.parallelism_config parallel.rank_watch models.lora models.quantization models.fsdp_loading"
FORBIDDEN += " report.profiling planner auto_micro_batch checkpoint.resume training.activation_offload data.mixed"
MOST_LINES = 7_000  # of common/ that lm.py loads

# Trains each recipe in a fork, so that torch and transformers are imported once, and prints the modules of common/.
LOADED = """
import json, os, runpy, sys, tempfile
import torch, accelerate, transformers.modeling_utils

for recipe, flags in json.loads(sys.argv[1]).items():
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        sys.argv = [f"recipes/{recipe}", *flags]
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # tokens are not cached yet
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
        files = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("common.")}
        files = {name: path for name, path in files.items() if path and not path.endswith("__init__.py")}
        os.write(writes, json.dumps([recipe, files]).encode())
        os._exit(0)
    os.close(writes)
    told = open(reads).read()
    assert os.waitpid(child, 0)[1] == 0, recipe
    print("LOADED", told, flush=True)
"""


def data_flags(recipe, directory):
    """Flags of a short run of a recipe on a few rows, or on its own data."""
    given, _ = COPIES[recipe]
    given = [str(directory / "rows.jsonl") if flag == "DATA" else str(flag) for flag in given]
    length = [] if recipe == "vision.py" else ["--sequence_length", "64"]
    return [*given, *length, "--num_updates", "11", "--global_batch_size", "4"]


def modules_of_runs(directory, recipes, *flags):
    """By recipe, the modules of common/ with their files, after a run with cpu.yaml."""
    write_rows(directory / "rows.jsonl", 80)
    (directory / "loaded.py").write_text(LOADED)
    runs = {one: [*data_flags(one, directory), *flags, "--output_dir", str(directory / one)] for one in recipes}
    result = run([*launch_command("cpu"), directory / "loaded.py", json.dumps(runs)], PYTHONPATH=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    found = [json.loads(line.partition(" ")[2]) for line in result.stdout.splitlines() if line.startswith("LOADED ")]
    return dict(found)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return modules_of_runs(tmp_path_factory.mktemp("loaded"), RECIPES)


def documented():
    """The files of common/ that docs/new_recipe.md names for a copy of each recipe."""
    text = (ROOT / "docs/new_recipe.md").read_text()
    section = text.partition("## Files that a copy needs")[2].partition("\n## ")[0]
    shared = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+\.py)` \| (.+) \|$", section, re.MULTILINE)
    every = {name for line in shared for name in line.split()}
    return {recipe: every | set(re.findall(r"[\w/]+\.py", names)) for recipe, names in rows}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_loads_what_its_page_names_and_no_more(recipe, loaded):
    modules = loaded[recipe]
    files = {str(Path(path).relative_to(ROOT / "common")) for path in modules.values()}
    assert files == documented()[recipe]
    assert not {f"common.{name}" for name in FORBIDDEN.split()} & modules.keys()
    tasks = {name.split(".")[2] for name in modules if name.startswith("common.tasks.")}
    assert tasks <= {recipe.removesuffix(".py")}


def test_the_first_recipe_loads_few_lines(loaded):
    modules = loaded["lm.py"]
    assert sum(len(Path(path).read_text().splitlines()) for path in modules.values()) <= MOST_LINES


def test_a_run_long_enough_to_compile_loads_that_decision_and_nothing_of_compiling(loaded, tmp_path):
    """Layers are compiled from 100 updates on, if their FLOPs are worth it: here they are not."""
    more = modules_of_runs(tmp_path, ["lm.py"], "--num_updates", "100", "--eval_every", "0")["lm.py"]
    several_epochs = {"common.training.epochs"}
    assert more.keys() - loaded["lm.py"].keys() - several_epochs == {"common.auto_compile"}


def test_the_list_of_checkpoints_looks_at_files_only():
    command = "import sys, tools.checkpoint.__main__; print('PIL' in sys.modules, 'transformers' in sys.modules)"
    assert run([BIN / "python", "-c", command]).stdout.split() == ["False", "False"]


STARTED = """
import gc, runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code
is_set_back = gc.get_threshold() == sys.modules["common"].GC_THRESHOLD and gc.get_threshold()[0] < 100_000
print(gc.get_freeze_count() > 100_000, is_set_back, *(name for name in sys.modules if "." not in name))
"""


@pytest.mark.parametrize("recipe", ["lm.py", "vision.py"])
def test_a_dry_run_loads_nothing_that_it_does_not_use(recipe, functions_file, model_dir):
    """Nor is what it loads looked through for garbage: that is put off before torch is imported, and set back."""
    given = ["--train_file", functions_file, "--model_name_or_path", model_dir] if recipe == "lm.py" else []
    result = run([BIN / "python", "-c", STARTED, f"recipes/{recipe}", *given, "--dry_run"], CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0 and "dry run: one forward and one backward done" in result.stdout, result.stderr
    is_frozen, is_set_back, *names = result.stdout.splitlines()[-1].split()
    assert not set(NOBODYS) & set(names)
    assert is_frozen == is_set_back == "True"
    assert names.index("common") < names.index("torch")


# What a copied recipe is given, in a file that all recipes can read, and a part of what it then says.
COPIES = {
    "lm.py": (["--train_file", "DATA"], "LlamaForCausalLM"),
    "dpo.py": (["--train_file", "DATA"], "rows.jsonl, columns prompt, chosen, rejected: "),
    "reward.py": (["--train_file", "DATA"], "rows.jsonl, columns prompt, chosen, rejected: "),
    "embed.py": (["--train_file", "DATA"], "rows.jsonl, columns source, target: "),
    "pipeline.py": (["--train_file", "DATA"], "LlamaForCausalLM"),
    "moe.py": (["--train_file", "DATA"], "Ernie4_5_MoeForCausalLM"),
    "long_sequence.py": (["--train_file", "DATA"], "RecurrentLM"),
    "seq2seq.py": (["--train_file", "DATA", "--micro_batch_tokens", 512], "T5ForConditionalGeneration"),
    "classify.py": ([], "12: asyncio"),  # packages of the standard library, to be told apart
    "vision.py": ([], "1,437 images, 8 x 8 gray, 10 classes"),
}


def copy_files(recipe, directory, left_out=()):
    """Copies a recipe and the files of common/ that its page names, also those for error messages and cached data."""
    shutil.copy(ROOT / "recipes" / recipe, directory)
    page = (ROOT / "docs/new_recipe.md").read_text()
    (others,) = re.findall(r"^Error messages also need (.+?) For text", page, re.M | re.S)
    for name in (documented()[recipe] | set(re.findall(r"[\w/]+\.py", others))) - set(left_out):
        (directory / "common" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "common" / name, directory / "common" / name)
    shutil.copy(ROOT / "common/__init__.py", directory / "common")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_of_these_files_trains_from_another_directory(recipe, tmp_path):
    """Its own common/ wins."""
    copy_files(recipe, tmp_path)
    errors = tmp_path / "common/errors.py"
    errors.write_text(errors.read_text() + "\nprint('the copy of common/')\n")
    write_rows(tmp_path / "rows.jsonl", 80)
    (tmp_path / "empty").mkdir()
    flags = [*data_flags(recipe, tmp_path), "--output_dir", tmp_path / "run"]
    printed = launch(*flags, script=tmp_path / recipe, cwd=tmp_path / "empty").stdout
    for part in ("the copy of common/", COPIES[recipe][1]):
        assert part in printed, part
    assert (tmp_path / "run/model").is_dir() and not list((tmp_path / "empty").iterdir())
    again = launch(*flags, script=tmp_path / recipe, cwd=tmp_path / "empty", check=False)
    assert_refused(again, "run holds a run; continue it with --resume")


def test_a_copy_without_one_of_these_files_does_not_train(tmp_path):
    """The control."""
    copy_files("lm.py", tmp_path, left_out=["training/clipping.py"])
    write_rows(tmp_path / "rows.jsonl", 80)
    flags = [*data_flags("lm.py", tmp_path), "--output_dir", tmp_path / "run"]
    result = launch(*flags, script=tmp_path / "lm.py", cwd=tmp_path, check=False)
    assert result.returncode and "training.clipping" in result.stderr


# --- a bug keeps its traceback

BUG = "for _a, _b in [(1, 2, 3)]: pass"


def run_copy(directory, name, after, bug, *flags):
    """`cp -r recipes/lm.py common elsewhere/` with a bug after a line of a file, run by itself for its own status."""
    shutil.copy(ROOT / "recipes/lm.py", directory)
    shutil.copytree(ROOT / "common", directory / "common", ignore=shutil.ignore_patterns("__pycache__"))
    lines = (directory / name).read_text().splitlines()
    (at,) = (number for number, line in enumerate(lines, 1) if after in line)
    indent = lines[at][: -len(lines[at].lstrip())]
    (directory / name).write_text("\n".join([*lines[:at], indent + bug, *lines[at:]]) + "\n")
    small = ["--sequence_length", 64, "--num_updates", 2, "--output_dir", directory / "run", *flags]
    result = run([BIN / "python", directory / "lm.py", *small], CUDA_VISIBLE_DEVICES="")
    assert f'{directory / name}", line {at + 1}' in result.stderr, result.stderr
    assert result.returncode == 1 and "error: " not in result.stderr  # as Python ends; a user's mistake has status 2
    return result


def test_a_bug_in_a_copied_loop_keeps_its_traceback(functions_file, model_dir, tmp_path):
    flags = ["--train_file", functions_file, "--model_name_or_path", model_dir]
    result = run_copy(tmp_path, "lm.py", "for batch in batches:", BUG, *flags)
    assert result.stderr.splitlines()[-1].startswith("ValueError: too many values to unpack")
    status = json.loads((tmp_path / "run/run.json").read_text())["status"]
    assert status.startswith("failed at update 0: ValueError: too many values to unpack")


def test_a_bug_in_a_copied_file_that_a_data_worker_meets_keeps_its_traceback(functions_file, model_dir, tmp_path):
    flags = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--num_workers", 1]
    line, bug = "length = round_up(max(len(ids)", "if torch.utils.data.get_worker_info(): a, b = 1, 2, 3"
    result = run_copy(tmp_path, "common/training/batching.py", line, bug, *flags)
    assert "ValueError" in result.stderr and "in DataLoader worker process 0" in result.stderr


class Mistaken(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        try:
            raise KeyError("foreign")
        except KeyError as error:
            raise UserError("UserError: no class of ours", "a second line") from error


def test_a_mistake_that_a_data_worker_meets_is_told_in_its_own_lines(capsys):
    """Also where a line has the name of the class in it, as in a class of the reader's own."""
    for num_workers in (0, 1):
        with pytest.raises(SystemExit) as ended, exit_on_user_error():
            list(torch.utils.data.DataLoader(Mistaken(), batch_size=None, num_workers=num_workers))
        errors = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert errors == ["error: UserError: no class of ours", "error: a second line"]


def test_an_error_of_a_file_that_a_bug_provokes_keeps_its_traceback(tmp_path, capsys):
    """Only a disk that is full or broken is told in a line wherever it is met."""
    for read in (lambda: open(tmp_path / "nothing"), lambda: open(tmp_path)):
        with pytest.raises(OSError, match="nothing|directory"), exit_on_user_error():
            read()
    with pytest.raises(FileNotFoundError), complete_or_absent(tmp_path / "model"):
        open(tmp_path / "nothing")
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().err
    with pytest.raises(SystemExit), exit_on_user_error():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "error: disk: a file could not be read or written: No space left" in capsys.readouterr().err
