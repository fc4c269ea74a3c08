"""Selects shallow models to trace instead of a deep model, because each further layer adds the same memory."""

from typing import Any

# Names of the number of layers in configurations. An encoder-decoder has two of them, which must be equal.
DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def count_layers(config: Any) -> int | None:
    """Returns the number of layers; None if the configuration is ambiguous, so that the full model must be traced."""
    text = config.get_text_config()
    depths = {getattr(text, name) for name in DEPTHS if isinstance(getattr(text, name, None), int)}
    return depths.pop() if len(depths) == 1 else None


def choose_depths(config: Any, has_stages: bool = False) -> tuple[int | None, ...]:
    """Returns the numbers of layers of the models to trace: two to extrapolate from, or only None, the full model.

    has_stages: whether the memory per layer is needed (for pipeline stages): a shallow model then has two depths too.
    """
    layers, text = count_layers(config), config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["alike"]
    period = next(n for n in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds[n:], kinds, strict=False)))
    first = getattr(text, "first_k_dense_replace", 0) or 0  # number of dense layers before all others
    few = period * -(-2 // period)
    if layers is None or layers <= first + 2 * few:
        return (max(1, layers // 2), layers) if has_stages and layers and layers > 1 else (None,)
    return first + few, first + 2 * few


def set_layers(config: Any, number: int | None) -> None:
    """Sets the number of layers of a configuration, in place; None leaves it unchanged."""
    if number is None:
        return
    text = config.get_text_config()
    for name in DEPTHS:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, number)
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name)[:number])
