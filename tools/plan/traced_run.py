"""Traces the allocations of a recipe's update, with fake tensors.

A tracing process is a fork of the planner, started when the model's configuration and the data are known. There,
`TracedRun` replaces the run, and the recipe continues as usual: it builds its model without weights, creates its
optimizer, computes an update of two micro-batches, and evaluates.
"""

import argparse
import contextlib
import itertools
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.internals.accelerate_state import forget_state
from common.internals.torch import drop_collectives, fake_mode, replace_functions, without_fakes
from common.models import cpu_kernels, parallel_setup
from common.parallel import failures, liveness, sequence, tensor
from common.process import this_process
from common.training.accumulation import RunAccelerator
from common.training.activation_checkpointing import apply_activation_checkpointing
from common.training.batching import Collate, GlobalBatch, Samples
from common.training.precision import weights_cast_once
from common.training.process_grid import ProcessGrid, set_current_grid
from common.training.recipe_traits import Traits
from common.training.token_budget import longest_samples
from common.training.token_rows import shard_tokens
from tools.plan.allocation_tracer import AllocationTracer

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """The model, micro-batch and precision to trace."""

    rows: int  # samples per micro-batch; the longest samples of the dataset are used
    layers: int | None = None  # layers of the model; None: all
    activation_checkpointing: str = "none"
    optimizer: str = "adamw"
    autocast: str = "no"  # or bf16, fp16
    weights: str = "float32"  # dtype of the compute weights
    device: str = "cpu"  # or cuda; selects the kernels, but the trace runs on the CPU
    grid: ProcessGrid = ProcessGrid(1)  # grid of a single sequence or tensor group


@dataclass
class Recording:
    """The allocations and FLOPs of a case."""

    events: list[tuple[str, int, int]]  # fields of `allocation_tracer.Event`
    parts: dict[int, str]  # contents of each storage
    flops: dict[str, int]  # by segment
    ended: str  # "" or the error that ended the trace early
    tokens: int = 0  # tokens per micro-batch of text


class TracedRun:
    """Replaces the run after `begin`; it has the methods and attributes that recipes use."""

    args: argparse.Namespace
    traits: Traits
    accelerator: RunAccelerator

    def set_up(self, case: Case, samples: Samples, held_out: Samples | None, pipe: int) -> None:
        """Makes this process compute alone, on the CPU, with fake tensors, and write its recording to `pipe`."""
        self.case, self.samples, self.pipe, self.tracer = case, samples, pipe, AllocationTracer()
        for name in list(os.environ):
            if name.startswith(("ACCELERATE_", "FSDP_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
                del os.environ[name]
        # The end of this process must not be reported to other ranks, and must not remove files of the run.
        liveness.leave = failures.leave = sys.excepthook = lambda *_: os._exit(1)  # type: ignore[assignment]  # on purpose
        forget_state()
        _simulate_group(case.grid)
        torch.set_num_threads(1)
        autocast = "bf16" if case.autocast == "fp16" else case.autocast  # bf16 has the same width, and CPUs support it
        self.accelerator = RunAccelerator(cpu=True, device_placement=False, mixed_precision=autocast)
        self.device, self.is_sharded = torch.device("cpu"), False
        this_process().has_fake_weights = True
        self.args.activation_checkpointing, self.args.optimizer = case.activation_checkpointing, case.optimizer
        self.args.dry_run = False  # a dry run would end before the step
        self.evaluates = held_out is not None
        if case.device == "cuda":
            _use_gpu_kernels()
        head: Any = sys.modules.get("common.training.linear_cross_entropy")
        if head:  # imported only for language models
            is_sharded = case.grid.tensor > 1  # chunks of a sharded vocabulary are not sliced
            if case.device == "cuda" or (case.autocast, case.weights) == ("no", "float32") or is_sharded:
                head.CACHED_LOGITS = sys.maxsize  # one slice per chunk: more slices would share its memory
            else:  # skips the computation, because a slice allocates the same without it
                head._logits_to_gradient = lambda logits, *_: logits.new_zeros(len(logits))

    def prepare(self, model: Any, optimizer: Any, collate: Collate, *_: Any, **__: str) -> tuple[Any, Any]:
        """Returns the model with fake weights; afterwards every tensor is fake, and the tracer is active."""
        apply_activation_checkpointing(model, self.case.activation_checkpointing, self.device)
        ids = longest_samples(self.samples, self.case.rows)
        chosen = [self.samples[number] for number in ids]
        # As in `loader_sizes`: on a GPU without activation checkpointing, an evaluation has twice the samples at once.
        is_larger = self.case.activation_checkpointing == "none" and self.case.device == "cuda"
        larger = collate(chosen * 2 if is_larger else chosen)
        micro_batch, grid = collate(chosen), self.case.grid
        if grid.sequence > 1:
            micro_batch, larger = (shard_tokens(batch, 0, grid.sequence) for batch in (micro_batch, larger))
        sequence.share_sequences(model, grid)
        tensor.cut_model(model, optimizer, grid)
        fake: Any = fake_mode()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(fake)
        parameters = _fill(model, optimizer, DTYPES[self.case.weights])
        self.stack.enter_context(self.tracer)
        self.tracer.name("weights", *parameters.values())
        self.tracer.name("buffers", *model.buffers())
        for p in parameters.values():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: self.tracer.name("gradients", p.grad))
        self.tracer.vocabulary = getattr(model.config.get_text_config(), "vocab_size", 0) // grid.tensor
        self.micro_batch = {name: fake.from_tensor(tensor) for name, tensor in micro_batch.items()}
        self.num_targets = len(micro_batch["targets"])
        model, optimizer = self.accelerator.prepare(model, optimizer)
        parallel_setup.prepare_frozen = self._prepare_frozen  # type: ignore[assignment]  # replaced on purpose
        register_optimizer_step_pre_hook(lambda *_: self._begin("step"))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._name_states(optimizer))
        backward = self.accelerator.backward

        def traced_backward(loss: torch.Tensor, **kwargs: Any) -> None:
            self._begin(f"backward {self.number}")
            backward(loss, **kwargs)

        self.accelerator.backward = traced_backward
        if self.traits.pipeline_schedule:  # a pipeline recipe fetches all micro-batches before the first forward
            self.forwards = itertools.count()
            model.register_forward_pre_hook(self._begin_next_forward)
        self.model, self.optimizer = model, optimizer
        evaluated = {name: fake.from_tensor(tensor) for name, tensor in larger.items()}
        self.held_out = [_global_batch([evaluated], 1)] if self.evaluates else None
        return model, optimizer

    def _prepare_frozen(self, _: Any, build: Callable[[], Any]) -> Any:
        """Replaces `parallel_setup.prepare_frozen`: the second model gets fake weights, which are not trained."""
        with without_fakes():  # its loss is examined with numbers
            model = build().requires_grad_(False).eval()
        parameters = _fill(model, SimpleNamespace(param_groups=[]), DTYPES[self.case.weights])
        self.tracer.name("teacher", *parameters.values())
        return model

    def _begin(self, segment: str) -> None:
        self.tracer.segment = segment

    def _begin_next_forward(self, model: torch.nn.Module, _: Any) -> None:
        if model.training:
            self.number = next(self.forwards)
            self._begin(f"forward {self.number}")

    def _name_states(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            self.tracer.name("optimizer state", *filter(torch.is_tensor, state.values()))
        self._begin("after step")

    @contextlib.contextmanager
    def training(self, *_: Any):
        """Runs an update, then an evaluation, and sends the recording."""
        self.model.train()
        ended = ""
        try:
            yield iter([_global_batch([self.micro_batch] * 2, 2 * self.num_targets)])
        except Exception:  # an evaluation fails when it reads a result, because fake tensors have no values
            ended = traceback.format_exc(limit=-6)
        self._send(ended)

    def micro_batches(self, batch: GlobalBatch):
        """Yields (micro-batch, is_last), two in an update, because gradients exist only from the second on."""
        is_evaluated = self.tracer.segment.endswith("evaluation")
        with weights_cast_once(self.case.activation_checkpointing == "none"):
            for self.number, micro_batch in enumerate(batch.micro_batches):
                if not is_evaluated:
                    self._begin(f"forward {self.number}")
                yield micro_batch, self.number == 1
        if not is_evaluated:
            self._begin("clip")

    def all_finite(self, batch: GlobalBatch, loss_sums: Any, grad_norm: Any, **extra: Any) -> bool:
        """Returns True without communication; the reduced values that a recipe reads are zeros."""
        with without_fakes():
            self.reduced = {name: torch.zeros(getattr(value, "shape", ())) for name, value in extra.items()}
        return True

    @property
    def evaluations(self) -> "TracedRun":
        return self

    def answer_prompts(self, *_: Any) -> None:
        """Does nothing, because fake tensors have no values; a micro-batch needs more memory than an answer."""

    def repeat(self, *_: Any) -> None:
        """Does nothing, because a traced run is never resumed."""

    def after_update(self, evaluate: Callable[[Any, torch.nn.Module], dict], model: torch.nn.Module) -> dict:
        """Evaluates if there are held-out samples."""
        if not self.evaluates:
            return {}
        self._begin("evaluation")
        return evaluate(self, model)

    def end_update(self, *_: Any, **__: Any) -> bool:
        """Ends the loop; `make_profile` derives later updates, which have the optimizer state from the beginning."""
        return True

    def _send(self, ended: str) -> NoReturn:
        tracer, ids = self.tracer, self.micro_batch.get("input_ids")
        events = [(segment, storage, size) for segment, storage, size in tracer.events]
        recording = Recording(events, tracer.parts, dict(tracer.flops), ended, 0 if ids is None else ids.numel())
        with os.fdopen(self.pipe, "wb") as pipe:
            pickle.dump(recording, pipe)
        os._exit(0)  # skips exit handlers, which belong to the planner


def examine_head_once(model: torch.nn.Module) -> None:
    """Examines a language model's use of its logits once for all tracing processes; a large head takes seconds."""
    losses: Any = sys.modules.get("common.training.losses")
    if losses is None:
        return
    outcome: Any
    examine = losses.examine_head
    try:
        outcome = examine(model)
    except Exception as reason:
        outcome = reason

    def known(other: torch.nn.Module) -> Any:
        if type(other) is not type(model):  # a teacher
            return examine(other)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    losses.examine_head = known


def _global_batch(micro_batches: list[dict[str, torch.Tensor]], num_targets: int) -> GlobalBatch:
    """Returns a batch with `num_targets`, by which recipes divide; its other counts are not used."""
    return GlobalBatch(0, micro_batches, 1, num_targets, 1, 1, torch.zeros(1), "", torch.ones(1, dtype=torch.int64))


def _fill(model: torch.nn.Module, optimizer: Any, dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    """Replaces parameters and buffers of a meta model and its optimizer by CPU tensors; tied weights stay tied."""
    new: dict[int, Any] = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) not in new:
                # A frozen parameter next to an adapter may be in 16 bits, although trained parameters are in float32.
                kind = dtype if p.is_floating_point() and p.itemsize >= dtype.itemsize else p.dtype
                empty = torch.nn.Parameter(torch.empty_like(p, device="cpu", dtype=kind), p.requires_grad)
                new[id(p)] = new[id(empty)] = empty
            module.register_parameter(name, new[id(p)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    for group in optimizer.param_groups:
        group["params"] = [new[id(p)] for p in group["params"]]
    return dict(model.named_parameters())


def _simulate_group(grid: ProcessGrid) -> None:
    """Simulates the other processes of the group: collectives do nothing, and received tensors have no values."""
    set_current_grid(grid)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: grid.group_size)
    tensor.group_of = sequence.group_of = lambda _: group  # type: ignore[assignment]  # replaced on purpose
    drop_collectives(("all_reduce", "all_gather", "all_to_all_single"))


def _use_gpu_kernels() -> None:
    """Uses the kernels that transformers and torch would call on a GPU: no CPU kernels, fused dropout and attention."""
    cpu_kernels.use_cpu_kernels = lambda model: None
    AttentionInterface.register("sdpa", sdpa_attention_forward)  # a model of this process may have replaced it

    def dropout(input, p=0.5, training=True, inplace=False):
        return torch.native_dropout(input, p, True)[0] if training and p else input

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        if attn_mask is None and query.dtype != torch.float32:
            return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal
        )[0]

    replace_functions(dropout=dropout, scaled_dot_product_attention=attention)
