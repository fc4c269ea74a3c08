"""Checks that the run matches the requested launch configuration.

In some cases `accelerate launch` silently starts a different run: one process instead of two, two unconnected runs of
one process each, float32 instead of fp16. So a recipe compares the launcher's config file and flags with its process.
"""

import os

from common.parallel.launch import Launch, mpi_variables, started_world_size
from common.training.recipe_traits import Arguments, Traits


def check_launch(launch: Launch, args: Arguments, traits: Traits) -> list[str]:
    """Returns a line for each difference between the requested launch and this process; needs no process group.

    It also returns a line for each recipe flag that the mode does not support. The flags' defaults must be filled in
    (`argument_checks.check_arguments`).
    """
    problems = []
    processes = (launch.num_machines, launch.num_processes, started_world_size())
    if processes != (1, 1, 1) or "WORLD_SIZE" in launch.environment or mpi_variables():
        from common.parallel import process_checks

        problems += process_checks.check_processes(launch)
    problems += check_requested(launch, args, traits)
    if launch.mode != "plain":
        from common.parallel import mode_checks

        problems += mode_checks.check_flags(launch, args, traits)
    if launch.mixed_precision != "no" or not launch.use_cpu:
        from common.parallel import process_checks

        problems += [*process_checks.check_precision(launch), *process_checks.check_gpus(launch)]
    return problems


def check_requested(launch: Launch, args: Arguments, traits: Traits) -> list[str]:
    """Returns one line per mistake in the launch, as far as it can be checked without a device and DeepSpeed."""
    problems = list(launch.file_problems)
    in_environment = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    accumulates = not {launch.gradient_accumulation_steps, in_environment} <= {"1", "auto"}
    has_grid = any(name.startswith("parallelism_config_") for name in {*launch.given, *launch.file_settings})
    if launch.mode != "plain" or accumulates or has_grid or any(size != 1 for size in launch.sizes.values()):
        from common.parallel import mode_checks

        problems += mode_checks.check_requested(launch, args, traits)
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        problems.append("the launch turns on torch.compile (dynamo_backend); remove it and use --compile")
    return problems
