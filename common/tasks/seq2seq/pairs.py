"""Turns pairs of texts into samples of an encoder-decoder model, which reads a source and is trained on a target.

pairs = tokenize_pairs(Source(files=("train.jsonl",)), ("source", "target"), tokenizer, 512, 128)
micro_batch = collate_pairs([pairs[0], pairs[1]], tokenizer.pad_token_id, config.decoder_start_token_id)
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached
from common.data.column_checks import unused_columns
from common.data.empty_rows import no_row_left, text_batches
from common.data.python_functions import derived_corpus, find_docstring, first_line
from common.data.source_types import Corpus, Source, name_and_columns
from common.data.sources import check_columns, open_source
from common.data.token_store import TokenStore, TokenWriter
from common.data.tokenizer import no_more_threads, tokenizer_identity
from common.data.too_long import is_left_out
from common.training.token_rows import pad_rows

if TYPE_CHECKING:
    from common.data.mixed import Mixed

NAMES = ("source", "target")
FLAGS = ("sequence_length", "target_length")  # that limit their tokens
FORMAT = 2  # increase this when the meaning of a cached file changes


def tokenize_pairs(
    source: Source,
    columns: tuple[str, str],
    tokenizer: PreTrainedTokenizerBase,
    source_length: int,
    target_length: int,
    cache_dir: str | Path | None = None,
) -> "Pairs | Mixed":
    """Tokenises the rows of a source once into the cache and opens the result.

    The tokenizer adds its special tokens. If it adds no eos token to a target, eos is appended, because otherwise the
    model would never stop. A pair with an empty source or target is left out.

    Args:
        columns: the columns of source and target. In the embedded corpus, the source is a function without its
            docstring, and the target is the first line of the docstring.
        source_length, target_length: maximum number of tokens, including special tokens; longer texts are truncated.

    Raises UserError with file and location if something cannot be read or is no text.
    """
    if source.parts:
        from common.data.mixed import Mixed

        options = (columns, tokenizer, source_length, target_length, cache_dir)
        return Mixed({part.files[0]: tokenize_pairs(part, *options) for part in source.parts}, source.weights)
    corpus = open_source(source)
    if source.embedded:
        corpus = docstring_corpus(corpus, source.text_column, columns)
    check_columns(corpus, columns, "--source_column, --target_column")
    lengths = (source_length, target_length)
    directory = cached(
        "pairs",
        [FORMAT, corpus.identity, columns, tokenizer_identity(tokenizer), lengths, source.on_too_long],
        lambda partial: _write_pairs(partial, corpus, columns, tokenizer, lengths, source.on_too_long),
        cache_dir,
    )
    no_more_threads()
    return Pairs(directory)


def docstring_corpus(corpus: Corpus, text_column: str, columns: tuple[str, str]) -> Corpus:
    """Returns the embedded corpus as pairs: each function without its docstring, and the docstring's first line."""
    return derived_corpus(corpus, text_column, columns, split_docstring)


def split_docstring(function: str) -> tuple[str, str] | None:
    """Returns (a function's source without its docstring, the docstring's first line), or None without a docstring."""
    docstring, start, end = find_docstring(function) or ("", 0, 0)
    if not docstring.strip():
        return None
    lines = function.split("\n")
    return "\n".join(lines[:start] + lines[end:]), first_line(docstring)


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int, is_target: bool
) -> tuple[list[list[int]], dict[int, int]]:
    """Returns the tokens of each text, at most `length`, and {index: tokens without truncation} of truncated texts."""

    def tokens(texts: list[str], **options: Any) -> list[list[int]]:
        # Some models (Marian) have a separate vocabulary for the target language.
        options |= {"text_target" if is_target else "text": texts, "return_attention_mask": False, "verbose": False}
        return tokenizer(**options)["input_ids"]

    eos = tokenizer.eos_token_id
    ids, too_long = tokens(texts), {}
    for number, text in enumerate(texts):
        has_eos = not is_target or eos in ids[number][1:]  # [1:]: some tokenizers begin with eos
        if len(ids[number]) + (not has_eos) > length:
            too_long[number] = len(ids[number]) + (not has_eos)
            # Truncated by the tokenizer, which keeps its special tokens in place.
            ids[number] = tokens([text], truncation=True, max_length=length - (not has_eos))[0]
        ids[number] = ids[number] if has_eos else [*ids[number], eos]
    return ids, too_long


def _write_pairs(
    directory: Path,
    corpus: Corpus,
    columns: tuple[str, str],
    tokenizer: PreTrainedTokenizerBase,
    lengths: tuple[int, int],
    on_too_long: str | None,
) -> None:
    """Fills a store with rows of (source, target)."""
    counts = Counter(dict.fromkeys(("pairs", "max_length", "too_long", "empty"), 0))
    with TokenWriter(directory) as writer:
        for batch in text_batches(corpus, columns, columns, counts):
            texts = [[texts[n] for _, texts in batch] for n in range(2)]
            both = [_encode(tokenizer, texts[n], lengths[n], name == "target") for n, name in enumerate(NAMES)]
            for number, ((row, _), *pair) in enumerate(zip(batch, *(ids for ids, _ in both), strict=True)):
                if not pair[0]:  # only characters that the tokenizer drops
                    counts["empty"] += 1
                    continue
                # By position in the pair: the number of tokens of a text that is too long.
                too_long = {n: full[number] for n, (_, full) in enumerate(both) if number in full}
                limits = [(columns[n], full, FLAGS[n], lengths[n]) for n, full in too_long.items()]
                if any(is_left_out(on_too_long, row.where, *limit) for limit in limits):
                    counts["too_long"] += 1
                    continue
                writer.append(*pair)
                counts["pairs"] += 1
                counts["max_length"] = max(counts["max_length"], sum(map(len, pair)))
                for n, name in enumerate(NAMES):
                    counts[f"{name}s_cut"] += n in too_long
                    counts[f"{name}s"] += len(pair[n])
        if not counts["pairs"]:
            reasons = {"have too many tokens": counts["too_long"], "have an empty text": counts["empty"]}
            raise no_row_left(corpus, columns, reasons)
        unused = unused_columns(corpus)
        writer.finish(counts, name=corpus.name, columns=columns, lengths=lengths, unused=unused)


Pair = tuple[np.ndarray, np.ndarray]


class Pairs(TokenStore):
    """Memory-mapped pairs, `batching.Samples`. Item i is (source, target), int64 (length,) each, including eos.

    `lengths` returns both lengths of a pair (n, 2), because the work depends on source and target together.
    """

    unit = "tokens"

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory, NAMES)
        self.num_target_tokens = self.meta["targets"]
        self.max_length = self.meta["max_length"]  # source plus target
        self.fingerprint = self.meta["content"]  # equal if all pairs are equal, independent of the file location

    def __reduce__(self) -> tuple[Any, ...]:
        return Pairs, (self.directory,)

    def __getitem__(self, index: int) -> Pair:
        source, target = self.row(index).values()
        return source.astype(np.int64), target.astype(np.int64)

    def dummy_sample(self) -> Pair:
        """Returns a source of one token, without a target."""
        return self[0][0][:1], np.zeros(0, np.int64)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of target tokens of each pair, int64."""
        return self.lengths(ids)[:, 1]

    def describe(self) -> str:
        """Returns the description of the pairs for the run summary."""
        meta = self.meta
        line = f"{name_and_columns(meta)}: {len(self):,} pairs of "
        line += f"{meta['sources'] / len(self):,.1f} and {meta['targets'] / len(self):,.1f} tokens on average"
        line += f"; {self.num_target_tokens:,} targets"
        for name, length in zip(NAMES, meta["lengths"], strict=True):
            if number := meta[f"{name}s_cut"]:
                line += f"; {number:,} {name}{'s' * (number > 1)} truncated at {length}"
        line += f"; {meta['too_long']:,} pairs of more tokens left out" if meta["too_long"] else ""
        line += f"; {meta['empty']:,} pairs with an empty text left out" if meta["empty"] else ""
        return line + (f"\n{'':12}{meta['unused']}" if meta["unused"] else "")


def collate_pairs(
    samples: list[Pair], pad_token_id: int, decoder_start_token_id: int, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads sources to the longest source and targets to the longest target, on the right, into one micro-batch.

    The encoder is bidirectional and needs a mask. The decoder is causal, so its real tokens do not attend to padding.

    Returns (all int64):
        `input_ids` (B, S) and, if there is padding, `attention_mask` (B, S).
        `decoder_input_ids` (B, T): the targets shifted right by one, after the decoder's start token.
        `targets` (N,), and `target_rows` (N,): the positions in the flattened (B * T,) decoder input that predict them.
    """
    sources, targets = ([torch.from_numpy(ids) for ids in texts] for texts in zip(*samples, strict=True))
    pad = partial(pad_rows, multiple_of=multiple_of)
    start = torch.tensor([decoder_start_token_id])
    attention_mask, is_target = (pad([torch.ones_like(ids) for ids in texts]) for texts in (sources, targets))
    micro_batch = {
        "input_ids": pad(sources, padding_value=pad_token_id),
        # A dummy sample has no target and occupies one position.
        "decoder_input_ids": pad([torch.cat([start, ids[:-1]]) for ids in targets], padding_value=pad_token_id),
        "targets": torch.cat(targets),
        "target_rows": is_target.flatten().nonzero()[:, 0],
    }
    return micro_batch if attention_mask.all() else micro_batch | {"attention_mask": attention_mask}
