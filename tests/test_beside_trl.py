"""The losses of dpo.py and reward.py beside TRL's, over three updates on the same rows; skipped without trl."""

import json
import sys
from importlib.util import find_spec

import pytest
from conftest import read_metrics, run, run_specs, write_jsonl
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from common.training.batching import sample_ids_of

WORDS = "alpha beta gamma delta one two three four five six seven".split()
PAIRS = [
    {
        "prompt": "Q: " + " ".join(WORDS[: 2 + n]) + ":",
        "chosen": " " + " ".join(WORDS[n : n + 4]) + " x" * n,
        "rejected": " " + " ".join([*WORDS[n : n + 1], *WORDS[7 - n :]]),
    }
    for n in range(6)
]
WITH_MARGINS = [pair | {"margin": n / 4} for n, pair in enumerate(PAIRS)]
LABELLED = [
    {"prompt": pair["prompt"], "completion": pair[part], "label": part == "chosen"}
    for pair in PAIRS
    for part in ("chosen", "rejected")
]
# By loss: our flags, and the trainer of TRL with its settings.
LOSSES = {
    "sigmoid": ([], "dpo", {"loss_type": ["sigmoid"]}),
    "ipo": ([], "dpo", {"loss_type": ["ipo"]}),
    "hinge": ([], "dpo", {"loss_type": ["hinge"]}),
    "robust": (["--label_smoothing", 0.1], "dpo", {"loss_type": ["robust"], "label_smoothing": 0.1}),
    "kto": (["--undesirable_weight", 1.3], "kto", {"undesirable_weight": 1.3}),
    "orpo": ([], "orpo", {}),
    "simpo": (["--simpo_gamma", 0.7], "cpo", {"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0}),
    "cpo": (
        ["--cpo_alpha", 0.6, "--label_smoothing", 0.1],
        "cpo",
        {"loss_type": "sigmoid", "cpo_alpha": 0.6, "label_smoothing": 0.1},
    ),
    "reward": (["--center_rewards", 0.1], "reward", {"center_rewards_coefficient": 0.1}),
}
UPDATES, RATE, BETA, CLIPPING = 3, 1e-3, 0.3, 0.5
SETTINGS = {"max_steps": UPDATES, "learning_rate": RATE, "max_grad_norm": CLIPPING, "weight_decay": 0.0}
SETTINGS |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "adam_beta2": 0.95, "gradient_checkpointing": False}
SETTINGS |= {"max_length": 256, "logging_steps": 1, "save_strategy": "no", "report_to": []}
SETTINGS |= {"use_cpu": True, "bf16": False, "disable_tqdm": True}


def losses_of_trl(model_dir, reward_model, directory):
    """By loss, those of three updates of TRL's trainer, each on all rows."""
    num = len(LABELLED)
    # KTO's estimate of the divergence depends on the order of the rows.
    ordered = [LABELLED[row] for update in range(UPDATES) for row in sample_ids_of(update, num, num, 0)]
    files = {"kto": write_jsonl(directory / "ordered.jsonl", ordered)}
    files["reward"] = write_jsonl(directory / "margins.jsonl", WITH_MARGINS)
    pairs = write_jsonl(directory / "pairs.jsonl", PAIRS)
    runs = {}
    for name, (_, kind, own) in LOSSES.items():
        size = {"per_device_train_batch_size": num if kind == "kto" else len(PAIRS)}
        order = {"train_sampling_strategy": "sequential"} if kind == "kto" else {}
        order |= {} if kind == "reward" else {"beta": BETA}
        runs[name] = [kind, own | size | order, str(files.get(kind, pairs))]
    spec = {"model": str(model_dir), "reward_model": str(reward_model)}
    spec |= {"settings": SETTINGS | {"output_dir": str(directory / "trl")}, "runs": runs}
    (directory / "trl.json").write_text(json.dumps(spec))
    result = run([sys.executable, "tests/trl_losses.py", directory / "trl.json"], CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.partition(" ")[2] for line in result.stdout.splitlines() if line.startswith("LOSSES ")]
    return dict(map(json.loads, lines))


def losses_of_recipes(model_dir, reward_model, directory):
    files = {"kto": LABELLED, "reward": WITH_MARGINS, "pairs": PAIRS}
    files = {name: write_jsonl(directory / f"{name}.jsonl", rows) for name, rows in files.items()}
    runs = []
    for name, (own, kind, _) in LOSSES.items():
        is_reward, size = kind == "reward", len(LABELLED) if kind == "kto" else len(PAIRS)
        flags = ["--model_name_or_path", reward_model] if is_reward else ["--model_name_or_path", model_dir]
        flags += [] if is_reward else ["--loss", name, "--beta", BETA]
        flags += [*own, "--train_file", files.get(kind, files["pairs"])]
        flags += ["--sequence_length", SETTINGS["max_length"] - 1, "--global_batch_size", size]
        flags += ["--num_updates", UPDATES, "--learning_rate", RATE, "--lr_schedule", "constant", "--warmup_updates", 0]
        flags += ["--weight_decay", 0, "--max_grad_norm", CLIPPING, "--output_dir", directory / name]
        runs.append((flags, {}, "reward" if is_reward else "dpo"))
    run_specs("dpo", runs, directory)
    return {name: [line["loss"] for line in read_metrics(directory / name)] for name in LOSSES}


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl (pip install --no-deps trl==1.16.0)")
def test_every_loss_is_that_of_trl(model_dir, tmp_path):
    """After an update too, so gradients and clipping count. Control: without its flags, a loss is another one."""
    reward_model = tmp_path / "reward_model"
    AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1).save_pretrained(reward_model)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(reward_model)
    models = model_dir, reward_model
    ours, expected = losses_of_recipes(*models, tmp_path), losses_of_trl(*models, tmp_path)
    assert ours.keys() == expected.keys()
    for name, losses in expected.items():
        assert len(losses) == UPDATES and losses[0] != losses[-1], name
        assert ours[name] == pytest.approx(losses, rel=1e-5), name
    assert ours["robust"][-1] != pytest.approx(expected["sigmoid"][-1], rel=1e-5)
