"""Flags of well-known scripts: each is refused with what does the same here, and a page has them all."""

import importlib
import re
import sys

import pytest
from conftest import ROOT
from test_recipes import RECIPES

from common.familiar import FLAGS, VALUES, here, table

OPTIONS = re.compile(r"--\w+")


def refusal(words, monkeypatch, capsys, recipe="lm"):
    """What a recipe says of a command line, in one line on stderr."""
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
    return found | set(OPTIONS.findall((ROOT / "common/arguments.py").read_text()))


@pytest.mark.parametrize("name", FLAGS)
def test_each_flag_is_refused_with_what_does_the_same_here(name, flags_here, monkeypatch, capsys):
    """Control: a flag that nobody has is refused without."""
    told = refusal([f"--{name}", "3"], monkeypatch, capsys)
    assert f"; --{name} is {here(name, '3')}" in told and "\n" not in told
    unknown = [option for option in OPTIONS.findall(here(name)) if option not in flags_here]
    assert not unknown
    assert " is " not in refusal(["--quux_zork", "3"], monkeypatch, capsys)


def test_values_are_carried_over_where_they_mean_the_same(monkeypatch, capsys):
    words = ["--max_train_steps=500", "--optim", "adamw_torch", "--lr_scheduler_type", "polynomial", "--bf16"]
    told = refusal([*words, "--checkpointing-steps", "epoch"], monkeypatch, capsys)
    for here_too in ("--num_updates 500 here", "--optimizer adamw here", "--lr_schedule SCHEDULE here"):
        assert here_too in told
    assert "--checkpointing-steps is --save_every 1epoch here" in told and "--bf16 is --mixed_precision bf16 of" in told


def test_translated_values_are_values_here():
    from common.training.optimizers import OPTIMIZERS, SCHEDULES

    assert set(VALUES["OPTIMIZER"].values()) == set(OPTIMIZERS)
    assert set(VALUES["SCHEDULE"].values()) == set(SCHEDULES)


def test_the_page_has_the_table():
    page = (ROOT / "docs/coming_from.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `--")] == table()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_refuses_them(recipe, monkeypatch, capsys):
    told = refusal(["--per_device_train_batch_size", "4"], monkeypatch, capsys, recipe.removesuffix(".py"))
    assert "--micro_batch_size 4, beside --global_batch_size here" in told
