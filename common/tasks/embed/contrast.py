"""The losses of a global batch of vectors, in float32 or better: InfoNCE for pairs, CoSENT for pairs with scores.

InfoNCE (arXiv:1807.03748): cross-entropy of an anchor's similarities, divided by the temperature, to all positives and
negatives of the global batch; its own positive is the target. A candidate with the same text as the positive is
excluded, and so is the positive of an anchor with the same text. CoSENT (Su 2022, https://kexue.fm/archives/8847):
log(1 + sum of exp((cosine of j - cosine of i) / temperature)) over all pairs of pairs in which i has the higher score.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOWEST_TEMPERATURE = 1e-4
CHUNK_ROWS = 1024  # rows of similarities at once; those of a chunk are recomputed in backward


def temperature_of(args: Any, log_temperature: Tensor | None) -> Tensor | float:
    """Returns the temperature: exp of the learned parameter (1,), at least LOWEST_TEMPERATURE, or the flag's."""
    return args.temperature if log_temperature is None else log_temperature.exp().clamp(min=LOWEST_TEMPERATURE)


def global_loss(vectors: Tensor, facts: Tensor, num_pairs: int, log_temperature: Tensor | None, args: Any) -> Tensor:
    """Returns the loss sum over the pairs of a global batch, a scalar; over all --dimensions.

    Args:
        vectors: (T, D), before normalisation: anchors, then positives, then negatives.
        facts: (T, 2): the number of each text, equal for equal texts, and the score of its pair.
        args: the recipe's flags; --loss is contrastive or cosent.
    """
    temperature, total = temperature_of(args, log_temperature), vectors.new_zeros(())
    for dimension in widths(args, vectors.shape[1]):
        part = vectors[:, :dimension]
        if args.loss == "cosent":
            total = total + _cosent(part, facts[:num_pairs, 1], temperature)
        else:
            part = F.normalize(part) if args.normalize else part
            total = total + _info_nce(part, facts[:, 0], num_pairs, temperature, args.symmetric)
    return total


def widths(args: Any, width: int) -> list[int]:
    """Returns the dimensions of --dimensions and the full width, the largest first."""
    return sorted({width, *(args.dimensions or [])}, reverse=True)


def with_gradients(
    vectors: Tensor, facts: Tensor, num_pairs: int, log_temperature: Tensor | None, args: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns `global_loss` and its gradients with respect to vectors (T, D) and log temperature (1,), or None."""
    leaves = [x.detach().requires_grad_() for x in (vectors, log_temperature) if x is not None]
    with torch.enable_grad():
        loss = global_loss(leaves[0], facts, num_pairs, leaves[1] if len(leaves) > 1 else None, args)
    gradients = torch.autograd.grad(loss, leaves)
    return loss.detach(), gradients[0], gradients[1] if len(gradients) > 1 else None


def excluded_candidates(numbers: Tensor, num_pairs: int, start: int, end: int) -> Tensor:
    """Returns which candidates are no negatives of the anchors `start` to `end`, bool (end - start, T - num_pairs)."""
    candidates = numbers[num_pairs:]
    excluded = candidates == candidates[start:end, None]
    same_anchor = numbers[:num_pairs] == numbers[start:end, None]
    excluded = excluded | F.pad(same_anchor, (0, len(candidates) - num_pairs))
    own = torch.arange(start, end, device=numbers.device)[:, None]
    return excluded & (torch.arange(len(candidates), device=numbers.device) != own)


def _info_nce(vectors: Tensor, numbers: Tensor, num_pairs: int, temperature: Tensor | float, symmetric: bool) -> Tensor:
    anchors, candidates = vectors[:num_pairs], vectors[num_pairs:]

    def of_rows(anchors: Tensor, candidates: Tensor, temperature: Any, start: int, end: int) -> Tensor:
        """Returns the loss sum of some pairs."""
        excluded = excluded_candidates(numbers, num_pairs, start, end)
        own = torch.arange(start, end, device=numbers.device)

        def cross_entropy(queries: Tensor, others: Tensor) -> Tensor:
            logits = queries[start:end] @ others.T / temperature
            return F.cross_entropy(logits.masked_fill(excluded[:, : len(others)], -torch.inf), own, reduction="sum")

        loss = cross_entropy(anchors, candidates)
        return (loss + cross_entropy(candidates[:num_pairs], anchors)) / 2 if symmetric else loss

    total = vectors.new_zeros(())
    for start in range(0, num_pairs, CHUNK_ROWS):
        bounds = start, min(start + CHUNK_ROWS, num_pairs)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # draws no random numbers
        total = total + checkpoint(of_rows, anchors, candidates, temperature, *bounds, **options)
    return total


def _cosent(vectors: Tensor, scores: Tensor, temperature: Tensor | float) -> Tensor:
    """Returns the loss times the number of pairs: by one sum over sorted scores, because the exponential factorises."""
    num_pairs = len(scores)
    cosines = F.cosine_similarity(vectors[:num_pairs], vectors[num_pairs : 2 * num_pairs]) / temperature
    scores, order = scores.sort()
    cosines = cosines[order]
    # lower[i]: log of the sum of exp(cosine) over the pairs with a lower score than pair i
    sums = torch.cat([cosines.new_full((1,), -torch.inf), cosines.logcumsumexp(0)])
    lower = sums[torch.searchsorted(scores, scores)]
    return torch.cat([cosines.new_zeros(1), lower - cosines]).logsumexp(0) * num_pairs
