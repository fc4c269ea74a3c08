"""Pipeline parallelism: a model's layers are split into consecutive stages, each on its own process.

A stage sends the hidden states of a micro-batch to the next stage, and gradients to the previous stage. Schedules of
`torch.distributed.pipelining` determine the order of the micro-batches in each stage, one step per global batch.
"""

import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import PreTrainedModel

from common.tasks.pipeline.stages import Stages
from common.training.accumulation import synchronize_gradients
from common.training.precision import weights_cast_once
from common.training.process_grid import current_grid

SCHEDULES = {
    "1f1b": "a forward, then a backward, in turns: a stage keeps the activations of at most as many micro-batches as "
    "there are stages",
    "gpipe": "all forwards, then all backwards: the activations of all micro-batches",
}


class Pipeline:
    """Runs the stages of a model; with a single stage, `step` is the usual loop over micro-batches."""

    def __init__(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, run: Any):
        """Removes the other stages from a bare model that `sum_token_losses` has changed, and from its optimizer.

        Call it on all ranks together. Then call `step` for training, and the model itself for an evaluation. Raises
        UserError if the stages would not compute the same result as the model.
        """
        self.args, self.schedule = run.args, run.traits.pipeline_schedule
        self.description: dict[str, str] = {}  # lines for the run summary
        self.stages: Any = Stages(model) if current_grid().pipeline > 1 else None
        if self.stages is None:
            return
        self.description = {"stages": self.stages.description, "schedule": self.schedule}
        self.backbone, self.loss_sum = self.stages.backbone, model.forward
        embedding: Any = model.get_input_embeddings()
        self.width, self.dtype = embedding.embedding_dim, model.dtype
        self.stages.drop(model, optimizer)
        self.schedules: dict[tuple[int, int], Any] = {}  # at most one, by number of micro-batches and their tokens
        self.sent: tuple[Any, Tensor] | None = None  # in an evaluation: the send in progress, its tensor
        model.forward = types.MethodType(self._forward, model)  # a bound method, required by accelerate's prepare()

    def step(
        self, accelerator: Accelerator, model: nn.Module, micro_batches: list[dict[str, Tensor]], scale: float
    ) -> list[Tensor]:
        """Runs forward and backward of this rank's micro-batches of a global batch, and reduces the gradients.

        Args:
            model: as returned by `run.prepare`.
            scale: factor on each loss in backward.

        Returns unscaled sums of token losses, which `reduce_update` sums over the ranks; 0 except on the last stage.
        The last stage multiplies its sums by the number of stages, because `reduce_update` divides by it.
        """
        stages = self.stages
        if stages is None:
            sums: list[Tensor] = []
            for number, micro_batch in enumerate(micro_batches, start=1):
                with synchronize_gradients(accelerator, model, now=number == len(micro_batches)):
                    loss_sum = model(**micro_batch)
                    accelerator.backward(loss_sum * scale)
                sums.append(loss_sum.detach())
            return sums
        # Schedules need at least one micro-batch per stage. A dummy without a target adds no gradient.
        dummy = {
            name: torch.tensor([], dtype=torch.int64, device=accelerator.device) for name in ("targets", "target_rows")
        }
        dummy["input_ids"] = torch.tensor([[0]], device=accelerator.device)
        micro_batches = micro_batches + [dummy] * (stages.number - len(micro_batches))
        num_tokens = max(micro_batch["input_ids"].numel() for micro_batch in micro_batches)
        self.sums: list[Tensor] = []
        self.scale, self.queue, self.num_tokens = scale, iter(micro_batches), num_tokens
        schedule = self._schedule(accelerator.device, model, len(micro_batches))
        with weights_cast_once(self.args.activation_checkpointing == "none"):
            schedule.step(target=torch.zeros(len(micro_batches)), return_outputs=False)
        nothing = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        return [loss_sum.double() * stages.number for loss_sum in self.sums] or [nothing]

    def _schedule(self, device: torch.device, model: nn.Module, num_micro_batches: int) -> Any:
        """Returns the schedule for this number and size of micro-batches; creating it exchanges two messages."""
        key = num_micro_batches, self.num_tokens
        if key not in self.schedules:
            self.schedules.clear()  # frees the buffers of the previous schedule
            hidden = torch.empty(self.num_tokens, self.width, dtype=self.dtype, device="meta", requires_grad=True)
            loss_dtype = torch.promote_types(self.dtype, torch.float32)
            loss = torch.empty((), dtype=loss_dtype, device="meta", requires_grad=True)
            stage = PipelineStage(
                model,
                self.stages.index,
                self.stages.number,
                device,
                input_args=() if self.stages.is_first else (hidden,),
                output_args=(loss,) if self.stages.is_last else (hidden,),
                group=self.stages.group,
            )
            kind = Schedule1F1B if self.schedule == "1f1b" else ScheduleGPipe
            loss_of = lambda loss_sum, _: loss_sum * self.scale  # noqa: E731
            self.schedules[key] = kind(stage, num_micro_batches, loss_fn=loss_of, scale_grads=False)
        return self.schedules[key]

    def _forward(self, _: PreTrainedModel, hidden: Any = None, **micro_batch: Tensor) -> Tensor:
        """Replaces the model's forward: called by a schedule with received hidden states, or with a micro-batch."""
        if micro_batch:
            return self._evaluate(micro_batch)
        output = self._compute(hidden, next(self.queue), self.num_tokens)
        if self.stages.is_last:
            self.sums.append(output.detach())
        return output

    def _compute(self, hidden: Any, micro_batch: dict[str, Tensor], num_tokens: int) -> Tensor:
        """Returns this stage's hidden states (num_tokens, width), or on the last stage the loss sum.

        Hidden states of a smaller micro-batch are zero-padded after the computation, so all messages have equal size.
        """
        ids = micro_batch["input_ids"]
        inputs: Any = {"input_ids": ids}
        if not self.stages.is_first:
            inputs = {"input_ids": None, "inputs_embeds": hidden[: ids.numel()].view(*ids.shape, self.width)}
        if self.stages.is_last:
            return self.loss_sum(**inputs, targets=micro_batch["targets"], target_rows=micro_batch["target_rows"])
        output = self.backbone(**inputs, use_cache=False)[0].flatten(0, 1).to(self.dtype)
        return F.pad(output, (0, 0, 0, num_tokens - len(output)))

    def _evaluate(self, micro_batch: dict[str, Tensor]) -> Tensor:
        """Runs a forward of an evaluation, without waiting for the next stage to compute the same micro-batch."""
        ids, hidden = micro_batch["input_ids"], None
        if not self.stages.is_first:
            hidden = torch.empty(ids.numel(), self.width, dtype=self.dtype, device=ids.device)
            dist.recv(hidden, self.stages.ranks[self.stages.index - 1], group=self.stages.group)
        output = self._compute(hidden, micro_batch, ids.numel())
        if self.stages.is_last:
            return output.double() * self.stages.number
        if self.sent is not None:
            self.sent[0].wait()
        self.sent = dist.isend(output, self.stages.ranks[self.stages.index + 1], group=self.stages.group), output
        return torch.zeros((), dtype=torch.float64, device=ids.device)
