"""Turns preference pairs into samples: a chosen and a rejected sequence that begin with the same prompt.

    pairs = tokenize_preferences(Source(files=("train.jsonl",)), tokenizer, length=512)
    micro_batch = collate_preferences([pairs[0], pairs[1]], tokenizer.pad_token_id, beta=0.1)

The targets are the tokens of the answers, starting at the first difference. Tokens before the first difference are not
targets: their log-probabilities are equal in both sequences, and cancel because the loss contains only differences.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached
from common.data.chats import encode_chats, start_rendering
from common.data.examples import encode_texts, mark_targets
from common.data.limited_process import LimitedProcess
from common.data.messages import TRAINING_KEYS, history_of, is_wanted, messages_of, with_system
from common.data.python_functions import derived_corpus, find_docstring
from common.data.row_texts import batches
from common.data.sample_writing import corpus_facts
from common.data.source_types import Corpus, Row, Source
from common.data.sources import check_columns, open_source
from common.data.token_store import TokenStore, TokenWriter, split_targets
from common.data.tokenizer import Encoded, no_more_threads, tokenizer_identity
from common.errors import UserError, reading
from common.training.padding import round_up

ANSWERS = ("chosen", "rejected")
CONTEXT = ("system", "history", "tools")  # columns with the context of messages
PROMPTS = ("instruction", "question", "query", "problem", "input")  # names of the prompt column in other datasets


def columns_of(source: Source) -> tuple[str, ...] | None:
    """Returns the columns with text to train a tokenizer on; None, the default column, for the embedded corpus."""
    return None if source.embedded else _columns_of(open_source(source))


def _columns_of(corpus: Corpus) -> tuple[str, ...]:
    """Returns the columns of prompt and answers."""
    check_columns(corpus, ANSWERS)
    return tuple(name for name in ("prompt", *ANSWERS) if name in corpus.columns)


def tokenize_preferences(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    reference: str = "",
    cache_dir: str | Path | None = None,
) -> "Preferences":
    """Tokenises the rows of a source once into the cache and opens the result.

    A row has `chosen` and `rejected`, which are two texts or two lists of messages. Both begin with the prompt, or the
    prompt is in the column `prompt`. Messages are formatted with the chat template. In the embedded corpus, the prompt
    is the signature and docstring of a function, its body is chosen, and the body's lines in reverse order are
    rejected. Pairs without a differing target within `length` are skipped.

    Args:
        length: maximum number of input tokens of a prompt with an answer; longer sequences are truncated at the end.
        reference: identity of the reference model.

    Raises UserError with file and location if something cannot be read or yields no sample.
    """
    if source.parts:
        raise UserError("files of preferences cannot be mixed by weights; remove the weights from --train_file")
    tokenizer.chat_template = source.chat_template or tokenizer.chat_template
    corpus = open_source(source)
    if source.embedded:
        corpus = embedded_preferences(corpus, source.text_column)
    columns = _columns_of(corpus)
    directory = cached(
        "preferences",
        [corpus.identity, columns, tokenizer_identity(tokenizer), length],
        lambda partial: _write(partial, corpus, columns, tokenizer, length),
        cache_dir,
    )
    no_more_threads()
    return Preferences(directory, length, reference)


def embedded_preferences(corpus: Corpus, text_column: str) -> Corpus:
    """Returns the embedded corpus as pairs: function bodies are chosen, their lines in reverse order are rejected."""

    def values_of(function: str) -> tuple[str, str, str] | None:
        prompt, body = split_body(function) or ("", "")
        return (prompt, body, "\n".join(body.strip("\n").split("\n")[::-1]) + "\n") if prompt else None

    return derived_corpus(corpus, text_column, ("prompt", *ANSWERS), values_of)


def split_body(function: str) -> tuple[str, str] | None:
    """Returns (a function's lines up to the end of its docstring, its body), or None if it has no docstring."""
    if not (docstring := find_docstring(function)):
        return None
    lines, end = function.split("\n"), docstring[-1]
    return "\n".join(lines[:end]) + "\n", "\n".join(lines[end:])


def _check_row(row: Row, columns: tuple[str, ...]) -> None:
    """Raises UserError unless the row has two answers to the same prompt, both as texts or both as messages."""
    if missing := [name for name in ANSWERS if name not in row.values]:
        from common.data.column_errors import missing_column

        raise UserError(missing_column(row.where, missing, tuple(row.values)))
    values: dict[str, Any] = {name: row.values.get(name) for name in columns}
    lists, texts = ([name for name in columns if isinstance(values[name], list) is kind] for kind in (True, False))
    if not lists and row.values.get("prompt") and "prompt" not in columns:
        raise UserError(f"{row.where}: has a prompt, but the first row has none; give all rows a prompt, or none")
    if not lists:
        if given := [name for name in CONTEXT if row.values.get(name)]:  # these columns require messages
            raise UserError(
                f"{row.where}: {', '.join(given)}: needs a prompt of messages, but the prompt is a text; write prompt, "
                'chosen and rejected as messages, [{"role": "user", "content": ...}]'
            )
        return
    if set(ANSWERS) & set(texts):
        raise UserError(
            f"{row.where}: {', '.join(lists)} {'has' if len(lists) == 1 else 'have'} messages, and {', '.join(texts)} "
            f"{'has' if len(texts) == 1 else 'have'} not; write all as messages"
        )
    answers = [messages_of(row, name) for name in ANSWERS]
    for name, messages in zip(ANSWERS, answers, strict=True):
        if not messages or messages[-1]["role"] != "assistant":
            raise UserError(f"{row.where}: {name} does not end with a message of the assistant; fix or remove the row")
        questions = [str(message.get("content")).strip() for message in messages if message["role"] == "user"]
        if isinstance(values.get("prompt"), str) and values["prompt"].strip() not in questions:
            raise UserError(
                f"{row.where}: {name} has no user message with the text of prompt; write prompt as messages, "
                'such as [{"role": "user", "content": ...}]'
            )
    first, differing = next(((n, both) for n, both in enumerate(zip_longest(*answers)) if both[0] != both[1]), (0, ()))
    if any(message is None or message["role"] != "assistant" for message in differing):
        raise UserError(
            f"{row.where}: chosen and rejected differ before an answer of the assistant; give both the same prompt, or "
            "remove the row"
        )
    for name, messages in zip(ANSWERS, answers, strict=True):
        if any(is_wanted(message, f"{row.where}: column {name}") is False for message in messages[first:]):
            raise UserError(
                f"{row.where}: {name} has an answer of weight 0, but all of an answer is compared; remove its "
                f"{' or '.join(key for key in TRAINING_KEYS if any(key in message for message in messages))}"
            )


def _missing_prompts(row: Row, columns: tuple[str, ...]) -> list[str]:
    """Returns the columns of `PROMPTS` whose text `chosen` does not contain; [] if there is a column `prompt`."""
    chosen = row.values[ANSWERS[0]]
    is_chat = isinstance(chosen, list)
    content = "\n".join(str(message.get("content")) for message in chosen) if is_chat else str(chosen)
    texts = {name: row.values.get(name) for name in PROMPTS if "prompt" not in columns}
    missing = [name for name, text in texts.items() if isinstance(text, str) and text.strip() not in content]
    if missing and not (is_chat and any(message["role"] == "user" for message in chosen)):
        raise UserError(
            f"{row.where}: there is no prompt, and chosen does not contain the text of column {missing[0]}; name that "
            "column prompt, or write its text in chosen and rejected"
        )
    return missing


def _encode(
    batch: list[Row],
    columns: tuple[str, ...],
    answer: str,
    tokenizer: PreTrainedTokenizerBase,
    counts: Counter,
    process: LimitedProcess,
) -> Iterator[Encoded]:
    """Yields the encoded prompt and answer of each row; `answer` is a column name."""
    if not isinstance(batch[0].values.get(answer), list):
        return encode_texts(batch, ("prompt", answer) if "prompt" in columns else (answer,), tokenizer, counts)
    rows = []
    for row in batch:
        with reading(row.where):
            messages = messages_of(row, answer)
            # A text prompt is in the messages too (`_check_row`). Only some datasets repeat prompt messages there.
            prompt = messages_of(row, "prompt") if isinstance(row.values.get("prompt"), list) else []
            messages = messages if messages[: len(prompt)] == prompt else prompt + messages
            first = messages[:1] if messages[0]["role"] in ("system", "developer") else []
            chat = with_system(row, [*first, *history_of(row), *messages[len(first) :]])
            rows.append(row._replace(values={answer: chat, "tools": row.values.get("tools")}))
    return encode_chats(rows, tokenizer, counts, process, answer)


def _write(
    directory: Path, corpus: Corpus, columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> None:
    """Fills a store with rows of (chosen, rejected); the column `targets` has the number of targets of each."""
    counts = Counter(dict.fromkeys(("pairs", "truncated", "dropped", "empty", "max_length"), 0))
    with TokenWriter(directory, targets=[]) as writer, start_rendering() as process:
        for batch in batches(corpus, columns + (CONTEXT if "prompt" in columns else CONTEXT + PROMPTS)):
            for row in batch:
                with reading(row.where):
                    _check_row(row, columns)
                    corpus.unused.update(_missing_prompts(row, columns))
            both = [_encode(batch, columns, answer, tokenizer, counts, process) for answer in ANSWERS]
            for chosen, rejected in zip(*both, strict=True):
                if chosen[0][:1] != rejected[0][:1]:  # a first token cannot be a target
                    eos = tokenizer.eos_token_id
                    chosen, rejected = (([eos, *ids], [False, *mask]) for ids, mask, _ in (chosen, rejected))
                pair, num_cut, is_early = mask_common_start(chosen[:2], rejected[:2], sequence_length)
                counts["part early"] += is_early
                num_targets = [int((stored >= 0).sum()) for stored in pair]
                if not any(num_targets):
                    counts["dropped"] += 1
                    continue
                writer.append(*pair, targets=num_targets)
                counts["pairs"] += 1
                counts["truncated"] += num_cut
                counts["max_length"] = max(counts["max_length"], *(len(stored) - 1 for stored in pair))
        if not counts["pairs"]:
            raise UserError(
                f"{corpus.name}: no pair of answers that differ within --sequence_length {sequence_length} "
                f"({counts['dropped']} rows); use different data, or raise it"
            )
        early = f"{counts['part early']:,} pairs differ before their answers: those tokens are not compared"
        early *= bool(counts["part early"])
        writer.finish(counts, **corpus_facts(corpus, columns, counts, tokenizer, early))


def mask_common_start(
    chosen: tuple[list[int], list[bool]], rejected: tuple[list[int], list[bool]], sequence_length: int
) -> tuple[list[np.ndarray], int, bool]:
    """Returns both sequences as stored, int32, with targets starting at the first difference.

    It also returns the number of truncated sequences, and whether the first differing tokens are not targets.
    """
    shorter = min(len(chosen[0]), len(rejected[0]))
    differs = np.array(chosen[0][:shorter]) != np.array(rejected[0][:shorter])
    same = int(differs.argmax()) if differs.any() else shorter
    is_early = same < shorter and not (chosen[1][same] and rejected[1][same])
    masked = [(ids, [False] * same + is_target[same:]) for ids, is_target in (chosen, rejected)]
    num_cut = sum(len(ids) > sequence_length + 1 for ids, _ in masked)
    return [mark_targets(*answer, sequence_length) for answer in masked], num_cut, is_early


class Pair(NamedTuple):
    """A sample. `answers` are prompt and answer as stored, int32; a token that is not a target is stored as ~token."""

    answers: tuple[np.ndarray, ...]  # chosen, rejected; a dummy sample has one answer of one token
    number: int | None  # index of the pair; None for a dummy sample
    reference: np.ndarray  # (2,), reference log-probabilities of chosen and rejected; zeros until computed


class Preferences(TokenStore):
    """Memory-mapped pairs: a `batching.Samples`. A pair counts as one target, because the loss is a mean over pairs."""

    unit = "tokens"

    def __init__(self, directory: str | Path, sequence_length: int, reference: str, values: Path | None = None) -> None:
        super().__init__(directory, ANSWERS)
        self.sequence_length, meta = sequence_length, self.meta
        self._targets = self.column("targets").reshape(-1, 2)
        self.num_target_tokens, self.num_dropped = meta["pairs"], meta["dropped"]
        self.max_length = 2 * meta["max_length"]
        self.end_tokens = meta["end_tokens"]
        self.fingerprint = f"{meta['content']}-{sequence_length}"  # equal if all pairs are equal
        self.identity = {"reference": reference}  # identifies a run, in addition to its data
        self.set_reference(values)

    def set_reference(self, path: Path | None) -> None:
        """Sets the .npy file with the reference log-probabilities of all pairs, (pairs, 2); None: zeros."""
        self._values = path
        self._reference = None if path is None else np.load(path, mmap_mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        return Preferences, (self.directory, self.sequence_length, self.identity["reference"], self._values)

    def __getitem__(self, index: int) -> Pair:
        answers = tuple(map(np.array, self.row(index).values()))
        reference = np.zeros(2, np.float32) if self._reference is None else np.array(self._reference[index])
        return Pair(answers, int(index), reference)

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
        return self._targets[ids].sum(1)

    def describe(self) -> str:
        """Returns the description of the pairs for the run summary."""
        meta = self.meta
        line = f"{meta['name']} ({', '.join(meta['columns'])}): {len(self):,} pairs, a prompt with an answer "
        line += f"{meta['tokens'] / len(self) / 2 - 1:,.0f} tokens on average, at most {meta['max_length']}"
        line += f"; {meta['truncated']:,} answers truncated at {self.sequence_length}" if meta["truncated"] else ""
        line += f"; {meta['dropped']:,} skipped, which do not differ within that length" if meta["dropped"] else ""
        line += f"; {meta['empty']:,} answers are empty: only their end counts" if meta["empty"] else ""
        return f"\n{'':12}".join([line, *meta["notes"]])


def collate_preferences(
    samples: list[Pair], pad_token_id: int, beta: float, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads P pairs on the right into one micro-batch; chosen and rejected answers alternate in adjacent rows.

    The two rows of a pair together have a multiple of `multiple_of` tokens.

    Returns (integers are int64):
        `input_ids` (2 P, L).
        `target_tokens` (N,) of all answers, and `target_rows` (N,), the flattened input positions that predict them.
        `target_places` (2 P, T): indices into `target_tokens` of each answer's targets, padded with N.
        `targets` (P,): ones; `target_pairs` (P,): the pair indices; `target_reference` (P, 2); and `target_beta`.
    """
    rows = [stored for sample in samples for stored in sample.answers]
    real = [sample for sample in samples if sample.number is not None]
    length = round_up(max(1, *(len(stored) - 1 for stored in rows)), max(1, multiple_of // 2))
    input_ids = np.full((len(rows), length), pad_token_id, np.int64)
    tokens, predicting_rows = [], []
    for number, stored in enumerate(rows):
        ids, targets, predicted = split_targets(stored)
        input_ids[number, : max(1, len(ids) - 1)] = ids[: max(1, len(ids) - 1)]
        tokens.append(targets)
        predicting_rows.append(number * length + predicted)
    offsets = np.cumsum([0, *map(len, tokens)])
    places = np.full((2 * len(real), max(map(len, tokens))), offsets[-1])
    for number, row in enumerate(places):
        row[: len(tokens[number])] = np.arange(offsets[number], offsets[number + 1])
    micro_batch = {
        "input_ids": input_ids,
        "targets": np.ones(len(real), np.float32),
        "target_tokens": np.concatenate(tokens),
        "target_rows": np.concatenate(predicting_rows),
        "target_places": places,
        "target_pairs": np.array([sample.number for sample in real], np.int64),
        "target_reference": np.array([sample.reference for sample in real], samples[0].reference.dtype).reshape(-1, 2),
    }
    tensors = {name: torch.from_numpy(array) for name, array in micro_batch.items()}
    return tensors | {"target_beta": torch.tensor(beta)}
