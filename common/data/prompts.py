"""Chooses prompts from held-out samples, each with its reference answer if there is one.

| samples | prompt | reference answer |
| --- | --- | --- |
| a prompt and a completion | the prompt | the completion |
| a conversation | the text before the last assistant turn that is a target | this turn |
| plain text | the first half of a document, at most half of the sequence length | none |
| samples with a method `prompt` | its result | its result |
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.examples import token_ids
from common.data.token_store import TokenStore
from common.data.tokenizer import special_tokens_around


class Prompt(NamedTuple):
    """A prompt for a model: token ids, at least one, and those of the reference answer; None if there is none."""

    ids: list[int]
    reference: list[int] | None


class _Candidates(NamedTuple):
    """All prompts of a dataset: their number, and a function that returns the prompt of an index."""

    number: int
    prompt: Callable[[int], Prompt]


def choose_prompts(samples: Any, number: int, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Returns the prompts of `number` evenly spaced rows or documents, or of all if there are fewer.

    The choice is a function of the samples and of `number` alone. samples: as `text.tokenize` returns them, or with the
    attribute `num_prompts` and the method `prompt(index)`, which returns the two fields of a `Prompt`.
    """
    parts = [_find(part, tokenizer) for part in getattr(samples, "parts", {"": samples}).values()]
    ends = np.cumsum([part.number for part in parts])
    chosen = np.unique(np.linspace(0, ends[-1] - 1, min(number, ends[-1])).astype(int)).tolist()
    prompts = []
    for index in chosen:
        part = int(np.searchsorted(ends, index, side="right"))
        prompts.append(parts[part].prompt(index - int(ends[part]) + parts[part].number))
    return prompts


def _find(samples: Any, tokenizer: PreTrainedTokenizerBase) -> _Candidates:
    """Returns the candidates of samples that are not mixed."""
    if hasattr(samples, "prompt"):
        return _Candidates(samples.num_prompts, lambda index: Prompt(*samples.prompt(index)))
    store, longest = getattr(samples, "samples", samples), samples.sequence_length // 2  # packed samples wrap a store
    if store.is_stream:
        return _find_documents(store, tokenizer, longest)
    if len(store.meta["columns"]) == 1 and store.meta["columns"] != ["messages"]:  # a text per row
        rows = np.flatnonzero(store.num_targets(np.arange(len(store))) > 2)  # two tokens, and the end of the text

        def prompt(index: int) -> Prompt:
            before, text = split_answer(store.row(rows[index])["tokens"])
            return _first_half(before, np.array(text[:-1]), longest)

        return _Candidates(len(rows), prompt)
    return _Candidates(len(store), lambda index: Prompt(*split_answer(store.row(index)["tokens"])))


def _find_documents(store: TokenStore, tokenizer: PreTrainedTokenizerBase, longest: int) -> _Candidates:
    """Returns the candidates of a stream, in which an end-of-text token follows each document."""
    tokens, eos = token_ids(store.tokens), tokenizer.eos_token_id
    ends = np.flatnonzero(tokens == eos)
    starts, ends = np.concatenate([[0], ends + 1]), np.concatenate([ends, [len(tokens)]])
    # The tokens before a text are in the stream, except an end-of-text token, of which it has one between documents.
    before = special_tokens_around(tokenizer)[0]
    starts += len(before) - (before[:1] == [eos])
    is_long = ends - starts > 1
    starts, ends = starts[is_long], ends[is_long]
    return _Candidates(len(starts), lambda index: _first_half(before, tokens[starts[index] : ends[index]], longest))


def _first_half(before: list[int], text: np.ndarray, longest: int) -> Prompt:
    """Returns a prompt of at most `longest` tokens, but at least one of the text, of which it has at most half."""
    return Prompt(before + text[: max(1, min(len(text) // 2, longest - len(before)))].tolist(), None)


def split_answer(stored: np.ndarray) -> tuple[list[int], list[int]]:
    """Returns the token ids before the last run of consecutive targets, and this run.

    stored: a sequence with at least one target, in the form of `examples.mark_targets`.
    """
    targets = np.flatnonzero(stored >= 0)
    start = targets[np.flatnonzero(np.diff(targets, prepend=-2) > 1)[-1]]
    ids = token_ids(stored)
    return ids[:start].tolist(), ids[start : targets[-1] + 1].tolist()
