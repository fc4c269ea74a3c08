"""Detects out-of-memory errors."""

import torch
from accelerate.utils.memory import should_reduce_batch_size

# Messages of C++, oneDNN, cuBLAS and the system. Accelerate knows those of CUDA, cuDNN and torch's allocator.
WORDS = (
    "bad_alloc",
    "could not create a memory",
    "could not create a primitive",
    "_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that a device or the host is out of memory; each library has its own message.

    A process that the kernel kills, for example at the limit of a container, sees no error.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error):
        return True
    return isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in WORDS)
