"""Detects out-of-memory errors."""

import torch
from accelerate.utils.memory import should_reduce_batch_size

# Of C++, oneDNN, cuBLAS and the system, beside those of CUDA, cuDNN and torch's allocator that Accelerate knows.
WORDS = (
    "bad_alloc",
    "could not create a memory",
    "could not create a primitive",
    "_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left: each library says so in its own words.

    A process that the kernel ends, as at the limit of a container, sees no error.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error):
        return True
    return isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in WORDS)
