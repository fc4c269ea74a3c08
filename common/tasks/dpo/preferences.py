"""Turns preference pairs into samples: a chosen and a rejected sequence that begin with the same prompt.

    pairs = tokenize_preferences(Source(files=("train.jsonl",)), tokenizer, length=512)
    micro_batch = collate_preferences([pairs[0], pairs[1]], tokenizer.pad_token_id)

The targets are the tokens of the answers. If the loss contains only differences of log-probabilities, the targets start
at the first difference, because before it the log-probabilities are equal in both sequences and cancel.
"""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached
from common.data.chats import start_rendering
from common.data.examples import mark_targets, token_ids
from common.data.preference_rows import ANSWERS
from common.data.preferences import columns_of, encode_pairs, open_preferences
from common.data.sample_writing import corpus_facts
from common.data.source_types import Corpus, Source, name_and_columns
from common.data.token_store import TokenStore, TokenWriter, split_targets
from common.data.tokenizer import no_more_threads, tokenizer_identity
from common.data.too_long import describe_losses, is_left_out
from common.errors import UserError
from common.tasks.dpo.answers import find_answer, mask_common_start
from common.tasks.dpo.losses import SIGMOID, Objective
from common.training.padding import round_up


def tokenize_preferences(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    reference: str = "",
    cache_dir: str | Path | None = None,
    objective: Objective = SIGMOID,
    is_held_out: bool = False,
) -> "Preferences":
    """Tokenises the rows of a source once into the cache and opens the result.

    A row has `chosen` and `rejected`, which are two texts or two lists of messages. Both begin with the prompt, or the
    prompt is in the column `prompt`. Messages are formatted with the chat template. In the embedded corpus, the prompt
    is the signature and docstring of a function, its body is chosen, and the body's lines in reverse order are
    rejected. Pairs without a differing target within `length` are skipped.

    Args:
        length: maximum number of input tokens of a prompt with an answer; longer sequences are truncated at the end.
        reference: identity of the reference model; "" without a reference.
        objective: if its loss depends on the tokens that begin both answers, these are targets too.
        is_held_out: whether a mean over tokens is over all pairs, not over those of each global batch.

    Raises UserError with file and location if something cannot be read or yields no sample.
    """
    corpus = open_preferences(source, tokenizer)
    columns, is_whole = columns_of(corpus), objective.loss.is_whole
    directory = cached(
        "preferences",
        [
            corpus.identity,
            columns,
            tokenizer_identity(tokenizer),
            length,
            *["whole"] * is_whole,
            source.on_too_long,
            "answers",
        ],
        lambda partial: _write(partial, corpus, columns, tokenizer, length, is_whole, source.on_too_long),
        cache_dir,
    )
    no_more_threads()
    return Preferences(directory, length, reference, objective, is_held_out=is_held_out)


def _write(
    directory: Path,
    corpus: Corpus,
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    is_whole: bool,
    on_too_long: str | None,
) -> None:
    """Fills a store with rows of (chosen, rejected); the column `targets` has the number of targets of each.

    The column `answers` has the results of `find_answer`. It is not in the store's digest, which identifies a run.
    """
    counts = Counter(dict.fromkeys(("pairs", "truncated", "dropped", "empty", "max_length"), 0))
    answers: list[tuple[int, int]] = []
    with TokenWriter(directory, targets=[]) as writer, start_rendering() as process:
        pairs = encode_pairs(corpus, columns, tokenizer, counts, process, is_whole)
        for row, chosen, rejected in pairs:
            has_prompt = "prompt" in columns or isinstance(row.values[ANSWERS[0]], list)
            if chosen[0][:1] != rejected[0][:1]:  # a first token cannot be a target
                eos = tokenizer.eos_token_id
                both = (chosen, rejected)
                chosen, rejected = (([eos, *ids], [False, *mask], text) for ids, mask, text in both)
            lengths = [len(chosen[0]) - 1, len(rejected[0]) - 1]
            longest = ANSWERS[lengths[1] > lengths[0]]
            if max(lengths) > sequence_length and is_left_out(
                on_too_long, row.where, longest, max(lengths), "sequence_length", sequence_length
            ):
                counts["too_long"] += 1
                continue
            pair, num_cut, is_early = mask_common_start(chosen[:2], rejected[:2], sequence_length)
            differs = any((stored >= 0).any() for stored in pair)
            if is_whole and has_prompt:
                pair = [mark_targets(answer[0], answer[1], sequence_length) for answer in (chosen, rejected)]
            counts["part early"] += is_early
            num_targets = [int((stored >= 0).sum()) for stored in pair]
            if not differs or (is_whole and not all(num_targets)):
                counts["dropped"] += 1
                whole = mask_common_start(chosen[:2], rejected[:2], max(lengths))[0] if num_cut else []
                counts["without_targets"] += any((stored >= 0).any() for stored in whole)
                continue
            writer.append(*pair, targets=num_targets)
            answers.append(find_answer(chosen[:2], rejected[0], has_prompt))
            counts["pairs"] += 1
            counts["truncated"] += num_cut
            counts["max_length"] = max(counts["max_length"], *(len(stored) - 1 for stored in pair))
        losses = describe_losses(counts, sequence_length, "answers")
        if not counts["pairs"]:
            raise UserError(
                f"{corpus.name}: no pair of answers that differ within --sequence_length {sequence_length}{losses}; "
                "use different data, or raise it"
            )
        early = f"{counts['part early']:,} pairs differ before their answers: those tokens are not compared"
        early *= bool(counts["part early"])
        writer.finish(counts, **corpus_facts(corpus, columns, counts, tokenizer, early), losses=losses)
    np.array(answers, np.int64).tofile(directory / "answers.bin")


class Pair(NamedTuple):
    """A sample. `answers` are prompt and answer as stored, int32; a token that is not a target is stored as ~token."""

    answers: tuple[np.ndarray, ...]  # chosen, rejected; a dummy sample has one answer of one token
    number: int | None  # index of the pair; None for a dummy sample
    reference: np.ndarray  # (2,), reference log-probabilities of chosen and rejected; zeros until computed
    nll_scale: float = 0.0  # factor of the token losses in the loss's NLL, in the summed loss of the global batch


def view_of(store: Any, **attributes: Any) -> Any:
    """Returns a shallow copy of a store with different attributes. (`copy.copy` would open the files again.)"""
    view = object.__new__(type(store))
    vars(view).update(vars(store) | attributes)
    return view


class Preferences(TokenStore):
    """Memory-mapped pairs: a `batching.Samples`. A pair counts as one target, because the loss is a mean over pairs."""

    unit = "tokens"

    def __init__(
        self,
        directory: str | Path,
        sequence_length: int,
        reference: str,
        objective: Objective = SIGMOID,
        values: Path | None = None,
        is_held_out: bool = False,
    ) -> None:
        super().__init__(directory, ANSWERS)
        self.sequence_length, self.objective, self.is_held_out = sequence_length, objective, is_held_out
        meta = self.meta
        self._targets = self.column("targets").reshape(-1, 2)
        self.num_target_tokens, self.num_dropped = meta["pairs"], meta["dropped"]
        self.max_length = 2 * meta["max_length"]
        self.end_tokens = meta["end_tokens"]
        self.fingerprint = f"{meta['content']}-{sequence_length}"  # equal if all pairs are equal
        self.identity = {"reference": reference}  # identifies a run, in addition to its data
        self.nll_scale = self._nll_scale(np.arange(len(self)))
        self.set_reference(values)

    def _nll_scale(self, ids: np.ndarray) -> float:
        """Returns the factor by which the mean NLL of these pairs' tokens, times their number, becomes a sum."""
        if not self.objective.loss.nll:
            return 0.0
        return self.objective.nll_weight * len(ids) / int(self._num_nll_tokens(ids).sum())

    def _num_nll_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each chosen answer in the loss's NLL, int64."""
        is_sequence = self.objective.loss.nll == "sequence"
        return super().lengths(ids)[:, 0] - 1 if is_sequence else self._targets[ids, 0]

    def of_batch(self, ids: np.ndarray) -> tuple["Preferences", np.ndarray]:
        """Returns the pairs of a global batch as a dataset, and their ids; the held-out set is averaged as a whole."""
        if self.is_held_out or not self.objective.loss.nll:
            return self, ids
        return view_of(self, nll_scale=self._nll_scale(ids)), ids

    def set_reference(self, path: Path | None) -> None:
        """Sets the .npy file with the reference log-probabilities of all pairs, (pairs, 2); None: zeros."""
        self._values = path
        self._reference = None if path is None else np.load(path, mmap_mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.identity["reference"], self.objective, self._values, self.is_held_out
        return Preferences, (self.directory, self.sequence_length, *options)

    def __getitem__(self, index: int) -> Pair:
        answers = tuple(map(np.array, self.row(index).values()))
        reference = np.zeros(2, np.float32) if self._reference is None else np.array(self._reference[index])
        return Pair(answers, int(index), reference, self.nll_scale)

    @property
    def num_prompts(self) -> int:
        return len(self)

    def prompt(self, index: int) -> tuple[list[int], list[int]]:
        """Returns the token ids of a prompt, and of its chosen answer as far as it is stored."""
        start, end = self.column("answers")[2 * index : 2 * index + 2].tolist()
        stored = self.row(index)["chosen"]
        ids = token_ids(stored)
        return ids[:start].tolist(), ids[start:end].tolist()

    def dummy_sample(self) -> Pair:
        """Returns a sample of one token, which belongs to no pair."""
        pair = self[0]
        return Pair((pair.answers[0][:1],), None, pair.reference)

    def sequence_lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of input tokens of each of the two sequences of these pairs, int64 (2 n,)."""
        return super().lengths(ids).ravel() - 1

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of input tokens of each pair, with both sequences padded to equal length, int64 (n,)."""
        return 2 * self.sequence_lengths(ids).reshape(-1, 2).max(1)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns 1 for each pair, int64."""
        return np.ones(len(ids), np.int64)

    def num_predicted(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of predicted tokens of each pair, in both answers together, int64."""
        own = self._num_nll_tokens(ids) if self.objective.loss.nll else self._targets[ids, 0]
        return own + self._targets[ids, 1]

    def describe(self) -> str:
        """Returns the description of the pairs for the run summary."""
        meta = self.meta
        line = f"{name_and_columns(meta)}: {len(self):,} pairs, a prompt with an answer "
        line += f"{meta['tokens'] / len(self) / 2 - 1:,.0f} tokens on average, at most {meta['max_length']}"
        line += meta["losses"]
        return f"\n{'':12}".join([line, *meta["notes"]])


def collate_preferences(
    samples: list[Pair], pad_token_id: int, objective: Objective = SIGMOID, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads P pairs on the right into one micro-batch; chosen and rejected answers alternate in adjacent rows.

    The two rows of a pair together have a multiple of `multiple_of` tokens.

    Returns (integers are int64):
        `input_ids` (2 P, L).
        `target_tokens` (N,) of all answers, and `target_rows` (N,), the flattened input positions that predict them.
        `target_places` (2 P, T): indices into `target_tokens` of each answer's targets, padded with N.
        `targets` (P,): ones; `target_pairs` (P,): the pair indices; `target_reference` (P, 2).
        `target_nll` (M,): indices into `target_tokens` of the tokens in the NLL, and its factor `target_nll_scale`; if
        the NLL includes the prompt, `target_tokens` does too.
        `target_loss_NAME` (3,): the options of the loss of this name.
    """
    rows = [stored for sample in samples for stored in sample.answers]
    real = [sample for sample in samples if sample.number is not None]
    chosen = range(0, 2 * len(real), 2) if objective.loss.nll else range(0)
    padded, offsets = pad_rows(
        rows, pad_token_id, max(1, multiple_of // 2), chosen if objective.loss.nll == "sequence" else ()
    )
    micro_batch = padded | {
        "target_places": padded["target_places"][: 2 * len(real)],
        "targets": np.ones(len(real), np.float32),
        "target_pairs": np.array([sample.number for sample in real], np.int64),
        "target_reference": np.array([sample.reference for sample in real], samples[0].reference.dtype).reshape(-1, 2),
        "target_nll": np.concatenate([np.zeros(0, np.int64), *(np.arange(*offsets[n : n + 2]) for n in chosen)]),
    }
    tensors = {name: torch.from_numpy(array) for name, array in micro_batch.items()}
    tensors["target_nll_scale"] = torch.tensor(samples[0].nll_scale)
    return tensors | {f"target_loss_{objective.name}": torch.tensor(objective.options)}


def pad_rows(
    rows: list[np.ndarray], pad_token_id: int, multiple_of: int, all_targets: Collection[int] = ()
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns input and targets of R stored sequences, and the offsets (R + 1,) of their targets in `target_tokens`.

    The names and shapes are those of `collate_preferences`, with R = 2 P. all_targets: numbers of the rows of which
    `target_tokens` includes all tokens but the first; their `target_places` are those of the targets alone.
    """
    length = round_up(max(1, *(len(stored) - 1 for stored in rows)), multiple_of)
    input_ids = np.full((len(rows), length), pad_token_id, np.int64)
    tokens, predicting_rows, of_answer = [], [], []
    for number, stored in enumerate(rows):
        ids, targets, predicted = split_targets(stored)
        input_ids[number, : max(1, len(ids) - 1)] = ids[: max(1, len(ids) - 1)]
        of_answer.append(np.arange(len(targets)))
        if number in all_targets:
            of_answer[-1], targets, predicted = predicted, ids[1:], np.arange(len(ids) - 1)
        tokens.append(targets)
        predicting_rows.append(number * length + predicted)
    offsets = np.cumsum([0, *map(len, tokens)])
    places = np.full((len(rows), max(map(len, of_answer))), offsets[-1])
    for row, start, own in zip(places, offsets[:-1], of_answer, strict=True):
        row[: len(own)] = start + own
    arrays = {"input_ids": input_ids, "target_tokens": np.concatenate(tokens)}
    return arrays | {"target_rows": np.concatenate(predicting_rows), "target_places": places}, offsets
