"""How good is what a model predicts or writes, beside an answer that needs no model?"""

import math
import random
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from common.tasks.seq2seq.pairs import Pairs


def score_targets(
    written: dict[int, list[int]], samples: "Pairs", train: "Pairs", tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], list[str]]:
    """chrF (0 to 100) of what a model wrote for some of `samples`, beside two baselines, how much of it is exactly its
    target, and lines to print.

    The baselines: the most frequent target of the (first 100,000) training pairs for every sample, and the first tokens
    of each source, as many as a training target has on average. All against the targets as the tokenizer decodes them.
    """
    from sacrebleu.metrics import CHRF  # here because only recipes that write text need it

    def texts(sequences: Iterable[Any]) -> list[str]:
        return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in sequences]

    def chrf(answers: list[str]) -> float:
        return CHRF().corpus_score(answers, [targets]).score

    pairs = [samples[index] for index in written]
    answers, targets = texts(written.values()), texts(target for _, target in pairs)
    counts = Counter(train[index][1].tobytes() for index in range(min(len(train), 100_000)))
    frequent = texts([np.frombuffer(counts.most_common(1)[0][0], np.int64)])
    num_copied = train.num_target_tokens // len(train)
    figures = {
        "num_generated": len(written),
        "chrf": chrf(answers),
        "exact": sum(answer == target for answer, target in zip(answers, targets, strict=True)) / len(written),
        "chrf_of_most_frequent_target": chrf(frequent * len(pairs)),
        "chrf_of_copied_source": chrf(texts(source[:num_copied] for source, _ in pairs)),
        "examples": [
            {"target": target, "written": answer} for target, answer in list(zip(targets, answers, strict=True))[-4:]
        ],
    }
    lines = [
        f"\nchrF of {len(written)} held-out targets, written greedily: {figures['chrf']:.1f}, {figures['exact']:.1%} "
        f"of them exact; of always {frequent[0]!r}: {figures['chrf_of_most_frequent_target']:.1f}; of the first "
        f"{num_copied} tokens of each source: {figures['chrf_of_copied_source']:.1f}"
    ]
    return figures, lines + [f"{name:>11}  {text}" for one in figures["examples"] for name, text in one.items()]


def score(predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The figures of predictions (N,), for int targets those of classification, else of regression.

    accuracy; macro_f1, the plain mean of the F1 of every label that is there or was predicted; and majority_share, the
    accuracy of always answering with the most frequent label. Or r2, the share of the variance that is explained (0 is
    always answering with the mean), and Pearson's r.
    """
    # Directly, and not by `evaluate`: its `load` downloads a module that calls scikit-learn, and fails offline; a
    # metric of one's own there is only a longer way to call it.
    drawn = random.getstate()
    from sklearn.metrics import accuracy_score, f1_score, r2_score  # here because it takes seconds

    random.setstate(drawn)  # a library that it imports draws a number then: once in a process, so also after a resume
    if targets.dtype.kind == "i":
        return {
            "accuracy": float(accuracy_score(targets, predictions)),
            "macro_f1": float(f1_score(targets, predictions, average="macro", zero_division=0)),
            "majority_share": float(np.unique(targets, return_counts=True)[1].max() / len(targets)),
        }
    predictions, targets = predictions.astype(np.float64), targets.astype(np.float64)
    if len(targets) < 2 or not np.isfinite(predictions).all():
        return {"r2": math.nan, "pearson": math.nan}
    with np.errstate(invalid="ignore"):  # of equal predictions there is no correlation: nan
        pearson = np.corrcoef(predictions, targets)[0, 1]
    return {"r2": float(r2_score(targets, predictions)), "pearson": float(pearson)}


def describe_scores(results: dict[str, float]) -> list[str]:
    """A line with the metrics next to baselines, if there is a held-out set."""
    if "r2" in results:
        return [f"R2 {results['r2']:.3f} (0: always the mean), Pearson {results['pearson']:.3f}"]
    if "accuracy" not in results:
        return []
    line = (
        f"accuracy {results['accuracy']:.1%}, macro-F1 {results['macro_f1']:.1%}; always the most frequent label: "
        f"accuracy {results['majority_share']:.1%}"
    )
    if "tfidf_accuracy" in results:
        line += f"; TF-IDF and logistic regression on {results['tfidf_texts']:,} texts: {results['tfidf_accuracy']:.1%}"
        line += f" of {results['tfidf_held_out_texts']:,}"
    return [line]
