"""Detects out-of-memory errors, and frees what they keep alive."""

import traceback
from contextlib import suppress

import torch
import torch.distributed as dist
from accelerate.utils.memory import should_reduce_batch_size

# Messages of C++, torch's host allocator and the system.
HOST_WORDS = ("bad_alloc", "DefaultCPUAllocator", "Cannot allocate memory")
# Messages of oneDNN and cuBLAS. Accelerate knows those of CUDA, cuDNN and torch's allocators.
WORDS = (*HOST_WORDS, "could not create a memory", "could not create a primitive", "_STATUS_ALLOC_FAILED")
NCCL_WORDS = ("out of memory", "CUDA calloc", "CUDA malloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that a device or the host is out of memory; each library has its own message.

    A process that the kernel kills, for example at the limit of a container, sees no error.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error):
        return True
    words = (*WORDS, *NCCL_WORDS) if isinstance(error, dist.DistBackendError) else WORDS
    return isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in words)


def lacks_host_memory(error: BaseException, device: torch.device) -> bool:
    """Returns whether an out-of-memory error means the host's memory. device: the device that computes."""
    if device.type == "cpu" or isinstance(error, MemoryError):
        return True
    return any(word in str(error) for word in HOST_WORDS)


def free_activations(error: BaseException) -> None:
    """Frees the activations that local variables of the error's frames reference.

    The frames of functions that are still running, such as the recipe's loop, keep their variables. Therefore their
    tensors are detached from the graph, which holds the activations.
    """
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        variables = frame.f_locals
        for value in list(variables.values()):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                with suppress(RuntimeError):  # a view cannot be detached in place
                    value.detach_()
        if isinstance(variables, dict) and variables is not frame.f_globals:
            variables.clear()  # a function's are a copy before Python 3.13, which would keep the tensors alive
