"""Overwrites settings of evaluate. Tested with 0.4.6."""

from common.internals.library import private


def configure(offline: bool) -> None:
    """Makes `evaluate.load` use only its cache if `offline`; disables its download counter, a request per module.

    Overwrites HF_EVALUATE_OFFLINE and HF_UPDATE_DOWNLOAD_COUNTS of `evaluate.config`; raises UserError without them.
    """
    config = private("evaluate", "config")
    config.HF_EVALUATE_OFFLINE = private("evaluate.config", "HF_EVALUATE_OFFLINE") or offline
    private("evaluate.config", "HF_UPDATE_DOWNLOAD_COUNTS")
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
