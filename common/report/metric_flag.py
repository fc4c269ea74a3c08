"""Results of --metric, for recipes whose predictions can be compared with held-out targets."""

from typing import Any


def load_metrics(run: Any, held_out: Any, kind: type, num_labels: int = 0) -> None:
    """Loads the modules of --metric: see `evaluate_metrics.load`; not in a plan, which computes no metrics."""
    if run.args.metric and run.evaluations is not None:
        from common.report.evaluate_metrics import load

        run.evaluations.metrics = load(run.args, held_out, kind, num_labels)


def compute_metrics(run: Any, predictions: Any, references: Any) -> dict[str, Any]:
    """Returns the results of --metric on all ranks; {} without it. Arguments: (N,), for all held-out samples."""
    if run.evaluations.metrics is None:
        return {}
    results, run.evaluations.lines = run.evaluations.metrics.compute(predictions, references)
    return results
