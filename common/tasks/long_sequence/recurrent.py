"""Trains on sequences too long for memory: a recurrence in segments that backward recomputes, and MLPs in tiles.

Usually, a recurrent network saves tensors for each of L steps. Here, it saves only the state at the start of each
segment, and backward recomputes one segment at a time. With sqrt(L) segments of sqrt(L) steps, this needs memory for
2 sqrt(L) steps and one more forward (Chen et al. 2016, arXiv:1604.06174; for recurrent networks Gruslys et al. 2016,
arXiv:1606.03401). Nested segments need less memory and one more forward per level. With a fixed number of segments and
log(L) levels, memory and the number of forwards grow with log(L) (Griewank and Walther 2000, "Algorithm 799: revolve").
The gradient is that of the full sequence in all these cases, but not with `truncate`.
"""

import types
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from common.training.precision import without_autocast

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}
State = Sequence[Tensor]  # each (layers, B, width): two tensors for an LSTM, one for a GRU


class RecurrentConfig(PreTrainedConfig):
    """The sizes of a `RecurrentLM`; `cell` is one of `CELLS`."""

    model_type = "recurrent_lm"
    cell: str = "lstm"
    vocab_size: int = 257
    hidden_size: int = 256
    num_hidden_layers: int = 1


class RecurrentWeights(nn.Module):
    """All weights of a `RecurrentLM`: embedding, LSTM or GRU, output layer; its forward returns float32 copies.

    They are copies, because weights that FSDP or ZeRO-3 all-gathers for a forward are freed before backward recomputes
    a segment. They are in float32 (float64 stays float64), because DeepSpeed and FSDP provide bf16 or fp16 weights.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        width = config.hidden_size
        parts = {
            "embedding": nn.Embedding(config.vocab_size, width),
            "rnn": CELLS[config.cell](width, width, config.num_hidden_layers, batch_first=True),
            "head": nn.Linear(width, config.vocab_size),
        }
        # Registered on this module, because FSDP and ZeRO-3 all-gather the parameters of the module that is called.
        for part, module in parts.items():
            for name, parameter in module.named_parameters():
                self.register_parameter(f"{part}_{name}", parameter)

    def forward(self) -> tuple[Tensor, ...]:
        """Returns float32 (or float64) copies of all weights, in the order of their registration."""
        return tuple(p.to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self.parameters())


class RecurrentLM(PreTrainedModel):
    """A recurrent language model: embedding, LSTM or GRU, output layer. It has no dropout, so it is deterministic.

    `forward(input_ids)` returns logits (B, L, vocabulary). With `targets` (N,) and `target_rows` (N,) from
    `collate_tokens`, it returns the SUM of the losses in nats. The attributes below limit the memory of backward.

    Recurrence and loss are computed in float32 for any --mixed_precision, because the 8 significant bits of bf16 are
    too few for a state carried over 100,000 steps.
    """

    config_class = RecurrentConfig
    own_precision = "float32, independent of the launch"
    _no_split_modules = ["RecurrentWeights"]  # FSDP all-gathers this module as a unit

    segments: int | str = "sqrt"  # number of segments of the sequence, and of each segment at the next level
    levels: int = 0  # number of nested splits; 0: everything is saved for backward
    truncate: int | None = None  # steps after which the gradient is truncated; replaces segments

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.weights = RecurrentWeights(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the modules keep their own initialisation."""

    def get_input_embeddings(self) -> None:  # type: ignore[override]  # FSDP would wrap the embedding separately
        """Returns None."""

    def get_output_embeddings(self) -> None:
        """Returns None, because FSDP would wrap the output layer separately."""

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, target_rows: Any = None) -> Tensor:
        with without_autocast(input_ids.device):
            weights = self.weights()
            state = self._first_state(input_ids, weights[0].dtype)
            if targets is None:
                return self._walk(weights, state, input_ids)[0]
            # int32 to save memory, because this tensor has the length of the full sequence despite segments.
            labels = torch.full((input_ids.numel(),), -100, dtype=torch.int32, device=input_ids.device)
            labels = labels.index_copy_(0, target_rows, targets.int()).view_as(input_ids)
            piece, length = partial(self._piece, input_ids, labels), input_ids.shape[1]
            if not self.truncate:
                count = pieces_of(length, self.segments, self.levels)
                return sum_over_segments(piece, state, 0, length, count, self.levels, weights)[-1]
            loss_sum: Any = 0
            for start in range(0, length, self.truncate):
                end = min(start + self.truncate, length)
                *state, loss = sum_over_segments(piece, [s.detach() for s in state], start, end, 1, 1, weights)
                loss_sum = loss_sum + loss
            return loss_sum

    def _first_state(self, input_ids: Tensor, dtype: torch.dtype) -> State:
        shape = (self.config.num_hidden_layers, len(input_ids), self.config.hidden_size)
        zeros = partial(torch.zeros, shape, dtype=dtype, device=input_ids.device)
        return (zeros(), zeros()) if self.config.cell == "lstm" else (zeros(),)

    def _piece(
        self, input_ids: Tensor, labels: Tensor, weights: tuple[Tensor, ...], state: State, start: int, end: int
    ) -> tuple[Tensor, ...]:
        """Returns the state after the steps from `start` to `end`, and the sum of their losses."""
        logits, state = self._walk(weights, state, input_ids[:, start:end])
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, labels[:, start:end].flatten().long(), reduction="sum")
        return *state, loss

    def _walk(self, weights: tuple[Tensor, ...], state: State, input_ids: Tensor) -> tuple[Tensor, State]:
        """Returns logits (B, L, vocabulary) and the state after the last step."""
        embedding, *recurrent, head, bias = weights
        embedded = F.embedding(input_ids, embedding)
        # has_biases, num_layers, dropout, train, bidirectional, batch_first
        settings = (True, self.config.num_hidden_layers, 0.0, self.training, False, True)
        if self.config.cell == "lstm":
            output, *state = torch.lstm(embedded, list(state), recurrent, *settings)
        else:
            output, *state = torch.gru(embedded, state[0], recurrent, *settings)
        return F.linear(output, head, bias), state


AutoConfig.register(RecurrentConfig.model_type, RecurrentConfig, exist_ok=True)
AutoModelForCausalLM.register(RecurrentConfig, RecurrentLM, exist_ok=True)


def pieces_of(length: int, segments: int | str, levels: int) -> int:
    """Returns the number of pieces per level; with "sqrt", the smallest pieces have about that number of steps."""
    return max(1, round(length ** (1 / (levels + 1)))) if segments == "sqrt" else int(segments)


def sum_over_segments(
    piece: Callable[[tuple[Tensor, ...], State, int, int], tuple[Tensor, ...]],
    state: State,
    start: int,
    end: int,
    count: int,
    levels: int,
    weights: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Returns the state after the steps from `start` to `end`, and their summed loss; backward recomputes segments.

    Args:
        piece: a deterministic function (weights, state, start, end) that returns the state and loss sum of some steps.
        count, levels: split into `count` segments, recursively `levels` times; with 0 levels, `piece` computes all
            steps.
        weights: all tensors that need a gradient, except the state; they must not change before backward has ended.
    """
    if levels == 0:
        return piece(weights, state, start, end)
    loss_sum: Any = 0
    for first, last in pairwise(start + (end - start) * number // count for number in range(count + 1)):
        if first == last:  # fewer steps than segments
            continue
        run: Any = partial(sum_over_segments, piece, start=first, end=last, count=count, levels=levels - 1)
        if torch.is_grad_enabled():
            *state, loss = _Recomputed.apply(run, len(state), *state, *weights)
        else:
            *state, loss = run(state, weights=weights)
        loss_sum = loss_sum + loss
    return *state, loss_sum


class _Recomputed(torch.autograd.Function):
    """Computes `run(state, weights=weights)`, saving only these arguments for backward.

    torch.utils.checkpoint is not used for two reasons. With use_reentrant=False it calls Python for every saved tensor
    (measured with a GRU on a CPU: a forward takes five times as long). With use_reentrant=True a parameter's gradient
    is ready once per segment, which DDP rejects. Here the weights are inputs, so each gets one gradient, at the end.
    """

    @staticmethod
    def forward(ctx, run, num_states, *tensors):
        ctx.run, ctx.num_states = run, num_states
        ctx.save_for_backward(*tensors)
        return run(tensors[:num_states], weights=tensors[num_states:])  # gradients are disabled here

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.run(tuple(tensors[: ctx.num_states]), weights=tuple(tensors[ctx.num_states :]))
        return None, None, *torch.autograd.grad(outputs, tensors, gradients)


def tile_mlps(model: PreTrainedModel, rows: int) -> int:
    """Splits each layer's MLP into tiles of `rows` positions, recomputed in backward; returns the number of MLPs.

    An MLP processes each position separately, so the gradient is the same. Its wide intermediate tensors have only the
    length of a tile (as in Arctic Long Sequence Training, arXiv:2506.13996). Call it on the bare model. It returns 0
    for a model whose base has no `layers` with an `mlp`, such as GPT-2.
    """
    mlps: list[Any] = [layer.mlp for layer in getattr(model.base_model, "layers", []) if hasattr(layer, "mlp")]

    def forward(self: nn.Module, hidden: Tensor, original: Callable[..., Any]) -> Any:
        outputs = [checkpoint(original, self, tile, use_reentrant=False) for tile in hidden.split(rows, dim=1)]
        if isinstance(outputs[0], tuple):  # GPT-OSS also returns its router's scores, which its layer ignores
            hiddens, *others = zip(*outputs, strict=True)
            return torch.cat(hiddens, dim=1), *map(torch.cat, others)
        return torch.cat(outputs, dim=1)

    for mlp in mlps:
        mlp.forward = types.MethodType(partial(forward, original=mlp.forward.__func__), mlp)
    return len(mlps)
