"""A baseline for text classification: logistic regression on TF-IDF of the tokens; takes seconds on one process."""

import warnings

import numpy as np
from scipy.sparse import csr_matrix

from common.training.batching import Samples

# Maximum rows, rows x labels, weights, tokens per text, iterations: they bound time and memory for any dataset.
MOST_ROWS, MOST_ANSWERS, MOST_WEIGHTS, MOST_TOKENS, MOST_ITERATIONS = 10_000, 500_000, 1_000_000, 512, 100


def measure(train: Samples, held_out: Samples, num_labels: int, seed: int) -> dict[str, float]:
    """Returns the held-out accuracy of the baseline, and the numbers of texts in its training and evaluation.

    The features are the model's token ids, at most the first `MOST_TOKENS` of a text. Of many texts, a random subset is
    used. Returns {} if the training texts have a single label. The run's RNG states do not change.
    """
    from sklearn.exceptions import ConvergenceWarning  # here because the import takes seconds
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.linear_model import LogisticRegression

    rng, most_rows = np.random.default_rng(seed), min(MOST_ROWS, max(MOST_ANSWERS // num_labels, 1))
    texts, labels = _read(train, most_rows, rng)
    held_out_texts, expected = _read(held_out, most_rows, rng)
    if len(np.unique(labels)) < 2:
        return {}
    size = max(int(ids.max()) for ids in [*texts, *held_out_texts]) + 1
    counts, held_out_counts = _count(texts, size), _count(held_out_texts, size)
    kept = np.argsort(-counts.getnnz(axis=0), kind="stable")[: max(MOST_WEIGHTS // num_labels, 1)]
    weigh, model = TfidfTransformer(sublinear_tf=True), LogisticRegression(C=10, max_iter=MOST_ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a baseline need not converge
        model.fit(weigh.fit_transform(counts[:, kept]), labels)
    accuracy = model.score(weigh.transform(held_out_counts[:, kept]), expected)
    return {"tfidf_accuracy": float(accuracy), "tfidf_texts": len(labels), "tfidf_held_out_texts": len(expected)}


def _read(samples: Samples, most: int, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns token ids and labels of all samples; if there are more than `most`, of `most` random samples."""
    total = len(samples)
    rows = np.arange(total) if total <= most else np.sort(rng.choice(total, most, replace=False))
    selected = [samples[int(row)] for row in rows]
    return [ids[:MOST_TOKENS] for ids, *_ in selected], np.array([target for *_, target in selected])


def _count(texts: list[np.ndarray], size: int) -> csr_matrix:
    """Returns the number of occurrences of each token in each text, (texts, size)."""
    ends = np.cumsum([0, *map(len, texts)])
    counts = csr_matrix((np.ones(ends[-1]), np.concatenate(texts), ends), shape=(len(texts), size))
    counts.sum_duplicates()
    return counts
