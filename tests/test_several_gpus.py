"""What would fail first on a machine with several GPUs, as far as a CPU can show it."""

import pytest
from conftest import BIN, run

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("own", [{}, *({name: "max_split_size_mb:64"} for name in NAMES)], ids=str)
def test_the_allocator_has_expandable_segments_unless_the_user_configured_it(own):
    """Set before torch is imported. Control: a user's own value, by each name that torch reads, stays the only one."""
    program = "import os, sys, common; print('torch' in sys.modules, {n: v for n, v in os.environ.items() if n in "
    result = run([BIN / "python", "-c", f"{program}{NAMES}}})"], **(dict.fromkeys(NAMES) | own))
    assert result.stdout.strip() == f"False {own or SEGMENTS}", result.stderr
