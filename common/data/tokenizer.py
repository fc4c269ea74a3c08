"""Trains a byte-level BPE tokenizer on the training text, and handles the special tokens of any tokenizer."""

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.data.cache import cached
from common.data.row_texts import Batches, batches, text_of
from common.data.source_types import Corpus, Source
from common.data.sources import check_columns, choose_columns, open_source
from common.errors import UserError

END_OF_TEXT = "<|endoftext|>"
MARKER = re.compile(r"<\|\w+\|>")  # marks a turn in most chat templates
CHAT_COLUMNS = {"messages", "conversations", "conversation", "instruction"}  # that `chat_formats` converts
Encoded = tuple[list[int], list[bool], str]  # a sample's tokens, a mask of possible targets, its text


def load_tokenizer(
    name_or_path: str, trust_remote_code: bool = False, needs_end_of_text: bool = True
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a local directory or the hub; see `pretrained_tokenizer.load`."""
    from common.data.pretrained_tokenizer import load

    return load(name_or_path, trust_remote_code, needs_end_of_text)


def open_text(source: Source, shape: str | None, has_template: bool) -> tuple[Corpus, str, tuple[str, ...]]:
    """Opens a source and converts known chat formats; returns (corpus, shape, columns), see `choose_columns`."""
    corpus = open_source(source)
    if CHAT_COLUMNS & set(corpus.columns):
        from common.data.chat_formats import with_known_format

        corpus = with_known_format(corpus, source, shape, has_template)
    return corpus, *choose_columns(corpus, source, shape)


def train_tokenizer(
    source: Source,
    vocab_size: int,
    cache_dir: str | Path | None = None,
    columns: tuple[str, ...] | None = None,
    flags: str = "",
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on the first 200 MB of the source's text, or loads it from the cache.

    Each mixed source contributes at most an equal part of the 200 MB, independent of its weight. The same text yields
    the same tokenizer with any number of threads. Turn markers of the chat template, such as <|im_start|>, become
    special tokens. <|endoftext|> is bos, eos and pad; the tokenizer adds it before every text.
    Raises UserError: the source cannot be read or lacks a column.

    Args:
        vocab_size: at least 257, for the 256 bytes and <|endoftext|>.
        columns: the columns with the text; None: those that `tokenize` reads.
        flags: the flags that select the columns, for messages.
    """
    texts = []  # per source: a corpus and its columns
    for part in source.parts or (source,):
        if columns is None:
            corpus, _, wanted = open_text(part, None, bool(source.chat_template))
        else:
            corpus, wanted = open_source(part), columns
            check_columns(corpus, wanted, flags)
        texts.append((corpus, wanted))
    markers = sorted(set(MARKER.findall(source.chat_template or "")) - {END_OF_TEXT})
    identity = [item for corpus, wanted in texts for item in (corpus.identity, wanted)]

    def train(directory: Path) -> None:
        from common.data.tokenizer_training import train_bpe

        train_bpe(texts, vocab_size, [END_OF_TEXT, *markers]).save_pretrained(directory)

    directory = cached("tokenizer", [*identity, vocab_size, *markers], train, cache_dir)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.chat_template = source.chat_template
    return tokenizer


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Returns all settings of a tokenizer that affect the tokens of a text, as JSON values."""
    if tokenizer.is_fast:
        settings: Any = json.loads(tokenizer.backend_tokenizer.to_str())
        settings.pop("padding"), settings.pop("truncation")  # left over from the most recent call
    else:
        settings = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    return [settings, special_tokens_around(tokenizer), tokenizer.eos_token_id, tokenizer.chat_template]


def no_more_threads() -> None:
    """Disables the threads of tokenizers, because every DataLoader worker forked later would print a warning."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def encode_plain(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> Any:
    """Returns the tokenizer's output without the special tokens that most tokenizers add (`special_tokens_around`)."""
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)


def encoded_batches(corpus: Corpus, columns: tuple[str, ...], tokenizer: Any, whole_files: bool = False) -> Batches:
    """Yields the `batches` of a corpus, encoded. Raises UserError: a row has no text in one of the columns."""
    rows = batches(corpus, columns, whole_files)
    if corpus.may_be_large:
        from common.data.encoding_threads import encode_ahead

        special_tokens_around(tokenizer)  # afterwards it neither truncates nor pads, so the threads change no setting
        yield from encode_ahead(rows, columns, tokenizer, encode_plain)
    for batch in rows:  # `encode_ahead` leaves none
        texts = [[text_of(row, column) for row in batch] for column in columns]
        yield batch, texts, [encode_plain(tokenizer, column)["input_ids"] for column in texts]


def with_end_of_text(ids: list[int], eos: int) -> list[int]:
    """Returns the ids with the eos token at the end; some tokenizers already add it."""
    return ids if ids[-1:] == [eos] else [*ids, eos]


def special_tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns (before, after): the special tokens that `tokenizer(text)` adds around a text.

    Training adds exactly these tokens, as `tokenizer(text)` does at inference; a bos token is not always among them.
    Raises UserError: the tokenizer encodes the text differently when it adds special tokens.
    """
    texts = itertools.chain(["a"], (str(tokenizer.decode([token])) for token in range(len(tokenizer))))
    text = next(text for text in texts if encode_plain(tokenizer, [text])["input_ids"][0])
    own, whole = encode_plain(tokenizer, [text])["input_ids"][0], tokenizer(text)["input_ids"]
    for start in range(len(whole) - len(own) + 1):
        if whole[start : start + len(own)] == own:
            return whole[:start], whole[start + len(own) :]
    raise UserError(f"{type(tokenizer).__name__} tokenizes a text differently with special tokens; use a different one")


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns the ids of the tokens that begin, end and pad a text, by their names in a model's configuration."""
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
