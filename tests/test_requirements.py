"""requirements.lock: every package that requirements.txt leads to, with its version and the hashes of its files."""

import re
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

REQUIRED, LOCK = ((ROOT / f"requirements.{ending}").read_text() for ending in ("txt", "lock"))
# Their files depend on the machine, so they are not locked.
OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")


def entries(text):
    """(package, version, the rest of the entry) of each `name==version` of a requirements file or lock."""
    for line in text.replace("\\\n", " ").splitlines():
        if found := re.match(r"([\w.-]+)==([^\s;]+)(.*)", line):
            yield canonicalize_name(found[1]), found[2], found[3]


def faults(required, lock):
    """What is wrong with a lock, one line each."""
    locked = {(name, version) for name, version, _ in entries(lock)}
    names = {name for name, _ in locked}
    for name, version, _ in entries(required):
        if (name, version) not in locked and not OF_TORCH.fullmatch(name):
            yield f"{name} {version} is not locked"
    for name, version, rest in entries(lock):
        if not re.search(r"--hash=sha256:[0-9a-f]{64}", rest):
            yield f"{name} {version} has no hash"
        if OF_TORCH.fullmatch(name):
            yield f"{name} belongs to torch"
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # it is for another platform or Python
        for needed in map(Requirement, installed.requires or [] if installed.version == version else []):
            package = canonicalize_name(needed.name)
            asked = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if asked and package not in names and not OF_TORCH.fullmatch(package):
                yield f"{package} is not locked, and {name} needs it"


def test_every_package_is_locked_with_its_hashes():
    assert len(list(entries(LOCK))) > 100
    assert not list(faults(REQUIRED, LOCK))


def test_the_packages_of_the_benchmarks_need_no_others():
    required, lock = ((ROOT / f"benchmarks/requirements.{ending}").read_text() for ending in ("txt", "lock"))
    assert {name for name, _, _ in entries(lock)} == {name for name, _, _ in entries(required)}
    assert not list(faults(required, LOCK + lock))


def test_a_faulty_lock_is_noticed():
    assert list(faults(REQUIRED + "numpy==1.0\n", LOCK)) == ["numpy 1.0 is not locked"]
    assert list(faults("", LOCK + "markupsafe==3.0.4\n")) == ["markupsafe 3.0.4 has no hash"]
    without = LOCK.replace("\nmarkupsafe==", "\nother==")
    assert "markupsafe is not locked, and jinja2 needs it" in list(faults("", without))
    renamed = LOCK.replace("\nhjson==", "\nnvidia-nccl-cu13==")
    assert "nvidia-nccl-cu13 belongs to torch" in list(faults("", renamed))
