"""Memory that a process uses next to its tensors: CUDA, NCCL, allocator fragmentation; on a CPU malloc and Python."""

import os

import psutil

from tools.plan.memory import Mode
from tools.plan.memory_profile import Parts

GIB = 2.0**30
# Of a GPU, beside what is allocated: what CUDA takes, and NCCL where there are several processes, as measured on A100s
# (github.com/stas00/ml-engineering, training/performance: 0.47 GB with torch 2.1; 1.45 GB at the first barrier of two).
CONTEXT, NCCL = 0.47 * GIB, 1.45 * GIB
# Reserved by torch's allocator, of what is allocated: 1.20 to 1.36 with FSDP (pytorch/torchtitan#165).
FRAGMENTS = 1.25
# Of a CPU: `accelerate launch` itself, as measured; what a process grows by beside its tensors, from the plan to its
# last update; what glibc keeps, of activations and logits (0.7 to 0.95 were measured). `benchmarks/plan_limits.py`
# shows how far the sum is from the peaks of runs.
LAUNCHER, GROWTH, KEPT = 172 * 2**20, 128 * 2**20, 1.0


def held_on_gpu(mode: Mode, parts: Parts) -> float:
    """Returns the bytes of a GPU that a process uses for these tensors."""
    return sum(parts.values()) * FRAGMENTS + CONTEXT + (NCCL if mode.processes > 1 else 0)


def held_on_cpu(parts: Parts) -> float:
    """Bytes that a process of a CPU takes for its updates: its tensors, and what malloc keeps of those it freed."""
    kept = 0.0 if _maps_tensors() else KEPT * (parts.get("activations", 0) + parts.get("logits", 0))
    return sum(parts.values()) + kept + GROWTH


def need_on_cpu(mode: Mode, parts: Parts, host: float) -> float:
    """Bytes of memory that a run takes in all: its processes, what they have before training, and the launcher."""
    return mode.processes * (own_memory() + held_on_cpu(parts)) + LAUNCHER + host


def own_memory() -> float:
    """Bytes of this process that no other one shares. Files that are mapped do not count: the kernel drops them."""
    memory = psutil.Process().memory_info()
    return float(memory.rss - getattr(memory, "shared", 0))


def _maps_tensors() -> bool:
    """Whether malloc gives each tensor pages of its own, and gives them back with it."""
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return threshold.isdecimal() and int(threshold) <= 2**20
