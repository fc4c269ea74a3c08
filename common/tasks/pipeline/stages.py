"""Splits a causal language model into pipeline stages, and collects their weights.

Each process builds the full model and replaces the modules of other stages by modules that return their input. This
keeps the names of the remaining parts, on which checkpoints depend.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from common.errors import UserError, one_line
from common.models.adapters import count_parameters
from common.parallel import process_groups
from common.training.output_head import MoreTerms, examine_head, restore_afterwards
from common.training.process_grid import ProcessGrid, current_grid
from common.training.shares import Share, Shares

OTHER_MODEL = "use a different model"


def check_stages(config: PreTrainedConfig, grid: ProcessGrid | None = None) -> Iterator[str]:
    """Yields one line if a causal language model cannot be split into stages; works before the model is built.

    Args:
        grid: contains the number of stages; default: the grid of this run.
    """
    grid = grid or current_grid()
    if grid.pipeline == 1:
        return
    subject, name = f"parallelism_config_pp_size {grid.pipeline}", config.model_type
    if config.get_text_config() is not config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield f"{subject}: {name} has inputs other than text, or is not a model of transformers; {OTHER_MODEL}"
    elif not (plan := getattr(config, "base_model_pp_plan", None)):
        yield f"{subject}: transformers has no pipeline plan (base_model_pp_plan) for {name}; {OTHER_MODEL}"
    elif len(plan) != 3:
        yield f"{subject}: {name} has more than an embedding, layers and a norm ({', '.join(plan)}); {OTHER_MODEL}"
    elif (layers := config.num_hidden_layers) < grid.pipeline:
        yield f"{subject} is more than the model's {layers} layer{'s' * (layers > 1)}; use at most {layers}"
    elif getattr(config, "output_router_logits", False):
        yield f"{subject}: {name} has a router loss (output_router_logits), which spans all stages; set that to false"


def choose_stage_starts(parameters: list[int], flops: list[int], num_stages: int) -> list[int]:
    """Returns the first layer of each stage, followed by the number of layers; minimises the size of the largest stage.

    The size of a stage is the larger of its fraction of all parameters (memory) and its fraction of all matmuls (time).
    The minimum is exact, found by dynamic programming.

    Args:
        parameters, flops: results of `count_parts`: embedding, each layer, and norm and head together.
        num_stages: at most the number of layers.
    """
    num_layers = len(parameters) - 2
    totals = [sum(parameters), sum(flops)]

    def size(first: int, last: int) -> float:
        start, end = first and first + 1, last + (2 if last == num_layers else 1)
        return max(sum(amounts[start:end]) / total for amounts, total in zip((parameters, flops), totals, strict=True))

    # By the number of layers assigned so far: (size of the largest stage, first layers of the stages).
    best = {0: (0.0, [0])}
    for stage in range(num_stages):
        ends = [num_layers] if stage == num_stages - 1 else range(stage + 1, num_layers - num_stages + stage + 2)
        best = {
            end: min((max(largest, size(at, end)), [*cuts, end]) for at, (largest, cuts) in best.items() if at < end)
            for end in ends
        }
    return best[num_layers][1]


def find_parts(model: Any) -> list[Any] | None:
    """Returns embedding, layers, norm and head of a causal language model; None if its pipeline plan differs."""
    plan, backbone = getattr(model.config, "base_model_pp_plan", None) or (), model.get_decoder()
    parts = [*(getattr(backbone, name, None) for name in plan), model.get_output_embeddings()]
    if len(parts) != 4 or None in parts or not isinstance(parts[1], nn.ModuleList):
        return None
    return parts if parts[0] is model.get_input_embeddings() else None


def count_parts(embedding: Any, layers: nn.ModuleList, norm: nn.Module, head: Any) -> tuple[list[int], list[int]]:
    """Returns (parameters, weights used in matmuls), each for the embedding, each layer, and norm and head together."""
    parameters = [sum(p.numel() for p in part.parameters()) for part in (embedding, *layers, norm)]
    flops = [0, *parameters[1:-1], head.weight.numel()]  # an embedding lookup needs no matmul
    parameters[-1] += sum(p.numel() for p in head.parameters())  # a tied weight counts on the first and the last stage
    return parameters, flops


class _Pass(nn.Module):
    """Replaces a module of a different stage; returns its input."""

    def __init__(self, replaced: nn.Module):
        super().__init__()
        for name, value in vars(replaced).items():  # a backbone may read a layer's type
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, given: Any, *_: Any, **__: Any) -> Any:
        return given


@contextmanager
def _replaced(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Context in which these modules of the model return their input."""
    modules = {name: model.get_submodule(name) for name in names}
    try:
        for name, module in modules.items():
            model.set_submodule(name, _Pass(module))
        yield
    finally:
        for name, module in modules.items():
            model.set_submodule(name, module)


class Stages:
    """The stages of a model; `drop` leaves only the stage of this process.

    Attributes:
        number, index: number of stages, and index of this process's stage.
        ranks, group: the ranks that a sample passes through, including this rank, and their process group.
        num_parameters: (all, trained) parameters of the full model.
        held_before: names of weights (tied) that an earlier stage also has; only that stage saves them.
        description: the content of each stage, for the run summary.
    """

    def __init__(self, model: PreTrainedModel):
        """Determines the stages. Call it on all ranks together."""
        grid, rank = current_grid(), PartialState().process_index
        self.number, self.index = grid.pipeline, grid.stage(rank)
        self.is_first, self.is_last = self.index == 0, self.index == self.number - 1
        self.ranks = process_groups.pipeline_ranks(grid, rank)
        self.group = process_groups.group_of(process_groups.pipeline_ranks)
        self.num_parameters = count_parameters(model)
        self._find_parts(model)
        self._check_loss(model)
        self._check_parts(model)
        earlier = set().union(*(self._kept(model, stage) for stage in range(self.index)))
        self.held_before = earlier & self._kept(model, self.index)

    def _find_parts(self, model: PreTrainedModel) -> None:
        """Determines the modules that each stage drops, by name, and the description of each stage."""
        self.backbone = model.get_decoder()
        names = {id(module): name for name, module in model.named_modules()}
        parts = find_parts(model)
        if parts is None:
            raise UserError(f"{self._subject(model)} has modules that differ from its pipeline plan; {OTHER_MODEL}")
        embedding, layers, norm, head = parts
        self.is_tied = head.weight is embedding.weight
        parameters, flops = count_parts(*parts)
        cuts = choose_stage_starts(parameters, flops, self.number)
        self.dropped: list[list[str]] = []
        descriptions = []
        for stage, (first, last) in enumerate(pairwise(cuts)):
            is_last = stage == self.number - 1
            others = [*layers[:first], *layers[last:], *([] if is_last else [norm, head])]
            others += [embedding] if stage and not (is_last and self.is_tied) else []
            self.dropped.append([names[id(module)] for module in others])
            held = sum(parameters[first + 1 : last + 1]) + parameters[0] * (stage == 0) + parameters[-1] * is_last
            own = f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"
            descriptions.append(f"{'embedding, ' * (stage == 0)}{own}{', norm, head' * is_last}: {held:,} parameters")
        self.description = " | ".join(descriptions)

    def _kept(self, model: PreTrainedModel, stage: int) -> set[str]:
        """Returns the names of the parameters and buffers that a stage keeps."""
        prefixes = tuple(f"{name}." for name in self.dropped[stage])
        return {name for name in _names(model) if not name.startswith(prefixes)}

    def _subject(self, model: PreTrainedModel) -> str:
        """Returns the start of an error message: the requested number of stages and the model."""
        return f"parallelism_config_pp_size {self.number}: {type(model).__name__}"

    def _check_loss(self, model: PreTrainedModel) -> None:
        """Raises UserError if the model's own loss has more terms than the cross-entropy."""
        try:
            examine_head(model)
        except MoreTerms as reason:
            raise UserError(f"{self._subject(model)} has its own loss ({reason}); {OTHER_MODEL}") from reason
        except Exception:  # any error of a model's forward; `sum_token_losses` then uses its full logits
            pass

    def _check_parts(self, model: PreTrainedModel) -> None:
        """Raises UserError unless the stages in sequence compute the model's last hidden states, bit for bit."""
        tied = model.get_input_embeddings().weight if self.is_tied else None
        parameters = {name for name, p in model.named_parameters() if p is not tied}
        if everywhere := sorted(parameters.intersection(*(self._kept(model, stage) for stage in range(self.number)))):
            raise UserError(f"{self._subject(model)} has {everywhere[0]}, which is in no stage; {OTHER_MODEL}")
        inputs: dict[str, Any] = {"input_ids": torch.arange(1, 9).unsqueeze(0) % model.config.vocab_size}
        # Train mode reveals dropout outside the layers, which would be applied once per stage. Dropout in the layers
        # draws the same numbers with and without stages, because both start from the same seed.
        with restore_afterwards(model), torch.no_grad():
            try:
                torch.manual_seed(0)
                expected = self.backbone(**inputs, use_cache=False)[0]
                torch.manual_seed(0)
                for dropped in self.dropped:
                    with _replaced(model, dropped):
                        inputs = {"inputs_embeds": self.backbone(**inputs, use_cache=False)[0]}
            except Exception as error:  # any error of a model's forward, such as a layer with other inputs
                raise UserError(
                    f"{self._subject(model)} cannot run on eight tokens, unsplit or in stages ({one_line(error)}); "
                    f"{OTHER_MODEL}"
                ) from error
        if not torch.equal(inputs["inputs_embeds"], expected):
            raise UserError(
                f"{self._subject(model)} computes more than its embedding, layers in sequence and norm, so stages "
                f"would change the update; {OTHER_MODEL}"
            )

    def drop(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
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
        ends = process_groups.group_of(process_groups.first_and_last_stage)
        peers = process_groups.group_of(process_groups.gradient_peers)
        model.shares, model.pipeline_stages = Shares(self.group, shares, ends, peers), self

    def whole_weights(self, model: PreTrainedModel) -> dict[str, Tensor] | None:
        """Returns all stages' weights and saved buffers on the main process; None on other processes.

        The main process receives one tensor at a time.
        """
        state = PartialState()
        if self.ranks[0] != 0:  # the pipeline of the main process has the same weights
            return None
        kept = {*_names(model)} - self.held_before
        own = {name: tensor for name, tensor in model.state_dict().items() if name in kept}
        stages: list[Any] = [None] * self.number
        dist.all_gather_object(stages, [(name, t.shape, t.dtype) for name, t in own.items()], group=self.group)
        weights = {}
        for source, shapes in zip(self.ranks, stages, strict=True):
            for name, shape, dtype in shapes:
                if state.process_index == source:
                    tensor = own[name].contiguous()
                    if source != 0:
                        dist.send(tensor, 0, group=self.group)
                elif state.is_main_process:
                    tensor = torch.empty(shape, dtype=dtype, device=state.device)
                    dist.recv(tensor, source, group=self.group)
                if state.is_main_process:
                    weights[name] = tensor.cpu()
        return weights if state.is_main_process else None


def _names(model: nn.Module) -> list[str]:
    """Returns the names of all parameters and buffers."""
    return [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
