"""Measures the compressed size of a held-out text, for comparison with a model's bits per byte."""

import gzip
import lzma
from collections.abc import Iterator
from typing import Any

COMPRESSED_BYTES = 64 << 20  # xz needs a minute for this size; larger texts are not measured


def measure_sizes(samples: Iterator[tuple[Any, str]], sizes: dict[str, int | None]) -> Iterator[tuple[Any, str]]:
    """Yields the samples unchanged, (tokens, text); after the last sample, sets gzip_bytes and xz_bytes in `sizes`."""
    whole_text = bytearray()  # up to about COMPRESSED_BYTES
    for tokens, text in samples:
        if len(whole_text) <= COMPRESSED_BYTES:
            whole_text.extend(text.encode())
        yield tokens, text
    if len(whole_text) <= COMPRESSED_BYTES:
        sizes["gzip_bytes"] = len(gzip.compress(whole_text, 9))
        sizes["xz_bytes"] = len(lzma.compress(whole_text, preset=9))
