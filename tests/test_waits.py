"""The host does not wait for the device inside a global batch, counted on a CPU, where nothing would show it."""

import json
import re

import pytest
from conftest import read_metrics, run_specs, write_jsonl, write_rows

MODELS = {
    "lm": {
        "lm": [],
        "lm-selective": ["--activation_checkpointing", "selective"],
        "lm-packed": ["--shape", "packed"],
        "lm-teacher": ["--model_name_or_path", "MODEL", "--teacher", "MODEL"],
    },
    "classify": {"classify": [], "classify-full": ["--activation_checkpointing", "full"]},
    "seq2seq": {"seq2seq": ["--generate", 0]},
    "embed": {"embed": ["--learn_temperature"]},
    "reward": {"reward": ["--center_rewards", 0.1]},
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
    directory = tmp_path_factory.mktemp("data")
    texts = ["--train_file", write_rows(directory / "rows.jsonl", 60)]
    pairs = [{"prompt": "a ", "chosen": "b " * (n % 5 + 1), "rejected": "c", "margin": n} for n in range(60)]
    pairs = ["--train_file", write_jsonl(directory / "pairs.jsonl", pairs)]
    short = ["--sequence_length", 64, "--micro_batch_size", 1]
    return {
        "lm": [*texts, *short, "--shape", "examples"],
        "classify": [*texts, *short, "--micro_batch_size", 2],
        "seq2seq": [*texts, *short, "--micro_batch_size", 2],
        "embed": [*texts, *short, "--micro_batch_size", 2],
        "reward": [*pairs, *short, "--micro_batch_size", 2],
        "moe": [*texts, *short],
        "vision": ["--micro_batch_size", 2],
        "long_sequence": [*texts, *short, "--hidden_size", 16],
    }


@pytest.mark.parametrize("recipe", MODELS)
def test_the_host_does_not_wait_within_a_global_batch(recipe, files, model_dir, tmp_path):
    """Controls: a loss that is read in forward and in backward, and transformers' own looks at its masks.

    These find the same masks: the losses are equal in every bit.
    """
    runs, notes = [], {}

    def add(name, own, **changes):
        own = [model_dir if part == "MODEL" else part for part in own]
        given = [*files[recipe], *SHARED, *own, "--output_dir", tmp_path / name]
        runs.append((given, changes | {"note_waits": str(tmp_path / f"{name}.json")}))

    for name, own in MODELS[recipe].items():
        add(name, own)
    usual = MODELS[recipe][recipe]
    add("reads", [*usual, "--num_updates", 1], read_each_loss=1)
    if recipe in LOOKS:
        add("looks", usual, look_at_masks=1)
    run_specs(recipe, runs, tmp_path)
    notes = {
        path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json") if path.stem != f"{recipe}-cpu"
    }
    assert all(notes[name] == [[], []] for name in MODELS[recipe])
    lines = {re.search(r"_local_scalar_dense.* at .*work.py:(\d+)", note)[1] for note in notes["reads"][0]}
    assert len(lines) == 2  # in forward, and in backward
    if recipe in LOOKS:
        assert all(notes["looks"])
        knows, looks = ([line["loss"] for line in read_metrics(tmp_path / name)] for name in (recipe, "looks"))
        assert knows == looks


def test_compiled_attention_has_its_causal_flag_and_no_mask(files, tmp_path):
    """And key-value heads that are not repeated, in one graph for all layers.

    Control: the whole model is compiled, with the masks, and transformers looks for packed rows, which it then cannot.
    """
    runs = []
    for name, changes in (("knows", {}), ("looks", {"look_at_masks": 1, "compile_whole_model": 1})):
        given = [*files["lm"], *SHARED, "--compile", "--dry_run", "--output_dir", tmp_path / name]
        runs.append((given, changes | {"note_attention": str(tmp_path / f"{name}.json")}))
    run_specs("lm", runs, tmp_path)
    plain = {"has_mask": False, "heads": [4, 2], "is_causal": True, "enable_gqa": True}
    knows, looks = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("knows", "looks"))
    assert knows == [plain]
    assert len(looks) == 4 and all(call["has_mask"] and call["heads"] == [4, 4] for call in looks)
