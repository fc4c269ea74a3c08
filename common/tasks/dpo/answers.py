"""Finds the part of a pair of answers in which they differ."""

import numpy as np

from common.data.examples import mark_targets


def mask_common_start(
    chosen: tuple[list[int], list[bool]], rejected: tuple[list[int], list[bool]], sequence_length: int
) -> tuple[list[np.ndarray], int, bool]:
    """Returns both sequences as stored, int32, with targets starting at the first difference.

    It also returns the number of truncated sequences, and whether the first differing tokens are not targets.
    """
    same = _count_common(chosen[0], rejected[0])
    is_early = same < min(len(chosen[0]), len(rejected[0])) and not (chosen[1][same] and rejected[1][same])
    masked = [(ids, [False] * same + is_target[same:]) for ids, is_target in (chosen, rejected)]
    num_cut = sum(len(ids) > sequence_length + 1 for ids, _ in masked)
    return [mark_targets(*answer, sequence_length) for answer in masked], num_cut, is_early


def find_answer(chosen: tuple[list[int], list[bool]], rejected: list[int], has_prompt: bool) -> tuple[int, int]:
    """Returns first position and end of the chosen answer: of the first run of targets that differs from `rejected`.

    It begins where the run begins. Without a prompt of its own, it begins at the first difference.
    """
    ids, is_target = chosen
    start = min(_count_common(ids, rejected), len(ids) - 1)
    while not is_target[start] and start < len(ids) - 1:
        start += 1
    end = start + 1
    while end < len(ids) and is_target[end]:
        end += 1
    while has_prompt and start > 1 and is_target[start - 1]:
        start -= 1
    return start, end


def _count_common(chosen: list[int], rejected: list[int]) -> int:
    """Returns the number of tokens with which both sequences begin."""
    shorter = min(len(chosen), len(rejected))
    differs = np.array(chosen[:shorter]) != np.array(rejected[:shorter])
    return int(differs.argmax()) if differs.any() else shorter
