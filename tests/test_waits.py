"""Where transformers looks at its masks, our host knows the answer. (That no update waits: tests/test_meta.py.)"""

import json

import pytest
from conftest import read_metrics, run_specs, write_rows

OWN_FLAGS = {  # of the recipes with models in which transformers looks, if it is let
    "lm": ["--micro_batch_size", 1, "--shape", "examples"],
    "classify": ["--micro_batch_size", 2],
    "seq2seq": ["--micro_batch_size", 2, "--generate", 0],
    "moe": ["--micro_batch_size", 1],
}
LOOKS = {"knows": {}, "looks": {"look_at_masks": 1}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 60)


def flags(recipe, rows, output_dir, *more):
    base = ["--train_file", rows, "--sequence_length", 64, "--num_updates", 2, "--global_batch_size", 4]
    return [*base, "--warmup_updates", 0, *OWN_FLAGS[recipe], "--output_dir", output_dir, *more]


@pytest.mark.parametrize("recipe", OWN_FLAGS)
def test_the_masks_are_those_that_transformers_finds(recipe, rows, tmp_path):
    """The losses are equal in every bit."""
    run_specs(recipe, [(flags(recipe, rows, tmp_path / name), look) for name, look in LOOKS.items()], tmp_path)
    knows, looks = ([line["loss"] for line in read_metrics(tmp_path / name)] for name in LOOKS)
    assert knows == looks and len(knows) == 2


def test_compiled_attention_has_its_causal_flag_and_no_mask(rows, tmp_path):
    """And key-value heads that are not repeated. Control: transformers that looks for packed rows, and may not."""
    runs = [
        (
            flags("lm", rows, tmp_path / name, "--compile", "--dry_run"),
            look | {"note_attention": str(tmp_path / f"{name}.json")},
        )
        for name, look in LOOKS.items()
    ]
    run_specs("lm", runs, tmp_path)
    plain = {"has_mask": False, "heads": [4, 2], "is_causal": True, "enable_gqa": True}
    knows, looks = (json.loads((tmp_path / f"{name}.json").read_text()) for name in LOOKS)
    assert knows == [plain] * 4  # layers
    assert len(looks) == 4 and all(call["has_mask"] and call["heads"] == [4, 4] for call in looks)
