"""Text becomes samples: the tokenizer, tokenising once into a cache, and memory-mapped samples.

    tokenizer = train_tokenizer(Source(embedded="train"), vocab_size=8192)
    samples = tokenize(Source(embedded="train"), tokenizer, sequence_length=512)
    input_ids, targets = samples[0]

The cache holds one flat int32 file of tokens. A token that is not a target (a prompt's, a user's turn's, the first of
all) is stored as its bitwise complement ~token, which is negative: one file says both what is read and what is learned.
"""

import hashlib
import itertools
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from common.corpus import Corpus, Row, Source, check_sources, missing_column, open_source
from common.errors import UserError, one_line
from common.files import complete_or_absent
from common.hub import locate_pretrained

__all__ = [
    "Samples",
    "Source",
    "check_sources",
    "checked_text",
    "default_cache_dir",
    "load_tokenizer",
    "tokenize",
    "train_tokenizer",
]

FORMAT = 3  # in every fingerprint: raise it when the files' meaning changes
END_OF_TEXT = "<|endoftext|>"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # by which a chat template marks what the assistant says
MANIFEST = "sizes.json"  # the size of every file beside it
SHAPES = ("blocks", "examples")
PAIR = ("prompt", "completion")
# What other data sets call these two.
PAIRS_ELSEWHERE = (
    ("prompt", "instruction", "question", "query", "problem", "input", "user", "source"),
    ("completion", "output", "response", "answer", "solution", "chosen", "assistant", "target"),
)
BATCH_CHARACTERS = 1 << 20  # text handed to the tokenizer at once: it needs some 100 bytes a token for the time being
TOKENIZER_BYTES = 200_000_000  # a tokenizer is trained on at most this much text
COMPRESSED_BYTES = 64 << 20  # xz takes a minute for this; more held-out text than that is not compressed

Encoded = tuple[list[int], list[bool], int]  # a sample's tokens, which of them may be targets, bytes of its text


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/accelerate_recipes, else ~/.cache/accelerate_recipes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelerate_recipes"


# --- tokenizers ------------------------------------------------------------------------------------------------------


def load_tokenizer(
    name_or_path: str, trust_remote_code: bool = False, needs_end_of_text: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer of a local directory or of the hub, with a pad token (the end-of-text token if it has none).

    Raises UserError, one line, where it is not found, cannot be loaded, or has no end-of-text token. An encoder's
    needs none (`needs_end_of_text`) if it has a pad token.
    """
    where, problem = locate_pretrained(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)
    except Exception as error:  # a dozen types, by what is missing
        raise UserError(f"tokenizer {name_or_path}: {problem or one_line(error)}") from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):  # the library makes an empty one of no files
        raise UserError(f"tokenizer {name_or_path}: its files are missing; save it there (tokenizer.save_pretrained)")
    if needs_end_of_text or tokenizer.pad_token_id is None:
        _check_end_of_text(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_tokenizer(
    source: Source, vocab_size: int, cache_dir: str | Path | None = None, columns: tuple[str, ...] | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the source's text (of its first 200 MB): every text survives encoding and decoding.

    columns: that hold the text; without them, those of which `tokenize` makes samples.

    The same text gives the same tokenizer, whatever the number of threads. <|endoftext|> is bos, eos and pad, and the
    tokenizer puts it before every text, as it stands between the documents of a block. Kept in the cache.

    Raises UserError for a vocabulary that cannot hold the 256 bytes, and for what is wrong with the source.
    """
    if vocab_size < 257:
        raise UserError(f"a vocabulary of {vocab_size} does not hold 256 bytes and {END_OF_TEXT}; use at least 257")
    corpus = open_source(source)
    if columns is None:
        _, columns = _choose_columns(corpus, source, None)
    elif missing := [column for column in columns if column not in corpus.columns]:
        raise UserError(missing_column(corpus.name, missing, corpus.columns))
    directory = cached(
        "tokenizer",
        ["tokenizer", FORMAT, corpus.identity, columns, vocab_size],
        lambda partial: _train_bpe(corpus, columns, vocab_size).save_pretrained(partial),
        cache_dir,
    )
    return PreTrainedTokenizerFast.from_pretrained(directory)


def _train_bpe(corpus: Corpus, columns: tuple[str, ...], vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all 256 bytes, in an order that does not change
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        left = TOKENIZER_BYTES
        for row in corpus.rows(columns, True):
            for text in _all_texts(row, columns):
                left -= _num_bytes(text, row.where)
                # the library gathers 256 items before it works on them: keep each small
                yield from (text[start : start + 65536] for start in range(0, len(text), 65536))
            if left < 0:
                return

    bpe.train_from_iterator(texts(), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, bpe.token_to_id(END_OF_TEXT))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def _check_end_of_text(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no eos token to end a document or to pad with; "
            "set eos_token in its tokenizer_config.json"
        )


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """What decides which tokens a text becomes."""
    if tokenizer.is_fast:
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        settings.pop("padding"), settings.pop("truncation")  # left over from whichever call came last
    else:
        settings = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    return [settings, _frame(tokenizer), tokenizer.eos_token_id, tokenizer.chat_template]


# --- rows to tokens --------------------------------------------------------------------------------------------------


def _choose_columns(corpus: Corpus, source: Source, shape: str | None) -> tuple[str, tuple[str, ...]]:
    """(shape, columns): messages before prompt and completion before text, unless blocks or a column was asked for."""
    if shape not in (None, *SHAPES):
        raise UserError(f"no shape {shape!r}; there are: {', '.join(SHAPES)}")
    pair = (source.prompt_column or PAIR[0], source.completion_column or PAIR[1])
    if source.prompt_column or source.completion_column:
        if missing := [column for column in pair if column not in corpus.columns]:
            message = missing_column(corpus.name, missing, corpus.columns)
            raise UserError(f"{message} (--prompt_column, --completion_column)")
        return "examples", pair
    if shape != "blocks" and source.text_column == "text":
        for columns in (("messages",), pair):
            if set(columns) <= set(corpus.columns):
                return "examples", columns
    if source.text_column not in corpus.columns:
        message = missing_column(corpus.name, [source.text_column], corpus.columns)
        raise UserError(f"{message} (--text_column{_hint(corpus.columns)})")
    return shape or "blocks", (source.text_column,)


def _hint(columns: tuple[str, ...]) -> str:
    """How to name columns that other data sets use for what `messages`, `prompt` and `completion` are here."""
    if found := [column for column in ("conversations", "conversation") if column in columns]:
        return (
            f"; {found[0]} are messages here: rename the column, and in it `from` to `role`, `value` to `content`, the "
            "roles human and gpt to user and assistant"
        )
    names = {column.lower(): column for column in columns}
    prompt, completion = (next((names[name] for name in known if name in names), None) for known in PAIRS_ELSEWHERE)
    if not (prompt or completion):
        return ""
    return f"; for examples --prompt_column {prompt or 'NAME'} --completion_column {completion or 'NAME'}"


def _text(row: Row, column: str) -> str:
    if column not in row.values:
        raise UserError(missing_column(row.where, [column], tuple(row.values)))
    text = row.values[column]
    if not isinstance(text, str):
        found = "null" if text is None else f"of type {type(text).__name__}"
        raise UserError(f"{row.where}: column {column} is {found}, not a string; mend or remove the row")
    return text


def checked_text(row: Row, column: str) -> str:
    """A row's text. Raises UserError, one line, where it is missing, no string, or not to be written in UTF-8."""
    text = _text(row, column)
    _num_bytes(text, row.where)
    return text


def _num_bytes(text: str, where: str) -> int:
    """Length in UTF-8. JSON's escapes can spell half a surrogate pair, which no tokenizer takes."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UserError(f"{where}: half a surrogate pair ({half}) is not text; mend or remove the row") from error


def _all_texts(row: Row, columns: tuple[str, ...]) -> list[str]:
    if columns != ("messages",):
        return [_text(row, column) for column in columns]
    contents = [message.get("content") for message in _messages(row)]
    return [content for content in contents if isinstance(content, str)]


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in batches of bounded text, so that memory depends on neither the rows' length nor their number."""
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += sum(len(value) if isinstance(value, str) else len(str(value)) for value in row.values.values())
        if size >= BATCH_CHARACTERS or len(batch) == 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> Any:
    """Token ids without the special tokens that most tokenizers add by themselves (see `_frame`)."""
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What `tokenizer(text)` puts before a text's own tokens, and behind them.

    It is put there in training too, and nothing else: so a model meets what it was taught wherever its tokenizer is
    called as it is. That a tokenizer has a bos token does not say that it uses it.
    """
    texts = itertools.chain(["a"], (tokenizer.decode([token]) for token in range(len(tokenizer))))
    text = next(text for text in texts if _encode(tokenizer, [text])["input_ids"][0])
    own, whole = _encode(tokenizer, [text])["input_ids"][0], tokenizer(text)["input_ids"]
    for start in range(len(whole) - len(own) + 1):
        if whole[start : start + len(own)] == own:
            return whole[:start], whole[start + len(own) :]
    raise UserError(
        f"{type(tokenizer).__name__} makes other tokens of a text where it adds special ones; take another tokenizer"
    )


def _ended(ids: list[int], eos: int) -> list[int]:
    """With the eos token at its end, which some tokenizers put there by themselves."""
    return ids if ids[-1:] == [eos] else [*ids, eos]


def _encode_stream(rows: Iterable[Row], column: str, tokenizer: PreTrainedTokenizerBase, counts: Counter) -> Iterator:
    """(tokens, text) pieces of the stream of documents, each as `tokenizer(document)` makes it, and eos.

    Where nothing else stands before a document, or eos, it is the eos of the one before. Every token is a target but
    the first of all.
    """
    begin, end = _frame(tokenizer)
    end = _ended(end, tokenizer.eos_token_id)
    inside = False  # a document has begun
    if begin[:1] in ([], [tokenizer.eos_token_id]):
        begin = begin[1:]
        yield [tokenizer.eos_token_id], ""
    for batch in batches(rows):
        texts = [_text(row, column) for row in batch]
        counts["bytes"] += sum(_num_bytes(text, row.where) for text, row in zip(texts, batch, strict=True))
        for row, text, ids in zip(batch, texts, _encode(tokenizer, texts)["input_ids"], strict=True):
            if not text and not inside and not row.continues:
                counts["dropped"] += 1
                continue
            yield (ids if inside else begin + ids) + ([] if row.continues else end), text
            inside = row.continues
            counts["documents"] += not row.continues


def _encode_texts(
    batch: list[Row], columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, counts: Counter
) -> Iterator[Encoded]:
    """Text and eos, all targets; with two columns prompt, completion and eos, the completion and eos targets.

    The text, or the prompt, as `tokenizer(text)` makes it: what this puts before a text is no target. Prompt and
    completion are tokenised apart: when the model is used, the prompt is tokenised without the completion, so a token
    that reaches over the boundary would never be seen there.
    """
    before, behind = _frame(tokenizer)
    texts = [[_text(row, column) for row in batch] for column in columns]
    ids = [_encode(tokenizer, column)["input_ids"] for column in texts]
    for number, row in enumerate(batch):
        size = sum(_num_bytes(column[number], row.where) for column in texts)
        given, learned = before, ids[0][number] + behind
        if len(columns) == 2:
            given, learned = before + ids[0][number] + behind, ids[1][number]
            counts["empty"] += bool(size) and not texts[1][number]
        learned = _ended(learned, tokenizer.eos_token_id) if size else []
        yield given + learned, [False] * len(given) + [True] * len(learned), size


def _messages(row: Row) -> list[dict[str, Any]]:
    messages = row.values.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UserError(f'{row.where}: column messages is not a list of {{"role": ..., "content": ...}}; mend the row')
    # Parquet gives every message the keys of all; templates ask whether a key is there.
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _encode_chats(batch: list[Row], tokenizer: PreTrainedTokenizerBase, counts: Counter) -> Iterator[Encoded]:
    """The tokenizer's chat template decides every token; the targets are those that lie in the assistant's turns.

    `counts` gets, by its number, the token with which each turn ends.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"{batch[0].where}: messages need a chat template and the tokenizer has none; give one that has"
        )
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} does not tell where a token lies in a text; use a fast tokenizer")
    chats = [_render(row, tokenizer) for row in batch]
    encoded = _encode(tokenizer, [text for text, _ in chats], return_offsets_mapping=True)
    for row, (text, spans), ids, offsets in zip(
        batch, chats, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        is_target = np.zeros(len(ids), bool)
        starts = np.array([start for start, _ in offsets])
        for start, end in spans:  # a token that begins before the turn belongs to what the model is given
            turn = (starts >= start) & (starts < end)
            is_target |= turn
            tokens = [ids[place] for place in np.flatnonzero(turn)]
            while tokens and not tokenizer.decode(tokens[-1:]).strip():  # many templates end a turn with a line's end
                tokens.pop()
            if tokens and tokens[-1] in tokenizer.added_tokens_decoder:  # else it is text, at which nothing stops
                counts[tokens[-1]] += 1
        counts["empty"] += any(
            message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls"))
            for message in _messages(row)
        )
        yield ids, is_target.tolist(), _num_bytes(text, row.where)


def _render(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text, and the spans of characters that the assistant says.

    A template says itself which these are with {% generation %}. Without that: a turn is what its rendering adds to the
    rendering of the turns before it together with the prompt for an answer.
    """
    messages = _messages(row)
    template = tokenizer.get_chat_template()

    cannot = f"{row.where}: the chat template cannot be used"

    def render(messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, spans = render_jinja_template(
                [messages], chat_template=template, **options, **tokenizer.special_tokens_map
            )
        except Exception as error:  # templates raise jinja2's errors, and what Python raises for a missing key
            raise UserError(f"{cannot}: {one_line(error)}") from error
        return texts[0], spans[0] if spans else []

    if GENERATION_TAG.search(template):
        return render(messages, return_assistant_tokens_mask=True)
    text, spans = render(messages)[0], []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:turn], add_generation_prompt=True)[0] if turn else ""
            after = render(messages[: turn + 1])[0]
            if not (turn and after.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"{cannot}: what the assistant says is not a plain addition; mark it with {{% generation %}}"
                )
            spans.append((len(before), len(after)))
    return text, spans


# --- the cache -------------------------------------------------------------------------------------------------------


def tokenize(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    shape: str | None = None,
    cache_dir: str | Path | None = None,
    measure_compression: bool = False,
) -> "Samples":
    """Tokenises a source once and opens the result; of many processes that call this one works and the others wait.

    sequence_length: input tokens of a sample at most.
    shape: "blocks" joins the documents and cuts the stream: every token but the very first is a target once; "examples"
        makes one sample of each row, cut at sequence_length; None is examples for the columns `messages` or `prompt`
        and `completion`, else blocks.
    measure_compression: for held-out text: what gzip -9 and xz -9 make of it, if it is at most 64 MiB.

    Raises UserError that names file and place for whatever cannot be read or makes no sample.
    """
    if sequence_length < 1:
        raise UserError(f"a sequence length of {sequence_length} holds no token; use at least 1")
    _check_end_of_text(tokenizer)
    corpus = open_source(source)
    shape, columns = _choose_columns(corpus, source, shape)
    directory = cached(
        "samples",
        ["samples", FORMAT, corpus.identity, shape, columns, tokenizer_identity(tokenizer), measure_compression]
        + ([sequence_length] if shape == "examples" else []),  # blocks are cut when they are read
        lambda partial: _write_samples(
            partial, corpus, shape, columns, tokenizer, sequence_length, measure_compression
        ),
        cache_dir,
    )
    # Without this each DataLoader worker that is forked after the tokenizer used its threads would print a warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Samples(directory, sequence_length)


def cached(kind: str, identity: list[Any], write: Callable[[Path], None], cache_dir: str | Path | None = None) -> Path:
    """The directory of the cache that `write` fills, once for each `identity`: what its files depend on, as JSON.

    Of many processes that call this one works and the others wait.
    """
    directory = Path(cache_dir or default_cache_dir()) / f"{kind}-{_hash(identity)}"
    with _only_one(directory):
        if not _is_complete(directory):
            with _complete_or_absent(directory) as partial:
                write(partial)
    return directory


def _hash(parts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=10).hexdigest()


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """One process at a time. A lock and not a collective: that would time out while rank 0 tokenises for hours.

    The system frees the lock of a process that dies.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{directory}.lock")
        lock.acquire()
    except OSError as error:
        raise UserError(
            f"cache {directory.parent}: cannot be written ({one_line(error)}); set XDG_CACHE_HOME"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    """`complete_or_absent` with the sizes of the files, and nothing left behind where it fails."""
    with complete_or_absent(directory, "start again, or set XDG_CACHE_HOME to another disk") as partial:
        yield partial
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        (partial / MANIFEST).write_text(json.dumps(sizes))


def _is_complete(directory: Path) -> bool:
    """Whether the files have the sizes that were recorded. (Reading all of them each time would take too long.)"""
    try:
        sizes = json.loads((directory / MANIFEST).read_text())
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


class _Compression:
    """What gzip -9 and xz -9 make of a text, while it streams by; None beyond 64 MiB and if not wanted."""

    def __init__(self, wanted: bool) -> None:
        self.left = COMPRESSED_BYTES if wanted else -1
        if wanted:
            self.compressors = {"gzip": zlib.compressobj(9, zlib.DEFLATED, 31), "xz": lzma.LZMACompressor(preset=9)}
        self.sizes: Counter[str] = Counter()

    def add(self, text: str) -> None:
        if self.left < 0:
            return
        data = text.encode()
        self.left -= len(data)
        for name, compressor in self.compressors.items():
            self.sizes[name] += len(compressor.compress(data))

    def finish(self) -> dict[str, int | None]:
        if self.left < 0:
            return {"gzip": None, "xz": None}
        return {name: self.sizes[name] + len(compressor.flush()) for name, compressor in self.compressors.items()}


def _write_samples(
    directory: Path,
    corpus: Corpus,
    shape: str,
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    measure_compression: bool,
) -> None:
    """tokens.bin (int32), for examples also offsets.bin and target_counts.bin (int64, running sums), and meta.json."""
    is_text = len(columns) == 1 and columns != ("messages",)
    counts, compression = Counter(), _Compression(measure_compression and is_text)
    rows = with_progress(corpus.rows(columns, shape == "blocks"), corpus.name)
    if shape == "blocks":
        _write_blocks(directory, _encode_stream(rows, columns[0], tokenizer, counts), counts, compression)
    else:
        _write_examples(directory, rows, columns, tokenizer, sequence_length, counts, compression)
    if counts["targets"] == 0:
        raise UserError(
            f"{corpus.name}: no sample with a target in it ({counts['dropped']} rows were empty or all prompt); "
            "give more text, or a longer sequence length"
        )
    names = ("documents", "tokens", "targets", "bytes", "truncated", "dropped", "empty")
    meta = {name: counts[name] for name in names}
    # Is each byte of the text paid for by exactly one target? Then a loss can be told in bits per byte.
    is_whole = is_text and not counts["truncated"] and (shape == "blocks" or bool(_frame(tokenizer)[0]))
    ends = [token for token, _ in counts.most_common() if isinstance(token, int)]
    meta |= {
        "end_tokens": ends if columns == ("messages",) else [tokenizer.eos_token_id],
        "whole_text": is_whole,
        "name": corpus.name,
        "shape": shape,
        "columns": columns,
        "max_length": counts["max_length"],
    }
    meta |= {f"{name}_bytes": size for name, size in compression.finish().items()}
    meta["content"] = hash_files(directory)
    (directory / "meta.json").write_text(json.dumps(meta, indent=1))


def hash_files(directory: Path) -> str:
    """Of the contents of its files, in the order of their names."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(directory.iterdir()):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def with_progress(rows: Iterator[Row], name: str) -> Iterator[Row]:
    with tqdm(desc=f"tokenising {name}", unit="B", unit_scale=True, disable=None) as bar:  # None: only on a terminal
        for row in rows:
            yield row
            bar.update(sum(len(str(value)) for value in row.values.values()))


def _write_blocks(directory: Path, pieces: Iterator, counts: Counter, compression: _Compression) -> None:
    with open(directory / "tokens.bin", "wb") as file:
        for ids, text in pieces:
            tokens = np.array(ids, np.int32)
            if counts["tokens"] == 0:
                tokens[:1] = ~tokens[:1]
            file.write(tokens.tobytes())
            counts["tokens"] += len(tokens)
            compression.add(text)
    counts["targets"] = max(0, counts["tokens"] - 1) if counts["documents"] else 0


def _write_examples(
    directory: Path,
    rows: Iterator[Row],
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    counts: Counter,
    compression: _Compression,
) -> None:
    names = ("tokens.bin", "offsets.bin", "target_counts.bin")
    with open(directory / names[0], "wb") as tokens, open(directory / names[1], "wb") as offsets:
        with open(directory / names[2], "wb") as targets:
            offsets.write(bytes(8))
            targets.write(bytes(8))
            for batch in batches(rows):
                is_chat = columns == ("messages",)
                if is_chat:
                    encoded = _encode_chats(batch, tokenizer, counts)
                else:
                    encoded = _encode_texts(batch, columns, tokenizer, counts)
                for row, (ids, is_target, num_bytes) in zip(batch, encoded, strict=True):
                    sample = np.array(ids[: sequence_length + 1], np.int32)
                    mask = np.array(is_target[: sequence_length + 1], bool)
                    mask[:1] = False  # nothing comes before it
                    if not mask.any():
                        counts["dropped"] += 1
                        continue
                    tokens.write(np.where(mask, sample, ~sample).tobytes())
                    counts["documents"] += 1
                    counts["tokens"] += len(sample)
                    counts["targets"] += int(mask.sum())
                    counts["bytes"] += num_bytes
                    counts["truncated"] += len(ids) > len(sample)
                    counts["max_length"] = max(counts["max_length"], len(sample) - 1)
                    offsets.write(np.int64(counts["tokens"]).tobytes())
                    targets.write(np.int64(counts["targets"]).tobytes())
                    if len(columns) == 1 and not is_chat:
                        compression.add(_text(row, columns[0]))


# --- samples ---------------------------------------------------------------------------------------------------------


class Samples:
    """Memory-mapped samples. Item i is (input_ids, targets), int64 (length,) each, -100 where there is no target.

    Block b reads stream[b*S : (b+1)*S] and predicts stream[b*S+1 : (b+1)*S+1]; the last one is shorter.
    """

    unit = "tokens"

    def __init__(self, directory: str | Path, sequence_length: int) -> None:
        self.directory, self.sequence_length = Path(directory), sequence_length
        self.meta: dict[str, Any] = json.loads((self.directory / "meta.json").read_text())
        self.is_blocks = self.meta["shape"] == "blocks"
        self._tokens = np.memmap(self.directory / "tokens.bin", np.int32, "r")
        if not self.is_blocks:
            self._offsets = np.memmap(self.directory / "offsets.bin", np.int64, "r")
            self._target_counts = np.memmap(self.directory / "target_counts.bin", np.int64, "r")

    def __reduce__(self) -> tuple[Any, ...]:
        return Samples, (self.directory, self.sequence_length)  # a DataLoader's worker maps the files itself

    def __len__(self) -> int:
        return -(-self.num_tokens // self.sequence_length) if self.is_blocks else self.meta["documents"]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if self.is_blocks:
            start, end = index * self.sequence_length, (index + 1) * self.sequence_length + 1
        else:
            start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        stored = np.array(self._tokens[start:end], np.int64)
        return np.where(stored < 0, ~stored, stored)[:-1], np.where(stored < 0, -100, stored)[1:]

    def filler(self) -> tuple[np.ndarray, np.ndarray]:
        """A sample of one token that has no target."""
        return self[0][0][:1], np.array([-100])

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Input tokens of each sample, int64, without reading a token."""
        ids = np.asarray(ids, np.int64)
        if self.is_blocks:
            return np.minimum(self.sequence_length, self.num_tokens - ids * self.sequence_length)
        return np.asarray(self._offsets[ids + 1] - self._offsets[ids] - 1)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Targets of each sample, int64, without reading a token."""
        if self.is_blocks:
            return self.lengths(ids)
        ids = np.asarray(ids, np.int64)
        return np.asarray(self._target_counts[ids + 1] - self._target_counts[ids])

    @property
    def num_tokens(self) -> int:
        """Input tokens of all samples."""
        return self.meta["tokens"] - (1 if self.is_blocks else self.meta["documents"])

    @property
    def num_target_tokens(self) -> int:
        """Targets of all samples."""
        return self.meta["targets"]

    @property
    def num_bytes(self) -> int | None:
        """UTF-8 bytes of the text, by which a loss becomes bits per byte; None where not all of it is predicted."""
        return self.meta["bytes"] if self.meta["whole_text"] else None

    @property
    def gzip_bytes(self) -> int | None:
        """Size of the text under gzip -9, or None if it was not measured."""
        return self.meta["gzip_bytes"]

    @property
    def xz_bytes(self) -> int | None:
        """Size of the text under xz -9, or None if it was not measured."""
        return self.meta["xz_bytes"]

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that were taught to end a text or an answer, the most frequent one first."""
        return self.meta["end_tokens"]

    @property
    def max_length(self) -> int:
        """Input tokens of the longest sample."""
        return min(self.sequence_length, self.num_tokens) if self.is_blocks else self.meta["max_length"]

    @property
    def fingerprint(self) -> str:
        """Equal where every sample is equal, wherever the text lies."""
        return f"{self.meta['content']}-{self.sequence_length}"

    def describe(self) -> str:
        """One line for people."""
        meta = self.meta
        what = (
            f"blocks of {self.sequence_length} tokens from {meta['documents']:,} documents"
            if self.is_blocks
            else (f"examples of {self.num_tokens / len(self):,.0f} tokens on average, at most {self.max_length}")
        )
        losses = [f"{meta['truncated']:,} cut at {self.sequence_length}"] if meta["truncated"] else []
        losses += [f"{meta['dropped']:,} empty or without a target left out"] if meta["dropped"] else []
        line = f"{meta['name']} ({', '.join(meta['columns'])}): {len(self):,} {what}; "
        line += f"{self.num_target_tokens:,} targets, {self.meta['bytes']:,} bytes of text"
        lines = ["; ".join([line, *losses])]
        if meta["empty"]:
            lines.append(f"{meta['empty']:,} rows have an empty completion: nothing but its end is learned of it")
        if not meta["end_tokens"]:
            lines.append("no answer ends with a token of its own: the model will not know where to stop")
        return f"\n{'':12}".join(lines)
