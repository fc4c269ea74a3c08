"""A machine that lacks something: what needs it is skipped, and the end of the run says what would bring it."""

import re

from conftest import BIN, PACKAGES, ROOT, run, without

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


PACKAGES_MISS = """
def test_a_file():
    import zstandard

def test_a_launch():
    raise AssertionError("error: a.zst: this Python cannot unpack it; pip install zstandard")

def test_what_fails():
    raise AssertionError("error: pip install tqdm")
"""


def test_what_needs_a_package_is_skipped_with_its_name(tmp_path):
    """In a test, in its launch and in the imports of a file. Control: with the packages the same tests run."""
    (tmp_path / "test_some.py").write_text(PACKAGES_MISS)
    (tmp_path / "test_others.py").write_text("import datasets\n\ndef test_it():\n    pass\n")
    command = [BIN / "python", "-m", "pytest", "-q", "-p", "conftest", "--rootdir", tmp_path, tmp_path]
    hidden = without("datasets", "zstandard")
    hidden["PYTHONPATH"] = f"{hidden['PYTHONPATH']}:{ROOT / 'tests'}"
    told = run(command, **hidden).stdout
    assert "1 failed, 3 skipped" in told
    for line in ("1 x needs datasets", "2 x needs zstandard", "to run them: pip install datasets zstandard"):
        assert f"\n{line}\n" in told
    assert "2 failed, 2 passed" in run(command, PYTHONPATH=ROOT / "tests").stdout
