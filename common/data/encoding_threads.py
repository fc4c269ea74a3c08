"""Encodes texts in threads, while the calling thread reads rows and writes tokens."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.data.row_texts import Batches, text_of
from common.data.source_types import Row
from common.internals.transformers_uncommon import encodes_with_backend

NUM_AHEAD = 2  # batches encoded at once, so that no core waits for the longest text of a batch
Batch = tuple[list[Row], list[list[str]], list[list[list[int]]]]  # an item of `row_texts.Batches`
Encode = Callable[[PreTrainedTokenizerBase, list[str]], Any]


def encode_ahead(
    batches: Iterator[list[Row]], columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, encode_plain: Encode
) -> Batches:
    """Yields the encoded batches in order, while NUM_AHEAD further batches are encoded.

    tokenizer: neither truncates nor pads, so that the threads change no setting.
    encode_plain: that of `common.data.tokenizer`, for tokenizers that do more than their backend.
    """

    def encode(batch: list[Row]) -> Batch:
        texts = [[text_of(row, column) for row in batch] for column in columns]
        return batch, texts, [encode_ids(column, tokenizer, encode_plain) for column in texts]

    ahead: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(NUM_AHEAD) as threads:
        for batch in batches:
            ahead.append(threads.submit(encode, batch))
            if len(ahead) > NUM_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def encode_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, encode_plain: Encode) -> list[list[int]]:
    """Returns the token ids of `encode_plain`, without the time for offsets and other results (a quarter)."""
    if encodes_with_backend(tokenizer):
        backend: Any = tokenizer.backend_tokenizer
        splits_alike = backend.encode_special_tokens == tokenizer.split_special_tokens
        if splits_alike and not backend.truncation and not backend.padding:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    return encode_plain(tokenizer, texts)["input_ids"]
