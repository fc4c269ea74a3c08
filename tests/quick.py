"""Runs the tests of what has changed since origin's main branch, or the core if nothing has, in under three minutes.

A test file belongs to a changed file if it is that, has its name (test_batching.py for batching.py), or names its path
or module. Code that no test file names is the core's. What has not begun in time is skipped, and counted at the end.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = [f"test_{name}.py" for name in ("batching", "losses", "recipes", "lm", "docs")]
SECONDS = 110  # after them no test begins


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def changed_files() -> list[str]:
    """Committed here and not on main, or not committed yet."""
    base = next((commit for name in ("origin/main", "main") for commit in git("merge-base", "HEAD", name)), "HEAD")
    return git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")


def choose(changed: list[str], tests: dict[str, str]) -> list[str]:
    """The names of the files that belong to what has changed, out of `tests` (name to text), its namesakes first."""
    namesakes, others = [], []
    for path in map(Path, changed):
        stem = "docs" if path.suffix == ".md" else path.stem
        same = [name for name in tests if name in (path.name, f"test_{stem}.py")]
        module, package = (re.escape(".".join(part.parts)) for part in (path.with_suffix(""), path.parent))
        names = [re.escape(str(path)), rf"{module}\b", rf"from {package} import .*\b{stem}\b"]
        names += [f'"{stem}"'] if path.suffix == ".yaml" else []  # a config goes by its name
        more = [name for name, text in tests.items() if re.search("|".join(names), text)]
        namesakes += same
        others += more if same or more or path.suffix != ".py" else CORE
    return list(dict.fromkeys(namesakes + others)) or CORE


def main() -> int:
    tests = {path.name: path.read_text() for path in sorted((ROOT / "tests").glob("test_*.py"))}
    chosen = choose(changed_files(), tests)
    print("tests of what has changed:", *chosen, flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    env = os.environ | {"NO_TEST_BEGINS_AFTER": str(time.time() + SECONDS)}
    return subprocess.run([*command, *(f"tests/{name}" for name in chosen)], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
