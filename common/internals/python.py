"""Private names of Python's standard library. Tested with Python 3.11."""

import argparse


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns the flags of a parser with their actions. Needs `_option_string_actions`, in all versions."""
    return parser._option_string_actions


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks in help texts, and shows defaults, except None, False and empty lists.

    Overrides `_split_lines` and `_get_help_string`, in all versions; without them, argparse wraps texts as usual.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.splitlines() for line in super(HelpFormatter, self)._split_lines(part, width)]

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_none = action.default is None or action.default is False or action.default == []  # 0 is shown
        return action.help if has_none else super()._get_help_string(action)
