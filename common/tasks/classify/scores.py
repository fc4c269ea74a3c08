"""Accuracy, F1 or R2 of predictions, compared with simple baselines."""

import math
import random

import numpy as np


def score(losses: dict[str, float], predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Returns the losses with the metrics of predictions (N,): classification for int targets, otherwise regression.

    Classification: accuracy; macro_f1, the mean F1 over all labels in targets or predictions; majority_share, the
    accuracy of always predicting the most frequent label. Regression: r2 (0 for always predicting the mean) and
    pearson (correlation); both are NaN for a single target or non-finite predictions.
    """
    # scikit-learn is called directly, because the corresponding metrics of `evaluate` are downloaded code: they need a
    # network and --trust_remote_code. --metric computes them in addition.
    drawn = random.getstate()
    from sklearn.metrics import accuracy_score, f1_score, r2_score  # here because the import takes seconds

    # The first import in a process draws from Python's RNG. A resumed run imports again, so the state is restored.
    random.setstate(drawn)
    if targets.dtype.kind == "i":
        return losses | {
            "accuracy": float(accuracy_score(targets, predictions)),
            "macro_f1": float(f1_score(targets, predictions, average="macro", zero_division=0)),
            "majority_share": float(np.unique(targets, return_counts=True)[1].max() / len(targets)),
        }
    predictions, targets = predictions.astype(np.float64), targets.astype(np.float64)
    if len(targets) < 2 or not np.isfinite(predictions).all():
        return losses | {"r2": math.nan, "pearson": math.nan}
    with np.errstate(invalid="ignore"):  # equal predictions have no correlation: nan
        pearson = np.corrcoef(predictions, targets)[0, 1]
    return losses | {"r2": float(r2_score(targets, predictions)), "pearson": float(pearson)}


def describe_scores(results: dict[str, float]) -> list[str]:
    """Returns a line with the metrics and the baselines; [] without a held-out set."""
    if "r2" in results:
        return [f"R2 {results['r2']:.3f} (0: always the mean), Pearson {results['pearson']:.3f}"]
    if "accuracy" not in results:
        return []
    line = f"accuracy {results['accuracy']:.1%}, macro-F1 {results['macro_f1']:.1%}"
    line += f"; always the most frequent label: accuracy {results['majority_share']:.1%}"
    if "tfidf_accuracy" in results:
        line += f"; TF-IDF and logistic regression on {results['tfidf_texts']:,} texts: {results['tfidf_accuracy']:.1%}"
        line += f" of {results['tfidf_held_out_texts']:,}"
    return [line]
