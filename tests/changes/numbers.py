"""What is computed: types, sums, losses that are not finite, and what a test shows to be another update."""

import dataclasses
import inspect
import textwrap
from dataclasses import replace

import accelerate.utils
import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator

from changes import RANK, UNDO, after, before, change
from common.models import packed
from common.parallel import connect, sequence, sharding, tensor
from common.tasks.moe.routing import Routing
from common.tasks.pipeline import schedule as pipeline_schedule
from common.tasks.pipeline import stages
from common.training import accumulation, batching, losses, muon, optimizers


def float64(_):
    UNDO.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)


def float64_experts(_):
    """Float64 throughout ERNIE's mixture of experts, of which transformers computes parts in float32 at any dtype.

    Where these round, a difference in the sixteenth digit, by the cut of a global batch, can become one in the eighth.
    """
    from transformers.integrations import moe
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie

    change(moe, "_can_use_grouped_mm", lambda *_: False)  # torch's kernel knows no float64
    before(losses, "sum_token_losses", lambda model: model.double())  # its routers are born in float32
    for owner, name in (
        (ernie, "apply_rotary_pos_emb"),
        (ernie.Ernie4_5_MoeRMSNorm, "forward"),
        (ernie.Ernie4_5_MoeTopKRouter, "forward"),
    ):
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        names = dict(vars(ernie))
        exec(source.replace("float32", "double").replace("float", "double"), names)
        change(owner, name, names[name])


def own_counts(_):
    """Each rank moves the biases of its routers by what it counted itself."""
    end = Routing.end_update

    def alone(self, finite, reduced):
        own = {name: counts.cpu().double() for name, counts in self.values_to_reduce().items()}
        return end(self, finite, reduced | own)

    change(Routing, "end_update", alone)


def mean_of_means(_):
    """What loops do that divide by the number of micro-batches: each micro-batch's mean counts alike."""
    counts, backward = [], Accelerator.backward

    def count(batch, *_):
        counts[:] = [len(micro_batch["targets"]) for micro_batch in batch.micro_batches]

    after(batching.GlobalBatches, "__getitem__", count)
    change(accumulation, "loss_scale", lambda accelerator, num_targets: 1 / len(counts))
    change(Accelerator, "backward", lambda self, loss: backward(self, loss / counts.pop(0)))


def own_texts(_):
    """Each rank contrasts only the texts that it has embedded."""
    reduce = Accelerator.reduce
    change(
        Accelerator,
        "reduce",
        lambda self, tensor, reduction: tensor if tensor.ndim == 2 else reduce(self, tensor, reduction),
    )


def no_broadcast(_):
    """Processes that keep their own running statistics."""
    change(accelerate.utils, "broadcast", lambda tensor: tensor)


def sums_in_bf16(_):
    """Gradients are summed, and losses rounded, as Accelerate and DeepSpeed do it by themselves."""

    def as_before(_, accelerator, max_grad_norm):
        if accelerator.deepspeed_plugin is not None:
            for key in ("data_types", "communication_data_type"):
                del accelerator.deepspeed_plugin.deepspeed_config[key]
        else:
            accelerator.state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision, override=True)

    after(sharding, "configure_plugins", as_before)


def unsorted(_):
    """Micro-batches of the samples as they come, in the place of sorted ones."""

    def cut(lengths, world_size, micro_batch_size=None, micro_batch_tokens=None, _=None):
        size = micro_batch_size or max(1, micro_batch_tokens // int(lengths.max()))
        batches = [np.arange(start, min(start + size, len(lengths))) for start in range(0, len(lengths), size)]
        batches += [np.arange(0)] * (-len(batches) % world_size)
        return [batches[rank::world_size] for rank in range(world_size)]

    change(batching, "split_global_batch", cut)


def nan_loss(at):
    """The loss of one micro-batch in training is NaN: `at` is [rank, call]; of each call, if that is "all"."""
    rank, call = at
    calls = []

    def spoil(_, model):
        forward = model.forward

        def spoiled(*args, **batch):
            loss = forward(*args, **batch)
            if "targets" not in batch or not model.training:
                return loss
            calls.append(1)
            return loss * float("nan") if RANK == rank and call in (len(calls), "all") else loss

        model.forward = spoiled

    after(losses, "sum_token_losses", spoil)


def no_guard(_):
    """A step that is not finite is taken all the same."""
    change(accumulation, "skip_step", lambda accelerator, optimizer: (optimizer.step(), optimizer.zero_grad()))


def decay_all(_):
    """Weight decay pulls at every parameter, norms too."""

    def join(groups, *_):
        groups[0]["params"] = [parameter for group in groups for parameter in group["params"]]
        del groups[1:]

    after(optimizers, "parameter_groups", join)


def loss_scaler(interval):
    """A scaler as fp16 has it, on the CPU: its scale doubles after so many updates."""

    def scale(accelerator, *_, **__):
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=interval)

    after(connect, "make_accelerator", scale)


def fp16(interval):
    """A bf16 run computes in fp16, with its scaler: on a CPU torch can, and Accelerate would train in float32."""

    def compute_in_fp16(accelerator, *_, **__):
        assert accelerator.native_amp and accelerator.mixed_precision == "bf16"
        accelerator.state._mixed_precision = "fp16"
        if (plugin := getattr(accelerator.state, "fsdp_plugin", None)) is not None:
            plugin.set_mixed_precision("fp16", override=True)
            sharding.configure_plugins(accelerator, 1.0)

    loss_scaler(interval)
    after(connect, "make_accelerator", compute_in_fp16)


def no_tf32(_):
    """Torch's default stays."""
    change(torch, "set_float32_matmul_precision", lambda _: None)


def no_exchange(_):
    """Processes that share a sequence, and attend to their own part of it only."""
    change(sequence, "_exchange", lambda parts, group: parts)


def own_ends(_):
    """The two ends of a pipeline do not sum their parts of a tied weight's gradient."""

    def keep(_, __, model, *___):
        for name, share in model.shares.of.items():
            model.shares.of[name] = replace(share, sums_gradients=False)

    after(stages.Stages, "drop", keep)


def scaled_gradients(_):
    """A pipeline's gradients are divided by the number of micro-batches, as torch's schedules do by themselves."""
    original = pipeline_schedule.Schedule1F1B

    def schedule(*args, scale_grads, **given):
        return original(*args, scale_grads=True, **given)

    change(pipeline_schedule, "Schedule1F1B", schedule)


def own_attention(_):
    """A Llama whose first layer does not ask transformers for its attention."""

    def skip(model, _):
        model.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)

    before(sequence, "share_sequences", skip)


def partial_gradients(_):
    """Each process of a tensor group takes its part of a gradient for the whole."""
    change(tensor._Spread, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def sum_each_backward(_):
    """What a tensor group has parts of is summed after each backward, as transformers does, and so again and again."""

    def sum_now(_, model, *__):
        for name, p in model.named_parameters():
            if model.shares.of[name].sums_gradients:
                p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=model.shares.group))
                model.shares.of[name] = dataclasses.replace(model.shares.of[name], sums_gradients=False)

    after(tensor, "cut_model", sum_now)


def own_matrices(_):
    """Muon orthogonalises the part of a matrix that each rank holds."""
    change(muon._Exchange, "_holds_matrices", lambda *_: True)


def count_copies(_):
    """A norm counts what each process of a tensor group holds as often as it is held."""

    def count(_, model, *__):
        model.shares.of = {name: dataclasses.replace(one, counts=True) for name, one in model.shares.of.items()}

    after(tensor, "cut_model", count)


def float_packed(_):
    """Packed weights are float32 parameters, as bitsandbytes' own may be, so that mixed precision casts their bytes."""
    unpack = packed.unpack

    def store(_, layer, *__):
        size = layer.packed.numel() // 4 * 4
        layer.packed = torch.nn.Parameter(layer.packed.data[:size].view(torch.float32), requires_grad=False)

    def of_floats(stored, shape, dtype):
        whole = stored.float().view(torch.uint8)
        return unpack(torch.nn.functional.pad(whole, (0, packed.num_bytes(shape) - len(whole))), shape, dtype)

    after(packed.PackedLinear, "__init__", store)
    change(packed, "unpack", of_floats)
