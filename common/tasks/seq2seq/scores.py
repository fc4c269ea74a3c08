"""Scores of generated texts, compared with simple baselines."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.tasks.seq2seq.pairs import Pairs


def score_targets(
    written: dict[int, list[int]], samples: Pairs, train: Pairs, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], list[str], list[str], list[str]]:
    """Scores the texts that a model generated for some of `samples`.

    One baseline always predicts the most frequent target of the first 100,000 training pairs. The other baseline copies
    the first tokens of each source, up to the mean length of a training target.

    Returns: metrics (chrF, 0 to 100, and the share of exact matches, 0 to 1); lines to print; the generated texts; the
        target texts, as decoded by the tokenizer.
    """
    from sacrebleu.metrics import CHRF  # here because few runs generate text

    def texts(sequences: Iterable[Any]) -> list[str]:
        return [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in sequences]

    def chrf(answers: list[str]) -> float:
        return CHRF().corpus_score(answers, [targets]).score

    pairs = [samples[index] for index in written]
    answers, targets = texts(written.values()), texts(target for _, target in pairs)
    counts = Counter(train[index][1].tobytes() for index in range(min(len(train), 100_000)))
    frequent = texts([np.frombuffer(counts.most_common(1)[0][0], np.int64)])
    num_copied = train.num_target_tokens // len(train)
    examples = [{"target": pair[0], "written": pair[1]} for pair in list(zip(targets, answers, strict=True))[-4:]]
    metrics = {
        "num_generated": len(written),
        "chrf": chrf(answers),
        "exact": sum(answer == target for answer, target in zip(answers, targets, strict=True)) / len(written),
        "chrf_of_most_frequent_target": chrf(frequent * len(pairs)),
        "chrf_of_copied_source": chrf(texts(source[:num_copied] for source, _ in pairs)),
        "examples": examples,
    }
    lines = [
        f"\nchrF of {len(written)} held-out targets, written greedily: {metrics['chrf']:.1f}, {metrics['exact']:.1%} "
        f"of them exact; of always {frequent[0]!r}: {metrics['chrf_of_most_frequent_target']:.1f}; of the first "
        f"{num_copied} tokens of each source: {metrics['chrf_of_copied_source']:.1f}"
    ]
    lines += [f"{name:>11}  {text}" for example in examples for name, text in example.items()]
    return metrics, lines, answers, targets
