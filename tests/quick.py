"""Runs the tests of what has changed since origin's main branch, or the core if nothing has, in under three minutes.

A test file looks at what it imports and at the recipes that it names, these at what they import, and so on: the test
files that are nearest to a changed file are run. What has not begun in time is skipped, and counted at the end.
"""

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = [f"tests/test_{name}.py" for name in ("batching", "losses", "recipes", "lm", "docs")]
# Tests that come first for a folder or a file, where imports alone do not lead to them first.
FIRST = {
    "accelerate_configs/": ("modes",),
    "benchmarks/": ("benchmarks",),
    "common/arguments.py": ("bad_input",),
    "common/checkpoint/": ("checkpoint", "resume"),
    "common/argument_checks.py": ("bad_input",),
    "common/parallel/": ("modes",),
    "common/run.py": ("lm",),
    "common/training/": ("lm",),
    "docs/": ("docs",),
    "ds_configs/": ("modes",),
}
MOST = 5  # test files for one file
SOURCES = (".py", ".yaml", ".json", ".sh", ".sbatch")
SECONDS = 90  # after them no test begins
# Take more than two minutes each, and are left to `make test`.
TOO_LONG = ["tests/test_kills.py", "tests/test_lm.py::test_a_compiled_model_makes_the_same_update"]


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def changed_files() -> list[str]:
    """Committed here and not on main, or not committed yet."""
    base = next((commit for name in ("origin/main", "main") for commit in git("merge-base", "HEAD", name)), "HEAD")
    return git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")


def read_sources() -> dict[str, str]:
    folders = ("accelerate_configs", "benchmarks", "common", "ds_configs", "launchers", "recipes", "tests")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SOURCES]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def is_test(path: str) -> bool:
    return path.startswith("tests/test_")


def can_be_named(path: str) -> bool:
    return not (is_test(path) or path.startswith(("common/", "benchmarks/")))


def imported(text: str) -> set[str]:
    """The modules that a source imports, and each `module.name` that it takes from one."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def looks_at(sources: dict[str, str]) -> dict[str, set[str]]:
    """Of each file those that it imports or starts; of a test file also the recipes, configs and scripts that it names.

    What all tests share (tests/conftest.py, ...) leads nowhere.
    """
    modules = {path.removesuffix(".py").replace("/", "."): path for path in sources if path.endswith(".py")}
    modules |= {Path(path).stem: path for path in sources if path.startswith(("tests/", "benchmarks/"))}
    found = {path: set() for path in sources}
    for path, text in sources.items():
        if not path.endswith(".py") or (path.startswith("tests/") and not is_test(path)):
            continue
        started = set(re.findall(r'"(common\.[\w.]+)"', text))  # modules that run in a process of their own
        found[path] = {modules[name] for name in (imported(text) | started) & modules.keys()}
        if is_test(path):
            words = set(re.findall(r"""["'/](\w+)(?:\.\w+)?["']""", text))
            found[path] |= {other for other in sources if Path(other).stem in words and can_be_named(other)}
    return found


def distances(test: str, edges: dict[str, set[str]]) -> dict[str, int]:
    """How many steps it is from a test file to each file that it looks at, itself 0."""
    found, last = {test: 0}, [test]
    while last:
        last = sorted({other for path in last for other in edges[path] if other not in found})
        found |= dict.fromkeys(last, max(found.values()) + 1)
    return found


def choose(changed: list[str], edges: dict[str, set[str]]) -> list[str]:
    """The test files of what has changed, by what each file `looks_at`; the first ones of each changed file first.

    These are its namesake (test_batching.py for batching.py), that of its folder in common/tasks/, and those of FIRST,
    then the nearest, and of these first those that run few recipes.
    """
    steps = {test: distances(test, edges) for test in edges if is_test(test) and test not in TOO_LONG}
    ranked = []
    for path in changed:
        names = [Path(path).stem] if path.startswith(("common/", "recipes/")) else []
        names += [Path(path).parts[2]] if path.startswith("common/tasks/") else []
        names += ["docs"] if path.endswith(".md") else []
        names += [name for start, first in FIRST.items() if path.startswith(start) for name in first]
        own = [test for test in (f"tests/test_{name}.py" for name in names) if test in steps]
        near = {test: found[path] for test, found in steps.items() if path in found}
        near = [test for test in near if near[test] <= max(1, min(near.values()))]
        near.sort(key=lambda test: (steps[test][path], sum(other.startswith("recipes/") for other in edges[test])))
        ranked += enumerate(list(dict.fromkeys(own + near))[:MOST])
    return list(dict.fromkeys(test for _, test in sorted(ranked, key=lambda one: one[0]))) or CORE


def main() -> int:
    chosen = choose(changed_files(), looks_at(read_sources()))
    print("tests of what has changed:" if chosen != CORE else "tests of the core:", *chosen, flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command += [f"--deselect={test}" for test in TOO_LONG]
    env = os.environ | {"NO_TEST_BEGINS_AFTER": str(time.time() + SECONDS)}
    return subprocess.run([*command, *chosen], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
