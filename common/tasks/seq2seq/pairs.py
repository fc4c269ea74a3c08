"""How do pairs of texts become the samples of an encoder-decoder model? A source is read, a target is learned.

    pairs = tokenize_pairs(Source(files=("train.jsonl",)), ("source", "target"), tokenizer, 512, 128)
    source, target = pairs[0]
    micro_batch = collate_pairs([pairs[0], pairs[1]], tokenizer.pad_token_id, config.decoder_start_token_id)

Tokenised once into the cache: one flat int32 file of tokens, source and target by turns, and where each begins.
"""

import ast
import inspect
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached, hash_files, with_progress
from common.data.column_selection import batches, check_columns, filled_text, unused_columns, watched
from common.data.mixed import Mixed
from common.data.source_types import Corpus, Row, Source
from common.data.sources import open_source
from common.data.standard_library import parse_function
from common.data.tokenizer import no_more_threads, tokenizer_identity
from common.errors import UserError
from common.training.batching import pad_rows


def tokenize_pairs(
    source: Source,
    columns: tuple[str, str],
    tokenizer: PreTrainedTokenizerBase,
    source_length: int,
    target_length: int,
    cache_dir: str | Path | None = None,
) -> "Pairs | Mixed":
    """Tokenises the rows of a source once and opens the result; of many processes one works and the others wait.

    columns: of a row, its source and its target. In their place the embedded corpus has a function without its
        docstring, and the docstring's first line.
    source_length, target_length: most tokens of each, special ones included; what is longer is cut at its end.

    Special tokens are the tokenizer's own. A target without the eos token gets one, or a model would never stop.

    Raises UserError that names file and place for whatever cannot be read, and for a source or target that is empty.
    """
    if source.parts:
        how = (columns, tokenizer, source_length, target_length, cache_dir)
        return Mixed({part.files[0]: tokenize_pairs(part, *how) for part in source.parts}, source.weights)
    corpus = open_source(source)
    if source.embedded:
        corpus = docstring_corpus(corpus, source.text_column, columns)
    check_columns(corpus, columns, "--source_column, --target_column")
    corpus = watched(corpus, columns)
    lengths = (source_length, target_length)
    directory = cached(
        "pairs",
        [corpus.identity, columns, tokenizer_identity(tokenizer), lengths],
        lambda partial: _write_pairs(partial, corpus, columns, tokenizer, lengths),
        cache_dir,
    )
    no_more_threads()
    return Pairs(directory)


def docstring_corpus(corpus: Corpus, text_column: str, columns: tuple[str, str]) -> Corpus:
    """The embedded corpus as pairs: each function without its docstring, and the docstring's first line."""

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        for row in corpus.rows((text_column,), False):
            if pair := split_docstring(row.values[text_column]):
                yield Row(row.where, dict(zip(columns, pair, strict=True)))

    return replace(corpus, columns=columns, rows=rows)


def split_docstring(function: str) -> tuple[str, str] | None:
    """(a Python function's source without its docstring, the docstring's first line), or None where there is none."""
    if (node := parse_function(function)) is None:
        return None
    docstring = ast.get_docstring(node, clean=False)
    if not (docstring and docstring.strip()) or len(node.body) == 1:  # without a body nothing is left to read
        return None
    lines, expression = function.split("\n"), node.body[0]
    if node.lineno == expression.lineno or node.body[1].lineno == expression.end_lineno:  # all on one line
        return None
    rest = lines[: expression.lineno - 1] + lines[expression.end_lineno :]
    return "\n".join(rest), inspect.cleandoc(docstring).split("\n")[0].strip()


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int, is_target: bool
) -> tuple[list[list[int]], int]:
    """The tokens of each text, at most `length`, and how many texts were cut."""

    def tokens(texts: list[str], **options: Any) -> list[list[int]]:
        # Of some models (Marian) the target's language has a vocabulary of its own.
        given = {"text_target" if is_target else "text": texts}
        return tokenizer(**given, return_attention_mask=False, verbose=False, **options)["input_ids"]

    eos = tokenizer.eos_token_id
    ids, num_cut = tokens(texts), 0
    for number, text in enumerate(texts):
        has_eos = not is_target or eos in ids[number][1:]  # some tokenizers begin with it
        if len(ids[number]) + (not has_eos) > length:
            num_cut += 1  # by the tokenizer, which keeps its special tokens where they belong
            ids[number] = tokens([text], truncation=True, max_length=length - (not has_eos))[0]
        ids[number] = ids[number] if has_eos else [*ids[number], eos]
    return ids, num_cut


def _write_pairs(
    directory: Path,
    corpus: Corpus,
    columns: tuple[str, str],
    tokenizer: PreTrainedTokenizerBase,
    lengths: tuple[int, int],
) -> None:
    """tokens.bin (int32), offsets.bin (int64; the ends of source and target by turns, after a 0), and meta.json."""
    counts: Counter[str] = Counter()
    with open(directory / "tokens.bin", "wb") as tokens, open(directory / "offsets.bin", "wb") as offsets:
        offsets.write(bytes(8))
        for batch in batches(with_progress(corpus.rows(columns, False), corpus.name)):
            encoded = []
            for column, length, is_target in zip(columns, lengths, (False, True), strict=True):
                texts = [filled_text(row, column) for row in batch]
                ids, num_cut = _encode(tokenizer, texts, length, is_target)
                counts["targets_cut" if is_target else "sources_cut"] += num_cut
                encoded.append(ids)
            for row, *pair in zip(batch, *encoded, strict=True):
                if not pair[0]:
                    raise UserError(f"{row.where}: column {columns[0]} makes no token; mend or remove the row")
                for ids, name in zip(pair, ("sources", "targets"), strict=True):
                    tokens.write(np.array(ids, np.int32).tobytes())
                    counts[name] += len(ids)
                    offsets.write(np.int64(counts["sources"] + counts["targets"]).tobytes())
                counts["pairs"] += 1
                counts["max_length"] = max(counts["max_length"], len(pair[0]) + len(pair[1]))
    if not counts["pairs"]:
        raise UserError(f"{corpus.name}: no pair of {' and '.join(columns)} in it; give other data")
    facts = {"name": corpus.name, "columns": columns, "lengths": lengths, "content": hash_files(directory)}
    facts["unused"] = unused_columns(corpus)
    (directory / "meta.json").write_text(json.dumps(facts | counts, indent=1))


Pair = tuple[np.ndarray, np.ndarray]


class Pairs:
    """Memory-mapped pairs, `batching.Samples`. Item i is (source, target), int64 (length,) each; eos included.

    The work of a pair is that of its source and its target together.
    """

    unit = "tokens"

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.meta = meta = Counter(json.loads((self.directory / "meta.json").read_text()))
        self._tokens = np.memmap(self.directory / "tokens.bin", np.int32, "r")
        self._offsets = np.memmap(self.directory / "offsets.bin", np.int64, "r")
        self.num_target_tokens = meta["targets"]
        self.max_length = meta["max_length"]  # of a source and its target together
        self.fingerprint = meta["content"]  # equal where every pair is equal, wherever the text lies

    def __reduce__(self) -> tuple[Any, ...]:
        return Pairs, (self.directory,)  # a DataLoader's worker maps the files itself

    def __len__(self) -> int:
        return self.meta["pairs"]

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        start, middle, end = (int(offset) for offset in self._offsets[2 * index : 2 * index + 3])
        return self._tokens[start:middle].astype(np.int64), self._tokens[middle:end].astype(np.int64)

    def dummy_sample(self) -> Pair:
        """A source of one token, and no target."""
        return self[0][0][:1], np.zeros(0, np.int64)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of source and target of each pair, int64 (n, 2), without reading a token."""
        ends = self._offsets[2 * np.asarray(ids, np.int64)[:, None] + np.arange(3)]
        return np.diff(ends, axis=1)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Target tokens of each pair, int64."""
        return self.lengths(ids)[:, 1]

    def describe(self) -> str:
        """One line for people."""
        meta = self.meta
        line = f"{meta['name']} ({' to '.join(meta['columns'])}): {len(self):,} pairs of "
        line += f"{meta['sources'] / len(self):,.0f} and {meta['targets'] / len(self):,.1f} tokens on average"
        line += f"; {self.num_target_tokens:,} targets"
        for number, name in enumerate(("sources", "targets")):
            if meta[f"{name}_cut"]:
                line += f"; {meta[f'{name}_cut']:,} {name} cut at {meta['lengths'][number]}"
        return line + (f"\n{'':12}{meta['unused']}" if meta["unused"] else "")


def collate_pairs(
    samples: list[Pair], pad_token_id: int, decoder_start_token_id: int, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads sources and targets on the right, each to their longest, into one micro-batch; all int64.

    `input_ids` (B, S) and, where there is padding, `attention_mask` (B, S); `decoder_input_ids` (B, T): the targets one
    place to the right, behind the token that starts the decoder. `targets` (N,), and `target_rows` (N,): where in the
    flattened (B * T,) decoder each is predicted. The encoder looks both ways and needs the mask; no real token of a
    causal decoder sees its padding.
    """
    sources, targets = ([torch.from_numpy(ids) for ids in texts] for texts in zip(*samples, strict=True))
    pad = partial(pad_rows, multiple_of=multiple_of)
    start = torch.tensor([decoder_start_token_id])
    attention_mask, is_target = (pad([torch.ones_like(ids) for ids in texts]) for texts in (sources, targets))
    micro_batch = {
        "input_ids": pad(sources, padding_value=pad_token_id),
        # Of a dummy sample, which has no target, one place.
        "decoder_input_ids": pad([torch.cat([start, ids[:-1]]) for ids in targets], padding_value=pad_token_id),
        "targets": torch.cat(targets),
        "target_rows": is_target.flatten().nonzero()[:, 0],
    }
    return micro_batch if attention_mask.all() else micro_batch | {"attention_mask": attention_mask}
