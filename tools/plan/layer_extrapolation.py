"""Which shallower models stand for a deep one: all that a layer adds, each further layer of its kind adds too."""

from typing import Any

# Where configurations keep the number of their layers. An encoder and a decoder of one depth have one each.
DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def count_layers(config: Any) -> int | None:
    """How many layers a model has; None where no one number says it, and it must be recorded whole."""
    text = config.get_text_config()
    depths = {getattr(text, name) for name in DEPTHS if isinstance(getattr(text, name, None), int)}
    return depths.pop() if len(depths) == 1 else None


def choose_depths(config: Any, has_stages: bool = False) -> tuple[int | None, ...]:
    """The numbers of layers of the models that stand for the whole one; None is the whole one.

    has_stages: whether what one layer holds is asked too, so that two models are needed of a shallow one.
    """
    layers, text = count_layers(config), config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["alike"]
    period = next(n for n in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds[n:], kinds, strict=False)))
    first = getattr(text, "first_k_dense_replace", 0) or 0  # layers of another kind, before all others
    few = period * -(-2 // period)
    if layers is None or layers <= first + 2 * few:
        return (max(1, layers // 2), layers) if has_stages and layers and layers > 1 else (None,)
    return first + few, first + 2 * few


def set_layers(config: Any, number: int | None) -> None:
    """Makes a configuration one of so many layers, in place; None leaves it whole."""
    if number is None:
        return
    text = config.get_text_config()
    for name in DEPTHS:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, number)
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name)[:number])
