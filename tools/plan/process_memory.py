"""Memory of a process other than its tensors: CUDA, NCCL, allocator fragmentation; on a CPU, malloc and Python."""

import os

import psutil

from tools.plan.memory import Mode
from tools.plan.memory_profile import Parts

GIB = 2.0**30
# GPU memory in addition to allocated tensors: CUDA's context, and NCCL if there are several processes, as measured on
# A100s (github.com/stas00/ml-engineering, training/performance: 0.47 GB with torch 2.1; 1.45 GB at the first barrier of
# two).
CONTEXT, NCCL = 0.47 * GIB, 1.45 * GIB
# Ratio of reserved to allocated memory in torch's CUDA allocator: 1.20 to 1.36 with FSDP (pytorch/torchtitan#165).
FRAGMENTS = 1.25
# Host memory on a CPU. LAUNCHER: `accelerate launch` itself, as measured. GROWTH: growth of a process from the plan to
# its last update, without tensors. KEPT: fraction of activations and logits that glibc's malloc retains (0.7 to 0.95
# were measured). `benchmarks/plan_limits.py` compares the sum with the peaks of runs.
LAUNCHER, GROWTH, KEPT = 172 * 2**20, 128 * 2**20, 1.0


def held_on_gpu(mode: Mode, parts: Parts) -> float:
    """Returns the bytes of GPU memory that a process with these tensors uses."""
    return sum(parts.values()) * FRAGMENTS + CONTEXT + (NCCL if mode.processes > 1 else 0)


def held_on_cpu(parts: Parts) -> float:
    """Returns the bytes that a CPU process uses for its updates: its tensors, and freed memory that malloc retains."""
    kept = 0.0 if _maps_tensors() else KEPT * (parts.get("activations", 0) + parts.get("logits", 0))
    return sum(parts.values()) + kept + GROWTH


def need_on_cpu(mode: Mode, parts: Parts, host: float) -> float:
    """Returns the bytes of a run: all processes, including their memory before training, the launcher, and `host`."""
    return mode.processes * (own_memory() + held_on_cpu(parts)) + LAUNCHER + host


def own_memory() -> float:
    """Returns the unshared bytes of this process. Memory-mapped files are excluded; the kernel can drop them."""
    memory = psutil.Process().memory_info()
    return float(memory.rss - getattr(memory, "shared", 0))


def _maps_tensors() -> bool:
    """Returns whether malloc maps each large tensor separately, and so returns freed memory to the system."""
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return threshold.isdecimal() and int(threshold) <= 2**20
