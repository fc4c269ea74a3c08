"""FLOPs of an update and utilisation of the machine's matmul throughput, for metrics.jsonl.

Model FLOPs, as in PaLM's appendix B (arXiv:2204.02311), are the FLOPs of the matmuls of one forward and one backward
pass, without padding. Recomputation and additional forward passes do not count, so model FLOPs do not depend on the
config or on the split of a global batch. Attention counts in full, without regard to causal masks. Logits count only
for targets, and experts only for the tokens routed to them.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper

from common.models.load import attention_length
from common.parallel.matmul_throughput import can_measure_throughput, measure_throughput
from common.training.batching import GlobalBatch, GlobalBatches

FEW_STEPS = 16  # maximum counted length of models without attention, whose forward may loop over the time steps
INSPECTED = 1000  # number of samples from which the longest lengths are taken

# Operators that torch does not count. A grouped matmul's dimension of groups, in `a`, `b` or the result, is no factor.
_ATEN = torch.ops.aten
FORMULAS: dict[Any, Any] = {
    _ATEN._grouped_mm: shape_wrapper(lambda a, b, *_, **__: 2 * a[-2] * a[-1] * b[-1]),
    _ATEN.addmm_: flop_registry[_ATEN.addmm],
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
} | flop_registry


@dataclass
class ModelFlops:
    """FLOPs of an update (forward and backward) as a polynomial of each sample's lengths, and peak FLOP/s."""

    coefficients: np.ndarray  # (terms,) per sample, in the order of `_terms`
    per_target: float  # per row of logits
    rate: float | None  # measured matmul FLOP/s of all processes together; None: unknown

    def of(self, batch: GlobalBatch) -> float:
        """Returns the FLOPs of a global batch, over all ranks."""
        num_rows = batch.num_targets if batch.num_predicted is None else batch.num_predicted
        return float(_terms(batch.lengths.numpy()).sum(0) @ self.coefficients + self.per_target * num_rows)

    def metrics(self, flops: float, seconds: float) -> dict[str, float]:
        """Returns FLOP/s, and utilisation if the throughput is known, for metrics and results."""
        reached = flops / seconds
        return {"model_flops_per_second": reached} | ({"share_of_rate": reached / self.rate} if self.rate else {})


def of_run(run: Any, lacks_gpus: bool) -> ModelFlops | None:
    """Returns the `ModelFlops` of a `common.run.Run` on its main process, which reports them; None on others.

    Measures the matmul throughput of this process. On a CPU, it is reduced if a host has more threads than cores.
    """
    if not run.accelerator.is_main_process:
        return None
    own = getattr(type(run.meta_model()), "own_precision", None)  # set for models that only support float32
    precision = "no" if own else run.accelerator.mixed_precision
    rate = None
    if not lacks_gpus and can_measure_throughput(run.device, precision):
        rate = measure_throughput(run.device, precision) * run.accelerator.num_processes
        if run.device.type == "cpu":
            threads = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            rate *= min(1, (psutil.cpu_count() or 1) / threads)
    return (work := count(run.meta_model, run.loader.dataset)) and replace(work, rate=rate)


@lru_cache(1)  # a run counts to decide about --compile, and again to report
def count(meta_model: Callable[[], Any], batches: GlobalBatches) -> ModelFlops | None:
    """Fits the FLOPs of a model to forward passes at a few sample lengths, on the meta device.

    Draws no random numbers, and changes no model. Returns None if the model needs real data.
    """
    samples, model = batches.samples, copy.deepcopy(meta_model()).eval()
    lengths = getattr(samples, "sequence_lengths", samples.lengths)(np.arange(min(len(samples), INSPECTED)))
    longest = lengths.reshape(len(lengths), -1).max(0)
    if attention_length(model.config) == np.inf:
        longest = longest.clip(max=FEW_STEPS)
    # One point per term of a polynomial of degree 2: the longest lengths, halved 0 to 2 times. For very short samples,
    # such as images, points coincide.
    halvings = [n for n in product(range(3), repeat=len(longest)) if sum(n) <= 2]
    points = np.unique([np.maximum(1, longest >> n) for n in halvings], axis=0)
    try:
        if hasattr(model, "set_attn_implementation"):
            # Plain matmuls, because the current implementation may exchange tokens between ranks.
            model.set_attn_implementation("eager")
        model.config.get_text_config().pad_token_id = None  # some models search the ids for it: meta tensors have none
        sample = batches.collate([samples.dummy_sample()])
        try:
            passes = np.array([_count(model, sample, point) for point in points])
        except RuntimeError:  # on the meta device, torch supports grouped matmuls only in bf16
            model.bfloat16()
            passes = np.array([_count(model, sample, point) for point in points])
        head = model.get_output_embeddings()
        per_target = 2.0 * head.weight.numel() * (2 + head.weight.requires_grad) if head is not None else 0.0
    except Exception:  # a foreign forward may raise any error
        return None
    scale = (terms := _terms(points)).max(0)
    coefficients = np.linalg.lstsq(terms / scale, passes - per_target * points[:, -1], rcond=None)[0] / scale
    return ModelFlops(coefficients, per_target, None)


def _terms(lengths: np.ndarray) -> np.ndarray:
    """Returns 1, each length, and each product of two lengths: (samples,) or (samples, 1 or 2) to (samples, terms)."""
    lengths = lengths.reshape(len(lengths), -1).astype(np.float64)
    first, last = lengths.T[0], lengths.T[-1]
    others = [last, last * last, first * last] if lengths.shape[1] == 2 else []
    return np.stack([np.ones_like(first), first, first * first, *others], 1)


@torch.no_grad()
def _count(model: Any, sample: dict[str, torch.Tensor], lengths: np.ndarray) -> int:
    """Returns the FLOPs, forward and backward, of a sample. lengths: tokens, or tokens of encoder and decoder.

    Floating-point inputs, such as images, have their shape in `sample`. A backward pass has two matmuls per matmul of
    the forward pass, or one if the weight is frozen.
    """
    inputs = {}
    for name, tensor in sample.items():
        if not name.startswith("target"):
            is_float, length = tensor.is_floating_point(), lengths[-1 if name.startswith("decoder") else 0]
            dtype = next(model.parameters()).dtype if is_float else tensor.dtype
            inputs[name] = torch.empty(tensor.shape if is_float else (1, length), dtype=dtype, device="meta")
    counter = FlopCounterMode(display=False)
    counter.flop_registry = FORMULAS
    with counter:
        model(**inputs)
    counts, frozen = counter.get_flop_counts(), 0  # counts: by path of the module and operator
    for name, module in model.named_modules():
        weights = [p for p in module.parameters(recurse=False) if p.ndim > 1]
        if weights and not any(p.requires_grad for p in weights):
            frozen += sum(counts.get(f"{type(model).__name__}.{name}", {}).values())
    return 3 * counter.get_total_flops() - frozen
