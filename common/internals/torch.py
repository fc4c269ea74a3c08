"""Private names of torch.

Tested with torch 2.13. The source of torch 2.11 has the same names with the same arguments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.internals.library import private

known = cache(private)  # for names that a trace needs in each operator

# The function that torch's pipeline schedules call in each micro-batch, as (owner, name); --profile wraps it.
SCHEDULED_BACKWARD = (torch.autograd, "backward")


@contextmanager
def replace_parameters(module: nn.Module, replacements: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that replaces parameters of the module itself with tensors.

    Needs `Module._parameters`. `torch.func.functional_call` would also run the module's hooks, and would call `forward`
    of the instance instead of the class.
    """
    parameters = module._parameters
    before = {name: parameters[name] for name in replacements}
    parameters.update(replacements)
    try:
        yield
    finally:
        parameters.update(before)


def write_count(tensor: torch.Tensor) -> int:
    """Returns a counter that increases with each in-place write to the tensor. Needs `Tensor._version`."""
    return tensor._version


def argument_names(operator: Any) -> list[str]:
    """Returns the argument names of an operator (`torch.ops...default`). Needs `OpOverload._schema`."""
    return [argument.name for argument in operator._schema.arguments]


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and tensor of each buffer of the module itself that a state dict contains.

    Needs `Module._non_persistent_buffers_set`, in all versions since 1.6. `state_dict` would run hooks that all-gather.
    """
    excluded = module._non_persistent_buffers_set
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in excluded:
            yield name, buffer


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that identifies a tensor's storage while the storage exists, also for fake tensors.

    Needs `UntypedStorage._cdata`, in all versions since 2.0. `data_ptr` is 0 for every storage without data.
    """
    return tensor.untyped_storage()._cdata


def multiply_in_place(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies all tensors by a factor, in a few kernels. Needs `torch._foreach_mul_`; else raises UserError."""
    private(torch, "_foreach_mul_")(tensors, factor)


def divide_in_place(tensors: list[torch.Tensor], divisor: int) -> None:
    """Divides all tensors by a number, in a few kernels. Needs `torch._foreach_div_`; else raises UserError."""
    private(torch, "_foreach_div_")(tensors, divisor)


def shard_offset(tensor: Any) -> tuple[int, ...]:
    """Returns the global index of this rank's first element of a DTensor, per dimension.

    Needs `torch.distributed.tensor._utils.compute_local_shape_and_global_offset`, since 2.5; else raises UserError.
    """
    compute = private("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset")
    return compute(tensor.shape, tensor.device_mesh, tensor.placements)[1]


def extension_directory(name: str) -> Path:
    """Returns the directory in which torch builds a C++ extension; creates it if it does not exist.

    Needs `torch.utils.cpp_extension._get_build_directory`, in all versions. Raises UserError without it. The public
    `get_default_build_root` ignores TORCH_EXTENSIONS_DIR and omits the folder per version of Python and CUDA.
    """
    return Path(private("torch.utils.cpp_extension", "_get_build_directory")(name, verbose=False))


def dispatch_mode() -> type:
    """Returns the base class for modes that intercept every operator call.

    Needs `torch.utils._python_dispatch.TorchDispatchMode`, since 1.12. Raises UserError without it.
    """
    return private("torch.utils._python_dispatch", "TorchDispatchMode")


def tree_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of nested tuples, lists and dicts.

    Needs `torch.utils._pytree.tree_leaves`, since 2.2. Raises UserError without it.
    """
    return known("torch.utils._pytree", "tree_leaves")(tree)


def fake_mode() -> AbstractContextManager:
    """Returns a mode in which new tensors have no data; its method `from_tensor` converts real tensors.

    Needs `torch._subclasses.fake_tensor.FakeTensorMode`, since 2.0. Raises UserError without it.
    """
    mode = private("torch._subclasses.fake_tensor", "FakeTensorMode")(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # it takes longer to look a result up there than to compute it once (`ResultCache`)
    return mode


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is from `fake_mode`. Needs `torch._subclasses.fake_tensor.FakeTensor`, since 2.0."""
    return isinstance(tensor, known("torch._subclasses.fake_tensor", "FakeTensor"))


def make_fake(mode: Any, dtype: torch.dtype, layout: tuple, device: torch.device, storage: Any = None) -> torch.Tensor:
    """Returns a tensor of `fake_mode` without an operator call. layout: shape, strides and offset in the storage.

    storage: of another fake tensor; None: a new one. Needs `FakeTensor` and `in_kernel_invocation_manager` of
    `torch._subclasses.fake_tensor`, since 2.0. Raises UserError without them.
    """
    module = "torch._subclasses.fake_tensor"
    fake, in_kernel = known(module, "FakeTensor"), known(module, "in_kernel_invocation_manager")
    shape, strides, offset = layout
    with in_kernel(mode):
        if storage is None:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            tensor = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, strides)
    return fake(mode, tensor, device)


def without_fakes() -> AbstractContextManager:
    """Returns a context inside `fake_mode` in which new tensors have data.

    Needs `torch._subclasses.fake_tensor.unset_fake_temporarily`, since 2.1. Raises UserError without it.
    """
    return private("torch._subclasses.fake_tensor", "unset_fake_temporarily")()


def drop_collectives(names: Iterable[str]) -> None:
    """Replaces functions of `torch.distributed` by functions that do nothing, for the rest of the process."""
    for name in names:
        private(torch.distributed, name)
        setattr(torch.distributed, name, lambda *_, **__: None)


def replace_functions(**functions: Callable[..., torch.Tensor]) -> None:
    """Replaces functions of `torch.nn.functional`, by name, for the rest of the process."""
    for name, function in functions.items():
        private(nn.functional, name)
        setattr(nn.functional, name, function)
