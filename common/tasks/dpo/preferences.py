"""How do preferences become samples? A pair is two sequences that part somewhere: one is chosen, one is rejected.

    pairs = tokenize_preferences(Source(files=("train.jsonl",)), tokenizer, length=512)
    micro_batch = collate_preferences([pairs[0], pairs[1]], tokenizer.pad_token_id, beta=0.1)

Tokenised once into the cache. The targets are those of the answers, from where the two sequences part: before, the same
tokens follow the same tokens, their log-probabilities are equal, and the loss has only differences.
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
from common.data.chats import encode_chats
from common.data.column_selection import batches, check_columns, watched
from common.data.corpus_facts import Encoded, corpus_facts
from common.data.messages import TRAINING_KEYS, history_of, is_wanted, messages_of, with_system
from common.data.source_types import Corpus, Row, Source
from common.data.sources import open_source
from common.data.standard_library import derived_corpus, find_docstring
from common.data.text import encode_texts
from common.data.token_store import TokenStore, TokenWriter, mark_targets, split_targets
from common.data.tokenizer import check_end_of_text, no_more_threads, tokenizer_identity
from common.errors import UserError
from common.training.batching import round_up

ANSWERS = ("chosen", "rejected")
CONTEXT = ("system", "history", "tools")  # of messages, in columns of their own
PROMPTS = ("instruction", "question", "query", "problem", "input")  # names of the prompt in other data sets


def columns_of(source: Source) -> tuple[str, ...] | None:
    """Those with text, for a tokenizer; None for the embedded corpus, which has its own."""
    if source.embedded:
        return None
    return _columns_of(open_source(source))


def _columns_of(corpus: Corpus) -> tuple[str, ...]:
    check_columns(corpus, ANSWERS)
    return tuple(name for name in ("prompt", *ANSWERS) if name in corpus.columns)


def tokenize_preferences(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    reference: str = "",
    cache_dir: str | Path | None = None,
) -> "Preferences":
    """Tokenises the rows of a source once and opens the result; of many processes one works and the others wait.

    A row has `chosen` and `rejected`: two texts, which begin with their prompt or have it in `prompt`; or two lists of
    messages, likewise, which the chat template writes. In their place the embedded corpus has the signature and
    docstring of a function, its body, and the lines of its body in reverse order.
    length: input tokens of a prompt with an answer at most; what is longer is cut at its end.
    reference: what the model is known by that the tuned one is compared with.

    A pair is left out where nothing but equal tokens is left of it.

    Raises UserError that names file and place for whatever cannot be read or makes no sample.
    """
    if source.parts:
        raise UserError("files of preferences are not mixed by weights; take the weights out of --train_file")
    check_end_of_text(tokenizer)
    tokenizer.chat_template = source.chat_template or tokenizer.chat_template
    corpus = open_source(source)
    if source.embedded:
        corpus = embedded_preferences(corpus, source.text_column)
    columns = _columns_of(corpus)
    corpus = watched(corpus, columns, CONTEXT if "prompt" in columns else (*CONTEXT, *PROMPTS))
    directory = cached(
        "preferences",
        [corpus.identity, columns, tokenizer_identity(tokenizer), length],
        lambda partial: _write(partial, corpus, columns, tokenizer, length),
        cache_dir,
    )
    no_more_threads()
    return Preferences(directory, length, reference)


def embedded_preferences(corpus: Corpus, text_column: str) -> Corpus:
    """The embedded corpus as preferences: a function's body is chosen, its lines in reverse order are rejected."""

    def values_of(function: str) -> tuple[str, str, str] | None:
        prompt, body = split_body(function) or ("", "")
        return (prompt, body, "\n".join(body.strip("\n").split("\n")[::-1]) + "\n") if prompt else None

    return derived_corpus(corpus, text_column, ("prompt", *ANSWERS), values_of)


def split_body(function: str) -> tuple[str, str] | None:
    """(a Python function's lines to the end of its docstring, its body), or None where there is no docstring."""
    if not (found := find_docstring(function)):
        return None
    lines, end = function.split("\n"), found[-1]
    return "\n".join(lines[:end]) + "\n", "\n".join(lines[end:])


def _check_row(row: Row, columns: tuple[str, ...]) -> None:
    """Raises UserError where texts and messages are mixed, or the messages are no two answers to the same prompt."""
    values = {name: row.values.get(name) for name in columns}
    lists, texts = ([name for name in columns if isinstance(values[name], list) is kind] for kind in (True, False))
    if not lists and row.values.get("prompt") and "prompt" not in columns:
        raise UserError(f"{row.where}: has a prompt, and the first row has none; give all rows one, or none")
    if not lists:
        _check_context(row)
        return
    if set(ANSWERS) & set(texts):
        raise UserError(
            f"{row.where}: {', '.join(lists)} {'has' if len(lists) == 1 else 'have'} messages, and {', '.join(texts)} "
            f"{'has' if len(texts) == 1 else 'have'} not; write all as messages"
        )
    answers = [messages_of(row, name) for name in ANSWERS]
    for name, messages in zip(ANSWERS, answers, strict=True):
        if not messages or messages[-1]["role"] != "assistant":
            raise UserError(f"{row.where}: {name} does not end with a message of the assistant; mend or remove the row")
        said = [str(one.get("content")).strip() for one in messages if one["role"] == "user"]
        if isinstance(values.get("prompt"), str) and values["prompt"].strip() not in said:
            raise UserError(
                f"{row.where}: prompt is a text that no user's message of {name} has; write it as messages, "
                'as [{"role": "user", "content": ...}]'
            )
    parting, parted = next(((n, both) for n, both in enumerate(zip_longest(*answers)) if both[0] != both[1]), (0, None))
    if parted and any(one is None or one["role"] != "assistant" for one in parted):
        raise UserError(
            f"{row.where}: chosen and rejected part before an answer of the assistant; give both the same prompt, or "
            "remove the row"
        )
    for name, messages in zip(ANSWERS, answers, strict=True):
        if any(is_wanted(one, f"{row.where}: column {name}") is False for one in messages[parting:]):
            raise UserError(
                f"{row.where}: {name} has an answer of weight 0, but all of an answer is compared; remove its "
                f"{' or '.join(key for key in TRAINING_KEYS if any(key in one for one in messages))}"
            )


def _check_context(row: Row) -> None:
    """Raises UserError if answers that are texts have columns that only messages can follow."""
    if given := [name for name in CONTEXT if row.values.get(name)]:
        raise UserError(
            f"{row.where}: {', '.join(given)} cannot be put before a prompt that is a text; write prompt, chosen and "
            'rejected as messages, [{"role": "user", "content": ...}]'
        )


def _unsaid_prompts(row: Row, columns: tuple[str, ...]) -> list[str]:
    """The columns in which other data sets have the prompt, if their text is not in an answer that comes without one.

    Raises UserError if nothing is left of the prompt.
    """
    chosen = row.values[ANSWERS[0]]
    is_chat = isinstance(chosen, list)
    said = "\n".join(str(one.get("content")) for one in chosen) if is_chat else str(chosen)
    texts = {name: row.values.get(name) for name in PROMPTS if "prompt" not in columns}
    unsaid = [
        name for name, text in texts.items() if isinstance(text, str) and text.strip() and text.strip() not in said
    ]
    if unsaid and not (is_chat and any(one["role"] == "user" for one in chosen)):
        raise UserError(
            f"{row.where}: there is no prompt, and chosen does not contain the text of column {unsaid[0]}; name that "
            "column prompt, or write its text in chosen and rejected"
        )
    return unsaid


def _encode(
    batch: list[Row], columns: tuple[str, ...], answer: str, tokenizer: PreTrainedTokenizerBase, counts: Counter
) -> Iterator[Encoded]:
    """The prompt with one of its answers, of each row."""
    if not isinstance(batch[0].values.get(answer), list):
        return encode_texts(batch, ("prompt", answer) if "prompt" in columns else (answer,), tokenizer, counts)
    rows = []
    for row in batch:
        messages = messages_of(row, answer)
        # A prompt that is a text is said in the messages too; one of messages is in some data sets, and not in others.
        given = messages_of(row, "prompt") if isinstance(row.values.get("prompt"), list) else []
        is_said = messages[: len(given)] == given
        messages = messages if is_said else given + messages
        first = messages[:1] if messages[0]["role"] in ("system", "developer") else []
        whole = with_system(row, [*first, *history_of(row), *messages[len(first) :]])
        rows.append(row._replace(values={answer: whole, "tools": row.values.get("tools")}))
    return encode_chats(rows, tokenizer, counts, answer)


def _write(
    directory: Path, corpus: Corpus, columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> None:
    """Fills a store, in whose rows chosen comes before rejected; the column targets counts those of each."""
    counts = Counter(dict.fromkeys(("pairs", "truncated", "dropped", "empty", "max_length"), 0))
    with TokenWriter(directory, targets=[]) as writer:
        for batch in batches(corpus, columns):
            for row in batch:
                _check_row(row, columns)
                corpus.unused.update(_unsaid_prompts(row, columns))
            both = [_encode(batch, columns, answer, tokenizer, counts) for answer in ANSWERS]
            for chosen, rejected in zip(*both, strict=True):
                if chosen[0][:1] != rejected[0][:1]:  # nothing comes before a first token, so that it cannot count
                    eos = tokenizer.eos_token_id
                    chosen, rejected = (([eos, *ids], [False, *mask]) for ids, mask, _ in (chosen, rejected))
                pair, num_cut, is_early = part_answers(chosen[:2], rejected[:2], sequence_length)
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
                f"({counts['dropped']} rows); give other data, or raise it"
            )
        early = f"{counts['part early']:,} pairs part before their answers: what differs there is not compared"
        early *= bool(counts["part early"])
        writer.finish(counts, **corpus_facts(corpus, columns, counts, tokenizer, early))


def part_answers(
    chosen: tuple[list[int], list[bool]], rejected: tuple[list[int], list[bool]], sequence_length: int
) -> tuple[list[np.ndarray], int, bool]:
    """Both sequences as they are stored, int32, with targets only from where they part; how many were cut; and whether
    the first tokens that differ are no targets."""
    shorter = min(len(chosen[0]), len(rejected[0]))
    differs = np.array(chosen[0][:shorter]) != np.array(rejected[0][:shorter])
    same = int(differs.argmax()) if differs.any() else shorter
    is_early = same < shorter and not (chosen[1][same] and rejected[1][same])
    masked = [(ids, [False] * same + is_target[same:]) for ids, is_target in (chosen, rejected)]
    num_cut = sum(len(ids) > sequence_length + 1 for ids, _ in masked)
    return [mark_targets(*answer, sequence_length) for answer in masked], num_cut, is_early


class Pair(NamedTuple):
    """A sample. Each answer is stored tokens, int32: ~token where it is no target."""

    answers: tuple[np.ndarray, ...]  # chosen, rejected; of a dummy sample, one token
    number: int | None  # of the pair; None of a dummy sample
    reference: np.ndarray  # (2,), the reference's log-probabilities of chosen and rejected; zeros until they are known


class Preferences(TokenStore):
    """Memory-mapped pairs, `batching.Samples`. A target is a pair: the loss is a mean over pairs."""

    unit = "tokens"

    def __init__(self, directory: str | Path, sequence_length: int, reference: str, values: Path | None = None) -> None:
        super().__init__(directory, ANSWERS)
        self.sequence_length, meta = sequence_length, self.meta
        self._targets = self.column("targets").reshape(-1, 2)
        self.num_target_tokens, self.num_dropped = meta["pairs"], meta["dropped"]
        self.max_length = 2 * meta["max_length"]
        self.end_tokens = meta["end_tokens"]
        self.fingerprint = f"{meta['content']}-{sequence_length}"  # equal where every pair is equal
        self.identity = {"reference": reference}  # of a run, beside its data
        self.take_reference(values)

    def take_reference(self, path: Path | None) -> None:
        """From here on samples have the log-probabilities of a .npy file, (pairs, 2)."""
        self._values = path
        self._reference = None if path is None else np.load(path, mmap_mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        return Preferences, (self.directory, self.sequence_length, self.identity["reference"], self._values)

    def __getitem__(self, index: int) -> Pair:
        answers = tuple(map(np.array, self.row(index).values()))
        known = np.zeros(2, np.float32) if self._reference is None else np.array(self._reference[index])
        return Pair(answers, int(index), known)

    def dummy_sample(self) -> Pair:
        """One token, and no pair."""
        pair = self[0]
        return Pair((pair.answers[0][:1],), None, pair.reference)

    def sequence_lengths(self, ids: np.ndarray) -> np.ndarray:
        """Input tokens of the sequences of these pairs, int64 (2 n,), without reading a token."""
        return super().lengths(ids).ravel() - 1

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Input tokens of each pair, both padded to the longer one, int64 (n,)."""
        return 2 * self.sequence_lengths(ids).reshape(-1, 2).max(1)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """One for each pair."""
        return np.ones(len(ids), np.int64)

    def num_predicted(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of the answers of each pair, int64."""
        return self._targets[ids].sum(1)

    def describe(self) -> str:
        """One line for people."""
        meta = self.meta
        line = f"{meta['name']} ({', '.join(meta['columns'])}): {len(self):,} pairs, a prompt with an answer "
        line += f"{meta['tokens'] / len(self) / 2 - 1:,.0f} tokens on average, at most {meta['max_length']}"
        line += f"; {meta['truncated']:,} answers cut at {self.sequence_length}" if meta["truncated"] else ""
        line += f"; {meta['dropped']:,} left out, which do not differ within that length" if meta["dropped"] else ""
        line += f"; {meta['empty']:,} answers are empty: only their end counts" if meta["empty"] else ""
        return f"\n{'':12}".join([line, *meta["notes"]])


def collate_preferences(
    samples: list[Pair], pad_token_id: int, beta: float, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads P pairs on the right into one micro-batch: chosen and rejected by turns, so that a row has a neighbour.

    `input_ids` (2 P, L); `target_tokens` (N,) of all answers, `target_rows` (N,): where in the flattened input each is
    predicted, `target_places` (2 P, T): which of them are an answer's, N where it is shorter. `targets` (P,): ones,
    `target_pairs` (P,): their numbers, `target_reference` (P, 2), and `target_beta`. Integers are int64.

    A pair takes a multiple of `multiple_of`, as its length is counted.
    """
    rows = [stored for sample in samples for stored in sample.answers]
    real = [sample for sample in samples if sample.number is not None]
    length = round_up(max(1, *(len(stored) - 1 for stored in rows)), max(1, multiple_of // 2))
    input_ids = np.full((len(rows), length), pad_token_id, np.int64)
    tokens, places = [], []
    for number, stored in enumerate(rows):
        ids, targets, predicted = split_targets(stored)
        input_ids[number, : max(1, len(ids) - 1)] = ids[: max(1, len(ids) - 1)]
        tokens.append(targets)
        places.append(number * length + predicted)
    ends = np.cumsum([0, *(len(one) for one in tokens)])
    which = np.full((2 * len(real), max(map(len, tokens))), ends[-1])
    for number, row in enumerate(which):
        row[: len(tokens[number])] = np.arange(ends[number], ends[number + 1])
    micro_batch = {
        "input_ids": input_ids,
        "targets": np.ones(len(real), np.float32),
        "target_tokens": np.concatenate(tokens),
        "target_rows": np.concatenate(places),
        "target_places": which,
        "target_pairs": np.array([sample.number for sample in real], np.int64),
        "target_reference": np.array([one.reference for one in real], samples[0].reference.dtype).reshape(-1, 2),
    }
    micro_batch = {name: torch.from_numpy(one) for name, one in micro_batch.items()}
    return micro_batch | {"target_beta": torch.tensor(beta)}
