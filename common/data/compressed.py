"""Reads compressed files, including files of several gzip members or zstd frames; a truncated file is an error."""

import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import IO, Any

from fsspec.compression import available_compressions, compr

from common.data.source_types import file_type

PIECE_BYTES = 1 << 16
ZSTD_BYTES = 1 << 10  # compressed bytes per read, of which zstd can make 32 MiB
WINDOW_BYTES = 128 << 20  # memory of a decompressor; the header of a file can request gigabytes


def can_unpack(compression: str) -> bool:
    """Returns whether the module for a compression (a value of `source_types.COMPRESSIONS`) is installed."""
    return find_spec("zstandard") is not None if compression == "zstd" else compression in available_compressions()


@contextmanager
def open_compressed(path: str) -> Iterator[IO[bytes]]:
    """Opens a compressed file for reading its contents.

    Reading raises EOFError if the file is truncated, and OSError if it is corrupted.
    """
    compression = file_type(path)[1]
    with open(path, "rb") as raw:
        if compression == "zstd":
            yield io.BufferedReader(_ZstandardFrames(raw), PIECE_BYTES)
            return
        if compression == "xz":
            _check_xz(raw)
        with compr[compression](raw, mode="rb") as file:
            try:
                yield file
            except (zlib.error, lzma.LZMAError) as error:
                raise OSError(str(error)) from error


def _check_xz(raw: IO[bytes]) -> None:
    """Raises OSError if the decompressor of an .xz file needs more memory than for the largest preset, xz -9."""
    with suppress(EOFError):
        try:
            lzma.LZMADecompressor(memlimit=WINDOW_BYTES).decompress(raw.read(1 << 12), 1)
        except lzma.LZMAError as error:
            if "limit" in str(error):
                raise OSError(f"{error}; write it with xz -9 at most") from error
    raw.seek(0)


class _ZstandardFrames(io.RawIOBase):
    """The contents of all zstd frames of a file; a truncated file raises EOFError.

    The reader of `zstandard`, which fsspec uses too, accepts truncated files as complete.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self.raw, self.unpacked, self.error = raw, memoryview(b""), zstandard.ZstdError
        self.unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        self.frame: Any = None  # the decompressor of the current frame
        self.packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.unpacked and (packed := self.packed or self.raw.read(ZSTD_BYTES)):
            self.frame = self.frame or self.unpacker.decompressobj()
            try:
                self.unpacked = memoryview(self.frame.decompress(packed))
            except self.error as error:
                limit = "; write it with zstd --long=27 at most" * ("memory" in str(error))
                raise OSError(f"{error}{limit}") from error
            self.packed = self.frame.unused_data
            if self.frame.eof:
                self.frame = None
        if not self.unpacked and self.frame is not None:
            raise EOFError("Compressed file ended before the end of a frame")
        size = min(len(buffer), len(self.unpacked))
        buffer[:size], self.unpacked = self.unpacked[:size], self.unpacked[size:]
        return size
