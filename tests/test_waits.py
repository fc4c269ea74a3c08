"""The host does not wait for the device inside a global batch, counted on a CPU, where nothing would show it."""

import json
import re

import pytest
from conftest import launch_command, read_metrics, run, write_rows

MODELS = {
    "lm": {"lm": [], "lm-selective": ["--activation_checkpointing", "selective"]},
    "classify": {"classify": [], "classify-full": ["--activation_checkpointing", "full"]},
    "seq2seq": {"seq2seq": ["--generate", 0]},
    "moe": {"moe": [], "moe-exact": ["--balance", "exact"], "moe-usual": ["--balance", "usual"]},
    "vision": {"vision": [], "vision-resnet": ["--model_config", "resnet"], "vision-vit": ["--model_config", "vit"]},
    "long_sequence": {
        "long_sequence": [],
        "long_sequence-gru": ["--architecture", "gru", "--truncate", 16],
        "long_sequence-transformer": ["--architecture", "transformer", "--mlp_rows", 16],
    },
}
LOOKS = ("lm", "classify", "seq2seq", "moe")  # transformers does, in these, if it is let
SHARED = ["--num_updates", 2, "--global_batch_size", 4, "--warmup_updates", 0]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Each recipe's own flags for small data."""
    texts = ["--train_file", write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 60)]
    short = ["--sequence_length", 64, "--micro_batch_size", 1]
    return {
        "lm": [*texts, *short, "--shape", "examples"],
        "classify": [*texts, *short, "--micro_batch_size", 2],
        "seq2seq": [*texts, *short, "--micro_batch_size", 2],
        "moe": [*texts, *short],
        "vision": ["--micro_batch_size", 2],
        "long_sequence": [*texts, *short, "--hidden_size", 16],
    }


def run_specs(specs, path):
    path.write_text(json.dumps(specs))
    result = run([*launch_command("cpu"), "tests/run_recipe.py", path], timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_host_does_not_wait_within_a_global_batch(files, tmp_path):
    """Controls: a loss that is read in forward and in backward, and transformers' own looks at its masks.

    These find the same masks: the losses are equal in every bit.
    """
    specs = []

    def add(recipe, name, own, **changes):
        given = [*files[recipe], *SHARED, *own, "--output_dir", tmp_path / name]
        changes |= {"note_waits": str(tmp_path / f"{name}.json")}
        specs.append({"recipe": f"recipes/{recipe}.py", "flags": list(map(str, given)), "changes": changes})

    for recipe, models in MODELS.items():
        for name, own in models.items():
            add(recipe, name, own)
        add(recipe, f"{recipe}-reads", [*models[recipe], "--num_updates", 1], read_each_loss=1)
        if recipe in LOOKS:
            add(recipe, f"{recipe}-looks", models[recipe], look_at_masks=1)
    run_specs(specs, tmp_path / "specs.json")
    for recipe, models in MODELS.items():
        for name in models:
            assert json.loads((tmp_path / f"{name}.json").read_text()) == [[], []]
        (notes,) = json.loads((tmp_path / f"{recipe}-reads.json").read_text())
        lines = {re.search(r"_local_scalar_dense.* at .*run_recipe.py:(\d+)", note)[1] for note in notes}
        assert len(lines) == 2  # in forward, and in backward
        if recipe in LOOKS:
            assert all(json.loads((tmp_path / f"{recipe}-looks.json").read_text()))
            losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in (recipe, f"{recipe}-looks")]
            assert losses[0] == losses[1]


def test_compiled_attention_has_its_causal_flag_and_no_mask(files, tmp_path):
    """And key-value heads that are not repeated. Control: transformers that looks for packed rows, and may not."""
    specs = []
    for name, changes in (("run", {}), ("control", {"look_at_masks": 1})):
        given = [*files["lm"], *SHARED, "--compile", "--dry_run", "--output_dir", tmp_path / name]
        changes |= {"note_attention": str(tmp_path / f"{name}.json")}
        specs.append({"flags": list(map(str, given)), "changes": changes})
    run_specs(specs, tmp_path / "specs.json")
    plain = {"has_mask": False, "heads": [4, 2], "is_causal": True, "enable_gqa": True}
    calls, control = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("run", "control"))
    assert calls == [plain] * 4  # layers
    assert len(control) == 4 and all(call["has_mask"] and call["heads"] == [4, 4] for call in control)
