"""Compares a language model with compressors: bits per byte of held-out text."""

import math
from typing import Any


def describe(metrics: dict[str, float], samples: Any) -> dict[str, float]:
    """Implements `tracking.describe_held_out`."""
    loss = metrics["validation_loss"]
    results = metrics | {"perplexity": math.exp(min(loss, 700))}
    if getattr(samples, "num_bytes", None):  # every token of the text is a target exactly once
        results["bits_per_byte"] = loss * samples.num_target_tokens / math.log(2) / samples.num_bytes
        for name, size in (("gzip", samples.gzip_bytes), ("xz", samples.xz_bytes)):
            if size:
                results[f"{name}_bits_per_byte"] = 8 * size / samples.num_bytes
    return results
