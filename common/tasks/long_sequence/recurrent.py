"""How is one sequence trained that does not fit? Its recurrence in segments that backward repeats, its MLPs in tiles.

A recurrent network keeps something for every step that it makes. Here only the state at a segment's start is kept, and
backward computes one segment again at a time: sqrt(L) segments of sqrt(L) steps need memory for 2 sqrt(L) of them, and
one more forward (Chen et al. 2016, arXiv:1604.06174; for recurrent networks Gruslys et al. 2016, arXiv:1606.03401).
Segments of segments need less memory and one more forward a level; with a fixed number of segments and log(L) levels
both grow with the logarithm (Griewank and Walther 2000, "Algorithm 799: revolve"). The gradient is the whole
sequence's each time. A truncated one is another gradient.
"""

import types
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from common.training.precision import without_autocast

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}
State = tuple[Tensor, ...]  # each (layers, B, width): of an LSTM two, of a GRU one


class RecurrentConfig(PreTrainedConfig):
    """The sizes of a `RecurrentLM`; `cell` is one of `CELLS`."""

    model_type = "recurrent_lm"
    cell: str = "lstm"
    vocab_size: int = 257
    hidden_size: int = 256
    num_hidden_layers: int = 1


class RecurrentWeights(nn.Module):
    """All weights of a `RecurrentLM`: embedding, LSTM or GRU, output layer. It is called for float32 copies of them.

    Copies, because what FSDP or ZeRO-3 gathers for a forward is gone when backward computes a segment again. float32
    (or float64), because DeepSpeed and FSDP give weights in bf16 or fp16.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        width = config.hidden_size
        parts = {
            "embedding": nn.Embedding(config.vocab_size, width),
            "rnn": CELLS[config.cell](width, width, config.num_hidden_layers, batch_first=True),
            "head": nn.Linear(width, config.vocab_size),
        }
        # Its own: FSDP and ZeRO-3 gather the parameters of the module that is called.
        for part, module in parts.items():
            for name, parameter in module.named_parameters():
                self.register_parameter(f"{part}_{name}", parameter)

    def forward(self) -> tuple[Tensor, ...]:
        return tuple(p.to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self.parameters())


class RecurrentLM(PreTrainedModel):
    """A recurrent language model: embedding, LSTM or GRU, output layer. It has no dropout, so nothing is random.

    `forward(input_ids)` returns logits (B, L, vocabulary). With `targets` (N,) and `target_rows` (N,), as
    `collate_tokens` makes them, it returns the SUM of the losses in nats, and keeps what the three
    attributes below say: logits and outputs of one piece at most, unless `levels` is 0.

    Recurrence and loss are computed in float32, whatever the launch's precision: bf16 has 8 bits for a state that is
    carried over 100,000 steps.
    """

    config_class = RecurrentConfig
    own_precision = "float32, whatever the launch asks for"
    _no_split_modules = ["RecurrentWeights"]  # what FSDP gathers at once

    segments: int | str = "sqrt"  # of the sequence, and of each segment at the levels below
    levels: int = 0  # how often it is cut; 0: everything is kept for backward
    truncate: int | None = None  # steps after which the gradient is cut, in the place of segments

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.weights = RecurrentWeights(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The modules' own initialisation is this model's."""

    def get_input_embeddings(self) -> None:
        """None: FSDP would wrap it by itself."""

    def get_output_embeddings(self) -> None:
        """None, likewise."""

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, target_rows: Tensor | None = None) -> Tensor:
        with without_autocast(input_ids.device):
            weights = self.weights()
            state = self._first_state(input_ids, weights[0].dtype)
            if targets is None:
                return self._walk(weights, state, input_ids)[0]
            # int32: what is as long as the sequence is not made shorter by segments.
            where = torch.full((input_ids.numel(),), -100, dtype=torch.int32, device=input_ids.device)
            where = where.index_copy_(0, target_rows, targets.int()).view_as(input_ids)
            piece, length = partial(self._piece, input_ids, where), input_ids.shape[1]
            if not self.truncate:
                count = pieces_of(length, self.segments, self.levels)
                return sum_over_segments(piece, state, 0, length, count, self.levels, weights)[-1]
            loss_sum = 0
            for start in range(0, length, self.truncate):
                state = tuple(part.detach() for part in state)
                end = min(start + self.truncate, length)
                *state, loss = sum_over_segments(piece, state, start, end, 1, 1, weights)
                loss_sum = loss_sum + loss
            return loss_sum

    def _first_state(self, input_ids: Tensor, dtype: torch.dtype) -> State:
        shape = (self.config.num_hidden_layers, len(input_ids), self.config.hidden_size)
        zeros = partial(torch.zeros, shape, dtype=dtype, device=input_ids.device)
        return (zeros(), zeros()) if self.config.cell == "lstm" else (zeros(),)

    def _piece(
        self, input_ids: Tensor, targets: Tensor, weights: tuple[Tensor, ...], state: State, start: int, end: int
    ) -> tuple[Tensor, ...]:
        """The state after the steps from `start` to `end`, and the sum of their losses."""
        logits, state = self._walk(weights, state, input_ids[:, start:end])
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, targets[:, start:end].flatten().long(), reduction="sum")
        return *state, loss

    def _walk(self, weights: tuple[Tensor, ...], state: State, input_ids: Tensor) -> tuple[Tensor, State]:
        """Logits (B, L, vocabulary) and the state after them."""
        embedding, *recurrent, head, bias = weights
        embedded = F.embedding(input_ids, embedding)
        settings = (True, self.config.num_hidden_layers, 0.0, self.training, False, True)  # as nn.LSTM calls it
        if self.config.cell == "lstm":
            output, *state = torch.lstm(embedded, state, recurrent, *settings)
        else:
            output, *state = torch.gru(embedded, state[0], recurrent, *settings)
        return F.linear(output, head, bias), state


AutoConfig.register(RecurrentConfig.model_type, RecurrentConfig, exist_ok=True)
AutoModelForCausalLM.register(RecurrentConfig, RecurrentLM, exist_ok=True)


def pieces_of(length: int, segments: int | str, levels: int) -> int:
    """Into how many pieces each level cuts: `sqrt` makes them as many at every level as a last piece has steps."""
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
    """The state after the steps from `start` to `end`, and the sum of their losses; backward computes segments again.

    Args:
        piece: (weights, state, start, end) to the same of some steps; deterministic.
        count, levels: cut into `count` segments, each of them likewise, `levels` times; 0: `piece` makes all at once.
        weights: all that gets a gradient; they must stay as they are until backward has ended.
    """
    if levels == 0:
        return piece(weights, state, start, end)
    loss_sum = 0
    edges = [start + (end - start) * number // count for number in range(count + 1)]
    for first, last in zip(edges, edges[1:], strict=False):
        if first == last:  # fewer steps than segments
            continue
        rest = {"start": first, "end": last, "count": count, "levels": levels - 1}
        run = partial(sum_over_segments, piece, **rest)
        keeps = torch.is_grad_enabled()
        *state, loss = _Recomputed.apply(run, len(state), *state, *weights) if keeps else run(state, weights=weights)
        loss_sum = loss_sum + loss
    return *state, loss_sum


class _Recomputed(torch.autograd.Function):
    """`run(state, weights=weights)`, of which only these arguments are kept.

    Not torch.utils.checkpoint: without re-entry it calls Python for every tensor that a step saves (measured with a
    GRU on a CPU: a forward five times as long), and with re-entry it finishes a parameter's gradient once a segment,
    which DDP forbids. Here the weights are inputs, so each gets one gradient, at the end.
    """

    @staticmethod
    def forward(ctx, run, num_states, *tensors):
        ctx.run, ctx.num_states = run, num_states
        ctx.save_for_backward(*tensors)
        return run(tensors[:num_states], weights=tensors[num_states:])  # gradients are off in here

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.run(tuple(tensors[: ctx.num_states]), weights=tuple(tensors[ctx.num_states :]))
        return None, None, *torch.autograd.grad(outputs, tensors, gradients)


def tile_mlps(model: PreTrainedModel, rows: int) -> int:
    """Make each layer's MLP see `rows` positions at once, and compute them again in backward; returns how many MLPs.

    An MLP looks at one position at a time, so its tiles give the same gradient, and its wide intermediate tensors are
    as long as a tile (the idea of Arctic Long Sequence Training, arXiv:2506.13996). Call it on the bare model. Without
    `layers` that have an `mlp` each (GPT-2) it does nothing.
    """
    mlps = [layer.mlp for layer in getattr(model.base_model, "layers", []) if hasattr(layer, "mlp")]

    def forward(self: nn.Module, hidden: Tensor, original: Callable[..., Tensor]) -> Tensor:
        outputs = [checkpoint(original, self, tile, use_reentrant=False) for tile in hidden.split(rows, dim=1)]
        if isinstance(outputs[0], tuple):  # of GPT-OSS, with its router's scores, which its layer leaves aside
            outputs, *others = zip(*outputs, strict=True)
            return torch.cat(outputs, dim=1), *map(torch.cat, others)
        return torch.cat(outputs, dim=1)

    for mlp in mlps:
        mlp.forward = types.MethodType(partial(forward, original=mlp.forward.__func__), mlp)
    return len(mlps)
