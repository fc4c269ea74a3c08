"""Recipes are short, what they share by copy is word for word the same, and every recipe is in the README."""

import ast

import pytest
from conftest import ROOT

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.py"))
MOST_LINES = 150
# How the lines of the language model's `main` begin that all have, and those of them that a recipe has otherwise.
SHARED = ("args = ", "tokenizer, config, ", "optimizer = ", "with run.training(", "train(args, ", "results |= ")
OWN = {
    "classify.py": ("tokenizer, config, ", "optimizer = ", "results |= "),
    "dpo.py": ("results |= ",),
    "embed.py": ("with run.training(", "results |= "),
    "reward.py": ("optimizer = ", "results |= "),
    "vision.py": ("tokenizer, config, ", "optimizer = ", "with run.training(", "results |= "),
}
# What moe.py says of its own in the shared parts: it balances the experts.
BALANCE = {
    ", router)": ")",
    "if (is_finite := run.all_finite(batch, loss_sums, grad_norm, **router.values_to_reduce())):": (
        "if run.all_finite(batch, loss_sums, grad_norm):"
    ),
    "{'learning_rate': rate} | balance | ": "{'learning_rate': rate} | ",
}
# What pipeline.py says of its own there: a schedule computes all micro-batches, on all stages.
SCHEDULE = {
    "batches, pipeline)": "batches)",
    "the pipeline's schedule of its micro-batches": "forward and backward of its micro-batches",
    """        scale = loss_scale(accelerator, batch.num_targets)
        micro_batches = [micro_batch for micro_batch, _ in run.micro_batches(batch)]
        loss_sums = pipeline.step(accelerator, model, micro_batches, scale)
""": """        scale, loss_sums, loss_sum = (loss_scale(accelerator, batch.num_targets), [], None)
        for micro_batch, is_last in run.micro_batches(batch):
            with synchronize_gradients(accelerator, model, now=is_last):
                loss_sum = sum_losses(model, micro_batch)
                accelerator.backward(loss_sum * scale)
                loss_sums.append(loss_sum.detach())
""",
}
# And embed.py: each micro-batch comes with the gradient of the loss of the whole global batch.
REPLAY = {"replayed(run, model, batch, predict)": "run.micro_batches(batch)"}
# And dpo.py: with KTO, each micro-batch comes with the baseline of the whole global batch.
BASELINE = {"with_baseline(run, model, batch)": "run.micro_batches(batch)"}
SAID = {"dpo.py": BASELINE, "moe.py": BALANCE, "pipeline.py": SCHEDULE, "embed.py": REPLAY}


def function(recipe, name):
    tree = ast.parse((ROOT / "recipes" / recipe).read_text())
    return next(ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def as_shared(recipe, text):
    """Without what the recipe says of its own in the shared parts."""
    for own, shared in SAID.get(recipe, {}).items():
        text = text.replace(own, shared)
    return "\n".join(line for line in text.splitlines() if "router." not in line)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_read_in_one_sitting(recipe):
    assert len((ROOT / "recipes" / recipe).read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loop_is_word_for_word_the_language_models(recipe):
    assert as_shared(recipe, function(recipe, "train")) == function("lm.py", "train")


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_evaluation_is_word_for_word_the_language_models_unless_it_measures_predictions(recipe):
    evaluate = function(recipe, "evaluate")
    assert evaluate == function("lm.py", "evaluate") or "measure(run, model, predict" in evaluate


def calls_of_run(recipe):
    """What `main` asks of `run`, in its order."""
    tree = ast.parse(function(recipe, "main"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    nodes = sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
    return [node.func.attr for node in nodes if ast.unparse(node.func.value) == "run"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_has_the_same_order_in_every_recipe(recipe):
    order = "begin prepare training end_training write_model optional_steps finish"
    assert calls_of_run(recipe) == order.split()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_main_has_the_lines_that_all_share(recipe):
    """But for those that OWN names, and these it has otherwise."""
    shared = [line for line in function("lm.py", "main").splitlines() if line.lstrip().startswith(SHARED)]
    lines = as_shared(recipe, function(recipe, "main")).splitlines()
    missing = [line.lstrip() for line in shared if line not in lines]
    assert len(shared) == len(SHARED)
    assert tuple(start for start in SHARED if any(line.startswith(start) for line in missing)) == OWN.get(recipe, ())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sections_come_in_the_same_order(recipe):
    tree = ast.parse((ROOT / "recipes" / recipe).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    sections = ["parse_arguments", "load_data", "sum_losses", "evaluate", "train", "main"]
    assert [name for name in names if name in sections] == sections


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_readme_has_its_command(recipe):
    assert f"recipes/{recipe}" in (ROOT / "README.md").read_text()
