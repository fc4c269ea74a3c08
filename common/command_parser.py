"""The parser of commands such as `python -m tools.check`."""

import argparse
from typing import NoReturn

from common.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """Parser that raises a mistake in the command, or in a subcommand, as a UserError of one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")
