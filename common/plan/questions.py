"""Which question about its memory a run answers before it builds its model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common.parallel import shutdown
from common.plan import shortage
from common.plan.choice import choose
from common.plan.forecast import Forecast, foresee
from common.plan.plan import plan
from common.report.tracking import memory_in_use_bytes
from common.training.batching import Samples


def predict(
    model_class: Any,
    run: Any,
    config: Any,
    make_empty: Callable[[], torch.nn.Module],
    samples: Samples,
    held_out: Samples | None,
) -> Forecast | None:
    """The forecast of the run at hand; --plan, and a process that explains why a run died, print theirs and end.

    None in a process that plays an update without data, and is this run no more. From here on an error of memory says
    what would have helped. model_class: an Auto class.
    """
    chooses = getattr(run.args, "micro_batch_tokens", None) == "auto"
    answer = choose if chooses else foresee
    if run.args.plan or shortage.is_asked():
        answer = partial(shortage.answer if shortage.is_asked() else plan, model_class)
    forecast = answer(run, config, make_empty, samples, held_out)
    if forecast is not None:
        shutdown.explain_error = partial(shortage.explain, run, forecast.mode, memory_in_use_bytes(run.device))
    return forecast
