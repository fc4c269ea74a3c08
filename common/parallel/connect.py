"""Connects the processes of the requested launch: creates the Accelerator."""

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers.utils.logging import disable_progress_bar

from common.parallel import liveness
from common.parallel.distributed_mode import current_mode
from common.parallel.launch import Launch, mpi_variables, runs_on_cpu, started_world_size
from common.training.accumulation import RunAccelerator
from common.training.process_grid import current_grid, set_current_grid


def make_accelerator(launch: Launch, args: argparse.Namespace) -> RunAccelerator:
    """Returns the Accelerator of the requested launch; call `check_launch` first.

    Processes wait for each other for at most `--connect_timeout` seconds; afterwards, if one dies, all others end.
    Raises UserError: mode, world size or precision of this run differ from the request.
    """
    if not sys.stderr.isatty():  # in a log, each of transformers' bars would be one long line
        disable_progress_bar()
    for name in mpi_variables():  # they would affect processes that this process starts
        del os.environ[name]
    liveness.reset()
    connecting: AbstractContextManager[None] = nullcontext()
    sharded, options = None, {"log_with": args.report_to or None, "project_dir": args.output_dir}
    if started_world_size() > 1:
        from common.parallel import rank_connection, rank_watch

        timeout = args.connect_timeout or rank_connection.default_timeout(launch)
        rank_watch.start(timeout, launch.grid)
        connecting = rank_connection.connecting(timeout)
    if launch.mode in ("FSDP", "DeepSpeed"):
        from common.parallel.sharding import ShardedLaunch

        sharded = ShardedLaunch(launch, args)
        options |= sharded.options
    _name_device(launch)
    if launch.grid.data_parallel < launch.grid.num_processes:
        from common.parallel import parallelism_config

        parallelism_config.hide_from_accelerate(launch.sizes)
    with connecting:
        if sharded is not None:
            sharded.connect()
        accelerator = RunAccelerator(**options)
        set_current_grid(launch.grid)
        if current_mode(accelerator) != "plain":
            from common.parallel.process_groups import AveragedByPeers, host_group

            # DDP: gradients are views of the communication buckets, without memory of their own.
            accelerator.ddp_handler = AveragedByPeers(gradient_as_bucket_view=True)
            host_group()
        accelerator.wait_for_everyone()  # NCCL connects at the first collective
    _check_accelerator(launch, accelerator)
    if sharded is not None:
        sharded.configure(accelerator)
    return accelerator


def _name_device(launch: Launch) -> None:
    """Selects the CPU for Accelerate and DeepSpeed by environment variables; on a GPU, allows TF32 matmuls."""
    if not runs_on_cpu(launch):
        if torch.cuda.is_available():
            # TF32 matmuls: float32 range, 10-bit mantissa, several times faster. Mixed precision leaves some matmuls in
            # float32 too, such as those of a recurrence. NVIDIA_TF32_OVERRIDE=0 turns TF32 off.
            torch.set_float32_matmul_precision("high")
    elif launch.mode not in ("FSDP", "DeepSpeed"):
        # Accelerate then uses the CPU and gloo. Without this variable, the processes of a MULTI_GPU launch on a machine
        # without a GPU are not connected, and each is a separate run.
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns at import that it looked for a GPU


def _check_accelerator(launch: Launch, accelerator: Accelerator) -> None:
    requested = (launch.mode, launch.num_processes, launch.mixed_precision)
    if requested != (current_mode(accelerator), accelerator.num_processes, accelerator.mixed_precision):
        from common.parallel import process_checks

        process_checks.check_accelerator(launch, accelerator)
    if launch.num_machines > 1:
        from common.parallel import parallelism_config

        parallelism_config.warn_across_machines(launch.grid, launch.num_machines)


def seed_everything(seed: int, accelerator: Accelerator | None = None) -> None:
    """Seeds Python, numpy and torch: equal on all ranks without `accelerator`, different (for dropout) with it.

    The ranks of a tensor group compute the same values, so they get the same seed.
    """
    set_seed(seed + (0 if accelerator is None else accelerator.process_index // current_grid().tensor))
