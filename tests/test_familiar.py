"""Flags of well-known scripts: each is refused with what does the same here, and a page has them all."""

import importlib
import itertools
import re
import sys

import pytest
from conftest import ROOT
from test_recipes import RECIPES

from common.arguments import ArgumentParser
from common.flag_translation import ELSEWHERE, FLAGS, VALUES, here, table

OPTIONS = re.compile(r"--\w+")


class Parsed(Exception):
    """A recipe's parser, at the moment when it is to parse."""


def refusal(words, monkeypatch, capsys, recipe="lm"):
    """What a recipe says of a command line on stderr."""
    monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *words])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"recipes.{recipe}").parse_arguments()
    assert ended.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.fixture(scope="module")
def flags_here():
    """Those of all recipes and of the launcher, from their parsers."""
    from accelerate.commands.launch import launch_command_parser

    found = {option for action in launch_command_parser()._actions for option in action.option_strings}
    for path in sorted((ROOT / "recipes").glob("*.py")):
        found |= set(OPTIONS.findall(path.read_text()))
    for path in ("common/arguments.py", "common/tasks/lm/distillation.py", "tools/checkpoint/__main__.py"):
        found |= set(OPTIONS.findall((ROOT / path).read_text()))
    return found


@pytest.fixture(scope="module")
def options_of():
    """The flags of each recipe's parser, by the recipe."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_known_args", lambda parser, *_: (_ for _ in ()).throw(Parsed(parser)))
        for recipe in RECIPES:
            with pytest.raises(Parsed) as parsed:
                importlib.import_module(f"recipes.{recipe.removesuffix('.py')}").parse_arguments()
            options = parsed.value.args[0]._option_string_actions
            found[recipe] = {option for option in options if option.startswith("--")}
    return found


def test_a_flag_that_not_every_recipe_has_is_found_in_the_others(options_of):
    own = set.union(*options_of.values()) - set.intersection(*options_of.values())
    assert own == {f"--{flag}" for flag in ELSEWHERE}


@pytest.mark.parametrize("name", FLAGS)
def test_each_flag_is_refused_with_what_to_do_here(name, flags_here, options_of, monkeypatch, capsys):
    """Control: a flag that nobody has is refused without."""
    asked = {*OPTIONS.findall(FLAGS[name][1])} & set.union(*options_of.values())
    recipe = next(recipe for recipe in ("lm.py", *options_of) if options_of[recipe] >= asked)
    told = refusal([f"--{name}", "3"], monkeypatch, capsys, recipe.removesuffix(".py"))
    shown = "(not shown)" if name == "hub_token" else "3"
    assert told == f"error: unrecognized argument --{name} {shown}: {here(name, '3')}"
    unknown = [option for option in OPTIONS.findall(here(name)) if option not in flags_here]
    assert not unknown
    told = refusal(["--quux_zork", "3"], monkeypatch, capsys)
    assert told == "error: unrecognized argument --quux_zork 3 (--help lists the flags)"


ANSWERS = {
    "--max_train_steps=500": "--max_train_steps=500: use --num_updates 500",
    "--checkpointing-steps epoch": "--checkpointing-steps epoch: use --save_every 1epoch",
    "--eval_steps 0.1": "--eval_steps 0.1: use --eval_every N",
    "--lr 3e-4": "--lr 3e-4: use --learning_rate 3e-4",
    "--optim adamw_torch": "--optim adamw_torch: use --optimizer adamw",
    "--lr_scheduler_type polynomial": "--lr_scheduler_type polynomial: use --lr_schedule constant|linear|cosine|wsd",
    "--lora_target_modules q_proj v_proj": "--lora_target_modules q_proj v_proj: use --lora_targets q_proj v_proj",
    "--bf16": "--bf16: use --mixed_precision bf16 as a flag of accelerate launch, before the recipe",
    "--bf16 False": "--bf16 False: use --mixed_precision no as a flag of accelerate launch, before the recipe",
    "--gradient_checkpointing False": "--gradient_checkpointing False: remove it; it is off by default",
    "--streaming False": "--streaming False: remove it; it is off by default",
    "--group_by_length no": "--group_by_length no: remove it; the samples of a global batch are always sorted",
    "--packing False": "--packing False: use --shape examples",
    "--save_strategy no": "--save_strategy no: use --save_every 0, which saves only",
    "--eval_strategy no": "--eval_strategy no: remove it; without --eval_every",
    "--max_steps -1": "--max_steps -1: remove it",
    "--save_steps 0": "--save_steps 0: use --save_every 0",
    "--train_files x": "--train_files x: did you mean --train_file?",
    "--fsdp=": "--fsdp=: remove it; it is off by default",
    "--beta 0.1": "--beta 0.1: this recipe does not have it; it is --beta in dpo.py",
    "--lora_task_type CAUSAL_LM --use_dora True": "--lora_task_type CAUSAL_LM: remove it; it is set by the recipe",
    "--trust_remote_code True": "True: it belongs to no flag (a switch, such as --overwrite, takes no value)",
}


@pytest.mark.parametrize("given", ANSWERS)
def test_values_are_carried_over_where_they_mean_the_same(given, monkeypatch, capsys):
    assert f"unrecognized argument {ANSWERS[given]}" in refusal(given.split(), monkeypatch, capsys)


def test_a_switch_with_a_value_is_told_as_one(monkeypatch, capsys):
    told = refusal(["--use_dora=True"], monkeypatch, capsys)
    assert told == "error: --use_dora is a switch and takes no value; pass only the flag, or remove it"


def test_of_several_each_has_a_line_of_its_own(monkeypatch, capsys):
    several = ["--bf16=True", "--lr=3e-4", "--packing False", "--train_files x"]
    told = refusal(" ".join(several).split(), monkeypatch, capsys).splitlines()
    assert [line.split(": ")[1] for line in told] == [f"unrecognized argument {one}" for one in several]


def test_the_betas_that_an_answer_names_are_those_of_the_optimizer():
    from common.training.optimizers import ADAM_BETAS

    assert here("adam_beta2").endswith(f"which is {ADAM_BETAS}")


def test_translated_values_are_values_here():
    from common.training.optimizers import OPTIMIZERS, SCHEDULES

    assert set(VALUES["OPTIMIZER"].values()) == set(OPTIMIZERS)
    assert set(VALUES["SCHEDULE"].values()) == set(SCHEDULES)


def test_the_page_has_the_table():
    page = (ROOT / "docs/coming_from.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `--")] == table()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_answers_with_flags_that_it_has(recipe, options_of, monkeypatch, capsys):
    """Else with the recipes that have them. Control: each flag of ELSEWHERE is one that some recipe has not."""
    name = recipe.removesuffix(".py")
    own = options_of[recipe]
    for flag, where in ELSEWHERE.items():
        named = recipe in where.partition(", which")[0]
        assert (f"--{flag}" in own) == (named != where.startswith("all recipes except ")), flag
        assert ".py" in where
    others = {f"--{flag}" for flag in ELSEWHERE} - own
    for flag, value in itertools.product(FLAGS, ("3", "False")):
        answer, missing = here(flag, value, own), here(flag, value)
        if others.isdisjoint(OPTIONS.findall(missing)):
            assert answer == missing and (
                "accelerate launch" in answer or own >= {*OPTIONS.findall(answer.partition("python -m")[0])}
            )
        else:
            assert answer.startswith("this recipe does not have it; it is --")
    told = refusal(["--max_target_length", "4", "--train_batch_size", "4"], monkeypatch, capsys, name)
    assert ("it is --target_length in seq2seq.py" in told) == (recipe != "seq2seq.py")
    assert told.endswith("--train_batch_size 4: use --global_batch_size 4, which counts the samples of all processes")
