"""Gradients of a loss over the global batch, with the memory of a micro-batch (GradCache, arXiv:2101.06983).

1. All texts of the global batch are embedded without a graph, micro-batch by micro-batch; the ranks sum a table to
   which each has added its own vectors.
2. Each rank computes the loss of the table, and its gradient with respect to every vector.
3. Each micro-batch is embedded again with a graph, with the random numbers of the first time. The surrogate loss, the
   sum of vector x gradient, has the gradient of the global batch's loss.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from common.tasks.embed.contrast import with_gradients
from common.training.batching import GlobalBatch
from common.training.process_grid import current_grid

Predict = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor | None]]


@torch.no_grad()
def embed(
    run: Any, model: nn.Module, batch: GlobalBatch, predict: Predict
) -> tuple[Tensor, Tensor, Tensor | None, list[list[Tensor]]]:
    """Embeds all texts of a global batch. Call it on all ranks together.

    Returns the vectors (T, D), their facts (T, 2), the log temperature (1,) or None, and the RNG states before each of
    this rank's micro-batches. The vectors and facts are equal on all ranks. predict: returns the vectors of a
    micro-batch (R, D), and the log temperature.
    """
    # The planner's batch has no lengths; a batch has at least two texts per pair.
    num_texts, states, rows, positions = max(len(batch.lengths), 2 * batch.num_targets), [], [], []
    log_temperature = None
    for micro_batch, _ in run.micro_batches(batch):
        states.append(_rng_states(run.device))
        vectors, log_temperature = predict(model, micro_batch)
        rows.append(torch.cat([vectors, micro_batch["target_facts"].to(vectors.dtype)], 1))
        positions.append(micro_batch["target_positions"])
    own = torch.cat(rows)
    table = own.new_zeros(num_texts, own.shape[1]).index_copy(0, torch.cat(positions), own)
    table = run.accelerator.reduce(table, reduction="sum") / current_grid().tensor  # a tensor group has equal vectors
    return table[:, :-2], table[:, -2:], log_temperature, states


def replayed(
    run: Any, model: nn.Module, batch: GlobalBatch, predict: Predict
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yields this rank's micro-batches as `run.micro_batches`, each with the gradient of the global batch's loss.

    `target_gradients` (R, D) belong to the vectors of a micro-batch; `target_loss` is the loss sum of the global batch
    in one micro-batch of one rank, and 0 in all others; `target_slope` is the gradient of the log temperature.
    """
    vectors, facts, log_temperature, states = embed(run, model, batch, predict)
    loss, gradients, slope = with_gradients(vectors, facts, batch.num_targets, log_temperature, run.args)
    is_first = current_grid().data_rank(run.accelerator.process_index) == 0
    for number, (micro_batch, is_last) in enumerate(run.micro_batches(batch)):
        share = 1.0 if is_first and number == 0 else 0.0
        _set_rng_states(run.device, states[number])
        micro_batch["target_gradients"] = gradients.index_select(0, micro_batch["target_positions"])
        micro_batch["target_loss"] = loss * share
        if slope is not None:
            micro_batch["target_slope"] = slope * share
        yield micro_batch, is_last


def surrogate(vectors: Tensor, log_temperature: Tensor | None, micro_batch: dict[str, Tensor]) -> Tensor:
    """Returns a scalar with the value `target_loss` and the gradient of the global batch's loss sum."""
    total = (vectors * micro_batch["target_gradients"]).sum()
    if log_temperature is not None:
        total = total + (log_temperature * micro_batch["target_slope"]).sum()
    return total - total.detach() + micro_batch["target_loss"]  # non-finite vectors make it non-finite


def _rng_states(device: torch.device) -> list[Tensor]:
    """Returns the states of the random number generators that a forward uses; the host does not wait."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _set_rng_states(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
