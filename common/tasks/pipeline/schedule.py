"""A pipeline: a model's layers in stages, one behind the other, each on a process of its own.

A stage computes a micro-batch and hands the hidden states to the next one; gradients come back the same way. Which
micro-batch a stage computes when, schedules of `torch.distributed.pipelining` decide: one step is a global batch.
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
from common.training.process_grid import running

SCHEDULES = {
    "1f1b": "a forward, then a backward, in turns: a stage keeps the activations of at most as many micro-batches as "
    "there are stages",
    "gpipe": "all forwards, then all backwards: the activations of all micro-batches",
}


class Pipeline:
    """Runs the stages of a model. With one stage it is the loop of every other recipe.

    Attributes:
        description: for the first printed block, a name and a text a line.
    """

    def __init__(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, run: Any):
        """Leaves this process its stage of a bare model that `sum_token_losses` has changed, and of its optimizer.

        On all ranks together. From here on the model is called by `step`, and for an evaluation by itself.
        run: the recipe's `Run`.

        Raises UserError: the stages would not compute what the model computes.
        """
        self.args, self.schedule, degrees = run.args, run.traits.pipeline_schedule, running()
        self.description: dict[str, str] = {}
        self.stages = Stages(model) if degrees.pipeline > 1 else None
        if self.stages is None:
            return
        self.description = {"stages": self.stages.description, "schedule": self.schedule}
        self.backbone, self.loss_sum = self.stages.backbone, model.forward
        self.width, self.dtype = model.get_input_embeddings().embedding_dim, model.dtype
        self.stages.drop(model, optimizer)
        self.made: tuple[Any, Any] = None, None  # for how many micro-batches of which size, the schedule
        self.sent: tuple[Any, Tensor] | None = None  # in an evaluation: what is on its way
        model.forward = types.MethodType(self._forward, model)  # a bound method, which accelerate's prepare() relies on

    def step(
        self, accelerator: Accelerator, model: nn.Module, micro_batches: list[dict[str, Tensor]], scale: float
    ) -> list[Tensor]:
        """Forward and backward of this rank's micro-batches of a global batch: its gradients are reduced then.

        Args:
            model: as `run.prepare` returned it. scale: what each loss is multiplied by, for its gradient.

        Returns: sums of token losses, not multiplied, whose sum over the ranks `reduce_update` takes. Stages that know
        none tell 0, and the last one all as often as there are stages, since these count as one.
        """
        stages = self.stages
        if stages is None:
            sums = []
            for number, micro_batch in enumerate(micro_batches, start=1):
                with synchronize_gradients(accelerator, model, now=number == len(micro_batches)):
                    loss_sum = model(**micro_batch)
                    accelerator.backward(loss_sum * scale)
                sums.append(loss_sum.detach())
            return sums
        few = {"input_ids": [[0]], "targets": [], "target_rows": []}  # no target: no gradient
        dummy = {name: torch.tensor(value, dtype=torch.int64, device=accelerator.device) for name, value in few.items()}
        micro_batches = micro_batches + [dummy] * (stages.number - len(micro_batches))
        num_tokens = max(micro_batch["input_ids"].numel() for micro_batch in micro_batches)
        self.scale, self.sums, self.queue, self.num_tokens = scale, [], iter(micro_batches), num_tokens
        schedule = self._schedule(accelerator.device, model, len(micro_batches))
        with weights_cast_once(self.args.activation_checkpointing == "none"):
            schedule.step(target=torch.zeros(len(micro_batches)), return_outputs=False)
        nothing = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        return [loss_sum.double() * stages.number for loss_sum in self.sums] or [nothing]

    def _schedule(self, device: torch.device, model: nn.Module, num_micro_batches: int) -> Any:
        """The one before, where micro-batches are as many and as large; else another, which takes two messages."""
        key = num_micro_batches, self.num_tokens
        if self.made[0] != key:
            self.made = None, None  # and its memory
            hidden = torch.empty(self.num_tokens, self.width, dtype=self.dtype, device="meta", requires_grad=True)
            loss = torch.empty(
                (), dtype=torch.promote_types(self.dtype, torch.float32), device="meta", requires_grad=True
            )
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
            self.made = key, kind(stage, num_micro_batches, loss_fn=loss_of, scale_grads=False)
        return self.made[1]

    def _forward(self, _: PreTrainedModel, hidden: Tensor | None = None, **micro_batch: Tensor) -> Tensor:
        """The model's, as a schedule calls it, with what it has received; or, of an evaluation, with a micro-batch."""
        if micro_batch:
            return self._pass_on(micro_batch)
        output = self._compute(hidden, next(self.queue), self.num_tokens)
        if self.stages.is_last:
            self.sums.append(output.detach())
        return output

    def _compute(self, hidden: Tensor | None, micro_batch: dict[str, Tensor], num_tokens: int) -> Tensor:
        """This stage's part: hidden states (num_tokens, width), those of a smaller micro-batch filled up; or the loss.

        So all that is sent is of one size, and what is computed has no padding but its own.
        """
        ids = micro_batch["input_ids"]
        given = {"input_ids": ids}
        if not self.stages.is_first:
            given = {"input_ids": None, "inputs_embeds": hidden[: ids.numel()].view(*ids.shape, self.width)}
        if self.stages.is_last:
            return self.loss_sum(**given, targets=micro_batch["targets"], target_rows=micro_batch["target_rows"])
        output = self.backbone(**given, use_cache=False)[0].flatten(0, 1).to(self.dtype)
        return F.pad(output, (0, 0, 0, num_tokens - len(output)))

    def _pass_on(self, micro_batch: dict[str, Tensor]) -> Tensor:
        """An evaluation's forward: a stage goes on to the next micro-batch while the next stage computes this one."""
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
