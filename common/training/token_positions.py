"""Determines how a causal language model passes information between tokens, and where it takes their positions from."""

import inspect
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from common.internals.transformers_uncommon import is_recurrent

# Model types that have an argument `position_ids`, but compute positions themselves, or derive a mask from tokens.
# Found by running 100 model types of transformers 5.23 on two processes and on one process.
OTHERS = {"camembert", "data2vec-text", "doge", "llama4_text", "roberta", "roberta-prelayernorm", "xlm-roberta"}
OTHERS |= {"xlm-roberta-xl", "xmod"}


def why_not_by_attention(config: PreTrainedConfig, layer_types: set[str]) -> str | None:
    """Returns why tokens exchange information outside of attention, as the end of a sentence; None if they do not.

    layer_types: the supported types of attention layers, as in the configuration.
    """
    kind, text = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), config.get_text_config()
    if isinstance(kind, tuple) or kind is None or text is not config:
        return "has inputs other than text, or is not a causal language model of transformers"
    others = sorted(set(getattr(text, "layer_types", None) or ()) - layer_types)
    if others or is_recurrent(kind):
        where = f" in its layers of {', '.join(others)}" if others else ""
        return f"passes information between tokens outside of attention{where}"
    return None


def computes_positions(config: PreTrainedConfig) -> bool:
    """Returns whether a causal language model ignores `position_ids`, or derives a mask from tokens."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "position_ids" not in inspect.signature(kind.forward).parameters or config.model_type in OTHERS


def has_longrope(config: PreTrainedConfig) -> bool:
    """Returns whether rotary positions depend on the largest position of a micro-batch."""
    return "longrope" in str(getattr(config.get_text_config(), "rope_parameters", None))
