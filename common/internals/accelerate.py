"""Private names of Accelerate. Tested with 1.15."""

import argparse
from typing import Any

from common.internals.library import private


def read_launch(words: list[str]) -> tuple[argparse.Namespace, Any, set[str]]:
    """Parses the arguments of `accelerate launch`; returns (settings, parsed config file or None, names of settings).

    Needs `accelerate.commands.launch._validate_launch_command`, the code that `accelerate launch` itself runs: 150
    lines that choose between flag, config file and default. Raises UserError without it. The public
    `load_config_from_file` ignores flags, and leaves 4 to 6 settings of each config in accelerate_configs/ undefined.
    """
    from accelerate.commands.launch import launch_command_parser

    validate = private("accelerate.commands.launch", "_validate_launch_command")
    args = launch_command_parser().parse_args(words)
    known = vars(args).keys() - {"nondefault"}  # not a setting: the set of flags that were passed
    args, defaults, _ = validate(args)
    return args, defaults, known
