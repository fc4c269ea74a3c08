"""FSDP2 and DeepSpeed: what they can take, how they run without a GPU, and the extensions that DeepSpeed compiles."""

import argparse
import json
import os
import shutil
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from filelock import FileLock
from torch.distributed.fsdp import CPUOffloadPolicy

# Keys that follow from the recipe's own flags: a DeepSpeed file says "auto", or nothing.
FOLLOWING_KEYS = {
    "train_batch_size": "--global_batch_size",
    "train_micro_batch_size_per_gpu": "--micro_batch_size or --micro_batch_tokens",
    "gradient_accumulation_steps": "--global_batch_size",
}


def inline_deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """The part of a DeepSpeed configuration that `check_sharding` reads, from the launcher's own flags."""
    devices = {part: getattr(args, f"{part}_device", None) or "none" for part in ("offload_optimizer", "offload_param")}
    return {"zero_optimization": {part: {"device": device} for part, device in devices.items()}}


def check_sharding(mode: str, config: str | dict, optimizer: str, max_grad_norm: float) -> list[str]:
    """One line for each flag that a mode cannot take, and for each value of a DeepSpeed file that contradicts a flag.

    Args:
        mode: plain, DDP, FSDP or DeepSpeed.
        config: DeepSpeed's configuration or the name of its file.
    """
    if mode == "FSDP" and optimizer not in ("adamw", "sgd"):
        # Their steps mix the shards (DTensor) with plain tensors, and raise.
        return [f"--optimizer {optimizer} does not work on the shards of FSDP2; use adamw or sgd, or multi_gpu.yaml"]
    if mode != "DeepSpeed":
        return []
    where = "the launch's DeepSpeed settings"
    if isinstance(config, str):
        where = config
        try:
            config = json.loads(Path(config).read_text())
        except OSError as error:
            return [f"{where}: {error.strerror}; name a DeepSpeed file, from the directory that you launch in"]
        except ValueError as error:
            return [f"{where}: not JSON ({error}); mend the file"]
        if not isinstance(config, dict):
            return [f"{where}: not a JSON object; mend the file"]
    problems = []
    for section in ("optimizer", "scheduler"):
        if section in config:
            problems.append(f"{where}: take out its section {section}: --optimizer and --lr_schedule are what runs")
    for key, flag in FOLLOWING_KEYS.items():
        if config.get(key, "auto") != "auto":
            problems.append(f'{where}: {key} is {config[key]}; it follows from {flag}: take it out, or set "auto"')
    clipping = config.get("gradient_clipping", "auto")
    if clipping not in ("auto", max_grad_norm):
        problems.append(
            f'{where}: gradient_clipping is {clipping}, but --max_grad_norm is {max_grad_norm}; set "auto" there'
        )
    zero = config.get("zero_optimization", {})
    offloads = {part: zero.get(part) or {} for part in ("offload_optimizer", "offload_param")}
    is_offloaded = offloads["offload_optimizer"].get("device", "none") != "none"
    if is_offloaded and optimizer != "adamw":
        # Accelerate would put DeepSpeed's CPU Adam in its place, without a word.
        problems.append(f"--optimizer {optimizer}: with its state offloaded, DeepSpeed runs only adamw; use adamw")
    elif optimizer not in ("adamw", "sgd"):
        # ZeRO updates flat pieces of the parameters: factored or block-wise states would be others than the tensors'.
        problems.append(f"--optimizer {optimizer} works on whole tensors, and ZeRO cuts them; use adamw or sgd")
    for part, offload in offloads.items():
        path = offload.get("nvme_path")
        if offload.get("device") == "nvme" and not (path and os.path.isdir(path) and os.access(path, os.W_OK)):
            problems.append(f"{where}: {part}.nvme_path {path} is no writable directory; make it, or name another")
    return problems


def prepare_rehearsal(mode: str) -> None:
    """What sharding on a CPU needs before the processes connect."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # also where there is a GPU and the config says use_cpu
    # With ACCELERATE_USE_CPU, Accelerate would drop FSDP and DeepSpeed. Without, it finds no backend on a machine that
    # has no GPU, unless told.
    os.environ["ACCELERATE_USE_CPU"] = "false"
    if mode == "DeepSpeed":
        build_extensions({})  # DeepSpeed's collectives want theirs when the processes connect


def connect_rehearsal(mode: str) -> None:
    """Lets Accelerate shard on a CPU, over gloo: the state that it would make by itself has no sharding there."""
    state = PartialState(backend="gloo")
    if mode == "FSDP":
        state.distributed_type = DistributedType.MULTI_GPU  # the only types for which Accelerate looks at FSDP


def adapt(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Tells FSDP2 and DeepSpeed what the recipe knows, before `accelerator.prepare`."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.device.type == "cpu" and fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy):
        fsdp.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinned memory is for copies to a GPU
    if accelerator.deepspeed_plugin is not None:
        config = accelerator.deepspeed_plugin.deepspeed_config
        build_extensions(config.get("zero_optimization", {}))
        config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed wants a number; nothing is divided by it
        if config.get("gradient_clipping", "auto") == "auto":
            # Never 0: DeepSpeed would compute no norm then, and so would not see that a gradient is not finite.
            config["gradient_clipping"] = max_grad_norm or 1e30


def _build_extension(builder_name: str, package: str) -> None:
    """Builds one of DeepSpeed's C++ extensions, which takes minutes, once: one process compiles, the others wait.

    `package` is Debian's name for what the build needs. Raises ValueError, one line, where it cannot be built.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    builder = get_accelerator().create_op_builder(builder_name)
    directory = Path(_get_build_directory(builder.name, verbose=False))
    library, torch_lock = directory / f"{builder.name}.so", directory / "lock"
    # Released when its process ends, however it ends. Torch's own is a file that a killed build leaves, and everybody
    # then waits for it for ever: who holds ours may remove it.
    with FileLock(directory.parent / f"{builder.name}.building"):
        if library.exists() and not torch_lock.exists():
            return
        if shutil.which(os.environ.get("CXX", "c++")) is None:
            raise ValueError("DeepSpeed compiles an extension here and finds no C++ compiler; apt install g++")
        if not builder.is_compatible(verbose=False):
            raise ValueError(
                f"DeepSpeed's extension {builder.name} cannot be built on this machine; apt install {package}"
            )
        if torch_lock.exists():
            print(f"{torch_lock} was left by a build that was killed; removing it", flush=True)
            torch_lock.unlink()
        print(f"building DeepSpeed's extension {builder.name}: some minutes, only once ...", flush=True)
        started = time.perf_counter()
        with open(os.devnull, "w") as null, redirect_stdout(null):
            try:
                builder.load(verbose=False)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1]
                raise ValueError(f"DeepSpeed's extension {builder.name} does not compile ({reason})") from error
        print(f"built in {time.perf_counter() - started:.0f} s", flush=True)


def build_extensions(zero_optimization: dict[str, Any]) -> None:
    """The extensions that the offload of a DeepSpeed configuration needs; on a CPU, also the one of its collectives."""
    parts = ("offload_optimizer", "offload_param")
    devices = {(zero_optimization.get(part) or {}).get("device", "none") for part in parts}
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        _build_extension("ShareMemCommBuilder", "g++")
    if devices - {"none"}:
        _build_extension("CPUAdamBuilder", "g++")
    if "nvme" in devices:
        _build_extension("AsyncIOBuilder", "libaio-dev")
