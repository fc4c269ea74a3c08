"""Maps each config file to its mode on the planned machine, with the launch flags that adapt it to this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.parallel.deepspeed_files import check_optimizer
from common.parallel.launch import Launch, parse_launch
from common.parallel.launch_checks import check_requested
from common.parallel.process_checks import check_machines
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Arguments, Traits
from tools.plan.hardware import Machine
from tools.plan.memory import Mode, parse_mode

CONFIGS = "accelerate_configs"
TOO_FEW = " (too few devices)"  # suffix of the names of configs that save no memory on so few devices
PORT = 29500  # port of the first node, to which the other nodes connect


class TooFewDevices(Exception):
    """A config saves no memory with this number of devices."""


def folder() -> Path:
    """Returns the folder of the config files: in the current directory, or next to common/."""
    own = Path(__file__).resolve().parents[2] / CONFIGS
    for path in (Path(CONFIGS), own):
        if path.is_dir():
            return path
    raise UserError(f"--plan finds no {CONFIGS}/ here or in {own.parent}; copy it from the repository")


def modes_for(
    machine: Machine, args: Arguments, traits: Traits, check_model: Callable[[ProcessGrid], list[str]]
) -> tuple[list[Mode], list[str]]:
    """Returns the mode of each config on a machine, and the names of configs that a run rejects or that save no memory.

    args, traits: those of the recipe. check_model: returns the reasons why the model does not support a process grid.
    """
    candidates: list[tuple[Launch, Mode]] = []
    left_out = []
    for path in sorted(folder().glob("*.yaml")):
        try:
            flags = _flags(path, machine, traits)
            if flags is None:
                continue
            launch = parse_launch(["--config_file", str(path), *flags, "recipe.py"])
            mode = parse_mode(launch, path.stem, traits, flags)
            refused = [*check_requested(launch, args, traits), *check_machines(launch)] or check_model(launch.grid)
            refused += check_optimizer(mode.zero, args.optimizer) if mode.zero else []
            if not refused and mode.kind == "FSDP" and mode.shards == 1 and mode.state_on == "device":
                raise TooFewDevices
        except TooFewDevices:
            left_out.append(path.name + TOO_FEW)
            continue
        except UserError:  # the config's DeepSpeed file is neither here nor next to the config
            refused = ["no file"]
        if refused:
            left_out.append(path.name)
        else:
            candidates.append((launch, mode))
    # With several nodes, a single-node config is omitted if a multi-node config has the same layout.
    for_nodes = [_layout(launch) for launch, _ in candidates if _is_for_nodes(launch)]
    return [mode for launch, mode in candidates if _is_for_nodes(launch) or _layout(launch) not in for_nodes], left_out


def _is_for_nodes(launch: Launch) -> bool:
    return launch.file_settings.get("num_machines", 1) > 1


def _layout(launch: Launch) -> tuple:
    return launch.mode, launch.sizes, launch.deepspeed_config, launch.num_processes


def _flags(path: Path, machine: Machine, traits: Traits) -> tuple[str, ...] | None:
    """Returns flags of `accelerate launch` that make a config use the full machine; None if it is for other hardware.

    Raises TooFewDevices: the config saves no memory on a single device.
    """
    launch = parse_launch(["--config_file", str(path), "recipe.py"])
    processes, sizes = machine.devices * machine.nodes, launch.sizes
    if launch.use_cpu != (machine.kind == "cpu") or (_is_for_nodes(launch) and machine.nodes == 1):
        return None
    if machine.kind == "cpu" or launch.mode == "plain":
        return ("--num_processes", str(launch.num_processes)) if launch.num_processes > 1 else ()
    # On a single device, only configs with offload save memory.
    if processes == 1 and parse_mode(launch, path.stem, traits).state_on == "device":
        raise TooFewDevices
    flags: dict[str, Any] = {"num_processes": processes}
    if sizes["dp_replicate"] * sizes["dp_shard"] > 1:
        copies = machine.nodes if sizes["dp_replicate"] > 1 and machine.nodes > 1 else sizes["dp_replicate"]
        wanted = {"dp_replicate": copies, "dp_shard": processes // (copies * sizes["sp"] * sizes["tp"])}
        changed = {name: size for name, size in wanted.items() if size != sizes[name]}
        flags |= {f"parallelism_config_{name}_size": size for name, size in changed.items()}
    if launch.mode == "DeepSpeed":
        flags["mixed_precision"] = "bf16"
    if machine.nodes > 1:
        flags |= {"num_machines": machine.nodes, "main_process_ip": "IP"}
        flags |= {} if launch.settings["main_process_port"] else {"main_process_port": PORT}
        if launch.mode == "DeepSpeed":
            flags["deepspeed_multinode_launcher"] = "standard"
    return tuple(word for name, value in flags.items() for word in (f"--{name}", str(value)))
