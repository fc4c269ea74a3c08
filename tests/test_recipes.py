"""Recipes are short, what they share by copy is word for word the same, and every recipe is in the README."""

import ast

import pytest
from conftest import ROOT

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.py"))
MOST_LINES = 150
# Those whose held-out figures are losses; the others measure predictions too.
WITH_LOSSES = ("lm.py", "long_sequence.py", "moe.py", "seq2seq.py")
# The lines of the shared `main` that a recipe has otherwise.
OWN = {
    "classify.py": ("tokenizer, config,", "results |= "),
    "vision.py": ("tokenizer, config,", "with run.training(", "results |= "),
}
# What moe.py says of its own in the shared parts: it balances the experts.
BALANCE = {
    ", router)": ")",
    "if (is_finite := run.all_finite(batch, loss_sums, grad_norm, **router.news())):": (
        "if run.all_finite(batch, loss_sums, grad_norm):"
    ),
    "{'learning_rate': rate} | balance | ": "{'learning_rate': rate} | ",
}


def function(recipe, name):
    tree = ast.parse((ROOT / "recipes" / recipe).read_text())
    return next(ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def without_balance(text):
    for own, shared in BALANCE.items():
        text = text.replace(own, shared)
    return "\n".join(line for line in text.splitlines() if "router." not in line)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_read_in_one_sitting(recipe):
    assert len((ROOT / "recipes" / recipe).read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loop_is_word_for_word_the_language_models(recipe):
    loop = function(recipe, "train")
    assert (without_balance(loop) if recipe == "moe.py" else loop) == function("lm.py", "train")


def test_evaluations_are_word_for_word_the_same():
    assert {function(recipe, "evaluate") for recipe in WITH_LOSSES} == {function("lm.py", "evaluate")}
    for recipe in set(RECIPES) - set(WITH_LOSSES):
        assert "measure(run, model, predict)" in function(recipe, "evaluate")


def calls_of_run(recipe):
    """What `main` asks of `run`, in its order."""
    tree = ast.parse(function(recipe, "main"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    nodes = sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
    return [node.func.attr for node in nodes if ast.unparse(node.func.value) == "run"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_has_the_same_order_in_every_recipe(recipe):
    assert calls_of_run(recipe) == ["begin", "prepare", "training", "end_training", "write_model", "finish"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_most_mains_say_all_say(recipe):
    """A line of the language model's `main` that four recipes have is in all of them, but for what OWN names."""
    mains = {name: without_balance(function(name, "main")).splitlines() for name in RECIPES}
    shared = [line for line in mains["lm.py"] if sum(line in main for main in mains.values()) >= 4]
    missing = [line.strip() for line in shared if line not in mains[recipe]]
    assert len(shared) >= 7 and len(missing) == len(OWN.get(recipe, ())), missing
    assert all(line.startswith(own) for line, own in zip(missing, OWN.get(recipe, ()), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sections_come_in_the_same_order(recipe):
    tree = ast.parse((ROOT / "recipes" / recipe).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    sections = ["parse_arguments", "load_data", "sum_losses", "evaluate", "train", "main"]
    assert [name for name in names if name in sections] == sections


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_readme_has_its_command(recipe):
    assert f"recipes/{recipe}" in (ROOT / "README.md").read_text()
