"""A recipe's own updates, played by a process whose tensors have no data: what would they have allocated?

The process is a fork of the run, made where the run knows its data and its model's configuration. In it, `Run` is
replaced by `TracedRun`, and the recipe goes on as always: it builds its model (without weights, as the ranks of FSDP2
do that are given theirs), makes its optimizer, and its loop computes an update of two micro-batches, and evaluates.
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
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from common.internals.accelerate import forget_state
from common.internals.torch import drop_collectives, fake_mode, replace_functions, without_fakes
from common.models import single_copy, untrained
from common.parallel import liveness, sequence, tensor
from common.training.activation_checkpointing import apply_activation_checkpointing
from common.training.batching import Collate, GlobalBatch, Samples, longest_samples, shard_tokens
from common.training.precision import weights_cast_once
from common.training.process_grid import Degrees, set_running
from common.training.recipe_traits import Traits
from tools.plan.allocation_tracer import AllocationTracer

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """What is played."""

    rows: int  # samples in a micro-batch, the longest ones
    layers: int | None = None  # of the model; None: all
    activation_checkpointing: str = "none"
    optimizer: str = "adamw"
    autocast: str = "no"  # or bf16, fp16
    weights: str = "float32"  # while the model computes
    device: str = "cpu"  # or cuda: whose kernels
    degrees: Degrees = Degrees(1)  # those who share its samples: of a sequence, or of a layer


@dataclass
class Recording:
    """What a case allocated: the events of its tape, and what each storage held."""

    events: list[tuple[str, int, int]]
    parts: dict[int, str]
    flops: dict[str, int]
    ended: str  # "" or what kept the tape from going to the end
    tokens: int = 0  # of a micro-batch of text


class TracedRun:
    """Stands in for `Run` from the end of `begin` on, with the same methods and what recipes read of it."""

    args: argparse.Namespace
    traits: Traits
    accelerator: Accelerator

    def set_up(self, case: Case, samples: Samples, held_out: Samples | None, pipe: int) -> None:
        """Makes this process one that computes alone, on a CPU, without data; what it records goes into `pipe`."""
        self.case, self.samples, self.pipe, self.tape, self.news = case, samples, pipe, AllocationTracer(), {}
        for name in list(os.environ):
            if name.startswith(("ACCELERATE_", "FSDP_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
                del os.environ[name]
        # However this process ends, no rank is to hear of it, and nothing of the run is to be cleared away.
        liveness.leave = sys.excepthook = lambda *_: os._exit(1)
        forget_state()
        _share_with_nobody(case.degrees)
        torch.set_num_threads(1)
        autocast = "bf16" if case.autocast == "fp16" else case.autocast  # as wide, and CPUs have it
        self.accelerator = Accelerator(cpu=True, device_placement=False, mixed_precision=autocast)
        self.device, self.is_sharded = torch.device("cpu"), False
        single_copy.imagine_weights()
        self.args.activation_checkpointing, self.args.optimizer = case.activation_checkpointing, case.optimizer
        self.args.dry_run = False  # it would end before the step
        self.evaluates = held_out is not None
        if case.device == "cuda":
            _use_gpu_kernels()
        if head := sys.modules.get("common.training.linear_cross_entropy"):  # of a language model
            is_whole = case.degrees.tensor == 1  # a part of the vocabulary is not sliced
            if case.device == "cuda" or (case.autocast, case.weights) == ("no", "float32") or not is_whole:
                head.CACHED_LOGITS = sys.maxsize  # the slices of a chunk share its memory
            else:  # the few rows of a slice hold the same, whatever is computed of them
                head._logits_to_gradient = lambda logits, *_: logits.new_zeros(len(logits))

    def prepare(self, model: Any, optimizer: Any, collate: Collate, *_: Any, **__: str) -> tuple[Any, Any]:
        """The model with fake weights; from here on every tensor is fake, and the tape runs."""
        apply_activation_checkpointing(model, self.case.activation_checkpointing, self.device)
        ids = longest_samples(self.samples, self.case.rows)
        chosen = [self.samples[number] for number in ids]
        # As `batching` cuts them: an evaluation without recomputation takes twice the samples at once, on a GPU.
        is_larger = self.case.activation_checkpointing == "none" and self.case.device == "cuda"
        larger = collate(chosen * 2 if is_larger else chosen)
        micro_batch, degrees = collate(chosen), self.case.degrees
        if degrees.sequence > 1:
            micro_batch, larger = (shard_tokens(one, 0, degrees.sequence) for one in (micro_batch, larger))
        sequence.share_sequences(model, degrees)
        tensor.cut_model(model, optimizer, degrees)
        self.fake = fake_mode()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(self.fake)
        parameters = _fill(model, optimizer, DTYPES[self.case.weights])
        self.stack.enter_context(self.tape)
        self.tape.name("weights", *parameters.values())
        self.tape.name("buffers", *model.buffers())
        for p in parameters.values():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: self.tape.name("gradients", p.grad))
        self.tape.vocabulary = getattr(model.config.get_text_config(), "vocab_size", 0) // degrees.tensor
        self.micro_batch = {name: self.fake.from_tensor(one) for name, one in micro_batch.items()}
        self.num_targets = len(micro_batch["targets"])
        model, optimizer = self.accelerator.prepare(model, optimizer)
        register_optimizer_step_pre_hook(lambda *_: self._begin("step"))
        register_optimizer_step_post_hook(lambda one, *_: self._name_states(one))
        backward = self.accelerator.backward

        def told(loss: torch.Tensor, **kwargs: Any) -> None:
            self._begin(f"backward {self.number}")
            backward(loss, **kwargs)

        self.accelerator.backward = told
        if self.traits.pipeline_schedule:  # all micro-batches are taken before the first one is computed
            self.forwards = itertools.count()
            model.register_forward_pre_hook(self._begin_next_forward)
        self.model, self.optimizer = model, optimizer
        evaluated = {name: self.fake.from_tensor(one) for name, one in larger.items()}
        self.held_out = [_global_batch([evaluated], 1)] if self.evaluates else None
        return model, optimizer

    def _begin(self, segment: str) -> None:
        self.tape.segment = segment

    def _begin_next_forward(self, model: torch.nn.Module, _: Any) -> None:
        if model.training:
            self.number = next(self.forwards)
            self._begin(f"forward {self.number}")

    def _name_states(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            self.tape.name("optimizer state", *[one for one in state.values() if torch.is_tensor(one)])
        self._begin("after step")

    @contextlib.contextmanager
    def training(self, *_: Any):
        """One update, then an evaluation; what was recorded is what the process has to tell."""
        self.model.train()
        ended = ""
        try:
            yield iter([_global_batch([self.micro_batch] * 2, 2 * self.num_targets)])
        except Exception:  # an evaluation ends where its figures are wanted: there are none
            ended = traceback.format_exc(limit=-6)
        self._tell(ended)

    def micro_batches(self, batch: GlobalBatch):
        """Two of them, the second one where gradients are there already."""
        keeps_copies = self.case.activation_checkpointing == "none"
        is_evaluated = self.tape.segment.endswith("evaluation")
        with weights_cast_once(keeps_copies):
            for self.number, micro_batch in enumerate(batch.micro_batches):
                if not is_evaluated:
                    self._begin(f"forward {self.number}")
                yield micro_batch, self.number == 1
        if not is_evaluated:
            self._begin("clip")

    def all_finite(self, batch: GlobalBatch, loss_sums: Any, grad_norm: Any, **own_news: Any) -> bool:
        """Nothing is exchanged; what a recipe reads of it is zero."""
        with without_fakes():
            self.news = {name: torch.zeros(getattr(one, "shape", ())) for name, one in own_news.items()}
        return True

    @property
    def evaluations(self) -> "TracedRun":
        """Of which `after_update` and `repeat` are called."""
        return self

    def repeat(self, *_: Any) -> None:
        """Nothing was resumed."""

    def after_update(self, evaluate: Callable[[Any, torch.nn.Module], dict], model: torch.nn.Module) -> dict:
        """Where there are held-out samples."""
        if not self.evaluates:
            return {}
        self._begin("evaluation")
        return evaluate(self, model)

    def end_update(self, *_: Any, **__: Any) -> bool:
        """One is enough: a later one is the same, with the optimizer's state from its beginning on."""
        return True

    def _tell(self, ended: str) -> NoReturn:
        tape = self.tape
        events = [tuple(event) for event in tape.events]
        ids = self.micro_batch.get("input_ids")
        tokens = 0 if ids is None else ids.numel()
        told = Recording(events, tape.parts, dict(tape.flops), ended, tokens)
        with os.fdopen(self.pipe, "wb") as pipe:
            pickle.dump(told, pipe)
        os._exit(0)  # nothing of the run that it was forked from is to end with it


def examine_head_once(model: torch.nn.Module) -> None:
    """What a language model does with its logits, for all processes that will play it: a large one takes seconds."""
    losses = sys.modules.get("common.training.losses")
    if losses is None:
        return
    found: Any
    try:
        found = losses.examine_head(model)
    except Exception as reason:
        found = reason

    def known(_: torch.nn.Module) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    losses.examine_head = known


def _global_batch(micro_batches: list[dict[str, torch.Tensor]], num_targets: int) -> GlobalBatch:
    """With the counts that a loop divides by; nobody reads the others."""
    return GlobalBatch(0, micro_batches, 1, num_targets, 1, 1, torch.zeros(1), "", torch.ones(1, dtype=torch.int64))


def _fill(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype
) -> dict[str, torch.nn.Parameter]:
    """Gives a model without data, and its optimizer, new parameters and buffers on the CPU; tied ones stay so."""
    new: dict[int, Any] = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) not in new:
                # Frozen beside an adapter, it may be in 16 bits while what is trained is in float32.
                kind = dtype if p.is_floating_point() and p.itemsize >= dtype.itemsize else p.dtype
                empty = torch.nn.Parameter(torch.empty_like(p, device="cpu", dtype=kind), p.requires_grad)
                new[id(p)] = new[id(empty)] = empty
            module.register_parameter(name, new[id(p)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    for group in optimizer.param_groups:
        group["params"] = [new[id(p)] for p in group["params"]]
    return dict(model.named_parameters())


def _share_with_nobody(degrees: Degrees) -> None:
    """The processes that share with this one are not there: what it sends is lost, and what would come has no data."""
    set_running(degrees)
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: degrees.group)
    tensor.group_of = sequence.group_of = lambda _: alone
    drop_collectives(("all_reduce", "all_gather", "all_to_all_single"))


def _use_gpu_kernels() -> None:
    """What transformers and torch would call on a GPU: no kernels of ours for CPUs, fused dropout and attention."""
    untrained.use_cpu_kernels = lambda model: None

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
