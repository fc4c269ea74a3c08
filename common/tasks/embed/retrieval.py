"""Metrics of vectors over the held-out pairs: loss, retrieval of an anchor's positive, or the correlation of scores."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from common.tasks.embed.contrast import excluded_candidates, global_loss, widths
from common.tasks.embed.replay import Predict, embed
from common.training.accumulation import sum_over_ranks
from common.training.process_grid import current_grid

CHUNK_ROWS = 1024  # anchors at once
RANKS = (1, 10)


@torch.no_grad()
def measure(run: Any, model: nn.Module, predict: Predict) -> dict[str, float]:
    """Returns the metrics of the held-out pairs, the same on all ranks.

    The loss is that of consecutive global batches of --global_batch_size pairs. An anchor's positive is ranked among
    the positives and negatives of all held-out pairs; candidates that the loss excludes are left out.
    """
    model.eval()
    parts: list[tuple[Tensor, ...]] = []
    log_temperature = None
    for batch in run.held_out:
        vectors, facts, log_temperature, _ = embed(run, model, batch, predict)
        number = batch.num_targets
        rows = torch.cat([vectors, facts], 1)
        parts.append((rows[:number], rows[number : 2 * number], rows[2 * number :]))
    model.train()
    samples = run.held_out.dataset.samples
    anchors, positives, negatives = (torch.cat(rows) for rows in zip(*parts, strict=True))
    counts = torch.from_numpy(samples.texts_per_pair() - 2)
    metrics = {"validation_loss": _mean_loss(run.args, anchors, positives, negatives, counts, samples, log_temperature)}
    table = torch.cat([anchors, positives, negatives])
    vectors, scores = table[:, :-2], anchors[:, -1]
    if run.args.loss == "cosent":
        cosines = cosine_similarity(vectors[: len(scores)], vectors[len(scores) :])
        metrics["spearman"] = spearman(cosines.cpu().numpy(), scores.cpu().numpy())
    else:
        # Each evaluated batch numbers its texts; these numbers are those of all held-out texts.
        numbers = torch.from_numpy(samples.of_batch(np.arange(len(samples)))[0].numbers).to(vectors.device)
        for width in widths(run.args, vectors.shape[1]):
            found = _retrieve(run, vectors[:, :width], numbers, len(scores))
            is_full = width == vectors.shape[1]
            metrics |= {name if is_full else f"{name}/{width}": value for name, value in found.items()}
    if log_temperature is not None:
        metrics["temperature"] = log_temperature.exp().item()
    return metrics


def _mean_loss(
    args: Any, anchors: Tensor, positives: Tensor, negatives: Tensor, counts: Tensor, samples: Any, temperature: Any
) -> float:
    """Returns the mean loss of the pairs, in global batches of consecutive pairs. counts: negatives of each pair."""
    total, ends = 0.0, counts.cumsum(0)
    for start in range(0, len(anchors), args.global_batch_size):
        end = min(start + args.global_batch_size, len(anchors))
        own = slice(int(ends[start] - counts[start]), int(ends[end - 1]))
        rows = torch.cat([anchors[start:end], positives[start:end], negatives[own]])
        facts = rows[:, -2:].clone()
        facts[:, 0] = torch.from_numpy(samples.of_batch(np.arange(start, end))[0].numbers)
        total += global_loss(rows[:, :-2], facts, end - start, temperature, args).item()
    return total / len(anchors)


def _retrieve(run: Any, vectors: Tensor, numbers: Tensor, num_pairs: int) -> dict[str, float]:
    """Returns recall and mean reciprocal rank; each rank ranks the positives of a share of the anchors."""
    vectors = normalize(vectors) if run.args.normalize else vectors
    anchors, candidates, grid = vectors[:num_pairs], vectors[num_pairs:], current_grid()
    sums = vectors.new_zeros(len(RANKS) + 1)
    share, world = grid.data_rank(run.accelerator.process_index), grid.data_parallel
    for start in range(share * CHUNK_ROWS, num_pairs, world * CHUNK_ROWS):
        end = min(start + CHUNK_ROWS, num_pairs)
        similarity = anchors[start:end] @ candidates.T
        own = similarity.diagonal(start)[:, None]
        # A tie or NaN counts against the positive: a model with equal vectors retrieves nothing.
        is_before = ~(similarity < own) & ~excluded_candidates(numbers, num_pairs, start, end)
        ranks = is_before.sum(1)  # the positive itself is one of them
        reciprocal = torch.where(ranks <= max(RANKS), 1 / ranks, 0)
        sums += torch.stack([*((ranks <= most).sum() for most in RANKS), reciprocal.sum()])
    (totals,) = sum_over_ranks(run.accelerator, sums)
    names = [*(f"recall_at_{most}" for most in RANKS), f"mrr_at_{max(RANKS)}"]
    return {name: value / num_pairs for name, value in zip(names, totals.tolist(), strict=True)}


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Returns Spearman's rank correlation of two arrays (N,), equal values at their mean rank; NaN if all are equal."""
    from scipy.stats import spearmanr  # here because the import takes a second, and few runs have scores

    if min(len(np.unique(first)), len(np.unique(second))) < 2:  # scipy would warn
        return float("nan")
    return float(spearmanr(first, second).statistic)


def describe_results(results: dict[str, Any]) -> list[str]:
    """Returns the lines on held-out pairs, and on a learned temperature, for the end of a run."""
    lines = []
    if "recall_at_1" in results:
        lines.append(
            f"the positive is first for {results['recall_at_1']:.1%} of the held-out anchors, and among the "
            f"first 10 for {results['recall_at_10']:.1%} (mean reciprocal rank {results['mrr_at_10']:.4f})"
        )
    if "spearman" in results:
        lines.append(f"Spearman's correlation of cosines and scores, held out: {results['spearman']:.4f}")
    if "temperature" in results:
        lines.append(f"temperature {results['temperature']:.4f}")
    return lines
