"""The server that forks the tests' runs imports what is installed, and never initialises CUDA."""

import pytest
from conftest import BIN, ROOT, run, without

# The imports of the server on a machine with a GPU, of which each question that initialises CUDA is printed.
IMPORTS = f"""
import sys
import torch

def ask(question, answer):
    return lambda *_, **__: (print("ASKED", question, flush=True), answer)[1]

for question, answer in {{
    "is_available": True, "device_count": 1, "get_device_capability": (9, 0), "get_device_name": "a GPU",
    "get_device_properties": None, "current_device": 0, "set_device": None, "init": None, "_lazy_init": None,
}}.items():
    setattr(torch.cuda, question, ask(question, answer))
sys.path.insert(0, "{ROOT / "tests"}")
import recipe_server
sys.path.insert(0, "{ROOT}")
from common.parallel import process_checks

process_checks.find_unseen_gpu = lambda: "/dev/nvidia0"
recipe_server.ASK_THE_GPU = sys.argv[1:]
recipe_server.import_all()
print("IMPORTED", *sys.modules)
"""


def imports(*left_out, **env):
    return run([BIN / "python", "-c", IMPORTS, *left_out], **env)


def test_the_server_does_not_initialise_cuda():
    """CUDA works in no process that is forked after its initialisation. Control: with what the server leaves out."""
    from recipe_server import ASK_THE_GPU

    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    result = imports(*ASK_THE_GPU)
    assert "IMPORTED" in result.stdout and "ASKED" not in result.stdout, result.stdout + result.stderr
    assert "ASKED get_device_capability" in imports().stdout


def test_the_server_imports_what_is_installed():
    """The packages that a GPU machine's Python often lacks are optional. Control: a package that every run needs."""
    missing = "bitsandbytes datasets deepspeed evaluate plotly zstandard".split()
    loaded = imports(**without(*missing)).stdout.partition("IMPORTED")[2].split()
    assert {"peft", "common.run", "common.data.hub"} <= set(loaded)
    assert not {"common.data.dataset_source", *missing} & set(loaded)
    assert "ModuleNotFoundError: No module named 'accelerate'" in imports(**without("accelerate")).stderr
