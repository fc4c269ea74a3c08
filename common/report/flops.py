"""How many operations an update is worth, and what share of the machine's rate that is: figures of metrics.jsonl.

Model FLOPs, as in PaLM's appendix B (arXiv:2204.02311): the products of one forward and one backward of the model, for
the real tokens. What a run computes beside them is none: padding, what is recomputed, a forward that only counts. So
they do not depend on the config, on --activation_checkpointing, or on how a global batch is cut. Attention counts
whole squares, and of logits those that are a target's; of experts those that are chosen.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from common.models.load import attention_length
from common.parallel.matmul_throughput import has_rate, multiplication_rate
from common.training.batching import GlobalBatch, GlobalBatches

FEW_STEPS = 16  # of a model without attention, which may be recurrent: without data each step is an operator of its own
LOOKED_AT = 1000  # samples, for the lengths that occur


# Operators that torch does not count. Attention on a CPU computes what the kernel for GPUs does.
_ATEN = torch.ops.aten
if _ATEN._grouped_mm not in flop_registry:

    @register_flop_formula(_ATEN._grouped_mm)
    def grouped_mm_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
        """Counts a matmul in groups: `a`, `b` or the result has a dimension of groups, which is not a factor."""
        return 2 * a[-2] * a[-1] * b[-1]


_ATTENTION = _ATEN._scaled_dot_product_flash_attention
for _other, _known in ((_ATEN.addmm_, _ATEN.addmm), (_ATEN._scaled_dot_product_flash_attention_for_cpu, _ATTENTION)):
    flop_registry.setdefault(_other, flop_registry[_known])


@dataclass
class ModelFlops:
    """Operations of an update, forward and backward: a polynomial of each sample's lengths, and a share of a rate."""

    coefficients: np.ndarray  # (terms,) of a sample, as `_terms` has them
    per_target: float  # of a row of logits
    rate: float | None  # FLOP/s that all processes together could reach; None: not known

    def of(self, batch: GlobalBatch) -> float:
        """Of a global batch, on all ranks."""
        num_rows = batch.num_targets if batch.num_predicted is None else batch.num_predicted
        return float(_terms(batch.lengths.numpy()).sum(0) @ self.coefficients + self.per_target * num_rows)

    def figures(self, flops: float, seconds: float) -> dict[str, float]:
        """For metrics and results: FLOP/s, and their share of the rate where that is known."""
        reached = flops / seconds
        share = {"share_of_rate": reached / self.rate} if self.rate else {}
        return {"model_flops_per_second": reached} | share


def count(
    make_empty: Callable[[], torch.nn.Module], batches: GlobalBatches, rate: float | None = None
) -> ModelFlops | None:
    """Counts the model by a forward without data at a few lengths of a sample; None for one that needs its data.

    Draws no random numbers, and leaves the model of `make_empty` as it was.
    """
    samples = batches.samples
    looked_at = np.arange(min(len(samples), LOOKED_AT))
    lengths = getattr(samples, "sequence_lengths", samples.lengths)(looked_at)
    longest = lengths.reshape(len(lengths), -1).max(0)
    model = copy.deepcopy(make_empty()).eval()
    if attention_length(model.config) == np.inf:
        longest = longest.clip(max=FEW_STEPS)
    # As many as a polynomial of degree 2 has terms; those of one length may be the same (images).
    shares = [(i, j) for i in range(3) for j in range(3 - i)] if len(longest) == 2 else [(i,) for i in range(3)]
    points = np.unique([[max(1, n >> i) for n, i in zip(longest, one, strict=True)] for one in shares], axis=0)
    try:
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")  # plain products; the one in use may exchange tokens between ranks
        model.config.get_text_config().pad_token_id = None  # else some look for padding, and here are no tokens
        sample = batches.collate([samples.dummy_sample()])
        try:
            passes = np.array([_count(model, sample, point) for point in points])
        except RuntimeError:  # without data, torch multiplies in groups in bf16 only
            model.bfloat16()
            passes = np.array([_count(model, sample, point) for point in points])
        head = model.get_output_embeddings()
        per_target = 2.0 * head.weight.numel() * (2 + head.weight.requires_grad) if head is not None else 0.0
    except Exception:  # whatever a foreign forward raises
        return None
    terms = _terms(points)
    scale = terms.max(0)
    coefficients = np.linalg.lstsq(terms / scale, passes - per_target * points[:, -1], rcond=None)[0] / scale
    return ModelFlops(coefficients, per_target, rate)


def _terms(lengths: np.ndarray) -> np.ndarray:
    """(samples,) or (samples, 1 or 2) to (samples, terms), float64: 1, each length, and each product of two lengths."""
    lengths = lengths.reshape(len(lengths), -1).astype(np.float64)
    first, last = lengths.T[0], lengths.T[-1]
    others = [last, last * last, first * last] if lengths.shape[1] == 2 else []
    return np.stack([np.ones_like(first), first, first * first, *others], 1)


@torch.no_grad()
def _count(model: torch.nn.Module, sample: dict[str, torch.Tensor], lengths: np.ndarray) -> int:
    """Of one sample of these lengths: of tokens (an encoder's, a decoder's), or as `sample` is.

    A backward has two products for each of the forward; one where the weight is frozen.
    """
    inputs = {}
    for name, one in sample.items():
        if not name.startswith("target"):
            shape = one.shape if one.is_floating_point() else (1, lengths[-1 if name.startswith("decoder") else 0])
            dtype = next(model.parameters()).dtype if one.is_floating_point() else one.dtype
            inputs[name] = torch.empty(shape, dtype=dtype, device="meta")
    counter, frozen = FlopCounterMode(display=False), [0, 0]  # FLOPs of frozen weights; the total where one began

    def enter(*_: Any) -> None:
        frozen[1] = counter.get_total_flops()

    def leave(*_: Any) -> None:
        frozen[0] += counter.get_total_flops() - frozen[1]

    with counter:
        for module in model.modules():
            weights = [p for p in module.parameters(recurse=False) if p.ndim > 1]
            if weights and not any(p.requires_grad for p in weights):
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)
        model(**inputs)
    return 3 * counter.get_total_flops() - frozen[0]


def machine_rate(accelerator: Accelerator, precision: str) -> float | None:
    """FLOP/s of matrix products that all processes reach together; None where the precision has no measured rate.

    One process is measured, in a tenth of a second. On a CPU those of a host share its cores.
    """
    device = accelerator.device
    if not has_rate(device, precision):
        return None
    rate = multiplication_rate(device, precision) * accelerator.num_processes
    threads = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return rate * min(1, psutil.cpu_count() / threads) if device.type == "cpu" else rate


def of_run(run: Any, is_rehearsal: bool) -> ModelFlops | None:
    """Of a `common.run.Run` that begins to train: on its main process, which tells."""
    if not run.accelerator.is_main_process:
        return None
    own = getattr(type(run.make_empty()), "own_precision", None)  # of a model that takes no other than float32
    precision = "no" if own else run.accelerator.mixed_precision
    rate = None if is_rehearsal else machine_rate(run.accelerator, precision)
    return count(run.make_empty, run.loader.dataset, rate)
