"""The pages are short, their commands run, and what they name is there."""

import functools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from conftest import (
    BIN,
    ROOT,
    assert_refused,
    launch_command,
    make_model_dir,
    quick_python,
    read_metrics,
    run,
    run_specs,
    stdlib_functions,
    write_rows,
)

from common import flag_translation
from tools.checkpoint.export import export

sys.path.append(str(ROOT / "benchmarks"))
import first_run

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
FOLDERS = "recipes|common|tools|docs|tests|benchmarks|launchers|accelerate_configs|ds_configs"
# SLURM's, TensorBoard's and trackio's, one that all have, and those of docker, kubectl and sky.
FOREIGN_FLAGS = set("--nodes --gpus-per-node --cpus-per-task --signal --batch --logdir --project --help".split())
FOREIGN_FLAGS |= set("--file --tag --rm --gpus --ipc --volume --from-literal --secret".split())
SMALL = {"recipes/vision.py": ("--global_batch_size", "16")}  # others: --sequence_length
SMALL["recipes/embed.py"] = (*SMALL["recipes/vision.py"], "--sequence_length", "64")
TWO_UPDATES = ("--num_updates", "2", "--save_every", "1")


# --- what pages say that can be looked up


def commands(text):
    """The words of each command line that a page shows as a block: variables before it and comments left out."""
    lines = "\n".join(re.findall(r"(?:^ {4}.*\n)+", text, re.M)).replace("\\\n", " ").splitlines()
    command = r" *(?:[A-Z_]+=\S+ )*((?:accelerate|make|python|cp|sbatch|launchers/\S+|\.venv/bin/python) .*)"
    return [shlex.split(match[1], comments=True) for match in (re.fullmatch(command, line) for line in lines) if match]


@functools.cache
def known_flags():
    """Of recipes, launchers, benchmarks and tests, as their sources declare them, and of `accelerate launch`."""
    sources = [path.read_text() for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.py")]
    declared = {flag for source in sources for flag in re.findall(r'\badd(?:_argument)?\(\s*"(--[\w-]+)"', source)}
    declared |= {f"--no-{name}" for one in sources for name in re.findall(r'"--(\w+)".*BooleanOptionalAction', one)}
    return declared | set(launch_command_parser()._option_string_actions) | FOREIGN_FLAGS


def untrue(page, text):
    """What a page names that is not there: links, paths, modules, flags, make's targets."""
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    paths = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]*\w", text.replace("tests/test_NAME.py", ""))
    modules = re.findall(r"\b(?:common|tools)(?:\.\w+)+", text)
    modules += [f"{package}.{name}" for package, name in re.findall(r"from (common[.\w]*) import (\w+)", text)]
    targets = re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())[1].split()
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists() and not path.endswith("/mine.py")]
    for module in modules:
        path = ROOT / module.replace(".", "/")
        if not (path.is_dir() or path.with_suffix(".py").is_file() or path.parent.with_suffix(".py").is_file()):
            missing.append(module)
    theirs = {f"--{name}" for name in flag_translation.FLAGS} if page == "docs/coming_from.md" else set()
    missing += sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - known_flags() - theirs)
    missing += [f"make {name}" for name in re.findall(r"(?:`| {4})make ([a-z]+)", text) if name not in targets]
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there_and_it_is_short(page):
    assert untrue(page, PAGES[page]) == []
    assert len(PAGES[page].splitlines()) <= 150 or page == "CHANGELOG.md"


def test_what_is_not_there_is_noticed():
    text = "[a](nothing.md) `recipes/nothing.py` `common.nothing` `from common.data import none` `--no` `make nothing`"
    found = ["nothing.md", "recipes/nothing.py", "common.nothing", "common.data.none", "--no", "make nothing"]
    assert untrue("README.md", text) == found


def test_the_readme_leads_to_every_page_and_names_every_config():
    assert {page for page in PAGES if page != "README.md"} <= set(re.findall(r"\]\(([^)]+)\)", PAGES["README.md"]))
    configs = [path.name for path in (ROOT / "accelerate_configs").iterdir()]
    assert configs and all(name in PAGES["README.md"] for name in configs)


def test_the_picture_of_a_runs_end_is_drawn_from_what_a_run_printed():
    """Control: other figures are another picture."""
    recorded = json.loads((ROOT / "benchmarks/results/first-run-cpu.json").read_text())
    picture = (ROOT / "benchmarks/results/first-run-cpu.svg").read_text()
    assert first_run.draw(recorded) == picture and recorded["command"] in PAGES["README.md"]
    assert recorded["command"] == first_run.COMMAND  # and `make train` passes its flags
    assert first_run.COMMAND.partition("recipes/lm.py ")[2] in (ROOT / "Makefile").read_text()
    recorded["printed"][1] = "held-out loss 0.0000"
    assert first_run.draw(recorded) != picture


# --- commands run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory in which the data and models that the pages name lie, small."""
    from PIL import Image
    from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

    place = tmp_path_factory.mktemp("place")
    texts = stdlib_functions(200)
    for folder in ("chats", "books", "news", "path/to"):
        (place / folder).mkdir(parents=True)
    write_rows(place / "my.jsonl", 200)
    for name in ("chats/1.jsonl", "preferences.jsonl", "pairs.jsonl", "held_out_pairs.jsonl"):
        shutil.copy(place / "my.jsonl", place / name)
    names = ("text", "article", "summary", "chosen", "rejected")
    rows = [(text, text, text[4:40], text, text[::-1]) for text in texts]
    rows = [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows]
    for name in ("held_out.jsonl", "news/1.jsonl"):
        (place / name).write_text("".join(rows))
    (place / "books/1.txt").write_text("\n".join(texts))
    for name in ("reviews", "held_out"):
        (place / f"{name}.csv").write_text("text,stars\n" + "".join(f"word {i},{i % 3}\n" for i in range(100)))
    for number in range(32):
        path = place / ("photos/train" if number % 2 else "photos/test") / ("cat" if number % 4 < 2 else "dog")
        path.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (8 * number, 0, 0)).save(path / f"{number}.png")
    (place / "my_metrics").mkdir()
    module = re.search(r"```python\n(import datasets\n.*?)```", PAGES["docs/classify.md"], re.DOTALL)[1]
    (place / "my_metrics/mcc.py").write_text(module)
    model = make_model_dir(place / "path/to/model", place / "my.jsonl")
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    small |= {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    bert = AutoConfig.for_model("bert", num_labels=3, max_position_embeddings=1024, **small)
    t5 = {"num_layers": 1, "d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 32, "decoder_start_token_id": 0}
    t5 = AutoConfig.for_model("t5", **(small | t5))
    for name in ("llama", "encoder", "masked", "t5", "teacher"):
        shutil.copytree(model, place / "path/to" / name)
    AutoModelForSequenceClassification.from_config(bert).save_pretrained(place / "path/to/encoder")
    AutoModelForMaskedLM.from_config(bert).save_pretrained(place / "path/to/masked")
    AutoModelForSeq2SeqLM.from_config(t5).save_pretrained(place / "path/to/t5")
    return place


def recipe_commands(text):
    """(what stands before the recipe, the recipe, its flags) of each command that runs one."""
    found = []
    for words in commands(text):
        at = next((at for at, word in enumerate(words) if re.fullmatch(r"recipes/\w+\.py", word)), None)
        if at is not None and words[0] != "cp" and words[at] != "recipes/mine.py":  # see the worked example
            found.append((words[:at], words[at], tuple(words[at + 1 :])))
    return found


def plan_runs(before, recipe, flags):
    """What is wrong in a command before it runs, and the runs that show whether it does: (recipe, flags) of each.

    One without flags trains for two updates, and so does one with --resume, after a run that it can resume. Any other
    one makes a dry run, or its plan.
    """
    paths = [word for word in (*before, recipe) if word.startswith(("recipes/", "accelerate_configs/", "launchers/"))]
    wrong = [path for path in paths if not (ROOT / path).is_file()]
    wrong += [word for word in before if word.startswith("--") and word not in known_flags()]
    if before[-1:] == ["tools.plan"]:
        flags = (*flags[:-1], "--plan", flags[-1])
    more = SMALL.get(recipe, ("--sequence_length", "64"))
    if recipe != "recipes/vision.py" and "--train_file" not in flags:
        more += ("--train_file", "my.jsonl")
    if "--plan" in flags and "--model_config" in flags:  # the trace of a small model takes a tenth of the time
        more += ("--model_config", "tiny")
    if "--resume" in flags:
        at = flags.index("--resume")
        first = flags[:at] + flags[at + 1 + ("auto" in flags[at + 1 : at + 2]) :]
        return wrong, [(recipe, first + more + TWO_UPDATES), (recipe, flags + more + TWO_UPDATES)]
    if not flags:
        return wrong, [(recipe, more + TWO_UPDATES)]
    return wrong, [(recipe, (*flags, *more, *(() if "--plan" in flags else ("--dry_run",))))]


def what_fails(commands, place):
    """Why they do not run, as a list: on this machine's CPU, in one process, on small data.

    All but plans in one launch, of which dry runs make no prediction: tests/test_plan.py does.
    """
    planned = [plan_runs(*command) for command in commands]
    if wrong := [problem for problems, _ in planned for problem in problems]:
        return wrong
    runs = dict.fromkeys(words for _, own in planned for words in own)  # each once
    for recipe, flags in (words for words in runs if "--plan" in words[1]):  # it ends the process
        result = run([quick_python(), ROOT / recipe, *flags], cwd=place)
        wrong += [(recipe, flags, result.stderr[-3000:])] if result.returncode else []
    others = [(flags, {"no_prediction": 1}, Path(recipe).stem) for recipe, flags in runs if "--plan" not in flags]
    if others:
        result = run_specs("lm", others, place, check=False, cwd=place)
        wrong += [(others, result.stderr[-3000:])] if result.returncode else []
    return wrong


@pytest.mark.parametrize("page", [page for page in PAGES if recipe_commands(PAGES[page])])
def test_the_commands_of_a_page_run(page, place):
    assert what_fails(recipe_commands(PAGES[page]), place) == []


@pytest.mark.parametrize(("selected", "status"), [(None, 0), ("no_such_name", 5)])
def test_a_command_of_tests_selects_some(selected, status):
    """The second is the control."""
    found = [words for page in PAGES.values() for words in commands(page) if "pytest" in words]
    for words in found:
        words = words[:-1] + [selected or words[-1]]
        assert run([BIN / "python", *words[1:], "--collect-only"]).returncode == status
    assert found


@pytest.mark.parametrize(
    "broken",
    [
        "accelerate launch --config_file accelerate_configs/gpu.yaml recipes/lm.py",
        "accelerate launch --config_fil accelerate_configs/cpu.yaml recipes/lm.py",
        "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/llm.py",
        "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/lm.py --train_files my.jsonl",
        "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/lm.py --lr_schedule cosin",
        "accelerate launch --config_file accelerate_configs/cpu.yaml recipes/lm.py --train_file your.jsonl",
    ],
)
def test_a_broken_command_is_noticed(broken, place):
    assert what_fails(recipe_commands(f"    {broken}\n"), place) != []


# --- the worked example of docs/new_recipe.md


DIFF, AUXILIARY, AVERAGE = (ROOT / f"docs/{name}.diff" for name in ("masked", "auxiliary", "average"))


def changed(directory, diff):
    """The recipe that a diff makes, as the page's command does."""
    (directory / "recipes").mkdir()
    shutil.copy(ROOT / "recipes/lm.py", directory / "recipes")
    result = run(["git", "apply", diff], cwd=directory)
    assert result.returncode == 0, result.stderr
    return (directory / "recipes/mine.py").read_text()


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return changed(tmp_path_factory.mktemp("example"), DIFF)


def run_example(place, recipe, name, *flags, config=("cpu",)):
    """A copied recipe beside a link to common/, run on samples of many lengths; and its output directory."""
    directory = place / "copies" / name
    if not directory.exists():
        (directory / "recipes").mkdir(parents=True)
        (directory / "recipes/mine.py").write_text(recipe)
        (directory / "common").symlink_to(ROOT / "common")
    given = ("--train_file", "my.jsonl", "--validation_file", "held_out.jsonl", "--sequence_length", "64")
    given += ("--shape", "examples", "--output_dir", str(directory / "run"), *flags)
    script = [str(directory / "recipes/mine.py"), *given]
    return run([*launch_command(*config), *script], cwd=place), directory / "run"


def losses_of(place, recipe, name, size, *more, config=("cpu",)):
    """Of a few updates, with `size` samples at once."""
    flags = ("--num_updates", "5", "--micro_batch_size", size, *more)
    result, output_dir = run_example(place, recipe, f"{name}-{size}", *flags, config=config)
    assert result.returncode == 0, result.stderr
    return [line["loss"] for line in read_metrics(output_dir)]


def test_the_worked_example_is_short_and_makes_the_same_update_however_cut(place, example):
    """Control: without the mask for padding, it does not."""
    added, removed, _ = run(["git", "apply", "--numstat", DIFF]).stdout.split()
    page = PAGES["docs/new_recipe.md"]
    assert f"adds {added} lines and removes {removed}" in page and max(int(added), int(removed)) <= 40
    assert f"git apply {DIFF.relative_to(ROOT)}" in page and "causal" not in example.partition("import")[0]
    one, four = (losses_of(place, example, "masked", size) for size in ("1", "4"))
    assert one == pytest.approx(four, rel=1e-5) and one[-1] < one[0] - 0.5
    unmasked = example.replace("attention_mask=ids >= 0", "attention_mask=ids >= -1")
    assert one != pytest.approx(losses_of(place, unmasked, "unmasked", "4"), rel=1e-5)


def test_the_worked_example_refuses_a_tokenizer_without_a_mask_token_in_one_line(place, example):
    result, _ = run_example(place, example, "no-mask", "--model_name_or_path", "path/to/masked")
    assert_refused(result, "the tokenizer has no mask token")


def test_an_auxiliary_loss_needs_no_second_forward_and_its_flag_no_second_line(place, tmp_path):
    """The same update however cut, in FSDP2 too. Controls: without the penalty it is another; its value is resumed."""
    recipe = changed(tmp_path, AUXILIARY)
    counted = recipe.replace('kept["hidden"] =', 'print("a forward" * backbone.training)\n        kept["hidden"] =')
    flags = ("--penalty", "0.5", "--save_every", "2", "--keep_last", "9")
    one = losses_of(place, recipe, "penalty", "1", *flags)
    assert one == pytest.approx(losses_of(place, recipe, "penalty", "4", *flags), rel=1e-5)
    sharded = ("fsdp2", "--mixed_precision", "no")
    assert one == pytest.approx(losses_of(place, recipe, "sharded", "4", *flags, config=sharded), rel=1e-5)
    assert one != pytest.approx(losses_of(place, recipe, "none", "4", "--penalty", "0"), rel=1e-2)
    result, _ = run_example(place, counted, "counted", "--num_updates", "3", "--micro_batch_size", "4")
    assert result.returncode == 0 and result.stdout.count("a forward") == 3 * 8 // 4
    again = ("--resume", "--num_updates", "6", "--allow_changed", "num_updates", "--micro_batch_size", "4")
    result, _ = run_example(place, recipe, "penalty-4", *again, "--penalty", "0.1")
    assert_refused(result, "--penalty is 0.1, the checkpoint's is 0.5; pass 0.5")


@pytest.mark.parametrize("config", [("cpu",), ("fsdp2", "--mixed_precision", "no")], ids=lambda config: config[0])
def test_a_state_of_ones_own_is_resumed_bit_for_bit(config, place, tmp_path):
    """An average of the weights is in the checkpoint, and in model/. Control: it is not the weights."""
    recipe = changed(tmp_path, AVERAGE)
    flags = ("--num_updates", "4", "--save_every", "2", "--keep_last", "9", "--average_decay", "0.8")
    written = []
    for more in ((), ("--resume",)):
        result, output_dir = run_example(place, recipe, f"average-{config[0]}", *flags, *more, config=config)
        assert result.returncode == 0, result.stderr
        written.append((output_dir / "model/model.safetensors").read_bytes())
        last = output_dir / "checkpoints/update-000004"
        names = {name for path in last.glob("rank-*.json") for name in json.loads(path.read_text())["tensors"]}
        weights = {name.partition("/")[2] for name in names if name.startswith("weight/")}
        assert weights and {f"optimizer.average/{name}" for name in weights} <= names
        export(last, tmp_path / f"last-{len(written)}")
        shutil.rmtree(last)
    assert written[0] == written[1] != (tmp_path / "last-1/model.safetensors").read_bytes()
    assert (tmp_path / "last-1/model.safetensors").read_bytes() == (tmp_path / "last-2/model.safetensors").read_bytes()
