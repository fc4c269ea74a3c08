"""`--compile`: torch.compile, one repeated layer at a time."""

from torch import nn


def compile_layers(model: nn.Module, lengths_vary: bool) -> int:
    """Compiles each layer of a model's stacks of equal layers in place, or the whole model if it has no such stack.

    All layers of a stack share one compiled graph. So compilation takes as long as for one layer, however many there
    are, and attention masks, which need decisions on the host, stay outside of the graphs.

    Args:
        lengths_vary: whether the shapes differ between micro-batches; then the first graph is already for any shape.

    Returns: the number of compiled modules.
    """
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1 and len(set(map(type, m))) == 1]
    nested = {id(module) for stack in stacks for module in stack.modules() if module is not stack}
    layers = [layer for stack in stacks if id(stack) not in nested for layer in stack] or [model]
    for layer in layers:
        layer.compile(dynamic=lengths_vary or None)
    return len(layers)
