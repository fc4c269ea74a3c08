"""Tensor parallelism: each process of a group has a part of every layer, and computes all tokens with it.

The partition follows the model's plan (`base_model_tp_plan` of transformers' configs; Megatron, arXiv:1909.08053).
In a pair of linear layers, the outputs of the first (column-wise) and the inputs of the second (row-wise) are
partitioned. Between them, every process computes its own heads or its own part of the MLP; after the second layer, the
outputs are summed. Embedding and head are partitioned by vocabulary. Weights, gradients, optimizer state and FLOPs of
these layers are 1 / N. Per micro-batch, each transformer layer all-reduces 4 activations: 2 in forward, 2 in backward.

transformers' `tp_plan="auto"` is not used, for three reasons. It shards only weights that it reads from files. Its
DTensors work neither with DDP nor with Accelerate's FSDP2. After each backward it sums the gradients of replicated
weights (Qwen3's norms of queries and keys), so gradients accumulated before are summed again.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from common.parallel.process_groups import group_of, group_ranks
from common.training.process_grid import ProcessGrid
from common.training.shares import Share, Shares

CUT = {"colwise": 0, "rowwise": 1, "colwise_gather_output": 0, "rowwise_split_input": 1}  # sharded dimension of weights
PARTIAL = "replicated_with_grad_allreduce"  # replicated weights between partitioned layers


def check_model(config: PreTrainedConfig, empty_model: Callable[[], PreTrainedModel], grid: ProcessGrid) -> list[str]:
    """Returns a line if a model does not support tensor parallelism; called before the model is built.

    Args:
        empty_model: builds the model on the meta device.
    """
    if grid.tensor == 1:
        return []
    why = next(_why_not(config, empty_model, grid.tensor), None)
    asked = f"parallelism_config_tp_size {grid.tensor}: {config.model_type}"
    return [f"{asked} {why}; set it to 1, or use a different model"] if why else []


def _why_not(config: PreTrainedConfig, empty_model: Callable[[], PreTrainedModel], size: int) -> Iterator[str]:
    """Yields the reasons why a model cannot be partitioned into `size` parts, each as the end of a sentence."""
    plan = _plan(config)
    if config.get_text_config() is not config or config.is_encoder_decoder or not plan:
        yield "has no tensor-parallel plan in transformers (base_model_tp_plan)"
        return
    if unknown := sorted(set(plan.values()) - {*CUT, PARTIAL}):
        yield f"has tensor-parallel styles that are not supported ({', '.join(unknown)})"
        return
    try:
        heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1
    except RuntimeError:  # raised by transformers if layers differ
        yield "has layers with different numbers of heads"
        return
    if heads % size:
        fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield f"has {heads} attention heads, which {size} does not divide (use one of {fit})"
    elif groups % size and size % groups:
        yield f"has {groups} heads of keys and values, which {size} processes can neither divide nor share"
    model = empty_model()
    styles = dict(planned_modules(model))
    if not styles:
        yield "has none of the layers that its plan names"
    for name, (module, style) in styles.items():
        if style == PARTIAL:
            continue
        if type(module) is not nn.Linear:
            yield f"has {name}, a {type(module).__name__}, where its plan expects a linear layer"
            return
        width = module.weight.shape[CUT[style]]
        if width % size and not _is_shared(model, name, style, size):
            yield f"has {name} of {width} features, which {size} does not divide"
        if style.endswith("wise"):
            parent = model.get_submodule(name.rpartition(".")[0])
            known = {id(p) for one, _ in styles.values() for p in one.parameters()}
            if any(id(p) not in known for p in parent.parameters()):
                yield f"has weights next to {name} that its plan does not mention"


def _plan(config: PreTrainedConfig) -> dict[str, str]:
    """Returns the plan's style of each layer, without embeddings, which `_Cutter.divide_vocabulary` partitions.

    transformers 5.17 adds the embedding to the plan of every model with tied weights.
    """
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if style != "embedding_rowwise"}


def planned_modules(model: PreTrainedModel) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yields the name of each module in the plan, with the module and the plan's style, such as "colwise"."""
    base, plan = model.base_model, _plan(model.config)
    prefix = "" if base is model else f"{model.base_model_prefix}."
    for name, module in base.named_modules():
        if style := plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)):
            yield prefix + name, (module, style)


def _is_shared(model: PreTrainedModel, name: str, style: str, size: int) -> bool:
    """Returns whether a layer computes keys or values for fewer heads than processes, so that processes share heads."""
    if style != "colwise":  # each process gets all outputs
        return False
    module: Any = model.get_submodule(name)
    attention: Any = model.get_submodule(name.rpartition(".")[0])
    if not hasattr(attention, "num_key_value_groups") or not hasattr(attention, "head_dim"):
        return False
    groups = model.config.num_attention_heads // attention.num_key_value_groups
    is_keys = module.weight.shape[0] == groups * attention.head_dim
    return is_keys and groups % size != 0 and size % groups == 0


def _bounds(total: int, rank: int, size: int) -> tuple[int, int]:
    """Returns start and end of a rank's part of `total` items; the sizes of the parts differ by at most one."""
    return rank * total // size, (rank + 1) * total // size


class _Cutter:
    """Partitions a model in place: layers compute with this rank's part, and parameters contain only this part."""

    def __init__(self, model: PreTrainedModel, grid: ProcessGrid):
        self.model, self.group = model, group_of(group_ranks)
        self.rank, self.size = self.group.rank(), grid.tensor
        self.new: dict[int, tuple[nn.Parameter, Share]] = {}  # by id of the full parameter, so tied weights stay tied
        self._spread: tuple[Tensor, Tensor] | None = None  # last input and output of `spread`

    def bounds(self, total: int) -> tuple[int, int]:
        return _bounds(total, self.rank, self.size)

    def cut(self, module: nn.Module, name: str, dim: int) -> None:
        """Replaces a full parameter by this rank's part."""
        whole = getattr(module, name)
        if whole is None:
            return
        if id(whole) not in self.new:
            start, stop = self.bounds(whole.shape[dim])
            part = whole.detach().narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
            self.new[id(whole)] = (
                nn.Parameter(part, requires_grad=whole.requires_grad),
                Share(tuple(whole.shape), dim, start),
            )
        setattr(module, name, self.new[id(whole)][0])

    def keep(self, module: nn.Module) -> None:
        """Keeps the module's full parameters on each rank; their gradients are partial sums, to be summed later."""
        for p in module.parameters():
            self.new[id(p)] = (p, Share(tuple(p.shape), sums_gradients=True, counts=self.rank == 0))

    def spread(self, x: Tensor) -> Tensor:
        """Returns the input `x` for the layers that share it; its gradient is all-reduced once for all of them."""
        if not x.requires_grad:
            return x
        if self._spread is None or self._spread[0] is not x:
            self._spread = x, _Spread.apply(x, self.group)
        return self._spread[1]

    def first(self, layer: Any, gathers: bool) -> None:
        """Partitions a layer by its outputs (column-wise); with `gathers`, the outputs are all-gathered."""
        self.cut(layer, "weight", 0)
        self.cut(layer, "bias", 0)
        original = layer.forward

        @torch.compiler.disable
        def forward(x: Tensor) -> Tensor:
            y = original(self.spread(x))
            return _Gather.apply(y, self.group) if gathers else y

        layer.forward = forward

    def second(self, layer: Any, splits: bool) -> None:
        """Partitions a layer by its inputs (row-wise), all-reduces the outputs; with `splits`, splits full inputs."""
        start, stop = self.bounds(layer.in_features)
        self.cut(layer, "weight", 1)

        @torch.compiler.disable
        def forward(x: Tensor) -> Tensor:
            self._spread = None
            x = _Split.apply(x, start, stop, self.group) if splits else x
            y = _Sum.apply(F.linear(x, layer.weight), self.group)
            return y if layer.bias is None else y + layer.bias.to(y.dtype)

        layer.forward = forward

    def share_heads(self, layer: Any, attention: Any) -> None:
        """Lets processes share key or value heads, if there are fewer heads than processes.

        Each process keeps the full weight, but computes only the head that its queries need.
        """
        self.keep(layer)
        heads = self.model.config.num_key_value_heads
        width, head = layer.out_features // heads, self.rank * heads // self.size
        attention.num_key_value_groups = self.model.config.num_attention_heads // self.size
        rows = slice(head * width, (head + 1) * width)

        @torch.compiler.disable
        def forward(x: Tensor) -> Tensor:
            bias = None if layer.bias is None else layer.bias[rows]
            return F.linear(self.spread(x), layer.weight[rows], bias)

        layer.forward = forward

    def divide_vocabulary(self) -> None:
        """Partitions head and embedding by vocabulary if the head's loss supports it; otherwise both are replicated."""
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head is None or "targets" not in inspect.signature(head.forward).parameters:
            return
        if isinstance(embedding, nn.Embedding) and embedding.num_embeddings == head.out_features:
            self._divide_embedding(embedding)
        elif head.weight is embedding.weight:
            return
        first, _ = self.bounds(head.out_features)
        self.cut(head, "weight", 0)
        self.cut(head, "bias", 0)
        head.vocabulary = (self.group, first)  # read by the loss

    def _divide_embedding(self, embedding: Any) -> None:
        start, stop = self.bounds(embedding.num_embeddings)
        self.cut(embedding, "weight", 0)
        if embedding.padding_idx is not None:
            is_mine = start <= embedding.padding_idx < stop
            embedding.padding_idx = embedding.padding_idx - start if is_mine else None
        original = embedding.forward

        @torch.compiler.disable
        def forward(ids: Tensor) -> Tensor:
            is_mine = (start <= ids) & (ids < stop)
            rows = original(torch.where(is_mine, ids - start, 0))
            return _Sum.apply(torch.where(is_mine.unsqueeze(-1), rows, 0), self.group)

        embedding.forward = forward


def cut_model(model: PreTrainedModel, optimizer: torch.optim.Optimizer, grid: ProcessGrid) -> None:
    """Replaces the parameters of model and optimizer by this rank's parts, in place; call it on all ranks together.

    Call it on the bare model, after `sum_token_losses`, which sets the loss that the head's partition requires.
    """
    if grid.tensor == 1:
        return
    cutter = _Cutter(model, grid)
    size = grid.tensor  # detect shared heads before a partition changes the shapes
    planned = [(*one, _is_shared(model, name, one[1], size), name) for name, one in planned_modules(model)]
    for module, style, is_shared, name in planned:
        if style == PARTIAL:
            cutter.keep(module)
        elif is_shared:
            cutter.share_heads(module, model.get_submodule(name.rpartition(".")[0]))
        elif CUT[style] == 0:
            cutter.first(module, gathers=style.endswith("output"))
        else:
            cutter.second(module, splits=style.endswith("input"))
    cutter.divide_vocabulary()
    for group in optimizer.param_groups:
        group["params"] = [cutter.new[id(p)][0] if id(p) in cutter.new else p for p in group["params"]]
    shares = {id(p): share for p, share in cutter.new.values()}
    whole = {name: Share(tuple(p.shape), counts=cutter.rank == 0) for name, p in model.named_parameters()}
    named = {name: shares.get(id(p), whole[name]) for name, p in model.named_parameters()}
    model.shares = Shares(cutter.group, named)  # type: ignore[assignment]  # a module accepts any attribute


@torch.no_grad()
def whole_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns all full weights and buffers in host memory on rank 0, {} on others; call it on all ranks together."""
    shares: Shares = model.shares  # type: ignore[assignment]  # of `cut_model`
    names = {id(p): name for name, p in model.named_parameters()}
    whole: dict[int, Tensor] = {}  # tied weights once
    state = model.state_dict(keep_vars=True)
    for x in {id(x): x for x in state.values()}.values():
        share = shares.of.get(names.get(id(x), ""))
        part = x.detach().to(PartialState().device)  # also if offloaded
        part = part.full_tensor() if isinstance(part, DTensor) else part
        if share is not None and share.dim is not None:
            part = _gather_parts(part, share.shape, share.dim, shares.group)
        if dist.get_rank() == 0:
            whole[id(x)] = part.cpu()
    return {name: whole[id(x)] for name, x in state.items() if id(x) in whole}


def _gather_parts(x: Tensor, full_shape: tuple[int, ...], dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns the full tensor, from the parts of the group's ranks. Unlike in all_gather, their sizes may differ."""
    parts = []
    for rank in range(group.size()):
        start, stop = _bounds(full_shape[dim], rank, group.size())
        shape = [*full_shape[:dim], stop - start, *full_shape[dim + 1 :]]
        part = x.contiguous() if rank == group.rank() else x.new_empty(shape)
        dist.broadcast(part, group=group, group_src=rank)
        parts.append(part)
    return torch.cat(parts, dim)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum over the group in the dtype of `x`; 16-bit inputs are summed in float32."""
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gathers (..., D) of each rank to (..., N * D)."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


class _Spread(torch.autograd.Function):
    """Identity; in backward, all-reduces the ranks' partial gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return _summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    """All-reduces (sum); in backward the identity, because each rank has the full gradient."""

    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Gather(torch.autograd.Function):
    """All-gathers the last dimension; in backward, returns this rank's part of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.start, ctx.length = group.rank() * x.shape[-1], x.shape[-1]
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.narrow(-1, ctx.start, ctx.length), None


class _Split(torch.autograd.Function):
    """Returns this rank's part of a full tensor; in backward, all-gathers the gradients of the parts."""

    @staticmethod
    def forward(ctx, x, start, stop, group):
        ctx.group = group
        return x.narrow(-1, start, stop - start)

    @staticmethod
    def backward(ctx, gradient):
        return _gathered(gradient, ctx.group), None, None, None
