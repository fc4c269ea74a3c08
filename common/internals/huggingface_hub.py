"""Settings of huggingface_hub that are overwritten. Tested with 2.4."""

from common.internals.library import private


def is_offline() -> bool:
    """Returns whether the loaders use only their caches."""
    return private("huggingface_hub.constants", "HF_HUB_OFFLINE")


def set_offline(offline: bool) -> None:
    """Lets the loaders use only their caches, or the hub too, from now on.

    Overwrites `huggingface_hub.constants.HF_HUB_OFFLINE`, which is read from the environment at import. Raises
    UserError if it does not exist.
    """
    private("huggingface_hub.constants", "HF_HUB_OFFLINE")
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = offline
