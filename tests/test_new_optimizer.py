"""An entry in the table of optimizers is all that a new optimizer needs: help, training, FSDP2, resume, refusals."""

import shutil

import pytest
from conftest import ROOT, assert_refused, example_flags, launch, read_metrics

from common.training.optimizer_choice import smaller_optimizers
from common.training.optimizers import OPTIMIZERS
from tools.plan.memory import Mode, ModelSizes, on_host

TABLE = "OPTIMIZERS: dict[str, OptimizerInfo] = {\n"
ENTRY = """    "rmsprop": OptimizerInfo(
        lambda groups, model, learning_rate: torch.optim.RMSprop(groups, lr=learning_rate),
        "squared gradients, averaged",
        state_bytes=4,
        works_on={},
        aliases=("rmsprop_torch",),
        class_names=("RMSprop",),
    ),
"""


def copy(directory, works_on):
    """`cp -r recipes/lm.py common elsewhere/` with one more entry in the table."""
    directory.mkdir()
    shutil.copy(ROOT / "recipes/lm.py", directory)
    shutil.copytree(ROOT / "common", directory / "common", ignore=shutil.ignore_patterns("__pycache__"))
    path = directory / "common/training/optimizers.py"
    before, found, after = path.read_text().partition(TABLE)
    assert found
    path.write_text(before + TABLE + ENTRY.format(works_on) + after)
    return directory / "lm.py"


@pytest.fixture(scope="module")
def given(functions_file, model_dir):
    return lambda output_dir, *more: example_flags(
        functions_file, model_dir, output_dir, "--optimizer", "rmsprop", "--num_updates", 4, "--save_every", 2, *more
    )


def test_an_entry_in_the_table_trains_shards_and_resumes_in_another_mode(given, tmp_path):
    """The plain run's checkpoint of update 2 is continued by two processes under FSDP2, with the same losses."""
    script, losses = copy(tmp_path / "copy", "SPLITS"), {}
    fsdp2 = tmp_path / "fsdp2.yaml"
    shipped = (ROOT / "accelerate_configs/fsdp2.yaml").read_text()
    assert "mixed_precision: bf16" in shipped
    fsdp2.write_text(shipped.replace("mixed_precision: bf16", "mixed_precision: 'no'"))
    for name, config in (("plain", "cpu"), ("sharded", fsdp2)):
        launch(*given(tmp_path / name), config=config, script=script)
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
    assert losses["sharded"] == pytest.approx(losses["plain"], rel=1e-5) and losses["plain"][-1] < losses["plain"][0]
    shutil.rmtree(tmp_path / "plain/checkpoints/update-000004")
    result = launch(*given(tmp_path / "plain", "--resume"), config=fsdp2, script=script)
    assert "after update 2" in result.stdout
    resumed = [line["loss"] for line in read_metrics(tmp_path / "plain")]
    assert resumed == pytest.approx(losses["plain"], rel=1e-5) and resumed[:2] == losses["plain"][:2]


def test_an_entry_that_needs_whole_tensors_trains_and_is_refused_on_shards(given, tmp_path):
    """Control: in the test above, the same optimizer with the other property is not."""
    script = copy(tmp_path / "copy", ())
    launch(*given(tmp_path / "plain"), script=script)
    assert len(read_metrics(tmp_path / "plain")) == 4
    result = launch(*given(tmp_path / "sharded"), config="fsdp2", script=script, check=False)
    assert_refused(
        result,
        "--optimizer rmsprop does not work on the shards of FSDP2; use adamw, adamw8bit, muon or sgd, or multi_gpu",
    )
    result = launch("--optim", "rmsprop_torch", script=script, check=False)
    assert_refused(result, "use --optimizer rmsprop$")


@pytest.mark.parametrize(
    ("kind", "tensor", "expected"),
    [
        ("plain", 1, ["adamw8bit", "adafactor", "muon"]),
        ("DDP", 1, ["adamw8bit", "adafactor", "muon"]),
        ("DDP", 2, ["muon"]),
        ("FSDP", 1, ["adamw8bit", "muon"]),
        ("DeepSpeed", 1, []),
    ],
)
def test_an_optimizer_is_advised_only_where_it_works(kind, tensor, expected):
    mode = Mode("", kind, "no", 2, tensor=tensor)
    assert smaller_optimizers("adamw", *mode.splits) == expected
    assert all(OPTIMIZERS[name].state_bytes < OPTIMIZERS["adamw"].state_bytes for name in expected)


def test_offloaded_state_has_the_bytes_of_its_optimizer():
    """With float32 weights and gradients, of 10 elements, 4 of them in embedding and head."""
    mode = Mode("", "FSDP", "no", 2, state_on="host", weights_on="host")
    sizes = {name: on_host(ModelSizes(10, 10, 6, 4), mode, name)[0] for name in ("adamw", "sgd", "muon")}
    assert sizes == {"adamw": 160, "sgd": 120, "muon": 120 + 4 * 4}
