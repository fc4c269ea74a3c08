"""What a run does, written to a file that the test reads: gradients, memory, collectives, threads, graphs."""

import ctypes
import gc
import hashlib
import json
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from changes import RANK, UNDO, after, before_reduce, change
from common import run
from common.models import model_setup
from common.parallel import connect, tensor
from common.report.progress import Progress
from common.training import compilation, optimizers

ROOT = Path(__file__).resolve().parents[2]
NOT_COUNTED = {  # by torch: functions of shapes
    torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1],
    torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * a[-2] * a[-1] * b[-1],
}
OWN_MODES = (
    "parallel/sequence.py",
    "parallel/tensor.py",
    "training/shares.py",
    "training/linear_cross_entropy.py",
    "pipeline/schedule.py",
)  # own


def before_step(action):
    """Calls `action` with the optimizer before each step."""

    def hook(optimizer, *_):
        action(optimizer)

    UNDO.callback(register_optimizer_step_pre_hook(hook).remove)


def save_gradients(path):
    """Writes the reduced gradients of the first optimizer step, by shape and order of the parameters."""
    saved, cut = [], []
    after(model_setup, "prepare", lambda _, __, model, *___: cut.extend([model] if hasattr(model, "shares") else []))

    def whole(p):
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for model in cut:  # among the processes of a tensor group
            (share,) = (model.shares.of[name] for name, one in model.named_parameters() if one is p)
            if share.dim is not None:
                gradient = tensor._gather_parts(gradient, share.shape, share.dim, model.shares.group)
        return gradient

    def save(optimizer):
        if not saved:
            groups = [group["params"] for group in optimizer.param_groups]
            if cut and hasattr(cut[0], "pipeline_stages"):
                saved.extend(stages_gradients(cut[0], groups))
            else:
                saved.extend(whole(p) for group in groups for p in group)
            if RANK == 0:
                torch.save(saved, path)

    before_step(save)


def stages_gradients(model, groups):
    """Those of all stages of a pipeline, one after the other in each group of the optimizer; a tied weight's once."""
    own = model.pipeline_stages
    others = {id(p) for name, p in model.named_parameters() if name in own.held_before}
    told = [None] * own.number
    mine = [[p.grad for p in group if id(p) not in others] for group in groups]
    torch.distributed.all_gather_object(told, mine, group=own.group)
    return [gradient for number in range(len(groups)) for stage in told for gradient in stage[number]]


def count_products(path):
    """Writes what torch counts of all updates' forwards and backwards, and what the run's own figures come from."""
    begin, counter = run.Run.training, FlopCounterMode(display=False, custom_mapping=NOT_COUNTED)

    @contextmanager
    def training(self, *pretrained):
        # Kernels that keep no scores compute them again, and of a recurrent network's own kernel nothing is counted.
        plain = sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False)
        with begin(self, *pretrained) as batches, plain[0], plain[1], counter:
            yield batches
        told = self.progress.totals.get("flops")
        Path(path).write_text(json.dumps({"counted": counter.get_total_flops(), "told": told}))

    change(run.Run, "training", training)


def save_copies(path):
    """Each rank writes, before each step, the weights that every process of its tensor group holds."""

    def save_them(_, model, *__):
        def save(_):
            shares = model.shares.of
            torch.save(
                {name: p for name, p in model.named_parameters() if shares[name].dim is None}, f"{path}-{RANK}.pt"
            )

        before_step(save)

    after(tensor, "cut_model", save_them)


def save_steps(path):
    """Writes, by name, the full weights before the first step, and the full gradients and settings of each step."""
    steps, models = [], []
    after(model_setup, "prepare", lambda prepared, *_: models.append(model_setup.without_wrapper(prepared[0])))

    def full(tensor):
        return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()

    def save(optimizer):
        named = dict(models[0].named_parameters())
        decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        step = {"rate": optimizer.param_groups[0]["lr"], "gradients": {name: full(p.grad) for name, p in named.items()}}
        step |= {"decays": {name: decays[id(p)] for name, p in named.items()}}
        steps.append(step | ({} if steps else {"weights": {name: full(p) for name, p in named.items()}}))
        if RANK == 0:
            torch.save(steps, path)

    before_step(save)


def hash_weights(path):
    """Each rank writes a hash of the weights that it holds at the end of each update, by name."""

    def write(accelerator, _):
        named = accelerator.unwrap_model(accelerator._models[0]).named_parameters()
        held = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in named}
        hashes = {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in held.items()}
        Path(f"{path}-{RANK}.json").write_text(json.dumps(hashes))

    before_reduce(write)


def list_gradients(path):
    """Writes, at each update, in how many storages of how many bytes the gradients lie, and their own bytes."""

    def append(optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in gradients}
        facts = [len(gradients), len(storages), sum(storages.values()), sum(one.nbytes for one in gradients)]
        with open(f"{path}-{RANK}", "a") as file:
            file.write(json.dumps(facts) + "\n")

    before_step(append)


def note_float32_products(path):
    """Writes how torch computes float32 products, at each update."""
    before_step(lambda _: Path(path).write_text(torch.get_float32_matmul_precision()))


def threads_of_step(path):
    """Writes how many threads of the process compute in an optimizer step, and how many torch takes."""

    def ran():
        return {
            task.name: int((task / "schedstat").read_text().split()[0]) for task in Path("/proc/self/task").iterdir()
        }

    earlier = {}

    def begin(_):
        time.sleep(0.1)  # those of the backward have come to rest
        earlier.update(ran())

    def end(*_):
        used = sum(spent > earlier.get(task, 0) for task, spent in ran().items())
        Path(path).write_text(json.dumps([used, torch.get_num_threads()]))

    before_step(begin)
    UNDO.callback(register_optimizer_step_post_hook(end).remove)


def count_tensors(path):
    """Writes the number of live tensors at every tenth update."""
    counts = []

    def count(_, update):
        if update % 10 == 0:
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
            Path(path).write_text(json.dumps(counts))

    before_reduce(count)


def measure_state(path):
    """Writes the bytes of weights and of optimizer state that each rank holds at the last update."""

    def num_bytes(tensor):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return tensor.numel() * tensor.element_size()

    def measure(accelerator, _):
        optimizer = optimizers.inner_optimizer(accelerator._optimizers[0])
        states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        weights = accelerator.unwrap_model(accelerator._models[0]).parameters()
        # ZeRO-3 leaves nothing in a parameter but its share beside it.
        weights = sum(num_bytes(p) or num_bytes(p.ds_tensor) for p in weights)
        record = {"weights": weights, "optimizer": sum(map(num_bytes, states))}
        Path(f"{path}-{RANK}.json").write_text(json.dumps(record))

    before_reduce(measure)


def save_packed(path):
    """Writes of each packed weight, after the first update, this rank's bytes, and the size and a hash of all bytes."""
    models = []

    def digest(p):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        return whole.numel(), hashlib.sha256(whole.cpu().numpy().tobytes()).hexdigest()

    def save(_):
        packed = {name: p for name, p in models[0].named_parameters() if p.dtype == torch.uint8}
        local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in packed.items()}
        record = {name: [local[name].numel(), *digest(p)] for name, p in packed.items()}
        Path(f"{path}-{RANK}.json").write_text(json.dumps(record))

    after(model_setup, "prepare", lambda prepared, *_: models.append(model_setup.without_wrapper(prepared[0])))
    before_step(save)


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
            if is_ours and not frame.f_code.co_filename.endswith(OWN_MODES):
                self.ours.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            else:
                self.num_others += 1
        return function(*args, **(kwargs or {}))


def count_collectives(path):
    """Each rank writes the collectives of each update: {"ours": where from, "others": number, "all": number}."""
    original, updates = Progress.batches, []

    def batches(self, loader):
        for batch in original(self, loader):
            with Collectives() as seen:
                yield batch
            number = seen.num_issued() - seen.num_before
            updates.append({"ours": seen.ours, "others": seen.num_others, "all": number})
            Path(f"{path}-{RANK}.json").write_text(json.dumps(updates))

    change(Progress, "batches", batches)


def save_start(path):
    """Writes, from each rank, what `prepare` returned: weights, buffers, which are tied, the optimizer's groups."""

    def save(prepared, *_):
        model, optimizer = prepared
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
        torch.save(start, f"{path}-{RANK}.pt")

    after(model_setup, "prepare", save)


def hash_start(path):
    """Writes, from the main process, hashes of the full weights that `prepare` returned, by name."""

    def save(_, accelerator, model, *__):
        model = accelerator._models[-1] if accelerator._models else model
        if (weights := model_setup.whole_weights(accelerator, model)) is not None and RANK == 0:
            found = {
                name: hashlib.sha256(one.detach().cpu().numpy().tobytes()).hexdigest() for name, one in weights.items()
            }
            torch.save(
                {
                    name: found[name]
                    for name, _ in model_setup.without_wrapper(model).named_parameters(remove_duplicate=False)
                },
                path,
            )

    after(model_setup, "prepare", save)


def measure_start(path):
    """Writes the bytes of host memory by which each rank grew, at most, from the seeding until `prepare` returned."""
    at_first = []

    def resident(which):
        return 1024 * int(re.search(rf"{which}:\s*(\d+)", Path("/proc/self/status").read_text())[1])

    def begin(*_):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        at_first.append(resident("VmRSS"))

    after(connect, "seed_everything", begin)
    after(model_setup, "prepare", lambda *_: Path(f"{path}-{RANK}").write_text(str(resident("VmHWM") - at_first[0])))


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

    UNDO.callback(torch._dynamo.reset)
    change(torch.nn.Module, "compile", lambda self, dynamic, **_: original(self, backend=backend, dynamic=dynamic))


def compile_whole_model(_):
    change(compilation, "compile_layers", lambda model, *_: model.compile(dynamic=True))


def expect_status(expected):
    """[output directory, status]: how the run must have ended, by its run.json; the launch fails if it has not."""
    directory, status = expected

    def look():
        found = json.loads(Path(directory, "run.json").read_text())["status"]
        assert found == status, f"{directory}: {found}, not {status}"

    UNDO.callback(look)
