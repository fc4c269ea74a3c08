"""RNG states that affect an update, as JSON."""

import base64
import random
from typing import Any

import numpy as np
import torch


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())


def random_states(device: torch.device) -> dict[str, Any]:
    """Returns the RNG states of this rank as JSON: Python, numpy, torch on the CPU and on the device."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type != "cpu":
        states[device.type] = _encode(torch.get_device_module(device).get_rng_state())
    return states


def _set(states: dict[str, Any], python: Any, numpy: Any, torch_cpu: torch.Generator) -> None:
    version, internal, gauss = states["python"]
    python.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    if not 0 <= position <= len(keys):
        raise ValueError("numpy's position")  # numpy would read beyond its keys
    numpy.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    torch_cpu.set_state(_decode(states["torch"]))


def check_random_states(states: dict[str, Any]) -> None:
    """Raises an error if `restore_random_states` would; uses temporary generators."""
    _set(states, random.Random(), np.random.RandomState(0), torch.Generator())


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restores the RNG states that `random_states` returned."""
    _set(states, random, np.random, torch.default_generator)
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_decode(states[device.type]))
