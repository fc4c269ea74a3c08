"""The plain padded loop of benchmarks/techniques.py, and the same loop with one technique of the project.

benchmarks/techniques.py starts this file by `accelerate launch`, like a recipe. Without the flag of a technique, it is
the loop of a tutorial: batches padded to their longest sample, PyTorch's AdamW, all logits, and all activations kept.
The techniques are the functions that the recipes call. Only one thing differs from a tutorial, without overhead: a
micro-batch is weighted by its targets, so that all arms compute the same update and their losses can be compared.
Writes results.json.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from peers import Recorder, load, num_targets
from torch.utils.data import DataLoader, Dataset

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common.report.tracking import peak_memory_bytes
from common.training.activation_checkpointing import ACTIVATION_CHECKPOINTING, apply_activation_checkpointing
from common.training.batching import collate_tokens
from common.training.losses import sum_token_losses
from common.training.micro_batch_partition import split_global_batch
from common.training.optimizers import ADAM_BETAS, OPTIMIZERS, make_optimizer

PYTORCHS_ADAMW = "pytorch"  # as torch makes it without an option: one operator after the other


class Updates(Dataset):
    """Item k: the micro-batches of update k, padded, each with its share of the update's targets."""

    def __init__(self, args, model, rows, collate):
        self.args, self.rows, self.collate, self.model = args, rows, collate, model

    def __len__(self):
        return len(self.rows) // self.args.global_batch_size

    def __getitem__(self, update):
        args = self.args
        rows = self.rows[update * args.global_batch_size :][: args.global_batch_size]
        if args.sort:
            lengths = np.array([len(row["input_ids"]) for row in rows])
            (cut,) = split_global_batch(lengths, 1, args.micro_batch_size, None, math.inf)
        else:
            cut = np.arange(len(rows)).reshape(-1, args.micro_batch_size)
        total = sum(num_targets(row, self.model) for row in rows)
        chosen = [[rows[place] for place in places] for places in cut]
        return [
            (dict(self.collate(some)), sum(num_targets(row, self.model) for row in some) / total) for some in chosen
        ]


def rows_of_targets(pad_token_id):
    """A collator for the chunked loss, which takes inputs and targets apart, as the recipes give them."""

    def collate(rows):
        ids = [np.array(row["input_ids"]) for row in rows]
        return collate_tokens([(one[:-1], one[1:], np.arange(len(one) - 1)) for one in ids], pad_token_id)

    return collate


def state_bytes(optimizer):
    """Of the optimizer's state, without what is smaller than a row of a matrix (counters)."""
    tensors = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x) and x.ndim]
    return sum(tensor.nbytes for tensor in tensors)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--model_class", required=True)
    parser.add_argument("--train_file", required=True, help="JSONL of samples with labels, in the updates' order")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--global_batch_size", type=int, required=True, help="samples of an update")
    parser.add_argument("--micro_batch_size", type=int, required=True, help="samples")
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--weight_decay", type=float, required=True)
    parser.add_argument("--max_grad_norm", type=float, required=True)
    parser.add_argument(
        "--sort", action="store_true", help="cut the samples of an update in the order of their lengths"
    )
    parser.add_argument("--chunked_loss", action="store_true", help="of a language model")
    parser.add_argument("--activation_checkpointing", choices=ACTIVATION_CHECKPOINTING, default="none")
    parser.add_argument("--optimizer", choices=[PYTORCHS_ADAMW, *OPTIMIZERS], default=PYTORCHS_ADAMW)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--num_workers", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_arguments()
    args.output_dir.mkdir(parents=True)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    accelerator, recorder = Accelerator(), Recorder()
    model, tokenizer, rows, collate = load(args)
    num_parameters, device = model.num_parameters(), accelerator.device
    updates = Updates(args, model, rows, collate)
    if args.chunked_loss:
        sum_token_losses(model)
        updates.collate = rows_of_targets(tokenizer.pad_token_id)
    apply_activation_checkpointing(model, args.activation_checkpointing, device)
    if args.compile:
        model.base_model.compile(dynamic=True)
    if args.optimizer == PYTORCHS_ADAMW:
        how = {"betas": ADAM_BETAS, "weight_decay": args.weight_decay}
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, **how)
    else:
        optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    pins = device.type == "cuda"
    loader = DataLoader(updates, batch_size=None, num_workers=args.num_workers, pin_memory=pins)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    recorder.start()
    for micro_batches in loader:
        losses = []
        for batch, share in micro_batches:
            batch = send_to_device(batch, device, non_blocking=True)
            # The chunked loss is a sum over the targets, and a model's own their mean.
            loss = model(**batch) / len(batch["targets"]) if args.chunked_loss else model(**batch).loss
            accelerator.backward(loss * share)
            losses.append(loss.detach() * share)
        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        recorder.losses.append(torch.stack(losses).sum().item())
        recorder.update()
    recorder.results["peak_memory_bytes"] = peak_memory_bytes(device)
    recorder.results["optimizer_bytes"] = state_bytes(optimizer.optimizer) / num_parameters
    if device.type == "cuda":
        recorder.results["reserved_bytes"] = torch.cuda.max_memory_reserved()
    recorder.write(args.output_dir)


if __name__ == "__main__":
    main()
