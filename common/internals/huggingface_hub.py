"""Reads and overwrites settings of huggingface_hub. Tested with 2.4."""

from common.internals.library import private


def is_offline() -> bool:
    """Returns whether huggingface_hub, and the libraries that use it, load only from their caches."""
    return private("huggingface_hub.constants", "HF_HUB_OFFLINE")


def set_offline(offline: bool) -> None:
    """Sets whether huggingface_hub, and the libraries that use it, load only from their caches, or also from the hub.

    Overwrites `huggingface_hub.constants.HF_HUB_OFFLINE`, whose initial value is from the environment. Raises UserError
    if this name does not exist.
    """
    private("huggingface_hub.constants", "HF_HUB_OFFLINE")
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = offline
