"""What all recipes share by copy stays word for word the same, and every recipe is in the README."""

import ast

import pytest
from conftest import ROOT

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.py"))


def function(recipe, name):
    tree = ast.parse((ROOT / "recipes" / recipe).read_text())
    return next(ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loop_is_word_for_word_the_language_models(recipe):
    loop = function(recipe, "train")
    if recipe == "moe.py":  # says in two lines of its own what balances the experts
        loop = "\n".join(line for line in loop.splitlines() if "router." not in line).replace(", router)", ")")
    assert loop == function("lm.py", "train")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sections_come_in_the_same_order(recipe):
    tree = ast.parse((ROOT / "recipes" / recipe).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    order = [
        name for name in names if name in ("parse_arguments", "load_data", "sum_losses", "evaluate", "train", "main")
    ]
    assert order == ["parse_arguments", "load_data", "sum_losses", "evaluate", "train", "main"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_readme_has_its_command(recipe):
    assert f"recipes/{recipe}" in (ROOT / "README.md").read_text()
