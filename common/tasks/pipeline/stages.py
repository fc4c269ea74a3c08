"""Splits a causal language model into pipeline stages, and collects their weights.

Each process builds the full model, as a single process would, and removes the parts of other stages. Removed modules
are replaced by modules that return their input, so that all remaining parts keep their names: checkpoints depend on
names.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from common.errors import UserError, one_line
from common.parallel.process_groups import group_of
from common.training.output_head import MoreTerms, examine_head, left_unchanged
from common.training.process_grid import Degrees, running
from common.training.shares import Share, Shares


def check_stages(config: PreTrainedConfig, degrees: Degrees | None = None) -> Iterator[str]:
    """Yields one line if a causal language model cannot be split into stages; works before the model is built.

    Args:
        degrees: contains the number of stages; default: the grid of this run.
    """
    degrees = degrees or running()
    if degrees.pipeline == 1:
        return
    asked, name = f"parallelism_config_pp_size {degrees.pipeline}", config.model_type
    text = config.get_text_config()
    if text is not config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield f"{asked}: {name} has other inputs than text, or is a model of its own; take another model"
    elif not (plan := getattr(config, "base_model_pp_plan", None)):
        yield f"{asked}: transformers has no pipeline plan (base_model_pp_plan) for {name}; take another model"
    elif len(plan) != 3:
        yield f"{asked}: {name} has more than an embedding, layers and a norm ({', '.join(plan)}); take another model"
    elif config.num_hidden_layers < degrees.pipeline:
        most = config.num_hidden_layers
        yield f"{asked} is more than the model's {most} layer{'s' * (most > 1)}; use at most {most}"
    elif getattr(config, "output_router_logits", False):
        yield f"{asked}: {name} has a router loss (output_router_logits), which no stage sees whole; set that to false"


def place_cuts(parameters: list[int], products: list[int], num_stages: int) -> list[int]:
    """Returns the first layer of each stage, followed by the number of layers; minimises the size of the largest stage.

    The size of a stage is its share of the parameters or of the matmuls, whichever is larger. Thus it fits in memory,
    and computes as fast as the others. The result is exact: all contiguous splits are compared.

    Args:
        parameters, products: amounts in the embedding, in each layer, and in norm and head together.
        num_stages: at most the number of layers.
    """
    num_layers = len(parameters) - 2
    totals = [sum(parameters), sum(products)]

    def size(first: int, last: int) -> float:
        start, end = first and first + 1, last + (2 if last == num_layers else 1)
        return max(
            sum(amounts[start:end]) / total for amounts, total in zip((parameters, products), totals, strict=True)
        )

    # By the number of layers assigned so far: (size of the largest stage, first layers of the stages).
    best = {0: (0.0, [0])}
    for stage in range(num_stages):
        ends = [num_layers] if stage == num_stages - 1 else range(stage + 1, num_layers - num_stages + stage + 2)
        best = {
            end: min((max(largest, size(at, end)), [*cuts, end]) for at, (largest, cuts) in best.items() if at < end)
            for end in ends
        }
    return best[num_layers][1]


def find_parts(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList, nn.Module, nn.Module] | None:
    """Returns embedding, layers, norm and head of a causal language model.

    It returns None if the model has other parts than its pipeline plan.
    """
    plan, backbone = getattr(model.config, "base_model_pp_plan", None) or (), model.get_decoder()
    found = [*(getattr(backbone, name, None) for name in plan), model.get_output_embeddings()]
    if len(found) != 4 or None in found or not isinstance(found[1], nn.ModuleList):
        return None
    return tuple(found) if found[0] is model.get_input_embeddings() else None


def count_parts(
    embedding: nn.Module, layers: nn.ModuleList, norm: nn.Module, head: nn.Module
) -> tuple[list[int], list[int]]:
    """Returns (parameters, matmul operations), each for the embedding, each layer, and norm and head together."""
    parameters = [sum(p.numel() for p in one.parameters()) for one in (embedding, *layers, norm)]
    products = [0, *parameters[1:-1], head.weight.numel()]  # an embedding lookup needs no matmul
    parameters[-1] += sum(p.numel() for p in head.parameters())  # a tied weight is on the first and the last stage
    return parameters, products


class _Pass(nn.Module):
    """Replaces a module of a different stage; returns its input."""

    def __init__(self, replaced: nn.Module):
        super().__init__()
        for name, value in vars(replaced).items():  # a backbone may read a layer's type
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, given: Any, *_: Any, **__: Any) -> Any:
        return given


class _replaced:
    """A context in which these modules of the model return their input."""

    def __init__(self, model: nn.Module, names: list[str]):
        self.model, self.modules = model, {name: model.get_submodule(name) for name in names}

    def __enter__(self) -> None:
        for name, module in self.modules.items():
            self.model.set_submodule(name, _Pass(module))

    def __exit__(self, *_: Any) -> None:
        for name, module in self.modules.items():
            self.model.set_submodule(name, module)


class Stages:
    """The stages of a model; `drop` leaves only the stage of this process.

    Attributes:
        number, index: number of stages, and index of this process's stage.
        ranks, group: the ranks that a sample passes through, including this rank, and their process group.
        num_parameters: (all, trained) parameters of the full model.
        held_before: names of weights that an earlier stage also has and saves: a tied weight.
        description: the content of each stage, for the run summary.
    """

    def __init__(self, model: PreTrainedModel):
        """Determines the stages. Call it on all ranks together.

        Raises UserError if the stages would not compute the same result as the model.
        """
        degrees, rank = running(), PartialState().process_index
        self.number, self.index = degrees.pipeline, degrees.stage(rank)
        self.is_first, self.is_last = self.index == 0, self.index == self.number - 1
        self.ranks, self.group = degrees.stages(rank), group_of(degrees.stages)
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        self.num_parameters = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
        self._find_parts(model)
        self._check_loss(model)
        self._check_parts(model)
        earlier = set().union(*(self._kept(model, stage) for stage in range(self.index)))
        self.held_before = earlier & self._kept(model, self.index)

    def _find_parts(self, model: PreTrainedModel) -> None:
        """Determines the modules that each stage drops, by name, and the description of each stage.

        Raises UserError if the model differs from its pipeline plan.
        """
        self.backbone = model.get_decoder()
        names = {id(module): name for name, module in model.named_modules()}
        parts = find_parts(model)
        if parts is None:
            raise UserError(f"{self._asked(model)} has other parts than its pipeline plan says; take another model")
        embedding, layers, norm, head = parts
        self.is_tied = head.weight is embedding.weight
        parameters, products = count_parts(*parts)
        cuts = place_cuts(parameters, products, self.number)
        self.dropped: list[list[str]] = []
        told = []
        for stage, (first, last) in enumerate(pairwise(cuts)):
            is_last = stage == self.number - 1
            others = [*layers[:first], *layers[last:], *([] if is_last else [norm, head])]
            others += [embedding] if stage and not (is_last and self.is_tied) else []
            self.dropped.append([names[id(one)] for one in others])
            held = sum(parameters[first + 1 : last + 1]) + parameters[0] * (stage == 0) + parameters[-1] * is_last
            which = f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"
            told.append(f"{'embedding, ' * (stage == 0)}{which}{', norm, head' * is_last}: {held:,} parameters")
        self.description = " | ".join(told)

    def _kept(self, model: PreTrainedModel, stage: int) -> set[str]:
        """Returns the names of the parameters and buffers that a stage keeps."""
        prefixes = tuple(f"{name}." for name in self.dropped[stage])
        names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
        return {name for name in names if not name.startswith(prefixes)}

    def _asked(self, model: PreTrainedModel) -> str:
        """Returns the start of an error message: the requested number of stages and the model."""
        return f"parallelism_config_pp_size {self.number}: {type(model).__name__}"

    def _check_loss(self, model: PreTrainedModel) -> None:
        """Raises UserError if the model's own loss has more terms."""
        try:
            examine_head(model)
        except MoreTerms as reason:
            raise UserError(f"{self._asked(model)} has a loss of its own ({reason}); take another model") from reason
        except Exception:  # any error of a model's forward; `sum_token_losses` then uses its full logits
            pass

    def _check_parts(self, model: PreTrainedModel) -> None:
        """Checks that the stages in sequence compute the model's hidden states exactly, in every bit.

        Raises UserError if they do not, or if every stage keeps the same parameter.
        """
        tied = model.get_input_embeddings().weight if self.is_tied else None
        parameters = {name for name, p in model.named_parameters() if p is not tied}
        if everywhere := sorted(parameters.intersection(*(self._kept(model, stage) for stage in range(self.number)))):
            raise UserError(f"{self._asked(model)} has {everywhere[0]}, which is in no stage; take another model")
        ids = torch.arange(1, 9).unsqueeze(0) % model.config.vocab_size
        given: dict[str, Any] = {"input_ids": ids}
        # Train mode reveals dropout in the backbone itself, which would be applied once per stage. All forwards draw
        # the same random numbers.
        with left_unchanged(model), torch.no_grad():
            try:
                torch.manual_seed(0)
                expected = self.backbone(**given, use_cache=False)[0]
                torch.manual_seed(0)
                for dropped in self.dropped:
                    with _replaced(model, dropped):
                        given = {"inputs_embeds": self.backbone(**given, use_cache=False)[0]}
            except Exception as error:  # any error of a model's forward, such as a layer with other inputs
                raise UserError(
                    f"{self._asked(model)} cannot run on eight tokens, whole or in stages ({one_line(error)}); take "
                    "another model"
                ) from error
        if not torch.equal(given["inputs_embeds"], expected):
            raise UserError(
                f"{self._asked(model)} does more than its embedding, its layers one after the other and its norm, so "
                "that stages would make another update; take another model"
            )

    def drop(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Removes the parts of other stages from the model and the optimizer."""
        for name in self.dropped[self.index]:
            model.set_submodule(name, _Pass(model.get_submodule(name)))
        kept = {id(p) for p in model.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in kept]
        tied = model.get_input_embeddings().weight if self.is_tied and (self.is_first or self.is_last) else None
        shares = {
            name: Share(tuple(p.shape), sums_gradients=p is tied, counts=name not in self.held_before)
            for name, p in model.named_parameters()
        }
        model.shares, model.pipeline_stages = Shares(self.group, shares, group_of(running().ends)), self

    def whole_weights(self, model: PreTrainedModel) -> dict[str, Tensor] | None:
        """Returns all stages' weights and saved buffers on the main process; None on other processes.

        They are received one tensor at a time.
        """
        rank = PartialState().process_index
        if self.ranks[0] != 0:  # a different pipeline has the same weights
            return None
        mine = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
        own = {name: one for name, one in model.state_dict().items() if name in mine - self.held_before}
        shapes: list[Any] = [None] * self.number
        dist.all_gather_object(shapes, [(name, one.shape, one.dtype) for name, one in own.items()], group=self.group)
        weights = {}
        for source, told in zip(self.ranks, shapes, strict=True):
            for name, shape, dtype in told:
                if rank == source != 0:
                    dist.send(own[name].contiguous(), 0, group=self.group)
                elif rank == 0:
                    one = own[name] if source == 0 else torch.empty(shape, dtype=dtype, device=PartialState().device)
                    if source != 0:
                        dist.recv(one, source, group=self.group)
                    weights[name] = one.cpu()
        return weights if rank == 0 else None
