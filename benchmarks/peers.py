"""The peers of benchmarks/throughput.py: a plain Accelerate loop, transformers' Trainer and TRL's SFTTrainer.

benchmarks/throughput.py starts this file through `accelerate launch`, as it does recipes/lm.py, and says there what is
the same in all arms. Each peer writes what the recipe writes: a line of metrics.jsonl an update, and run.json.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

# The repository's root: this file's folder is on the path, the root is not.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common.report.tracking import memory_in_use_bytes, peak_memory_bytes  # noqa: E402
from common.training.optimizers import ADAM_BETAS  # noqa: E402


class Recorder(TrainerCallback):
    """Wall time and loss of each update, and how much memory the training took; a callback for the two Trainers."""

    def __init__(self, num_tokens: list[int]):
        self.num_tokens = num_tokens  # of each update, without padding: what the recipe counts, on the same samples
        self.device = PartialState().device
        self.seconds, self.losses = [], []

    def start(self):
        """The model is loaded and the loop begins."""
        self.memory_at_start = memory_in_use_bytes(self.device)
        self.last = time.perf_counter()

    def update(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the update is done, not only queued
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now

    def write(self, output_dir):
        growth = peak_memory_bytes(self.device) - self.memory_at_start
        with open(output_dir / "metrics.jsonl", "w") as file:
            for loss, tokens, seconds in zip(self.losses, self.num_tokens, self.seconds, strict=True):
                record = {"loss": loss, "target_tokens": tokens, "tokens_per_second": tokens / seconds}
                file.write(json.dumps(record) + "\n")
        results = {"memory_growth_bytes": growth, "num_threads": torch.get_num_threads()}
        (output_dir / "run.json").write_text(json.dumps({"results": results}))

    def on_train_begin(self, *_, **__):
        self.start()

    def on_step_end(self, *_, **__):
        self.update()

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:  # the summary at the end has none
            self.losses.append(logs["loss"])


def train_plain(args, model, tokenizer, dataset, recorder):
    """The loop of the tutorials: micro-batches padded to their longest sample, the mean of their mean losses."""
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation_steps)
    collate = DataCollatorForSeq2Seq(tokenizer)
    loader = DataLoader(dataset, batch_size=args.micro_batch_size, collate_fn=collate)  # in the data's shuffled order
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=ADAM_BETAS, weight_decay=args.weight_decay, fused=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    recorder.start()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            recorder.losses.append(torch.stack(losses).mean().item())
            recorder.update()
            losses.clear()


def trainer_settings(args):
    """What both Trainers are given; everything else is their default."""
    return {
        "output_dir": str(args.output_dir),
        "max_steps": args.num_updates,
        "per_device_train_batch_size": args.micro_batch_size,
        "gradient_accumulation_steps": args.accumulation_steps,
        "train_sampling_strategy": "sequential",  # in the data's shuffled order
        "optim": "adamw_torch_fused",
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": args.weight_decay,
        "adam_beta1": ADAM_BETAS[0],
        "adam_beta2": ADAM_BETAS[1],
        "max_grad_norm": args.max_grad_norm,
        # A Trainer takes device and precision from its arguments, not from the config of `accelerate launch`.
        "use_cpu": os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true",
        "bf16": os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def train_trainer(args, model, tokenizer, dataset, recorder):
    settings = TrainingArguments(**trainer_settings(args))
    collate = DataCollatorForSeq2Seq(tokenizer)
    Trainer(model, settings, data_collator=collate, train_dataset=dataset, callbacks=[recorder]).train()


def train_sft(args, model, tokenizer, dataset, recorder):
    from trl import SFTConfig, SFTTrainer

    # Two of its defaults are turned off: no other arm recomputes activations (slower, less memory), and the samples
    # are cut already.
    settings = SFTConfig(**trainer_settings(args), gradient_checkpointing=False, max_length=None)
    SFTTrainer(model, settings, train_dataset=dataset, processing_class=tokenizer, callbacks=[recorder]).train()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=("plain", "trainer", "sft"))
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--train_file", required=True, help='JSONL of {"input_ids": [...]}, shuffled')
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--micro_batch_size", type=int, required=True, help="samples")
    parser.add_argument("--accumulation_steps", type=int, required=True)
    parser.add_argument("--num_updates", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--weight_decay", type=float, required=True)
    parser.add_argument("--max_grad_norm", type=float, required=True)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True)

    with open(args.train_file) as file:
        rows = [json.loads(line)["input_ids"] for line in file]
    # Labels are given, and not left to a collator that masks what equals the padding token: here that is the end token.
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    global_batch = args.micro_batch_size * args.accumulation_steps
    # One less a row: the model predicts n - 1 of n tokens, and so many the recipe reads.
    tokens = [
        sum(len(row) - 1 for row in rows[start : start + global_batch]) for start in range(0, len(rows), global_batch)
    ]
    recorder = Recorder(tokens)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    train = {"plain": train_plain, "trainer": train_trainer, "sft": train_sft}[args.arm]
    train(args, model, tokenizer, dataset, recorder)
    recorder.write(args.output_dir)


if __name__ == "__main__":
    main()
