"""Private names of torch that few runs use.

Tested with torch 2.13. The source of torch 2.11 has the same names with the same arguments.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


def compiled_only_if(module: nn.Module, condition: Callable[..., bool]) -> None:
    """Makes a compiled module run its original code if `condition` of the arguments of its call is False.

    Needs `Module._compiled_call_impl`, which `Module.compile` sets, and `Module._call_impl`. A wrapped `forward` would
    stay that of the original module in a deep copy.
    """
    patched: Any = module
    compiled, plain = patched._compiled_call_impl, patched._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if condition(*args, **kwargs) else plain)(*args, **kwargs)

    patched._compiled_call_impl = call
