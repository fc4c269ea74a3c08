"""The pages are short, their commands run, and what they name is there."""

import functools
import json
import re
import shlex
import shutil
import sys

import pytest
from accelerate.commands.launch import launch_command_parser
from conftest import (
    BIN,
    ROOT,
    base_env,
    launch_command,
    make_model_dir,
    read_metrics,
    run,
    server,
    stdlib_functions,
    write_rows,
)

sys.path.append(str(ROOT / "benchmarks"))
import first_run

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
FOLDERS = "recipes|common|docs|tests|benchmarks|launchers|accelerate_configs|ds_configs"
FOREIGN_FLAGS = set("--nodes --gpus-per-node --cpus-per-task --signal --batch --help".split())  # SLURM's, and all have
SMALL = {"recipes/vision.py": ("--global_batch_size", "16")}  # others: --sequence_length
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
    declared = {flag for source in sources for flag in re.findall(r'add_argument\(\s*"(--\w+)"', source)}
    return declared | set(launch_command_parser()._option_string_actions) | FOREIGN_FLAGS


def untrue(page, text):
    """What a page names that is not there: links, paths, modules, flags, make's targets."""
    prose = re.sub(r"```diff.*?```", "", text, flags=re.S)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", prose) if "://" not in link]
    paths = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]*\w", prose.replace("tests/test_NAME.py", ""))
    modules = re.findall(r"common(?:\.\w+)+", prose)
    modules += [f"{package}.{name}" for package, name in re.findall(r"from (common[.\w]*) import (\w+)", prose)]
    targets = re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())[1].split()
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists() and not path.endswith("/mine.py")]
    for module in modules:
        path = ROOT / module.replace(".", "/")
        if not (path.is_dir() or path.with_suffix(".py").is_file() or path.parent.with_suffix(".py").is_file()):
            missing.append(module)
    missing += sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", prose)) - known_flags())
    missing += [f"make {name}" for name in re.findall(r"(?:`| {4})make ([a-z]+)", prose) if name not in targets]
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there_and_it_is_short(page):
    assert untrue(page, PAGES[page]) == []
    assert len(PAGES[page].splitlines()) <= 150


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
    recorded["printed"][1] = "held-out loss 0.0000"
    assert first_run.draw(recorded) != picture


# --- commands run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory in which the data and models that the pages name lie, small."""
    from PIL import Image
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

    place = tmp_path_factory.mktemp("place")
    texts = stdlib_functions(200)
    for folder in ("chats", "books", "news", "path/to"):
        (place / folder).mkdir(parents=True)
    write_rows(place / "my.jsonl", 200)
    shutil.copy(place / "my.jsonl", place / "chats/1.jsonl")
    rows = [json.dumps({"text": text, "article": text, "summary": text[4:40]}) + "\n" for text in texts]
    for name in ("held_out.jsonl", "news/1.jsonl"):
        (place / name).write_text("".join(rows))
    (place / "books/1.txt").write_text("\n".join(texts))
    for name in ("reviews", "held_out"):
        (place / f"{name}.csv").write_text("text,stars\n" + "".join(f"word {i},{i % 3}\n" for i in range(100)))
    for number in range(32):
        path = place / ("photos/train" if number % 2 else "photos/test") / ("cat" if number % 4 < 2 else "dog")
        path.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (8 * number, 0, 0)).save(path / f"{number}.png")
    model = make_model_dir(place / "path/to/model", place / "my.jsonl")
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    small |= {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    bert = AutoConfig.for_model("bert", num_labels=3, max_position_embeddings=1024, **small)
    t5 = {"num_layers": 1, "d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 32, "decoder_start_token_id": 0}
    t5 = AutoConfig.for_model("t5", **(small | t5))
    for name in ("llama", "encoder", "t5"):
        shutil.copytree(model, place / "path/to" / name)
    AutoModelForSequenceClassification.from_config(bert).save_pretrained(place / "path/to/encoder")
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


@functools.cache
def run_fails(place, recipe, flags):
    result = run([*launch_command("cpu"), ROOT / recipe, *flags], cwd=place)
    return [] if result.returncode == 0 else [(recipe, *flags), result.stderr[-3000:]]


def what_fails(before, recipe, flags, place):
    """Why a command does not run, as a list: on this machine's CPU, in one process, on small data.

    One without flags trains for two updates, and so does one with --resume, after a run that it can resume. Any other
    one makes a dry run.
    """
    paths = [word for word in (*before, recipe) if word.startswith(("recipes/", "accelerate_configs/", "launchers/"))]
    wrong = [path for path in paths if not (ROOT / path).is_file()]
    wrong += [word for word in before if word.startswith("--") and word not in known_flags()]
    if wrong:
        return wrong
    more = SMALL.get(recipe, ("--sequence_length", "64"))
    if recipe != "recipes/vision.py" and "--train_file" not in flags:
        more += ("--train_file", "my.jsonl")
    if "--resume" in flags:
        first = tuple(flag for flag in flags if flag != "--resume")
        wrong = run_fails(place, recipe, first + more + TWO_UPDATES)
    if not flags or "--resume" in flags:
        return wrong or run_fails(place, recipe, flags + more + TWO_UPDATES)
    return run_fails(place, recipe, (*flags, *more, "--dry_run"))


@pytest.mark.parametrize("page", [page for page in PAGES if recipe_commands(PAGES[page])])
def test_the_commands_of_a_page_run(page, place):
    for command in recipe_commands(PAGES[page]):
        assert what_fails(*command, place) == [], command


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
    (command,) = recipe_commands(f"    {broken}\n")
    assert what_fails(*command, place) != []


# --- the worked example of docs/new_recipe.md


def patched(text, diff):
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines()
        before, after = ("\n".join(line[1:] for line in lines if line[:1] in (" ", "", sign)) for sign in "-+")
        assert text.count(before) == 1, hunk
        text = text.replace(before, after)
    return text


def losses_of(place, recipe, name, size):
    """Of a few updates of a copied recipe beside a link to common/, on samples of many lengths, `size` at once."""
    directory = place / "copies" / f"{name}-{size}"
    (directory / "recipes").mkdir(parents=True)
    (directory / "recipes/mine.py").write_text(recipe)
    (directory / "common").symlink_to(ROOT / "common")
    flags = (
        "--train_file my.jsonl --validation_file held_out.jsonl --shape examples --sequence_length 64 --num_updates 5"
    )
    flags += f" --micro_batch_size {size} --output_dir {directory}/run"
    launcher = [str(BIN / "accelerate-launch"), *map(str, launch_command("cpu")[2:])]
    command = [str(directory / "recipes/mine.py"), *flags.split()]
    result = server(*launcher).run(command, base_env(), 300, place)
    assert result.returncode == 0, result.stderr
    return [line["loss"] for line in read_metrics(directory / "run")]


def test_the_worked_example_is_short_and_makes_the_same_update_however_cut(place):
    """Control: without the mask for padding, it does not."""
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGES["docs/new_recipe.md"], re.S)
    assert 0 < len(re.findall(r"^\+.*\S", diff, re.M)) <= 40
    recipe = patched((ROOT / "recipes/lm.py").read_text(), diff)
    one, four = (losses_of(place, recipe, "masked", size) for size in ("1", "4"))
    assert one == pytest.approx(four, rel=1e-5) and one[-1] < one[0] - 0.5
    unmasked = recipe.replace("< lengths[:, None]", "< lengths.max() + 0 * lengths[:, None]")
    assert one != pytest.approx(losses_of(place, unmasked, "unmasked", "4"), rel=1e-5)
