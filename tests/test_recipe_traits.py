"""Shared code asks what a recipe states about itself; names of the recipe's own flags change nothing."""

import re
import shutil

import pytest
from conftest import ROOT, launch, read_metrics, recipe_arguments

from common import arguments
from common.argument_checks import check_arguments
from common.parallel.launch import parse_launch
from common.parallel.launch_checks import check_launch
from common.tasks.seq2seq.encoder_decoder import TRAITS
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Traits

OWN = ("beta", "schedule", "target_length", "generate", "quantize")
ADDED = "".join(f'    parser.add_argument("--{name}", type=int, default=2048)\n' for name in OWN)
PARSED = "    args = distillation.parse_arguments(parser)\n"
SMALL = ("--model_config", "tiny", "--sequence_length", 32, "--num_updates", 2, "--global_batch_size", 4)


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Copies of recipes next to a copy of common/, in which --quantize and --generate are the copy's own flags."""
    directory = tmp_path_factory.mktemp("copies")
    shutil.copytree(ROOT / "common", directory / "common", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "recipes/lm.py").read_text()
    assert text.count(PARSED) == text.count(shared := ", adapters=True, answers=True") == 1
    (directory / "plain.py").write_text(text)
    (directory / "flags.py").write_text(text.replace(shared, "").replace(PARSED, ADDED + PARSED))
    text = (ROOT / "recipes/pipeline.py").read_text()
    assert text.count('"--schedule"') == text.count("args.schedule") == 1
    (directory / "staged.py").write_text(
        text.replace('"--schedule"', '"--order"').replace("args.schedule", "args.order")
    )
    return directory


def trained(copies, name, config, *flags):
    directory = copies / f"{name}-{config}"
    run = launch(*SMALL, *flags, "--output_dir", directory, config=config, script=copies / f"{name}.py")
    return [line["loss"] for line in read_metrics(directory)], run.stdout


@pytest.mark.parametrize("config", ["cpu", "multi_cpu"])
def test_a_flag_of_a_copied_recipe_makes_no_other_recipe_of_it(copies, functions_file, config):
    """Nor does --quantize mean 4 bits in a recipe that has no adapters."""
    losses, printed = trained(copies, "flags", config, "--train_file", functions_file)
    expected, before = trained(copies, "plain", config, "--train_file", functions_file)
    assert losses == expected
    mode = [re.search(r"^ *mode +.*", text, re.M)[0] for text in (printed, before)]
    assert mode[0] == mode[1] and ("DDP" in mode[0]) == (config == "multi_cpu")
    assert "1024 tokens" in printed.replace(",", "") and "1024 tokens" in before.replace(",", "")


def test_a_recipe_with_another_name_for_its_schedule_has_stages(copies, functions_file):
    """Control: without its trait, the launch is refused."""
    _, printed = trained(copies, "staged", "pipeline", "--train_file", functions_file, "--order", "gpipe")
    assert re.search(r"schedule +gpipe", printed) and "stage" in printed
    path = copies / "staged.py"
    path.write_text(path.read_text().replace("Run(args, pipeline_schedule=args.order)", "Run(args)"))
    result = launch(*SMALL, "--dry_run", config="pipeline", script=path, check=False)
    assert result.returncode != 0 and "this recipe has no stages" in result.stderr


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        ({}, 1500),
        ({"sequences_per_sample": 2, "splits_sequences": False}, 3000),
        (TRAITS, 2300),
        ({"size_flags": ()}, 1024),
    ],
)
def test_the_default_budget_holds_the_longest_sample(traits, expected):
    """On a CPU 1024 tokens. The flags are the same each time."""
    args = recipe_arguments()
    args.micro_batch_tokens, args.sequence_length, args.target_length, args.beta = None, 1500, 800, 0.1
    assert not check_arguments(args, True, Traits(**traits), ProcessGrid(1))
    assert args.micro_batch_tokens == expected


def test_only_a_loss_that_needs_whole_sequences_is_refused_where_they_are_split(monkeypatch):
    launch = parse_launch(["--config_file", str(ROOT / "accelerate_configs/sequence_parallel.yaml"), "recipe.py"], {})
    monkeypatch.setenv("WORLD_SIZE", str(launch.num_processes))
    args = recipe_arguments()
    args.beta = 0.1
    assert not [line for line in check_launch(launch, args, Traits()) if "needs all tokens" in line]
    assert [line for line in check_launch(launch, args, Traits(splits_sequences=False)) if "needs all tokens" in line]


def test_a_shared_flag_is_none_where_a_recipe_does_not_have_it():
    parser = arguments.recipe_parser("", lengths_vary=False)
    parser.add_argument("--micro_batch_tokens", default="its own")
    args = parser.parse_args(["--micro_batch_size", "2"])
    assert args.micro_batch_tokens == "its own" and args.shared("micro_batch_tokens") is None
    assert args.shared("micro_batch_size") == 2 and "shared_flags" not in vars(args)


def test_no_shared_code_looks_for_a_flag():
    """Control: the pattern finds one."""
    pattern = re.compile(r"hasattr\(.*args|getattr\(.*args\b.*, (None|False|0|\"\")\)")
    assert pattern.search('hasattr(run.args, "beta")') and pattern.search('getattr(args, "quantize", None)')
    for path in [*(ROOT / "common").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        assert not [line for line in path.read_text().splitlines() if pattern.search(line)], path
