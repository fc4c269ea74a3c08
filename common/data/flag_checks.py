"""Checks of flags that have no effect on some data: --chat_template and --on_too_long."""

from common.data.source_types import Source
from common.errors import UserError, main_logger

logger = main_logger(__name__)


def check_flags(source: Source, name: str, shape: str, columns: tuple[str, ...]) -> None:
    """Prints that --chat_template has no effect on data without messages; `name` is that of the corpus.

    Raises UserError if --on_too_long is passed with documents that are concatenated and split into blocks.
    """
    if source.chat_template and columns != ("messages",):
        logger.warning("%s: --chat_template has no effect on it, for its rows hold no messages", name)
    if source.on_too_long and shape != "examples":
        raise UserError(
            f"{name}: --on_too_long has no effect on blocks, because documents are split, not truncated; remove it, or "
            "use samples of one row each (--shape examples)"
        )
