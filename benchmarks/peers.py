"""The peers of benchmarks/throughput.py: Accelerate loops, transformers' Trainer and TRL's SFTTrainer.

benchmarks/throughput.py starts this file by `accelerate launch`, like a recipe, and documents what all arms have in
common. Each peer writes results.json: seconds and loss of every update, and its memory growth.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

# The repository's root: this file's folder is on the path, the root is not.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common.report.tracking import memory_in_use_bytes, peak_memory_bytes  # noqa: E402
from common.training.optimizers import ADAM_BETAS  # noqa: E402

BLOCK = 512  # tokens of a packed sample


class Recorder(transformers.TrainerCallback):
    """Wall time and loss of each update, and how much memory the training took; a callback for the two Trainers."""

    def __init__(self):
        self.device = PartialState().device
        self.seconds, self.losses, self.results = [], [], {}

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
        self.results["memory_bytes"] = peak_memory_bytes(self.device)
        growth = self.results["memory_bytes"] - self.memory_at_start
        self.results |= {"memory_growth_bytes": growth, "num_threads": torch.get_num_threads()}
        self.results |= {"seconds": self.seconds, "losses": self.losses}
        (output_dir / "results.json").write_text(json.dumps(self.results))

    def on_train_begin(self, *_, **__):
        self.start()

    def on_step_end(self, *_, **__):
        self.update()

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:  # the summary at the end has none
            self.losses.append(logs["loss"])


def adamw(args, model):
    rates = {"lr": args.learning_rate, "betas": ADAM_BETAS, "weight_decay": args.weight_decay}
    return torch.optim.AdamW(model.parameters(), **rates, fused=True)


def train_plain(args, model, tokenizer, rows, collate, recorder):
    """The loop of the tutorials: micro-batches padded to their longest sample, the mean of their mean losses."""
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation_steps)
    loader = DataLoader(rows, batch_size=args.micro_batch_size, collate_fn=collate)  # in the data's shuffled order
    model, optimizer, loader = accelerator.prepare(model, adamw(args, model), loader)
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


def train_tuned(args, model, tokenizer, rows, collate, recorder):
    """What one would write by hand: sorted samples, micro-batches by tokens, each weighted by its targets."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, adamw(args, model))
    model.train()
    recorder.start()
    for start in range(0, len(rows), args.global_batch_size):
        samples = sorted(rows[start : start + args.global_batch_size], key=lambda row: -num_inputs(row, model))
        batches = [[samples[0]]]
        for row in samples[1:]:
            if (len(batches[-1]) + 1) * num_inputs(batches[-1][0], model) > args.micro_batch_tokens:
                batches.append([])
            batches[-1].append(row)
        total, losses = sum(num_targets(row, model) for row in samples), []
        for batch in batches:
            share = sum(num_targets(row, model) for row in batch) / total
            loss = model(**send_to_device(dict(collate(batch)), accelerator.device)).loss * share
            accelerator.backward(loss)
            losses.append(loss.detach())
        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        recorder.losses.append(torch.stack(losses).sum().item())
        recorder.update()


def num_inputs(row, model):
    """Of a sample: its tokens; of a decoder alone without the last one, which is only a target."""
    is_decoder = not isinstance(row["labels"], int) and not model.config.is_encoder_decoder
    return len(row["input_ids"]) - is_decoder


def num_targets(row, model):
    """Of a sample: its labels; a decoder alone predicts all but the first."""
    if isinstance(row["labels"], int):
        return 1
    return len(row["labels"]) - (not model.config.is_encoder_decoder)


def trainer_settings(args, **more):
    """What all Trainers are given; everything else is their default."""
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
        # Liger's kernels are for GPUs.
        "use_liger_kernel": torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | more


def train_trainer(args, model, tokenizer, rows, collate, recorder, **more):
    kind = "Seq2Seq" if model.config.is_encoder_decoder else ""
    settings = getattr(transformers, f"{kind}TrainingArguments")(**trainer_settings(args, **more))
    trainer = getattr(transformers, f"{kind}Trainer")
    data = {"data_collator": collate, "train_dataset": rows}
    trainer(model, settings, processing_class=tokenizer, callbacks=[recorder], **data).train()


def train_trainer_compiled(*args):
    train_trainer(*args, torch_compile=True)


def train_grouped(*args):
    train_trainer(*args, train_sampling_strategy="group_by_length")


def train_sft(args, model, tokenizer, rows, collate, recorder, **more):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    # Two of its defaults are turned off: no other arm recomputes activations (slower, less memory), and the samples
    # are cut already.
    settings = SFTConfig(**trainer_settings(args, gradient_checkpointing=False, **{"max_length": None} | more))
    data, adapter = Dataset.from_list(rows), None
    if args.lora_rank:
        adapter = LoraConfig(
            r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    more = {"processing_class": tokenizer, "peft_config": adapter, "callbacks": [recorder]}
    trainer = SFTTrainer(model, settings, train_dataset=data, **more)
    trainer.train()
    return trainer


def train_packed(args, model, tokenizer, rows, collate, recorder):
    """Joined and cut into blocks: as many of them an update as hold its tokens on average, four at once, once."""
    num_blocks = sum(len(row["input_ids"]) for row in rows) // BLOCK
    at_once = min(4, num_blocks)
    steps = max(1, num_blocks // args.num_updates // at_once)
    batch = {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": steps}
    how = {"packing": True, "packing_strategy": "wrapped", "max_length": BLOCK, "max_steps": -1, "num_train_epochs": 1}
    trainer = train_sft(args, model, tokenizer, rows, collate, recorder, **batch, **how)
    recorder.results["tokens"] = [len(row["input_ids"]) - 1 for row in trainer.train_dataset]


def load(args):
    """Model, tokenizer (None for images), rows, and what makes a padded batch of some of them."""
    with open(args.train_file) as file:
        rows = [json.loads(line) for line in file]
    path = args.model_name_or_path
    rank, quantize = (getattr(args, name, None) for name in ("lora_rank", "quantize"))  # techniques_loop.py has none
    is_bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    dtype = torch.bfloat16 if is_bf16 and rank else torch.float32  # a frozen base has no masters
    more = {}
    if quantize:
        four_bits = {"bnb_4bit_quant_type": quantize, "bnb_4bit_use_double_quant": True}
        more["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **four_bits
        )
    model = getattr(transformers, args.model_class).from_pretrained(path, dtype=dtype, **more)
    if rank and args.arm != "sft":  # the SFTTrainer adds the adapter itself
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    if "input_ids" in rows[0]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        # Labels are given, and not left to a collator that masks what equals the padding token: here that is the end
        # token.
        pads_labels = not isinstance(rows[0]["labels"], int)
        collate = transformers.DataCollatorForSeq2Seq(tokenizer, model if model.config.is_encoder_decoder else None)
        collate = collate if pads_labels else transformers.DataCollatorWithPadding(tokenizer)
    else:
        tokenizer, collate = None, transformers.default_data_collator
        for row in rows:  # once, not in every update
            row["pixel_values"] = torch.tensor(row["pixel_values"])
    return model, tokenizer, rows, collate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arms = {name.removeprefix("train_"): train for name, train in globals().items() if name.startswith("train_")}
    parser.add_argument("arm", choices=arms)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--model_class", required=True)
    parser.add_argument("--train_file", required=True, help="JSONL of samples with labels, shuffled")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--global_batch_size", type=int, required=True, help="samples of an update")
    parser.add_argument("--micro_batch_size", type=int, required=True, help="samples")
    parser.add_argument("--micro_batch_tokens", type=int, required=True, help="of the tuned loop, padding included")
    parser.add_argument("--num_updates", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--weight_decay", type=float, required=True)
    parser.add_argument("--max_grad_norm", type=float, required=True)
    parser.add_argument("--lora_rank", type=int, help="an adapter of peft")
    parser.add_argument("--quantize", help="the base in 4 bits, such as nf4")
    args = parser.parse_args()
    args.accumulation_steps = args.global_batch_size // args.micro_batch_size
    args.output_dir.mkdir(parents=True)

    model, *data = load(args)
    recorder = Recorder()
    arms[args.arm](args, model, *data, recorder)
    recorder.write(args.output_dir)


if __name__ == "__main__":
    main()
