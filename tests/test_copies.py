"""A copied recipe carries what it uses and no more, and a bug that is put into it keeps its traceback."""

import errno
import json
import shutil

import pytest
import torch
from conftest import BIN, ROOT, launch, run, write_rows
from test_recipes import RECIPES

from common.errors import UserError
from common.files import complete_or_absent
from common.parallel.shutdown import user_mistakes_end_here

LANGUAGE = {"lm.py", "moe.py", "long_sequence.py", "seq2seq.py", "classify.py"}
# What a recipe may load of common/: what every one does, and what its job needs.
EVERY = """
    internals.accelerate internals.library internals.python internals.torch
    internals.transformers
    argument_checks arguments auto_micro_batch checkpoint.adapter checkpoint.agreement checkpoint.architecture
    checkpoint.format checkpoint.identity checkpoint.layouts checkpoint.optimizer_state checkpoint.random_states
    checkpoint.resume checkpoint.save checkpoint.training_state checkpoint.write data.hub errors evaluation files
    flag_translation host_memory launcher models.adapter_files models.adapters models.attention_masks
    models.cpu_kernels models.export_dtype models.load models.model_setup models.quantization models.tied_weights
    parallel.connect parallel.deepspeed_files parallel.deepspeed_flags parallel.distributed_mode parallel.extensions
    parallel.launch parallel.liveness parallel.matmul_throughput parallel.parallelism_config parallel.process_groups
    parallel.sequence parallel.sharding parallel.shutdown parallel.tensor planner redaction report.chance
    report.curves report.flops report.killed_runs report.model_card report.profiling report.progress report.settings
    report.totals report.tracking run training.accumulation training.activation_checkpointing
    training.activation_offload training.batching training.clipping training.epochs training.fine_tuning_rate
    training.handover training.micro_batch_partition training.optimizers training.out_of_memory training.precision
    training.process_grid training.recipe_traits training.stop_signals training.token_budget versions
"""
TEXT = """
    internals.datasets
    data.cache data.chat_formats data.column_selection data.compressed data.messages data.mixed data.readers
    data.source_types data.sources data.standard_library data.tokenizer training.data_mixing
"""
TOKENS = "data.chats data.text data.token_store training.linear_cross_entropy training.losses training.output_head"
PREDICTED = "models.classifiers report.predictions"
OURS = {
    "classify.py": f"{TEXT} {PREDICTED} tasks.classify.labels tasks.classify.text_baseline "
    "tasks.classify.text_classifier tasks.classify.scores",
    "lm.py": f"{TEXT} {TOKENS}",
    "dpo.py": f"{TEXT} {TOKENS} tasks.dpo.preferences tasks.dpo.reference report.predictions",
    "pipeline.py": f"{TEXT} {TOKENS} tasks.pipeline.schedule tasks.pipeline.stages",
    "long_sequence.py": f"{TEXT} {TOKENS} tasks.long_sequence.architectures tasks.long_sequence.recurrent",
    "moe.py": f"{TEXT} {TOKENS} tasks.moe.routing tasks.moe.moe_model",
    "seq2seq.py": f"{TEXT} data.token_store tasks.seq2seq.pairs tasks.seq2seq.encoder_decoder tasks.seq2seq.scores",
    "vision.py": f"{PREDICTED} internals.datasets tasks.vision.image_files "
    "tasks.vision.images tasks.vision.image_classifier "
    "tasks.vision.image_models tasks.vision.batch_norm",
}
# Packages that take seconds or that not everybody has.
NOBODYS = "datasets evaluate sklearn sacrebleu bitsandbytes deepspeed matplotlib tensorboard torchvision".split()
NOBODYS += ["pyarrow", "plotly"]

# Forks, so that torch and transformers are imported once.
LOADED = """
import os, runpy, sys
import torch, accelerate

def loaded(name, load, heavy=()):
    if (child := os.fork()) == 0:
        load()
        found = [module.partition(".")[2] for module in sys.modules if module.startswith("common.")]
        print(name, *found, *(module for module in sys.modules if "." not in module), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

loaded("checkpoint", lambda: __import__("tools.checkpoint.__main__"))
import transformers.modeling_utils
for recipe in sys.argv[1:]:
    loaded(recipe, lambda: runpy.run_path(f"recipes/{recipe}", run_name="imported"))
"""


def test_each_recipe_loads_what_it_uses_and_no_more():
    result = run([BIN / "python", "-c", LOADED, *RECIPES])
    assert result.returncode == 0, result.stderr
    loaded = {line.split()[0]: set(line.split()[1:]) for line in result.stdout.splitlines()}
    assert loaded.keys() == {"checkpoint", *RECIPES}
    ours = {path.stem for path in (ROOT / "common").iterdir()}
    for recipe, names in OURS.items():
        found = {name for name in loaded[recipe] if name.split(".")[0] in ours - {"__init__"}}
        assert {name for name in found if not (ROOT / "common" / name.replace(".", "/")).is_dir()} == {
            *EVERY.split(),
            *names.split(),
        }
    for module in NOBODYS:
        assert not {name for name in loaded if module in loaded[name]}, module
    assert not {"PIL", "transformers"} & loaded["checkpoint"]  # `list` looks at files, and that is all
    assert "checkpoint.format" in loaded["checkpoint"]


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
    "dpo.py": (["--train_file", "DATA"], "rows.jsonl (prompt, chosen, rejected): "),
    "pipeline.py": (["--train_file", "DATA"], "LlamaForCausalLM"),
    "moe.py": (["--train_file", "DATA"], "Ernie4_5_MoeForCausalLM"),
    "long_sequence.py": (["--train_file", "DATA"], "RecurrentLM"),
    "seq2seq.py": (["--train_file", "DATA", "--micro_batch_tokens", 512], "T5ForConditionalGeneration"),
    "classify.py": ([], "12: asyncio"),  # packages of the standard library, to be told apart
    "vision.py": ([], "1,437 images, 8 x 8 gray, 10 classes"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copied_recipe_runs_from_another_directory(recipe, tmp_path):
    """`cp -r recipes/lm.py common elsewhere/`: its own common/ wins, and a dry run writes nothing."""
    shutil.copy(ROOT / "recipes" / recipe, tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    errors = tmp_path / "common/errors.py"
    errors.write_text(errors.read_text() + "\nprint('the copy of common/')\n")
    write_rows(tmp_path / "rows.jsonl", 80)
    (tmp_path / "empty").mkdir()
    given, said = COPIES[recipe]
    given = [tmp_path / "rows.jsonl" if flag == "DATA" else flag for flag in given]
    printed = launch(*given, "--dry_run", script=tmp_path / recipe, cwd=tmp_path / "empty").stdout
    for part in ("the copy of common/", "dry run", said):
        assert part in printed, part
    assert not list((tmp_path / "empty").iterdir())


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
            raise UserError("UserError: no class of ours\na second line") from error


def test_a_mistake_that_a_data_worker_meets_is_told_in_its_own_lines(capsys):
    """Also where a line has the name of the class in it, as in a class of the reader's own."""
    for num_workers in (0, 1):
        with pytest.raises(SystemExit) as ended, user_mistakes_end_here():
            list(torch.utils.data.DataLoader(Mistaken(), batch_size=None, num_workers=num_workers))
        errors = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert errors == ["error: UserError: no class of ours", "error: a second line"]


def test_an_error_of_a_file_that_a_bug_provokes_keeps_its_traceback(tmp_path, capsys):
    """Only a disk that is full or broken is told in a line wherever it is met."""
    for read in (lambda: open(tmp_path / "nothing"), lambda: open(tmp_path)):
        with pytest.raises(OSError, match="nothing|directory"), user_mistakes_end_here():
            read()
    with pytest.raises(FileNotFoundError), complete_or_absent(tmp_path / "model"):
        open(tmp_path / "nothing")
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().err
    with pytest.raises(SystemExit), user_mistakes_end_here():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "error: disk: a file could not be read or written: No space left" in capsys.readouterr().err
