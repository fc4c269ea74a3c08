"""--export_dtype: model/ in half the size, the rounding of what was trained, and config.json says so."""

import json

import pytest
import torch
from conftest import BIN, launch, recipe_arguments, run, told
from safetensors.torch import load_file
from test_resume import RECIPES, data  # noqa: F401  a fixture
from transformers import AutoModelForCausalLM

from common.parallel.deepspeed_flags import check_deepspeed
from common.training.process_grid import ProcessGrid


def weights_of(directory):
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("lm", "multi_cpu"),
        ("lm", "fsdp2"),
        ("moe", "cpu"),
        ("classify", "cpu"),
        ("vision", "cpu"),
        ("long_sequence", "cpu"),
    ],
)
def test_the_model_is_the_rounding_of_what_was_trained(recipe, config, data, tmp_path):  # noqa: F811
    """Controls: without the flag it is float32, and the checkpoint is so either way."""
    own = [data.get(part, part) for part in RECIPES[recipe]]
    own += ["--num_updates", 1, "--global_batch_size", 8, "--micro_batch_size", 4, "--export_dtype", "bfloat16"]
    out = tmp_path / "run"
    result = launch(*own, "--output_dir", out, config=config, script=f"recipes/{recipe}.py")
    assert "(bfloat16, " in result.stdout
    checkpoint = out / "checkpoints/update-000001"
    for name, flags in (("whole", []), ("half", ["--dtype", "bfloat16"])):
        export = run([BIN / "python", "-m", "tools.checkpoint", "export", checkpoint, tmp_path / name, *flags])
        assert export.returncode == 0, told(export)
    made, whole, half = (weights_of(path) for path in (out / "model", tmp_path / "whole", tmp_path / "half"))
    assert made.keys() == whole.keys() == half.keys()
    for name, weight in whole.items():
        rounded = weight.bfloat16() if weight.is_floating_point() else weight
        assert weight.dtype != torch.bfloat16 and made[name].dtype == half[name].dtype == rounded.dtype
        assert torch.equal(made[name], rounded) and torch.equal(half[name], rounded)
    for path, dtype in ((out / "model", "bfloat16"), (tmp_path / "half", "bfloat16"), (tmp_path / "whole", "float32")):
        assert json.loads((path / "config.json").read_text())["dtype"] == dtype
    if recipe == "lm":
        assert AutoModelForCausalLM.from_pretrained(out / "model", dtype="auto").dtype == torch.bfloat16


def test_deepspeed_keeps_the_precision_that_it_computes_in():
    """Control: without mixed precision its weights are float32."""
    args = recipe_arguments("--export_dtype", "float32")
    config = {"zero_optimization": {"stage": 2}}
    (problem,) = check_deepspeed(config, args, "bf16", grid=ProcessGrid(2))
    assert "keeps the weights of model/ in bf16, not in --export_dtype float32" in problem
    assert check_deepspeed(config, args, "no", grid=ProcessGrid(2)) == []
