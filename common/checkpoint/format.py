"""The checkpoint format. write.py writes the files; read.py reads them, and detects corrupted or forged files.

    manifest.json           format, update, settings, fingerprints, versions, and size and XXH3 of every other file
    rank-00000.safetensors  the ranges of weights and optimizer state that rank 0 writes, flattened (see layouts.py)
    rank-00000.json         position of these ranges in their tensors; counts of the optimizer; the rank's RNG states
    model/                  configuration and tokenizer, for the export

XXH3 detects corruption by disks and copies, and is ten times as fast as SHA-256, which format 1 uses. Neither proves
who wrote a checkpoint. Therefore no part of it is executed, and the structure of its files is checked. Files that are
not in the manifest are ignored, and links are not followed.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from common.files import PAGE

FORMAT = 3  # format 2 has no ranges of columns, format 1 no XXH3
MANIFEST = "manifest.json"
# Names in the safetensors format, and in torch.
_NAMES = "F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ C64"
_TORCH_NAMES = """float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz complex64"""
DTYPES = {name: getattr(torch, own) for name, own in zip(_NAMES.split(), _TORCH_NAMES.split(), strict=True)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 16 << 20  # bytes written and hashed at a time


def safetensors_header(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Returns the header of a safetensors file, padded to full pages; the flattened tensors must follow in this order.

    `safetensors.torch.save_file` is not used, because it holds the GIL while it writes, so training would wait, and
    because the hash would need a second pass. safetensors can read the resulting files.
    """
    header, start = {}, 0
    for name, tensor in tensors:
        end = start + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": [tensor.numel()], "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def in_chunks(contents: Iterable[Any]) -> Iterator[memoryview]:
    """Yields the bytes of all contents, which are tensors or bytes, in chunks."""
    for content in contents:
        if isinstance(content, torch.Tensor):
            content = content.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(content), CHUNK):
            yield memoryview(content)[start : start + CHUNK]


def hash_of(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
