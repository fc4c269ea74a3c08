"""Trains with each preference loss of TRL, for tests/test_beside_trl.py: TRL's part of the comparison.

    python tests/trl_losses.py SPEC.json

SPEC.json: {"model": PATH, "reward_model": PATH, "settings": of TRL's configs, "runs": {NAME: [KIND, settings, file with
rows in order]}}. The losses of each run are printed as a line of JSON.
"""

import json
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

CLASSES = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "reward": (RewardTrainer, RewardConfig),
}


def main():
    spec = json.loads(open(sys.argv[1]).read())
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    for name, (kind, own, path) in spec["runs"].items():
        trainer_class, config_class = CLASSES[kind]
        if kind == "reward":
            model = AutoModelForSequenceClassification.from_pretrained(spec["reward_model"], dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
        rows = Dataset.from_list([json.loads(line) for line in open(path)])
        settings = config_class(**spec["settings"] | own)
        trainer = trainer_class(model=model, args=settings, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        print("LOSSES", json.dumps([name, losses]), flush=True)


if __name__ == "__main__":
    main()
