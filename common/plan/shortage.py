"""What a run that dies of memory says: what was predicted, what it held, and what would have helped, by how much.

The prediction comes from a new process: it starts the same recipe with the same flags, plays the update at hand and
those with less memory, and prints what each would hold. A fork of the run could not: once a process has computed a
backward, torch lets no fork of it compute another.
"""

import dataclasses
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import torch

from common.host_memory import left_to_one
from common.parallel.launch import ALONE
from common.plan.configs import modes_for
from common.plan.cost import micro_batches_of
from common.plan.forecast import Forecaster, NotPlayed, Played, Player, in_bytes, rows_of
from common.plan.machines import Machine
from common.plan.memory import Mode, needs, peak, shape_of
from common.plan.plan import CHECKPOINTING, check_shared_model, run_can_checkpoint
from common.plan.profile import Profile
from common.report.tracking import peak_memory_bytes
from common.training.batching import Samples
from common.training.optimizers import OPTIMIZERS
from common.training.out_of_memory import is_out_of_memory
from common.training.process_grid import Degrees

QUESTION = "MEMORY_QUESTION"  # in the environment of the process that answers
SECONDS = 180  # it may take
KNOBS = 3  # that are told
NOT_REPEATED = ("--output_dir", "--resume", "--overwrite", "--dry_run", "--profile")  # of the run's own flags


def explain(run: Any, mode: Mode, before: int, error: BaseException) -> None:
    """Adds to an error of memory what was predicted, what this process held, and which flags would have helped.

    mode: that of its forecast. before: bytes that it held before it had a model.
    """
    if not is_out_of_memory(error):
        return
    traceback.clear_frames(error.__traceback__)  # which hold the activations
    held = _held(run.device, before)
    kind = "cpu" if run.device.type == "cpu" else "cuda"
    args = {name: getattr(run.args, name, None) for name in ("micro_batch_size", "micro_batch_tokens")}
    question = json.dumps({"mode": dataclasses.asdict(mode), "device": kind, **args})
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_", "LOCAL_", "GROUP_", "ROLE_"))
        and name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment |= {QUESTION: question, ALONE: "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, sys.argv[0], *_repeated(sys.argv[1:])]
    try:
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        told = json.loads(asked.stdout.splitlines()[-1])
    except (MemoryError, OSError, subprocess.TimeoutExpired, IndexError, json.JSONDecodeError):
        told = {"reason": "no process could be started to predict it"}
    error.add_note("\n".join(["", f"Memory ran out. {held}.", *_lines(told)]))


def _repeated(words: list[str]) -> Iterator[str]:
    """The flags of the run but those of its output directory."""
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            is_left_out = word.partition("=")[0] in NOT_REPEATED
        if not is_left_out:
            yield word


def _held(device: torch.device, before: int) -> str:
    """What this process has used, and of how much."""
    most = in_bytes(peak_memory_bytes(device))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = in_bytes(torch.cuda.memory_reserved(device))
        return f"Used: at most {most} of tensors; {reserved} reserved of {in_bytes(total)}, {in_bytes(free)} free"
    left = in_bytes(left_to_one())
    return f"Used: at most {most} resident, {in_bytes(before)} of them before there was a model; {left} are left"


def _lines(told: dict[str, Any]) -> Iterator[str]:
    if "reason" in told:
        yield f"Not predicted: {told['reason']}."
        return
    yield f"Predicted: {in_bytes(told['peak'])} of tensors at the peak."
    knobs = [(saved, words) for words, saved in told["knobs"].items() if saved > 0.01 * told["peak"]]
    if knobs:
        yield "By prediction, these would need less:"
    for saved, words in sorted(knobs, reverse=True)[:KNOBS]:
        yield f"  {words:<45} {in_bytes(saved)} less"


def is_asked() -> bool:
    """Whether this process is one that answers."""
    return QUESTION in os.environ


def answer(
    model_class: Any,
    run: Any,
    config: Any,
    make_empty: Callable[[], torch.nn.Module],
    samples: Samples,
    held_out: Samples | None,
) -> None:
    """Prints the predicted peak and what each knob saves, in bytes, as JSON, and ends; returns where it plays."""
    question = json.loads(os.environ[QUESTION])
    mode, args = Mode(**question["mode"]), run.args
    args.micro_batch_size, args.micro_batch_tokens = question["micro_batch_size"], question["micro_batch_tokens"]
    shape, rows = shape_of(make_empty()), rows_of(args, samples, mode.degrees)
    forecaster = Forecaster(Player(run, config, samples, held_out), shape, question["device"])
    way = args.activation_checkpointing
    later = CHECKPOINTING[CHECKPOINTING.index(way) + 1 :] if way in CHECKPOINTING else ()
    check_model = partial(check_shared_model, config, model_class, make_empty)
    sharded = _sharded(mode, question["device"], args, check_model) if mode.kind == "DDP" else []
    tries = {"": (mode, rows, way)}
    if rows > 1:
        half = f"--micro_batch_tokens {args.micro_batch_tokens // 2}"
        half = f"--micro_batch_size {rows // 2}" if args.micro_batch_size else half
        tries[half] = (mode, rows // 2, way)
    if mode.precision == "no" and mode.kind != "DeepSpeed":
        tries["--mixed_precision bf16"] = (dataclasses.replace(mode, precision="bf16"), rows, way)
    if run_can_checkpoint(make_empty()):
        tries |= {f"--activation_checkpointing {one}": (mode, rows, one) for one in later}
    tries |= {f"--config_file accelerate_configs/{one.name}.yaml": (one, rows, way) for one in sharded}
    cases = {words: forecaster.cases(*one, args.optimizer) for words, one in tries.items()}
    try:
        played = iter(
            forecaster.player.play([case for some in cases.values() for case in some], at_once=psutil.cpu_count() or 1)
        )
        profiles = {words: forecaster.profile([next(played) for _ in some]) for words, some in cases.items()}
    except Played:
        return
    except NotPlayed as reason:
        print(json.dumps({"reason": str(reason)}), flush=True)
        sys.exit()

    def held(words: str, profile: Profile) -> float:
        mode, rows, _ = tries[words]
        number = micro_batches_of(args.global_batch_size, mode.degrees.data, rows)
        return sum(peak(needs(profile, shape, mode, number))[1].values())

    sizes = {words: held(words, profile) for words, profile in profiles.items()}
    knobs = {words: sizes[""] - size for words, size in sizes.items() if words}
    bytes_now = OPTIMIZERS[args.optimizer].state_bytes
    for name in ("adamw8bit", "adafactor"):
        saved = bytes_now - OPTIMIZERS[name].state_bytes
        knobs[f"--optimizer {name}"] = (
            saved * shape.trained / (mode.shards if mode.kind in ("FSDP", "DeepSpeed") else 1)
        )
    print(json.dumps({"peak": sizes[""], "knobs": _best_of_each(knobs)}), flush=True)
    sys.exit()


def _sharded(mode: Mode, device: str, args: Any, check_model: Callable[[Degrees], list[str]]) -> list[Mode]:
    """The shipped configs that shard, for as many processes, without offload."""
    modes, _ = modes_for(Machine(mode.processes, 0.0, kind=device), args, check_model)
    sharded = [one for one in modes if one.kind in ("FSDP", "DeepSpeed") and one.degrees.data == mode.processes]
    return [
        dataclasses.replace(one, precision=mode.precision)
        for one in sharded
        if one.state_on == one.weights_on == "device"
    ]


def _best_of_each(knobs: dict[str, float]) -> dict[str, float]:
    """Of each flag the value that saves most, where it saves anything."""
    best: dict[str, tuple[float, str]] = {}
    for words, saved in knobs.items():
        flag = words.split()[0]
        best[flag] = max(best.get(flag, (0.0, "")), (saved, words))
    return {words: saved for saved, words in best.values() if words}
