"""The parser of commands such as `python -m tools.check`."""

import argparse
from typing import NoReturn

from common.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """Parser that raises a one-line UserError for a mistake in the command or in a subcommand, instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")
