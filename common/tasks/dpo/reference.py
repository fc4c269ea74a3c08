"""The DPO reference: the initial model's log-probabilities of each pair, computed once.

The log-probabilities are cached on disk, so that no second model is in memory. They are computed in the run's mode and
precision, without dropout. Therefore they equal the model's own values before its first update.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

from common.data.cache import cache_path, cached, hash_files, only_one
from common.data.cache_check import remove_damaged
from common.data.hub import identify_pretrained
from common.errors import UserError
from common.models import adapters
from common.parallel.distributed_mode import current_mode
from common.parallel.main_decisions import decided_by_main
from common.process import this_process
from common.tasks.dpo.losses import LOSSES, sum_answers

FILE = "reference.npy"


def identify_reference(args: argparse.Namespace) -> str:
    """Returns the identity of the reference: a hash of its files, a hub name and commit, or a model size and a seed.

    It is "" if the loss needs no reference.
    """
    if not LOSSES[args.loss].needs_reference:
        return ""
    if not args.model_name_or_path:
        return f"{args.model_config}, seed {args.seed}"
    return identify_pretrained(args.model_name_or_path)


def of_answers(model: nn.Module, micro_batch: dict[str, Tensor], loss_of: Callable[[Tensor], Any]) -> Any:
    """Returns `loss_of(losses)` of the token losses (N,) of a micro-batch.

    Args:
        model: a model that `sum_token_losses` has changed.
        loss_of: if gradients are needed, its result is a tuple that begins with the loss.
    """
    tokens = {"targets": micro_batch["target_tokens"], "target_rows": micro_batch["target_rows"]}
    return model(input_ids=micro_batch["input_ids"], **tokens, loss_of=loss_of)


def sum_mismatched(model: nn.Module, micro_batch: dict[str, Tensor]) -> Tensor:
    """Returns the log-probabilities (P,) of the mismatched answers of a micro-batch of KTO."""
    prefix = "target_mismatched_"
    mismatched = {name.removeprefix(prefix): x for name, x in micro_batch.items() if name.startswith(prefix)}
    return of_answers(model, mismatched, partial(sum_answers, places=mismatched["target_places"]))


def _both_answers(model: nn.Module, micro_batch: dict[str, Tensor]) -> Tensor:
    """Returns log-probabilities (P, 2): of chosen and rejected answers, or of own and mismatched answers of KTO."""
    own = of_answers(model, micro_batch, partial(sum_answers, places=micro_batch["target_places"]))
    if "target_loss_kto" in micro_batch:
        return torch.stack([own, sum_mismatched(model, micro_batch)], 1)
    return own.view(-1, 2)


def add_reference(run: Any, model: nn.Module) -> None:
    """Adds reference log-probabilities to all pairs of a prepared `Run`; call it before loading a checkpoint.

    Without effect if the loss needs no reference.
    """
    args = run.args
    if this_process().has_fake_weights or args.dry_run or not LOSSES[args.loss].needs_reference:
        return
    loader, order = run.load(), []
    # A run of at most one epoch needs the reference of the pairs in its updates only.
    # Mismatched answers differ per epoch, so KTO needs a reference for each.
    if args.num_updates <= len(run.loader.dataset) or args.loss == "kto":
        loader = run.load(range(args.num_updates))
        order = [args.num_updates, args.global_batch_size, args.seed, args.drop_last_window]
    _add(run, model, "training", loader, order)
    if run.held_out is not None:
        _add(run, model, "held-out", run.held_out, [])


def _add(run: Any, model: nn.Module, what: str, loader: Any, order: list[int]) -> None:
    """Computes the reference of a loader's pairs, or finds it in the cache, and sets it in the samples."""
    args, accelerator, samples, started = run.args, run.accelerator, loader.dataset.samples, time.perf_counter()
    # The reference depends on `base`: the frozen base of an adapter may have fewer bits than fully trained weights.
    base = [adapters.is_asked(args), args.shared("quantize")]
    computed_by = [
        current_mode(accelerator),
        accelerator.device.type,
        *base,
        torch.__version__,
        transformers.__version__,
    ]
    precision = [accelerator.mixed_precision, str(torch.get_default_dtype())]
    identity = [samples.fingerprint, samples.identity, order, *precision, *computed_by]
    is_missing = torch.tensor(not is_cached(identity), device=run.device)
    values: Any = None
    if accelerator.reduce(is_missing.long(), reduction="sum"):  # all ranks compute if the file is missing on any
        values = _compute(run, model, loader)
    directory = cached("reference", identity, lambda partial: np.save(partial / FILE, values))
    if decided_by_main(f"reference of {what}", lambda: hash_files(directory)) != hash_files(directory):
        raise UserError(f"{directory}: differs from rank 0's reference; remove it on all hosts, and start again")
    samples.set_reference(directory / FILE)
    if values is not None:
        seconds = time.perf_counter() - started
        number = np.count_nonzero(~np.isnan(values[:, 0]))
        accelerator.print(f"reference: log-probabilities of {number:,} {what} pairs, in {seconds:.0f} s", flush=True)


def is_cached(identity: list[Any]) -> bool:
    """Returns whether `cached` would find a reference; a damaged one is removed."""
    directory = cache_path("reference", identity)
    with only_one(directory):
        if directory.exists():
            remove_damaged(directory)
        return directory.exists()


@torch.no_grad()
def _compute(run: Any, model: nn.Module, loader: Any) -> np.ndarray:
    """Returns the reference (pairs, 2) on all ranks; each rank computes a share. Pairs not in the loader are NaN."""
    model.eval()
    own_numbers, own_values, num_pairs = [], [], 0
    hidden = None if run.accelerator.is_main_process else True  # None: tqdm shows the bar only on a terminal
    for batch in tqdm(loader, desc="reference", unit="batch", disable=hidden):
        num_pairs += batch.num_samples
        for micro_batch, _ in run.micro_batches(batch):
            own_values.append(_both_answers(model, micro_batch))
            own_numbers.append(micro_batch["target_pairs"])
    model.train()
    gather, pad = run.accelerator.gather, run.accelerator.pad_across_processes
    numbers = gather(pad(torch.cat(own_numbers), pad_index=-1)).cpu().numpy()  # the shares have different sizes
    values = gather(pad(torch.cat(own_values))).cpu().numpy()[numbers >= 0]
    numbers, first = np.unique(numbers[numbers >= 0], return_index=True)  # ranks that share a layer have the same pairs
    assert len(numbers) == num_pairs, "each pair has a reference"
    reference = np.full((max(len(loader.dataset.samples), numbers.max() + 1), 2), np.nan, values.dtype)
    reference[numbers] = values[first]
    return reference
