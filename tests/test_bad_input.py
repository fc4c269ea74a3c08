"""A user's mistake ends in one line that says what, where and how to mend it, with status 2, and writes nothing."""

import argparse
import functools
import gzip
import importlib
import json
import re
import shutil
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from conftest import ROOT, assert_mistake, make_model_dir, run_recipe_alone, write_jsonl, write_rows
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BertConfig

from common.data.hub import held_out_splits, load_split
from common.data.source_types import Source
from common.data.sources import check_sources, choose_columns, open_source
from common.data.tokenizer import load_tokenizer
from common.errors import UserError
from common.models.load import load_config
from common.run import Run
from common.tasks.vision.image_files import folder as load_folder
from tools.checkpoint.__main__ import main as checkpoint_command

recipe = functools.partial(run_recipe_alone, "lm.py")


def test_broken_data_is_named_with_its_place(functions_file, tmp_path):
    """tests/test_data.py has all that can be broken."""
    rows = functions_file.read_text().splitlines()[:5]
    (tmp_path / "broken.jsonl").write_text("\n".join([*rows[:3], '{"text": "never clo', *rows[3:]]) + "\n")
    result = recipe("--train_file", tmp_path / "broken.jsonl", "--output_dir", tmp_path / "run")
    assert_mistake(result, "broken.jsonl, line 4")
    assert not (tmp_path / "run").exists()


def test_too_few_samples_for_a_global_batch(functions_file, tmp_path):
    (tmp_path / "few.jsonl").write_text("\n".join(functions_file.read_text().splitlines()[:2]))
    result = recipe("--train_file", tmp_path / "few.jsonl", "--shape", "examples", "--output_dir", tmp_path / "run")
    assert_mistake(result, r"2 samples, fewer than --global_batch_size 8")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def misfit_models(tmp_path_factory, functions_file):
    """A model whose embedding is smaller than its tokenizer, and one whose tokenizer has neither pad nor eos."""
    root = tmp_path_factory.mktemp("misfits")
    good = make_model_dir(root / "good", functions_file)
    for name in ("small_embedding", "no_pad"):
        shutil.copytree(good, root / name)
    tokenizer = AutoTokenizer.from_pretrained(good)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(5)])
    tokenizer.save_pretrained(root / "small_embedding")
    for path in (root / "no_pad").glob("*token*.json"):
        settings = json.loads(path.read_text())
        for key in ("pad_token", "eos_token", "bos_token"):
            settings.pop(key, None)
        path.write_text(json.dumps(settings))
    for name in ("no_tokenizer", "no_weights", "truncated", "wrong_shapes", "bidirectional"):
        shutil.copytree(good, root / name)
    for path in (root / "no_tokenizer").glob("*token*"):
        path.unlink()
    (root / "no_weights/model.safetensors").unlink()
    weights = root / "truncated/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    config = root / "wrong_shapes/config.json"
    config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    (root / "bidirectional/model.safetensors").unlink()
    BertConfig(vocab_size=384, hidden_size=32, num_hidden_layers=1).save_pretrained(root / "bidirectional")
    return root


MODEL_MISTAKES = {
    "no_tokenizer": ["tokenizer .*no_tokenizer"],
    "no_weights": ["no_weights.*weights cannot be loaded"],
    "truncated": ["truncated.*weights cannot be loaded"],
    "wrong_shapes": ["wrong_shapes.*weights cannot be loaded"],
    "bidirectional": ["bidirectional.*is_decoder"],
    "small_embedding": ["389 tokens.*384 rows", "resize"],
    "no_pad": ["pad|eos"],
    "good": ["--sequence_length 513 is beyond the model's 512 positions"],
}


@pytest.mark.parametrize("name", MODEL_MISTAKES)
def test_models_that_do_not_fit(name, misfit_models, functions_file, tmp_path):
    """They cannot be loaded, are not causal, or do not fit to their tokenizer or to the length of the samples."""
    flags = ["--model_name_or_path", misfit_models / name, "--train_file", functions_file]
    length = 513 if name == "good" else 64
    result = recipe(*flags, "--sequence_length", length, "--output_dir", tmp_path / "run")
    assert_mistake(result, *MODEL_MISTAKES[name])
    assert not (tmp_path / "run").exists()


FLAG_MISTAKES = {
    "--global_batch_size 12 --micro_batch_size 8": r"12 / \(8 micro x 1 process\) = 1.5 .* 8 or 16",
    "--micro_batch_size 8 --micro_batch_tokens 512": "mutually exclusive",
    "--optimiser adamw": "did you mean --optimizer",
    "--num_train_epochs 3": "--num_train_epochs 3: use --num_epochs 3",
    "--train_files x": "did you mean --train_file",
    "--train_epochs 3": "unrecognized argument --train_epochs 3 .--help lists the flags.",
    "--optimizer adam": "'adam' is not one of adamw.*did you mean adamw",
    "--model_config tinny": "did you mean tiny",
    "--lr_schedule cosin": "did you mean cosine",
    "--num_updates 0": "--num_updates.* is not an integer > 0",
    "--learning_rate inf": "'inf' is not a finite number",
    "--learning_rate nan --weight_decay nan": "--learning_rate: 'nan' is not a finite number",
    "--weight_decay=-0.1": "--weight_decay: '-0.1' is not a finite number >= 0",
    "--weight_decay nan": "--weight_decay: 'nan' is not a finite number >= 0",
    "--warmup_updates=-1": "--warmup_updates: '-1' is not an integer >= 0",
    "--learning_rate 0": "--learning_rate",
    "--warmup_updates 900 --num_updates 900": "--warmup_updates 900",
    "--report_to nonsense": "nonsense",
    "--report_to none": "--report_to none: remove it",
    "--train_file requirements.txt --text_column b": "--text_column b has no effect on .txt files, which have no",
    "--model_name_or_path no/such/model": "no/such/model",
    "--model_name_or_path requirements.txt": "requirements.txt: it is a file; give the directory of a model",
    "--model_name_or_path no/such --model_config tiny": "mutually exclusive",
    "--seed 99999999999999999999": "an integer from 0 to",
    "--dataset_config en": "--dataset_config has no effect",
    "--profile --num_updates 5": "--profile needs 6 updates, .* --num_updates 5 leaves 5; raise it",
    "--profile --dry_run": "--profile has no effect with --dry_run",
    "--load_best_at_end": "--load_best_at_end needs --keep_best",
    "--prompt_column question": "--prompt_column has no effect without --train_file",
    "--train_file LICENSE --completion_column a --shape blocks": "--completion_column and --shape blocks are mutually",
    "--train_file LICENSE --prompt_column a --text_column b": "--prompt_column and --text_column b are mutually",
    "--compile yes": "error: --compile takes no value, or auto; --no-compile compiles nothing",
    "--resume=yes": "error: --resume takes no value, or auto$",
    "--num_workers 100000": "--num_workers 100000: more than 16 per CPU core; use at most",
    "--micro_batch_tokens 100": "--micro_batch_tokens 100 does not hold the longest sample of 256",
}


@pytest.mark.parametrize("flags", FLAG_MISTAKES)
def test_flags_that_cannot_be(flags, tmp_path):
    result = recipe(*flags.split(), "--output_dir", tmp_path / "run")
    assert_mistake(result, FLAG_MISTAKES[flags])
    assert not (tmp_path / "run").exists()


def test_keep_best_needs_what_it_measures_on(functions_file, model_dir, tmp_path):
    flags = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--sequence_length", 64]
    result = recipe(*flags, "--keep_best", "--save_every", 4, "--eval_every", 4, "--output_dir", tmp_path / "run")
    assert_mistake(result, "--keep_best has nothing to measure: there are no held-out data")
    assert not (tmp_path / "run").exists()


def test_mistakes_that_can_be_seen_together_are_told_together(tmp_path):
    file = tmp_path / "a_file"
    file.write_text("mine")
    flags = ["--global_batch_size", 12, "--micro_batch_size", 8, "--output_dir", file]
    result = recipe(*flags, ACCELERATE_MIXED_PRECISION="fp16")
    assert_mistake(result, "fp16", "does not divide", "is a file", lines=3)
    assert file.read_text() == "mine"


def test_output_directory_that_holds_a_run(tmp_path, functions_file, model_dir):
    flags = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--output_dir", tmp_path / "run"]
    flags += ["--num_updates", 2, "--sequence_length", 64]
    assert recipe(*flags).returncode == 0
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert_mistake(recipe(*flags), "holds a run", "--overwrite")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert recipe(*flags, "--overwrite").returncode == 0
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").write_bytes(b"cat")
    assert_mistake(recipe(*flags[:4], "--output_dir", tmp_path / "photos", "--overwrite"), "holds no run")
    assert (tmp_path / "photos/cat.png").exists()


def test_output_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    result = recipe("--output_dir", tmp_path / "file/run", "--num_updates", 1)
    assert_mistake(result, "cannot be written|is a file|not a directory")


def parsed(name, monkeypatch, *flags):
    """A recipe and its arguments."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, flags)])
    module = importlib.import_module(f"recipes.{name}")
    return module, module.parse_arguments()


def test_flags_without_effect_are_told_together_and_by_a_dry_run_too(tmp_path, model_dir):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/cat.png").write_bytes(b"cat")
    columns = ["--label_column", "a", "--text_column=b", "--dry_run", "--output_dir", tmp_path / "full"]
    patterns = ["--label_column has no effect", "--text_column has no effect", "is not empty and holds no run"]
    assert_mistake(run_recipe_alone("classify.py", *columns), *patterns, lines=3)
    more = ["--source_column", "a", "--dry_run", "--output_dir", "/proc/run"]
    assert_mistake(run_recipe_alone("seq2seq.py", *more), "--source_column has no", "/proc/run cannot be", lines=2)

    rows = [{"prompt": "a b c d e f g h i j", "completion": "k"}] * 9 + [{"prompt": "a", "completion": "k"}] * 3
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--train_file", tmp_path / "prompts.jsonl", "--model_name_or_path", model_dir, "--sequence_length", 4]
    result = recipe(*given, "--eval_every", 1, "--output_dir", tmp_path / "run")
    assert result.stderr.startswith("--eval_every has no effect: there are no held-out data")
    assert_mistake(result, "3 samples, fewer .* raise --sequence_length .9 rows")
    given = ["--train_file", write_rows(tmp_path / "rows.jsonl", 8), "--generate", 3, "--output_dir", tmp_path / "run"]
    result = run_recipe_alone("seq2seq.py", *given)
    assert_mistake(result, "8 samples")
    assert "--generate has no effect" in result.stderr
    assert not (tmp_path / "run").exists() and [path.name for path in (tmp_path / "full").iterdir()] == ["cat.png"]


def test_folders_that_are_no_data_say_what_is_wrong(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.png").write_bytes(b"x")
    with pytest.raises(UserError, match="0.png, .*1.png, .*2.png and 6 more: unknown extension") as error:
        check_sources(Source(files=(f"{tmp_path}/*",)))
    assert len(str(error.value).splitlines()) == 1
    (tmp_path / "texts").mkdir()
    for name, files in {"a.txt": "txt", "b.md": "txt", "a.jsonl.gz": "jsonl.gz"}.items():  # the first of a known type
        (tmp_path / "texts" / name).write_bytes(b"x")
        with pytest.raises(UserError, match=rf"texts/\*\.{files}\), or --dataset_name"):
            check_sources(Source(files=(str(tmp_path / "texts"),)))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/train.jsonl").write_text('{"a": \n')
    with pytest.raises(UserError, match="broken: .* cannot be read .*JSON.*; fix or replace"):
        load_split(str(tmp_path / "broken"), None, "train")


def test_models_that_are_none_say_where_one_is(misfit_models, tmp_path):
    for name, pattern in {"run.json": "give .*run.json-dir/model", "manifest.json": "checkpoint export"}.items():
        (tmp_path / f"{name}-dir").mkdir()
        (tmp_path / f"{name}-dir" / name).write_text("{}")
        with pytest.raises(UserError, match=pattern):
            load_config(str(tmp_path / f"{name}-dir"))
    with pytest.raises(UserError, match="llama has no encoder-decoder in transformers; use"):
        load_config(str(misfit_models / "good"), model_class=AutoModelForSeq2SeqLM)
    with pytest.raises(UserError, match="save it there"):
        load_tokenizer(str(misfit_models / "no_tokenizer"))


COLUMN_FLAGS = {
    ("classify", "label_column"): "--text_column, --pair_column, --label_column",
    ("embed", "positive_column"): "--anchor_column, --positive_column, --negative_columns, --score_column",
    ("long_sequence", "text_column"): "--text_column",
    ("seq2seq", "target_column"): "--source_column, --target_column",
}


@pytest.mark.parametrize(("name", "column"), COLUMN_FLAGS)
def test_a_column_that_is_not_there_is_told_with_its_flag(name, column, tmp_path, monkeypatch):
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    module, args = parsed(name, monkeypatch, "--train_file", rows, f"--{column}", "foo")
    with pytest.raises(UserError, match=rf"no column foo; .*\({COLUMN_FLAGS[name, column]}\)"):
        module.load_data(args)


@pytest.mark.parametrize("columns", [("text",), ("prompt", "completion"), ("messages",)])
@pytest.mark.parametrize("extension", [".jsonl", ".jsonl.gz", ".csv"])
def test_a_wrong_column_of_a_later_file_is_named_before_the_first_is_read(columns, extension, tmp_path):
    paths = [str(tmp_path / f"{name}{extension}") for name in "abc"]
    for path in paths:
        names = ["other"] if path == paths[2] else columns
        row = json.dumps(dict.fromkeys(names, "x"))
        if extension == ".csv":
            row = f"{','.join(names)}\n{','.join('x' for _ in names)}"
        open_file = gzip.open if extension.endswith(".gz") else open
        with open_file(path, "wt") as file:
            file.write(f"{row}\n")
    source = Source(files=tuple(paths))
    with pytest.raises(UserError, match=rf"c{extension}: no column {', '.join(columns)}; there are: other"):
        choose_columns(open_source(source), source, None)
    source = Source(files=tuple(paths[:2]))  # the control
    assert choose_columns(open_source(source), source, None)[1] == columns


def test_a_damaged_archive_is_named_with_its_last_whole_row(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"row {hash(str(number))}"} for number in range(20_000)])
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(rows.read_bytes())[:-20_000])
    corpus = open_source(Source(files=(str(packed),)))
    with pytest.raises(UserError) as error:
        list(corpus.rows(("text",), False))
    assert re.match(rf"{packed}, after line \d+: cannot be used \(EOFError: .*\); replace the file$", str(error.value))


COLUMNS_TWICE = {
    "classify": ("text", "--pair_column"),
    "embed": ("anchor", "--positive_column"),
    "embed ": ("positive", "--negative_columns"),
    "lm": ("prompt", "--completion_column"),
    "seq2seq": ("source", "--target_column"),
}


@pytest.mark.parametrize("name", COLUMNS_TWICE)
def test_a_column_with_two_uses_is_refused(name, tmp_path, monkeypatch):
    """Control: the defaults, in the next parse of the same flags."""
    names = ["source", "target"] if name == "seq2seq" else "text label anchor positive prompt completion".split()
    rows = [{column: f"{column} {number // 2}" for column in names} for number in range(8)]
    rows = write_jsonl(tmp_path / "rows.jsonl", rows)
    column, flag = COLUMNS_TWICE[name]
    module, args = parsed(name.strip(), monkeypatch, "--train_file", rows, flag, column)
    with pytest.raises(UserError, match=rf"rows.jsonl: column {column} is selected twice; .* \(.*{flag}"):
        module.load_data(args)
    module, args = parsed(name.strip(), monkeypatch, "--train_file", rows)
    module.load_data(args)


def test_the_home_of_an_unknown_user_is_a_missing_path(tmp_path):
    path = "~nosuchuser/a"
    assert_mistake(recipe("--train_file", f"{path}.txt", "--output_dir", tmp_path / "run"), f"{path}.txt: no such file")
    assert_mistake(recipe("--train_file", " ", "--output_dir", tmp_path / "run"), "^error: ' ': no such file")
    for use in (load_config, load_folder, lambda path: list(held_out_splits(path, None))):
        with suppress(UserError):
            use(path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "recipes").glob("*.py")))
def test_every_argument_is_a_flag_and_the_length_has_a_default(name, monkeypatch, capsys):
    """A dry run lists the arguments as flags."""
    _, args = parsed(name, monkeypatch)
    with pytest.raises(SystemExit):
        parsed(name, monkeypatch, "--help")
    told = " ".join(capsys.readouterr().out.split())
    assert [one for one in vars(args) if not re.search(rf" --{one}[ ,]", told)] == []
    assert name == "vision" or "maximum tokens per sample (default: " in told
    assert ("without prompt or messages" in told) == (name in ("lm", "moe", "pipeline"))


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("list tests", "tests has no checkpoint; name"),
        ("export", "the following arguments are required: checkpoint, target"),
        ("", "the following arguments are required: command"),
        ("list runs --no_such", "unrecognized arguments: --no_such"),
    ],
)
def test_a_mistake_in_a_command_about_checkpoints_is_one_line(command, problem, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["checkpoint", *command.split()])
    with pytest.raises(SystemExit) as ended:
        checkpoint_command()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.startswith(f"error: {problem}") and told.count("\n") == 1


def test_a_flag_of_a_recipes_own_that_is_misspelled_is_named():
    """To `run.begin`: a resume would compare nothing. Control: one that is there is passed over."""
    run = SimpleNamespace(args=argparse.Namespace(penalty=0.1))
    with pytest.raises(AssertionError, match=r"no flags: \['panalty', 'penalti'\]"):
        Run.begin(run, None, None, [], None, "penalti", "penalty", "panalty")
