"""Runs a recipe several times in one process, each time unchanged but for the named changes around it.

    accelerate launch ... tests/run_recipe.py SPEC.json

SPEC.json is a list of {"flags": [...], "changes": {NAME: VALUE}}. A change observes (gradients, live tensors), sets
a condition, or takes out what a test guards, to show that the test would notice.
"""

import ctypes
import errno
import gc
import inspect
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import accelerate.utils
import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common.checkpoint.layouts  # noqa: E402
import common.checkpoint.resume  # noqa: E402
import common.checkpoint.save  # noqa: E402
import common.checkpoint.write  # noqa: E402
import common.data.labels  # noqa: E402
import common.data.pairs  # noqa: E402
import common.data.text  # noqa: E402
import common.files  # noqa: E402
import common.models.experts  # noqa: E402
import common.models.load  # noqa: E402
import common.models.masks  # noqa: E402
import common.parallel.connect  # noqa: E402
import common.parallel.ending  # noqa: E402
import common.parallel.liveness  # noqa: E402
import common.parallel.loading  # noqa: E402
import common.parallel.sharding  # noqa: E402
import common.report.settings  # noqa: E402
import common.report.tracking  # noqa: E402
import common.training.accumulation  # noqa: E402
import common.training.batching  # noqa: E402
import common.training.losses  # noqa: E402
import common.training.optimizers  # noqa: E402
from common.training.stopping import STOPPED  # noqa: E402

CHANGED = (
    common.checkpoint.layouts,
    common.checkpoint.resume,
    common.checkpoint.save,
    common.checkpoint.write,
    common.files,
    common.parallel.connect,
    common.parallel.ending,
    common.parallel.loading,
    common.training.accumulation,
    common.training.batching,
    common.training.losses,
    common.training.optimizers,
)
ORIGINALS = [(module, dict(vars(module))) for module in CHANGED]
FIND_PACKED = common.models.masks.masking_utils.find_packed_sequence_indices


def is_main():
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def float64(_):
    torch.set_default_dtype(torch.float64)


def float64_experts(_):
    """Float64 throughout ERNIE's mixture of experts, of which transformers computes parts in float32 at any dtype.

    Where these round, a difference in the sixteenth digit, by the cut of a global batch, can become one in the eighth.
    """
    from transformers.integrations import moe
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie

    own = [(moe, "_can_use_grouped_mm", moe._can_use_grouped_mm)]  # torch's kernel knows no float64
    moe._can_use_grouped_mm = lambda *_: False
    sum_losses = common.training.losses.sum_token_losses
    common.training.losses.sum_token_losses = lambda model: sum_losses(
        model.double()
    )  # its routers are born in float32
    for owner, name in (
        (ernie, "apply_rotary_pos_emb"),
        (ernie.Ernie4_5_MoeRMSNorm, "forward"),
        (ernie.Ernie4_5_MoeTopKRouter, "forward"),
    ):
        own.append((owner, name, getattr(owner, name)))
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        names = dict(vars(ernie))
        exec(source.replace("float32", "double").replace("float", "double"), names)
        setattr(owner, name, names[name])
    return lambda: [setattr(*one) for one in own]


def own_counts(_):
    """Each rank moves the biases of its routers by what it counted itself."""
    end = common.models.experts.Routing.end_update

    def alone(self, finite, news):
        return end(self, finite, news | {name: counts.cpu().double() for name, counts in self.news().items()})

    common.models.experts.Routing.end_update = alone
    return lambda: setattr(common.models.experts.Routing, "end_update", end)


def save_gradients(path):
    """Writes the reduced gradients of the first optimizer step, by shape and order of the parameters."""

    def hook(optimizer, args, kwargs):
        if is_main() and not Path(path).exists():
            torch.save([p.grad.clone() for group in optimizer.param_groups for p in group["params"]], path)

    return register_optimizer_step_pre_hook(hook)


def wrap_forward(wrap):
    """`wrap(model, forward, batch)`, called for each micro-batch, makes its loss; `forward()` is the recipe's own."""
    original = common.training.losses.sum_token_losses

    def patched(model, **kwargs):
        name = original(model, **kwargs)
        forward = model.forward

        def wrapped(*args, **batch):
            if "targets" not in batch:
                return forward(*args, **batch)
            return wrap(model, lambda: forward(*args, **batch), batch)

        model.forward = wrapped
        return name

    common.training.losses.sum_token_losses = patched


def mean_of_means(_):
    """What loops do that divide by the number of micro-batches: each micro-batch's mean counts alike."""
    counts, item, backward = [], common.training.batching.GlobalBatches.__getitem__, Accelerator.backward

    def getitem(self, update):
        batch = item(self, update)
        counts[:] = [len(micro_batch["targets"]) for micro_batch in batch.micro_batches]
        return batch

    common.training.batching.GlobalBatches.__getitem__ = getitem
    common.training.accumulation.loss_scale = lambda accelerator, num_targets: 1 / len(counts)
    Accelerator.backward = lambda self, loss: backward(self, loss / counts.pop(0))

    def undo():
        common.training.batching.GlobalBatches.__getitem__, Accelerator.backward = item, backward

    return undo


def no_broadcast(_):
    """Processes that keep their own running statistics."""
    original, accelerate.utils.broadcast = accelerate.utils.broadcast, lambda tensor: tensor
    return lambda: setattr(accelerate.utils, "broadcast", original)


def sums_in_bf16(_):
    """Gradients are summed, and losses rounded, as Accelerate and DeepSpeed do it by themselves."""
    adapt = common.parallel.sharding.configure_plugins

    def left_alone(accelerator, max_grad_norm):
        adapt(accelerator, max_grad_norm)
        if accelerator.deepspeed_plugin is not None:
            for key in ("data_types", "communication_data_type"):
                del accelerator.deepspeed_plugin.deepspeed_config[key]
        else:
            accelerator.state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision, override=True)

    common.parallel.sharding.configure_plugins = left_alone
    return lambda: setattr(common.parallel.sharding, "configure_plugins", adapt)


def unsorted(_):
    """Micro-batches of the samples as they come, in the place of sorted ones."""

    def cut(lengths, world_size, micro_batch_size=None, micro_batch_tokens=None):
        size = micro_batch_size or max(1, micro_batch_tokens // int(lengths.max()))
        batches = [np.arange(start, min(start + size, len(lengths))) for start in range(0, len(lengths), size)]
        batches += [np.arange(0)] * (-len(batches) % world_size)
        return [batches[rank::world_size] for rank in range(world_size)]

    common.training.batching.cut_global_batch = cut


def nan_loss(at):
    """The loss of one micro-batch in training is NaN: `at` is [rank, call]."""
    rank, call = at
    calls = []

    def broken(model, forward, _):
        calls.append(model.training)
        here = int(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0) == rank
        bad = here and model.training and (sum(calls) == call or call == "all")
        return forward() * (float("nan") if bad else 1.0)

    wrap_forward(broken)


def no_guard(_):
    """A step that is not finite is taken all the same."""
    common.training.accumulation.skip_step = lambda accelerator, optimizer: (optimizer.step(), optimizer.zero_grad())


def decay_all(_):
    """Weight decay pulls at every parameter, norms too."""
    original = common.training.optimizers.parameter_groups

    def one_group(model, weight_decay):
        groups = original(model, weight_decay)
        return [groups[0] | {"params": [parameter for group in groups for parameter in group["params"]]}]

    common.training.optimizers.parameter_groups = one_group


def count_tensors(path):
    """Writes the number of live tensors at every tenth update."""
    original, counts, updates = common.training.accumulation.reduce_update, [], itertools.count()

    def counted(*args):
        result = original(*args)
        if next(updates) % 10:
            return result
        gc.collect()
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        Path(path).write_text(json.dumps(counts))
        return result

    common.training.accumulation.reduce_update = counted


def measure_state(path):
    """Writes the bytes of weights and of optimizer state that each rank holds after the last update."""
    original = common.training.accumulation.reduce_update

    def num_bytes(tensor):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return tensor.numel() * tensor.element_size()

    def measured(accelerator, *args):
        optimizer = common.checkpoint.layouts.inner_optimizer(accelerator._optimizers[0])
        states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        weights = accelerator.unwrap_model(accelerator._models[0]).parameters()
        # ZeRO-3 leaves nothing in a parameter but its share beside it.
        weights = sum(num_bytes(p) or num_bytes(p.ds_tensor) for p in weights)
        record = {"weights": weights, "optimizer": sum(map(num_bytes, states))}
        Path(f"{path}-{accelerator.process_index}.json").write_text(json.dumps(record))
        return original(accelerator, *args)

    common.training.accumulation.reduce_update = measured


# Whose collectives are the mode's: gradients, gathered weights, the clip's norm. (Autograd calls DDP's reducer.)
MODES = ("/torch/distributed/fsdp/", "/torch/nn/parallel/", "/torch/nn/utils/clip_grad.py", "/torch/autograd/")
MODES += ("/deepspeed/",)


class Collectives(TorchDispatchMode):
    """Sees each collective of this thread, torch's functional ones too, and whose it is: the mode's or ours."""

    def __init__(self):
        super().__init__()
        self.ours, self.num_others, self.num_before = [], 0, self.num_issued()

    @staticmethod
    def num_issued():
        """As the process groups count them themselves, whichever thread and language called."""
        groups = torch.distributed.distributed_c10d._world.pg_map if torch.distributed.is_initialized() else ()
        return sum(group._get_sequence_number_for_group() for group in groups)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:  # it calls what it is made of
            return NotImplemented
        name = str(function)
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            frame = sys._getframe(1)
            while not (is_ours := frame.f_code.co_filename.startswith((f"{ROOT}/common/", f"{ROOT}/recipes/"))):
                if any(part in frame.f_code.co_filename for part in MODES):
                    break
                frame = frame.f_back
            if is_ours:
                self.ours.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            else:
                self.num_others += 1
        return function(*args, **(kwargs or {}))


def count_collectives(path):
    """Each rank writes the collectives of each update: {"ours": where from, "others": number, "all": number}."""
    original, updates = common.report.tracking.Progress.batches, []

    def batches(self, loader):
        for batch in original(self, loader):
            with Collectives() as seen:
                yield batch
            number = seen.num_issued() - seen.num_before
            updates.append({"ours": seen.ours, "others": seen.num_others, "all": number})
            Path(f"{path}-{self.accelerator.process_index}.json").write_text(json.dumps(updates))

    common.report.tracking.Progress.batches = batches
    return lambda: setattr(common.report.tracking.Progress, "batches", original)


def one_more_collective(_):
    """The ranks agree once more in each update."""
    original = common.checkpoint.save.Checkpoints.update_done

    def update_done(self, *args):
        torch.distributed.all_reduce(torch.zeros(1))
        return original(self, *args)

    common.checkpoint.save.Checkpoints.update_done = update_done
    return lambda: setattr(common.checkpoint.save.Checkpoints, "update_done", original)


def whole_model_on_each_rank(_):
    """Every process makes the model by itself, as with fsdp_cpu_ram_efficient_loading: false."""
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before, os.environ[name] = os.environ[name], "false"
    return lambda: os.environ.update({name: before})


def save_start(path):
    """Writes, from each rank, what `prepare` returned: weights, buffers, which are tied, the optimizer's groups."""
    prepare = common.parallel.loading.prepare

    def saving(accelerator, model, optimizer):
        model, optimizer = prepare(accelerator, model, optimizer)
        names = {id(p): name for name, p in model.named_parameters()}
        generation = getattr(model, "generation_config", None)
        start = {
            "weights": {name: p.full_tensor().detach() for name, p in model.named_parameters()},
            "trained": [name for name, p in model.named_parameters() if p.requires_grad],
            "buffers": dict(model.named_buffers(remove_duplicate=False)),
            "threads": torch.get_num_threads(),
            "generation": generation and generation.to_dict(),
            "tied": {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)},
            "groups": [group | {"params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups],
        }
        torch.save(start, f"{path}-{accelerator.process_index}.pt")
        return model, optimizer

    common.parallel.loading.prepare = saving


def cores(count):
    """The machine has so many."""
    share = common.parallel.sharding.share_of_cores

    def of_many():
        own = os.sched_getaffinity, psutil.cpu_count
        os.sched_getaffinity, psutil.cpu_count = (lambda _: range(count)), (lambda logical: count)
        try:
            return share()
        finally:
            os.sched_getaffinity, psutil.cpu_count = own

    common.parallel.sharding.share_of_cores = of_many
    return lambda: setattr(common.parallel.sharding, "share_of_cores", share)


def user_names_threads(_):
    """Of the launcher's environment."""
    common.parallel.connect.names_threads = lambda launch: True


def threads_of_step(path):
    """Writes how many threads of the process compute in an optimizer step, and how many torch takes."""

    def ran():
        return {
            task.name: int((task / "schedstat").read_text().split()[0]) for task in Path("/proc/self/task").iterdir()
        }

    before = {}

    def begin(*_):
        time.sleep(0.1)  # those of the backward have come to rest
        before.update(ran())

    def end(*_):
        used = sum(spent > before.get(task, 0) for task, spent in ran().items())
        Path(path).write_text(json.dumps([used, torch.get_num_threads()]))

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    return lambda: [hook.remove() for hook in hooks]


def measure_start(path):
    """Writes the bytes of host memory by which each rank grew, at most, from the seeding until `prepare` returned."""
    seed, prepare = common.parallel.connect.seed_everything, common.parallel.loading.prepare

    def resident(which):
        return 1024 * int(re.search(rf"{which}:\s*(\d+)", Path("/proc/self/status").read_text())[1])

    def first(*args):
        seed(*args)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        first.before = resident("VmRSS")

    def measured(accelerator, *args):
        prepared = prepare(accelerator, *args)
        common.parallel.connect.seed_everything = seed
        Path(f"{path}-{accelerator.process_index}").write_text(str(resident("VmHWM") - first.before))
        return prepared

    common.parallel.connect.seed_everything, common.parallel.loading.prepare = first, measured


def forbid_host_sync(_):
    """CUDA raises where the host waits for the device, from the first forward of an update to its last backward."""
    original = common.training.accumulation.synchronize_gradients

    @contextmanager
    def watched(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            with original(*args, **kwargs):
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    common.training.accumulation.synchronize_gradients = watched


# What makes a host wait for its device: for a value, or for as many results as there turn out to be.
WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "bincount", "repeat_interleave")
WAITS += ("_unique", "_unique2", "unique_dim", "unique_consecutive", "_linalg_check_errors")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


class WaitNotes(TorchDispatchMode):
    """Notes the operations, of forward and backward, for which a GPU's host would wait, and where they were asked for.

    What reads a CPU tensor's memory without an operation is noted by `Reads`.
    """

    def __init__(self):
        super().__init__()
        self.notes, self.num_operations = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_operations += 1
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        by_values = name in INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if name == "repeat_interleave":
            by_values, name = kwargs.get("output_size") is None, ""
        if name == "_to_copy":
            by_values = torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
        if name in WAITS or by_values:
            self.note(str(function))
        return function(*args, **kwargs)

    def note(self, what):
        frames = [frame for frame in traceback.extract_stack()[:-1] if not frame.name.startswith("__torch_")]
        frames = [frame for frame in frames if "/torch/" not in frame.filename]
        self.notes.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}")


class Reads(TorchFunctionMode):
    """Notes what copies a tensor to the host, on a CPU without an operation."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.cpu):
            self.waits.note(function.__name__)
        return function(*args, **(kwargs or {}))


def note_waits(path):
    """Writes the waits of each global batch, from before its first forward until its gradients are clipped."""
    begin, end, watch, written = (
        common.training.accumulation.loss_scale,
        common.training.accumulation.reduce_update,
        [],
        [],
    )

    def watched(*args):
        waits = WaitNotes()
        watch.extend([waits, Reads(waits)])
        for mode in watch:
            mode.__enter__()
        return begin(*args)

    def noted(*args):
        waits = watch[0]
        while watch:
            watch.pop().__exit__(None, None, None)
        assert waits.num_operations > 100, "nothing was watched"
        written.append(waits.notes)
        Path(path).write_text(json.dumps(written))
        return end(*args)

    common.training.accumulation.loss_scale, common.training.accumulation.reduce_update = watched, noted


def read_each_loss(_):
    """Reads the loss of each micro-batch, as loops do that log it, and once more in its backward."""
    backward = Accelerator.backward

    def reading(self, loss):
        loss.item()
        loss.register_hook(lambda gradient: gradient.item() and None)
        return backward(self, loss)

    Accelerator.backward = reading
    return lambda: setattr(Accelerator, "backward", backward)


def look_at_masks(_):
    """transformers looks at positions and padding masks, as it does alone; each micro-batch has such a mask."""
    mapping, utils = common.models.masks.AttentionMaskInterface._global_mapping, common.models.masks.masking_utils
    own = [(common.models.load, "decide_on_the_host", common.models.load.decide_on_the_host)]
    common.models.load.decide_on_the_host = lambda: None
    before = utils.find_packed_sequence_indices, dict(mapping)
    mapping.update(sdpa=utils.sdpa_mask, eager=utils.eager_mask)
    utils.find_packed_sequence_indices = FIND_PACKED
    for module, name in ((common.data.labels, "collate_texts"), (common.data.pairs, "collate_pairs")):
        own.append((module, name, getattr(module, name)))

        def with_mask(*args, whole=own[-1][-1], **kwargs):
            micro_batch = whole(*args, **kwargs)
            return {"attention_mask": torch.ones_like(micro_batch["input_ids"])} | micro_batch

        setattr(module, name, with_mask)

    def undo():
        utils.find_packed_sequence_indices = before[0]
        mapping.update(before[1])
        for one in own:
            setattr(*one)

    return undo


def note_attention(path):
    """--compile compiles nothing: it writes how the traced graphs call attention, and runs them as they are."""
    original, calls = torch.nn.Module.compile, []

    def backend(graph, _):
        for node in graph.graph.nodes:
            if node.op == "call_function" and "attention" in getattr(node.target, "__name__", ""):
                given = dict(zip(("query", "key", "value", "attn_mask"), node.args, strict=False)) | node.kwargs
                heads = [given[name].meta["example_value"].shape[1] for name in ("query", "key")]
                flags = {name: given.get(name) for name in ("is_causal", "enable_gqa")}
                calls.append({"has_mask": given.get("attn_mask") is not None, "heads": list(map(int, heads)), **flags})
        Path(path).write_text(json.dumps(calls))
        return graph.forward

    torch.nn.Module.compile = lambda self, **options: original(self, backend=backend, **options)
    return lambda: (setattr(torch.nn.Module, "compile", original), torch._dynamo.reset())


def silence(seconds):
    """How long a process may be silent; a number, or "inf"."""
    common.parallel.liveness.SILENCE = float(seconds)


def hold_lock(at):
    """One process holds Python's lock: `at` is [rank, update, seconds]."""
    original, updates = common.training.accumulation.reduce_update, itertools.count()

    def holding(accelerator, *args):
        if next(updates) == at[1] and accelerator.process_index == at[0]:
            ctypes.PyDLL(None).sleep(at[2])
        return original(accelerator, *args)

    common.training.accumulation.reduce_update = holding


def no_watch(_):
    """Processes that do not watch each other."""
    common.parallel.liveness.start = lambda timeout: None


def late(at):
    """One process comes later than the others: `at` is [rank, seconds]."""
    start, (rank, seconds) = common.parallel.liveness.start, at
    common.parallel.liveness.start = lambda timeout: (
        time.sleep(seconds * (int(os.environ["RANK"]) == rank)),
        start(timeout),
    )


def broken_rank(at):
    """One process fails at an update: `at` is [rank, update]."""
    original, updates = common.training.accumulation.reduce_update, itertools.count()

    def broken(accelerator, *args):
        if next(updates) == at[1] and accelerator.process_index == at[0]:
            raise RuntimeError("this rank is broken")
        return original(accelerator, *args)

    common.training.accumulation.reduce_update = broken


END_RUN = common.parallel.ending.end_run


def time_limit(seconds):
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), torch.distributed.group.WORLD)


def slow_rank(settings):
    """[where, seconds, limit]: one rank works alone for so long, the collectives of the others end after the limit.

    where: "tokenize", rank 1 before the model is built; "write", rank 0 at the end, which then is the recipe's own.
    """
    where, seconds, limit = settings
    if where == "write":
        gather, common.parallel.ending.end_run = Accelerator.get_state_dict, END_RUN

        def slow(self, model):
            weights = gather(self, model)
            time_limit(limit)
            time.sleep(seconds * self.is_main_process)
            return weights

        Accelerator.get_state_dict = slow
        return lambda: setattr(Accelerator, "get_state_dict", gather)
    tokenize, prepare = common.data.text.tokenize, Accelerator.prepare

    def slow(*args, **kwargs):
        time_limit(limit)
        time.sleep(seconds * (torch.distributed.get_rank() == 1))
        return tokenize(*args, **kwargs)

    def prepared(self, *args):
        result = prepare(self, *args)
        time_limit(1800)
        return result

    common.data.text.tokenize, Accelerator.prepare = slow, prepared

    def undo():
        common.data.text.tokenize, Accelerator.prepare = tokenize, prepare

    return undo


def list_gradients(path):
    """Writes, at each update, in how many storages of how many bytes the gradients lie, and their own bytes."""

    def hook(optimizer, args, kwargs):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in gradients}
        facts = [len(gradients), len(storages), sum(storages.values()), sum(one.nbytes for one in gradients)]
        with open(f"{path}-{torch.distributed.get_rank()}", "a") as file:
            file.write(json.dumps(facts) + "\n")

    return register_optimizer_step_pre_hook(hook)


def gradients_beside_buckets(_):
    """DDP as it is by itself."""
    common.parallel.connect.DistributedDataParallelKwargs = lambda **_: DistributedDataParallelKwargs()


def note_float32_products(path):
    """Writes how torch computes float32 products, at each update."""

    def hook(*_):
        Path(path).write_text(torch.get_float32_matmul_precision())

    return register_optimizer_step_pre_hook(hook)


def no_tf32(_):
    """Torch's default stays."""
    original, torch.set_float32_matmul_precision = torch.set_float32_matmul_precision, lambda _: None
    return lambda: setattr(torch, "set_float32_matmul_precision", original)


def no_wait(_):
    """Ranks meet in collectives only."""
    for module in (common.parallel.ending, common.checkpoint.resume, common.checkpoint.save, common.parallel.loading):
        module.wait_for_all = lambda: None


def memory_of_rank(settings):
    """[rank, bytes, file]: what that rank's host has left; the others have enough. Who copies its state touches it."""
    rank, left, file = settings
    checkpoint = common.checkpoint.write
    checkpoint.available_memory = lambda: left if torch.distributed.get_rank() == rank else 2**60
    copy = checkpoint.Writer._copy

    def noted(self, pieces):
        Path(f"{file}-{self.ranks.rank}").touch()
        return copy(self, pieces)

    checkpoint.Writer._copy = noted
    return lambda: setattr(checkpoint.Writer, "_copy", copy)


def copy_run(paths):
    """The run begins with what another one had after an update: [from, to, update]."""
    source, target, update = paths
    if is_main():
        shutil.copytree(source, target)
        for path in Path(target, "checkpoints").iterdir():
            if path.name > f"update-{update:06}":
                shutil.rmtree(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def signal_at(when):
    """[update, rank, signal, times, "late"]: the rank sends itself a signal while it computes the update.

    late: after the collective by which the ranks agree in it.
    """
    update, rank, name, times, *late = when
    original = common.training.accumulation.loss_scale, common.report.tracking.Progress.update

    def send(accelerator):
        if common.parallel.liveness.update == update and accelerator.process_index == rank:
            for _ in range(times):
                os.kill(os.getpid(), getattr(signal, name))

    def loss_scale(accelerator, num_targets):
        send(accelerator)
        return original[0](accelerator, num_targets)

    def progress_update(self, batch, **record):
        send(self.accelerator)
        return original[1](self, batch, **record)

    if not late:
        common.training.accumulation.loss_scale = loss_scale
        return None
    common.report.tracking.Progress.update = progress_update
    return lambda: setattr(common.report.tracking.Progress, "update", original[1])


def forget(what):
    """A resume that leaves something out."""
    if what == "random":
        common.checkpoint.resume.restore_generators = lambda *_: None
    if what == "scaler":
        common.checkpoint.resume.restore_scaler = lambda *_: None
    if what == "optimizer":
        common.checkpoint.layouts.make_state = lambda *_: None
        pieces = common.checkpoint.layouts.pieces
        common.checkpoint.layouts.pieces = lambda *args: (
            piece for piece in pieces(*args) if piece.name.startswith("weight/")
        )
        return lambda: setattr(common.checkpoint.layouts, "pieces", pieces)
    if what == "buffers":
        buffers = common.checkpoint.layouts._buffers
        common.checkpoint.layouts._buffers = lambda *args: iter(())
        return lambda: setattr(common.checkpoint.layouts, "_buffers", buffers)
    if what == "learning_rate":
        rate, first = common.training.optimizers.learning_rate, []

        def from_zero(update, *settings):
            first.append(update)
            return rate(update - first[0], *settings)

        common.training.optimizers.learning_rate = from_zero
    if what == "samples":
        sample_ids, first = common.training.batching.sample_ids_of, []

        def from_start(update, *args, **settings):
            first.append(update)
            return sample_ids(update - min(first[1:] or [update]), *args, **settings)

        common.training.batching.sample_ids_of = from_start
    return None


def loss_scaler(interval):
    """A scaler as fp16 has it, on the CPU: its scale doubles after so many updates."""
    make = common.parallel.connect.make_accelerator

    def with_scaler(*args, **kwargs):
        accelerator = make(*args, **kwargs)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=interval)
        return accelerator

    common.parallel.connect.make_accelerator = with_scaler


def fp16(interval):
    """A bf16 run computes in fp16, with its scaler: on a CPU torch can, and Accelerate would train in float32."""
    make = common.parallel.connect.make_accelerator

    def in_fp16(*args, **kwargs):
        accelerator = make(*args, **kwargs)
        assert accelerator.native_amp and accelerator.mixed_precision == "bf16"
        accelerator.state._mixed_precision = "fp16"
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=interval)
        if (plugin := getattr(accelerator.state, "fsdp_plugin", None)) is not None:
            plugin.set_mixed_precision("fp16", override=True)
            common.parallel.sharding.configure_plugins(accelerator, 1.0)
        return accelerator

    common.parallel.connect.make_accelerator = in_fp16


def fill_disk(room):
    """[update, directory, bytes]: something else fills the disk while that update's checkpoint is written."""
    update, directory, left = room
    checkpoint = common.checkpoint.write
    write = checkpoint.write_file

    def on_a_full_disk(path, parts):
        ballast = Path(directory, "ballast")
        if f"update-{update:06}" in str(path) and not ballast.exists():
            ballast.write_bytes(bytes(max(0, shutil.disk_usage(directory).free - left)))
        return write(path, parts)

    checkpoint.write_file = on_a_full_disk


def failing_write(at):
    """[rank, update]: the disk of one process refuses that update's checkpoint."""
    rank, update = at
    checkpoint = common.checkpoint.write
    write = checkpoint.write_file

    def refused(path, parts):
        if f"update-{update:06}" in str(path) and Path(path).name == f"rank-{rank:05}.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, parts)

    checkpoint.write_file = refused


def slow_copy(settings):
    """[seconds, wait]: a save's copy beside the next update takes so long; whether the optimizer waits for it."""
    seconds, wait = settings
    writer = common.checkpoint.write.Writer
    copy, wait_for_copy = writer._copy, writer._wait_for_copy

    def slow(self, pieces):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        return copy(self, pieces)

    writer._copy = slow
    if not wait:
        writer._wait_for_copy = lambda self: None

    def undo():
        writer._copy, writer._wait_for_copy = copy, wait_for_copy

    return undo


def save_waits_for(path):
    """A save is not on the disk before there is such a file."""
    checkpoint = common.checkpoint.write
    write = checkpoint.write_file

    def waiting(*args):
        while not Path(path).exists():
            time.sleep(0.05)
        return write(*args)

    checkpoint.write_file = waiting


def slow_updates(seconds):
    """Updates that last long enough to be met by a kill."""
    original = common.training.accumulation.reduce_update

    def slow(*args):
        time.sleep(seconds)
        return original(*args)

    common.training.accumulation.reduce_update = slow


def kill_in_save(when):
    """[rank, step, file]: the rank kills itself at that step of its second save or a later one; it leaves the file.

    A step is a moment before, in the middle of or after a write, flush, rename or removal. Without a step every rank
    writes the names of all of its own to FILE-RANK.
    """
    rank, kill_at, file = when
    checkpoint, here, saves, seen, removing = common.checkpoint.write, int(os.environ.get("RANK", 0)), [], {}, []

    def step(name):
        name = re.sub(r"update-\d+", "update", name)
        if kill_at is None:
            if name not in seen:
                seen[name] = True
                Path(f"{file}-{here}").write_text(json.dumps(list(seen)))
        elif len(saves) >= 2 and (here, name) == (rank, kill_at):
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def is_of_a_save(path):
        return "checkpoints" in Path(path).parts or Path(path).name == "metrics.jsonl"

    def around(function, describe):
        def wrapped(*args, **kwargs):
            name = describe(*args)
            if name:
                step(f"before {name}")
            result = function(*args, **kwargs)
            if name:
                step(f"after {name}")
            return result

        return wrapped

    def flushing(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        return is_of_a_save(path) and f"flushing {path.name}"

    def renaming(path, target):
        return is_of_a_save(path) and f"renaming {path.name} to {target.name}"

    write, rmtree = checkpoint.write_file, shutil.rmtree

    def write_halting(path, parts):
        def halting():
            for number, part in enumerate(parts):
                half = len(part) // 2
                yield part[:half]
                step(f"within {'a later' if number else 'the first'} part of {path.name}")
                yield part[half:]

        return write(path, halting())

    def remove(path, *args, **kwargs):
        if is_of_a_save(path):
            removing.append(path)
            step(f"before removing {path.name}")
        rmtree(path, *args, **kwargs)
        removing.clear()

    def in_removal(function):
        def wrapped(path, **kwargs):
            function(path, **kwargs)
            if removing:
                step(f"after removing {Path(path).name}")

        return wrapped

    checkpoints, writer = common.checkpoint.save.Checkpoints, checkpoint.Writer
    save = around(checkpoints.save, lambda *_: "the start of a save")
    checkpoints.save = lambda *args, **options: saves.append(1) or save(*args, **options)
    writer._copy = around(writer._copy, lambda _, pieces: pieces and f"the copy of {pieces[0].name}")
    checkpoint.write_file, shutil.rmtree = write_halting, remove
    os.fsync, Path.rename = around(os.fsync, flushing), around(Path.rename, renaming)
    os.unlink, os.rmdir = in_removal(os.unlink), in_removal(os.rmdir)


def lock_timeout(seconds):
    """How long a run waits for another one in its output directory."""
    common.files.LOCK_TIMEOUT = seconds


def no_redaction(_):
    """Secrets are written and printed as they come."""
    for module in (common.parallel.connect, common.parallel.ending, common.report.tracking, common.report.settings):
        module.redact = lambda value: value


LEAKED = []


def leak(_):
    """Keeps each update's losses with their graph's tensors, as `losses.append(loss)` would."""
    original = common.training.accumulation.loss_scale

    def leaking(accelerator, num_targets):
        LEAKED.append(torch.zeros(1))
        return original(accelerator, num_targets)

    common.training.accumulation.loss_scale = leaking


def main():
    # A second process group on the launcher's store can meet the keys of the first: one group serves all runs.
    ORIGINALS.append(
        (common.parallel.ending, {"end_run": lambda accelerator, status=0: accelerator.wait_for_everyone()})
    )
    vars(common.parallel.ending).update(ORIGINALS[-1][1])
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        undo = [globals()[name](value) for name, value in spec.get("changes", {}).items()]
        recipe = str(ROOT / spec.get("recipe", "recipes/lm.py"))
        argv, sys.argv = sys.argv, [recipe, *spec["flags"]]
        try:
            runpy.run_path(recipe, run_name="__main__")
        except SystemExit as error:  # a rehearsal, or a run that was asked to stop
            if error.code not in (None, 0, STOPPED):
                raise
        finally:
            sys.argv = argv
            for change in undo:
                if callable(change):
                    change()
                elif change is not None:
                    change.remove()
            for module, names in ORIGINALS:
                vars(module).update(names)
            torch.set_default_dtype(torch.float32)
            AcceleratorState._reset_state(reset_partial_state=False)
            GradientState._reset_state()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the recipe ends where it has several processes


if __name__ == "__main__":
    main()
