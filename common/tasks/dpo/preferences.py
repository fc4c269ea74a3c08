"""How do preferences become samples? A pair is two sequences that part somewhere: one is chosen, one is rejected.

    pairs = tokenize_preferences(Source(files=("train.jsonl",)), tokenizer, length=512)
    micro_batch = collate_preferences([pairs[0], pairs[1]], tokenizer.pad_token_id, beta=0.1)

Tokenised once into the cache: one flat int32 file, chosen and rejected by turns. As in `text`, a token that is no
target is stored as its bitwise complement. The targets are those of the answers, from where the two sequences part:
before, the same tokens follow the same tokens, their log-probabilities are equal, and the loss has only differences.
"""

import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached, hash_files, with_progress
from common.data.chats import Encoded, chat_notes, check_answers, encode_chats
from common.data.column_selection import batches, check_columns, unused_columns, watched
from common.data.messages import TRAINING_KEYS, history_of, is_wanted, messages_of, with_system
from common.data.source_types import Corpus, Row, Source
from common.data.sources import open_source
from common.data.standard_library import parse_function
from common.data.text import encode_texts
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
    corpus = open_source(source)
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
    check_columns(corpus, ANSWERS)
    columns = tuple(name for name in ("prompt", *ANSWERS) if name in corpus.columns)
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

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for row in corpus.rows((text_column,), False):
            if parts := split_body(row.values[text_column]):
                prompt, body = parts
                backwards = "\n".join(body.strip("\n").split("\n")[::-1]) + "\n"
                yield Row(row.where, {"prompt": prompt, "chosen": body, "rejected": backwards})

    return replace(corpus, columns=("prompt", *ANSWERS), rows=rows)


def split_body(function: str) -> tuple[str, str] | None:
    """(a Python function's lines to the end of its docstring, its body), or None where there is no docstring."""
    node = parse_function(function)
    if node is None or len(node.body) == 1 or not ast.get_docstring(node, clean=False):
        return None
    lines, end = function.split("\n"), node.body[0].end_lineno
    if node.body[1].lineno == end:  # on one line
        return None
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
    """tokens.bin (int32), offsets.bin (int64; the ends of chosen and rejected by turns, after a 0), targets.bin (int64,
    of each sequence), and meta.json."""
    counts, is_chat = Counter(), False
    files = [directory / f"{name}.bin" for name in ("tokens", "offsets", "targets")]
    with open(files[0], "wb") as tokens, open(files[1], "wb") as offsets, open(files[2], "wb") as targets:
        offsets.write(bytes(8))
        for batch in batches(with_progress(corpus.rows(columns, False), corpus.name)):
            for row in batch:
                _check_row(row, columns)
                corpus.unused.update(_unsaid_prompts(row, columns))
            is_chat = isinstance(batch[0].values.get(ANSWERS[0]), list)
            both = [_encode(batch, columns, answer, tokenizer, counts) for answer in ANSWERS]
            for chosen, rejected in zip(*both, strict=True):
                if chosen[0][:1] != rejected[0][:1]:  # nothing comes before a first token, so that it cannot count
                    eos = tokenizer.eos_token_id
                    chosen, rejected = (([eos, *ids], [False, *mask]) for ids, mask, _ in (chosen, rejected))
                counts["part early"] += _part_early(chosen, rejected)
                pair, num_cut = part_answers(chosen[:2], rejected[:2], sequence_length)
                if not any((stored >= 0).any() for stored in pair):
                    counts["dropped"] += 1
                    continue
                counts["pairs"] += 1
                counts["truncated"] += num_cut
                counts["max_length"] = max(counts["max_length"], *(len(stored) - 1 for stored in pair))
                for stored in pair:
                    tokens.write(stored.tobytes())
                    counts["tokens"] += len(stored)
                    offsets.write(np.int64(counts["tokens"]).tobytes())
                    targets.write(np.int64((stored >= 0).sum()).tobytes())
    if not counts["pairs"]:
        raise UserError(
            f"{corpus.name}: no pair of answers that differ within --sequence_length {sequence_length} "
            f"({counts['dropped']} rows); give other data, or raise it"
        )
    check_answers(counts, corpus.name)
    ends = [token for token, _ in counts.most_common() if isinstance(token, int)]
    early = f"{counts['part early']:,} pairs part before their answers: what differs there is not compared"
    names = ("pairs", "tokens", "truncated", "dropped", "empty", "max_length")
    meta = {name: counts[name] for name in names} | {
        "name": corpus.name,
        "columns": columns,
        "notes": [*chat_notes(counts), *filter(None, [early * bool(counts["part early"]), unused_columns(corpus)])],
        "end_tokens": ends if is_chat else [tokenizer.eos_token_id],
        "content": hash_files(directory),
    }
    (directory / "meta.json").write_text(json.dumps(meta, indent=1))


def _part_early(*pair: Encoded) -> bool:
    """Whether the first tokens that differ are no targets."""
    for one, other in zip(*(zip(ids, mask, strict=True) for ids, mask, *_ in pair), strict=False):
        if one[0] != other[0]:
            return not (one[1] and other[1])
    return False


def part_answers(
    chosen: tuple[list[int], list[bool]], rejected: tuple[list[int], list[bool]], sequence_length: int
) -> tuple[list[np.ndarray], int]:
    """Both sequences as they are stored, int32, with targets only from where they part; and how many were cut."""
    pair, num_cut = [], 0
    for ids, is_target in (chosen, rejected):
        stored = np.array(ids[: sequence_length + 1], np.int32)
        mask = np.array(is_target[: sequence_length + 1], bool)
        mask[:1] = False  # nothing comes before it
        pair.append((stored, mask))
        num_cut += len(ids) > len(stored)
    shorter = min(len(stored) for stored, _ in pair)
    differs = pair[0][0][:shorter] != pair[1][0][:shorter]
    same = int(differs.argmax()) if differs.any() else shorter
    for _, mask in pair:
        mask[:same] = False
    return [np.where(mask, stored, ~stored) for stored, mask in pair], num_cut


class Pair(NamedTuple):
    """A sample. Each answer is stored tokens, int32: ~token where it is no target."""

    answers: tuple[np.ndarray, ...]  # chosen, rejected; of a dummy sample, one token
    number: int | None  # of the pair; None of a dummy sample
    reference: np.ndarray  # (2,), the reference's log-probabilities of chosen and rejected; zeros until they are known


class Preferences:
    """Memory-mapped pairs, `batching.Samples`. A target is a pair: the loss is a mean over pairs."""

    unit = "tokens"

    def __init__(self, directory: str | Path, sequence_length: int, reference: str, values: Path | None = None) -> None:
        self.directory, self.sequence_length = Path(directory), sequence_length
        self.meta = meta = json.loads((self.directory / "meta.json").read_text())
        self._tokens = np.memmap(self.directory / "tokens.bin", np.int32, "r")
        self._offsets = np.memmap(self.directory / "offsets.bin", np.int64, "r")
        self._targets = np.memmap(self.directory / "targets.bin", np.int64, "r")
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
        # A DataLoader's worker maps the files itself.
        return Preferences, (self.directory, self.sequence_length, self.identity["reference"], self._values)

    def __len__(self) -> int:
        return self.meta["pairs"]

    def __getitem__(self, index: int) -> Pair:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        start, middle, end = (int(offset) for offset in self._offsets[2 * index : 2 * index + 3])
        answers = np.array(self._tokens[start:middle]), np.array(self._tokens[middle:end])
        known = np.zeros(2, np.float32) if self._reference is None else np.array(self._reference[index])
        return Pair(answers, index, known)

    def dummy_sample(self) -> Pair:
        """One token, and no pair."""
        pair = self[0]
        return Pair((pair.answers[0][:1],), None, pair.reference)

    def sequence_lengths(self, ids: np.ndarray) -> np.ndarray:
        """Input tokens of the sequences of these pairs, int64 (2 n,), without reading a token."""
        ends = self._offsets[2 * np.asarray(ids, np.int64)[:, None] + np.arange(3)]
        return np.diff(ends, axis=1).ravel() - 1

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Input tokens of each pair, both padded to the longer one, int64 (n,)."""
        return 2 * self.sequence_lengths(ids).reshape(-1, 2).max(1)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """One for each pair."""
        return np.ones(len(ids), np.int64)

    def num_predicted(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of the answers of each pair, int64."""
        return self._targets[2 * np.asarray(ids, np.int64)[:, None] + np.arange(2)].sum(1)

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
    for row, stored in zip(input_ids, rows, strict=True):
        read = np.where(stored < 0, ~stored, stored)[: max(1, len(stored) - 1)]
        row[: len(read)] = read
    for number, stored in enumerate(rows):
        predicted = np.flatnonzero(stored[1:] >= 0)
        tokens.append(stored[predicted + 1].astype(np.int64))
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
