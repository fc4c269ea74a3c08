"""Tries common/internals/accelerate.py and deepspeed.py, which change the state of a process, and prints the outcome.

python tests/internals_alone.py DIRECTORY
"""

import contextlib
import functools
import io
import os
import sys
from importlib import import_module
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from common.internals import accelerate as of_accelerate
from common.internals import accelerate_state
from common.internals import deepspeed as of_deepspeed
from common.internals.torch import extension_directory, shard_offset
from common.parallel.extensions import _build_extension

ROOT = Path(__file__).resolve().parent.parent


def try_launch():
    config = str(ROOT / "accelerate_configs/fsdp2.yaml")
    args, _, known = of_accelerate.read_launch(["--config_file", config, "recipe.py", "--flag"])
    mode = f"FSDP{args.fsdp_version}" if args.use_fsdp else "none"
    names = (f"{'known' if name in known else 'unknown'} {name}" for name in ("fsdp_version", "fsdp_vershun"))
    print("read_launch:", ", ".join([mode, *names]))


def try_state(directory):
    Accelerator(cpu=True, mixed_precision="no")
    try:
        before = Accelerator(cpu=True, mixed_precision="bf16").mixed_precision
    except ValueError as error:
        before = type(error).__name__
    accelerate_state.forget_state()
    print(f"forget_state: {Accelerator(cpu=True, mixed_precision='bf16').mixed_precision}; before: {before}")
    accelerate_state.forget_state()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": "cpu"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=0, world_size=1)
    types = []
    for change in (lambda: None, accelerate_state.shard_without_gpu):
        PartialState(backend="gloo")
        change()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        accelerator = Accelerator(fsdp_plugin=plugin)
        types.append(accelerator.distributed_type.value)
        if len(types) == 1:
            accelerate_state.forget_state()
    print(f"shard_without_gpu: {types[1]}; before: {types[0]}")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard_cp", "tp"))["dp_shard_cp"]
    accelerate_state.shard_over(accelerator, mesh, 1)
    model = nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    is_over = isinstance(model.weight, DTensor) and model.weight.device_mesh == mesh
    print("shard_over:", "sharded over the given mesh" if is_over else type(model.weight))
    accelerate_state.forget_state()
    torch.distributed.destroy_process_group()


def try_offset():
    """On the second of two processes, of which there is only this one: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], shape=(5, 3), stride=(3, 1))
    print("shard_offset:", tuple(shard_offset(tensor)))
    torch.distributed.destroy_process_group()


def zero_optimizers():
    """(engine, optimizer) of each stage, and of ZeRO-1 in bf16, which is another class."""
    import deepspeed

    for stage, is_bf16 in ((1, True), (1, False), (2, True), (3, True), (3, False)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 9},
            "bf16": {"enabled": is_bf16, "immediate_grad_update": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with contextlib.redirect_stdout(io.StringIO()):  # its announcements
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        yield stage, engine, engine.optimizer, torch.bfloat16 if is_bf16 else torch.float32


def try_zero(directory):
    import deepspeed.runtime.bf16_optimizer as bf16_optimizer

    # Its collectives on a CPU would be compiled first, for minutes; those of torch serve here.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/zero", rank=0, world_size=1)
    of_deepspeed.silence_memory_report()
    is_silent = bf16_optimizer.see_memory_usage("text", force=True) is None
    stages, kinds, sizes, before, after = [], [], set(), set(), set()
    for stage, engine, zero, dtype in zero_optimizers():
        stages.append(str(stage) if of_deepspeed.is_zero(zero) else "none")
        kinds.append(of_deepspeed.is_zero3(zero))
        groups = list(of_deepspeed.zero_groups(zero))
        sizes |= {(sum(flat.numel() for _, flat in groups), flat.dtype) for _, flat in groups}
        if stage == 2:
            fragments = " ".join(str(tuple(of_deepspeed.zero12_fragment(p))) for group, _ in groups for p in group)
        with torch.no_grad():
            for _, flat in groups:
                flat.fill_(0.5)
            x = torch.ones(1, 4, dtype=dtype)
            before.add(engine(x).tolist() == [[5.5, 5.5]])
            of_deepspeed.copy_master_weights(zero)
            after.add(engine(x).tolist() == [[5.5, 5.5]])
    print("silence_memory_report:", "silent" if is_silent else "told")
    print(f"is_zero: stages {' '.join(stages)};", f"AdamW: {of_deepspeed.is_zero(torch.optim.AdamW([x]))}")
    print("is_zero3:", *kinds)
    print("zero_groups:", "30 float32 elements in each" if sizes == {(30, torch.float32)} else sizes)
    print("zero12_fragment:", fragments)
    done, yet = ("in each" if after == {True} else "not"), ("not" if before == {False} else "in some")
    print(f"copy_master_weights: the model computes with them {done}; before: {yet}")


def try_builds():
    import cpuinfo
    from deepspeed.accelerator import get_accelerator

    before = cpuinfo.get_cpu_info() is cpuinfo.get_cpu_info()
    of_deepspeed.measure_cpu_once()
    print(f"measure_cpu_once: the same object: {cpuinfo.get_cpu_info() is cpuinfo.get_cpu_info()}; before: {before}")
    builder = get_accelerator().create_op_builder("CPUAdamBuilder")
    before = "-g" in builder.cxx_args()
    of_deepspeed.build_without_debug_symbols(builder)
    print(f"build_without_debug_symbols: -g before: {before}, after: {'-g' in builder.cxx_args()}")
    if not (extension_directory(builder.name) / f"{builder.name}.so").exists():
        print("replay_steps: not built")
        return
    _build_extension("CPUAdamBuilder", "g++")  # DeepSpeed by itself would compile it again, with -g
    from deepspeed.ops.adam import DeepSpeedCPUAdam, cpu_adam

    # It is loaded once: each look at the compiler takes seconds.
    cpu_adam.CPUAdamBuilder.load = functools.cache(cpu_adam.CPUAdamBuilder.load)
    cpu_adam.CPUAdamBuilder = functools.cache(cpu_adam.CPUAdamBuilder)

    def train(weight, state, steps, replays):
        weight = nn.Parameter(weight.clone())
        optimizer = DeepSpeedCPUAdam([weight], lr=0.1, betas=(0.9, 0.95))
        if state is not None:
            optimizer.state[weight] = {name: x.clone() if torch.is_tensor(x) else x for name, x in state.items()}
            if replays:
                of_deepspeed.replay_steps(optimizer)
        for _ in range(steps):
            weight.grad = weight.detach() + 1
            optimizer.step()
        return weight.detach(), optimizer.state[weight]

    start, outcomes = torch.linspace(-1, 1, 4096), {True: set(), False: set()}
    for done in range(5, 14, 4):
        whole, _ = train(start, None, done + 3, False)
        half, state = train(start, None, done, False)
        for replays, seen in outcomes.items():
            seen.add("equal" if torch.equal(whole, train(half, state, 3, replays)[0]) else "different")
    words = [
        "equal" if outcomes[True] == {"equal"} else "different",
        "different" if "different" in outcomes[False] else "equal",
    ]
    print(f"replay_steps: {words[0]}; without: {words[1]}")


def main(directory):
    torch.manual_seed(0)
    try_launch()
    try_state(directory)
    try_offset()
    try_zero(directory)
    try_builds()


if __name__ == "__main__":
    main(sys.argv[1])
