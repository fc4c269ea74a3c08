"""A machine that lacks something: what needs it is skipped, and the end of the run says what would bring it."""

import re

from conftest import BIN, PACKAGES, ROOT, run

SKIPPED = """
import pytest
from conftest import need

def test_offload_to_files():
    need("libaio-dev")

def test_a_page():
    need("chromium", "chromium-driver")

def test_a_job():
    pytest.skip("SLURM needs slurm-wlm, munge")

@pytest.mark.parametrize("number", range(2))
@pytest.mark.skipif(True, reason="needs a CUDA GPU")
def test_a_gpu(number):
    pass

def test_what_runs():
    pass
"""


def test_what_was_skipped_is_told_with_the_command_that_brings_it(tmp_path):
    (tmp_path / "test_some.py").write_text(SKIPPED)
    command = [BIN / "python", "-m", "pytest", "-q", "-p", "conftest", "--rootdir", tmp_path, tmp_path]
    # No browser is on the path, and the compiler finds no header.
    told = run(command, CC="false", PATH=tmp_path, PYTHONPATH=ROOT / "tests").stdout
    assert "1 passed, 5 skipped" in told
    for line in (
        "1 x needs libaio-dev",
        "1 x needs chromium, chromium-driver",
        "1 x SLURM needs slurm-wlm, munge",
        "2 x needs a CUDA GPU",
    ):
        assert f"\n{line}\n" in told
    assert "\nto run them, as root: apt install chromium chromium-driver libaio-dev munge slurm-wlm\n" in told
    assert "make gpu" in told
    told = run([*command, "-k", "what_runs"], PYTHONPATH=ROOT / "tests").stdout
    assert "1 passed" in told and "skipped on this machine" not in told  # the control


def test_ci_installs_what_makes_tests_skip():
    packages = re.search(r"packages=\((.*)\)", (ROOT / ".ci/run").read_text())[1].split()
    assert packages == list(PACKAGES)
