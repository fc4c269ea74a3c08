"""The house: files and functions stay small, imports go downward, no circle, and a recipe loads its own job only."""

import ast
import os

import pytest
import yaml
from conftest import ROOT
from quick import imported

# From the bottom up: a folder or module of common/ imports what stands before it, and nothing that comes behind it.
LAYERS = [
    "redaction",
    "errors",
    "reading",
    "command_parser",
    "broken_versions",
    "versions",
    "packages",
    "internals",
    "process",
    "elastic_launch",
    "output",
    "disk_errors",
    "output_dirs",
    "files",
    "peak_memory",
    "host_memory",
    "launcher",
    "training",
    "flag_translation",
    "parallel",
    "data",
    "models",
    "report",
    "checkpoint",
]
LAYERS += ["remote", "remote_resume", "remote_output"]
LAYERS += [
    "default_output_dir",
    "rare_arguments",
    "argument_checks",
    "auto_resume",
    "arguments",
    "run_endings",
    "evaluation",
    "planner",
]
LAYERS += ["auto_compile", "auto_micro_batch", "oom_message", "run", "tasks"]
LARGEST = {"file": 400, ast.ClassDef: 200, ast.FunctionDef: 60}  # lines


def draw(sources):
    """Which modules each module imports. sources: {name: text}."""
    arrows = {}
    for name, text in sources.items():
        ours = {found for found in imported(text) if found.startswith("common.")}
        arrows[name] = {found for found in ours if found.rpartition(".")[0] not in sources}  # a module's own names
    return arrows


def upward(arrows):
    """The arrows that go from a lower layer to a higher one, and those between modules that reach each other."""

    def layer(name):
        part = name.split(".")[1]
        assert part in LAYERS, f"{part} has no place in LAYERS"
        return LAYERS.index(part)

    def reached(name, seen):
        for other in arrows.get(name, ()):
            if other not in seen:
                seen.add(other)
                reached(other, seen)
        return seen

    ours = [(name, other) for name in sorted(arrows) for other in sorted(arrows[name])]
    up = [f"{name} -> {other}" for name, other in ours if name.startswith("common.") and layer(name) < layer(other)]
    circles = [f"{name} <-> {other}" for name, other in ours if name in reached(other, set())]
    return up + circles


def sources():
    paths = [*(ROOT / "common").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    modules = dict(zip(names, (path.read_text() for path in paths), strict=True))
    return {name: text for name, text in modules.items() if not name.endswith("__init__")}


def test_imports_go_downward_and_close_no_circle():
    assert upward(draw(sources())) == []


def test_nothing_that_trains_imports_a_tool():
    """And the code of a recipe's task is imported by this recipe and this task only."""
    for name, text in sources().items():
        names = imported(text)
        assert not {found for found in names if found.split(".")[0] == "tools"}, name
        tasks = {found.split(".")[2] for found in names if found.startswith("common.tasks.")}
        own = name.split(".")[2] if name.startswith("common.tasks.") else name.rpartition(".")[2]
        assert tasks <= {own}, name


@pytest.mark.parametrize(
    ("name", "line", "arrow"),
    [
        ("common.training.batching", "from common.models.load import build_model", "batching -> common.models.load"),
        ("common.training.batching", "import common.models.load", "batching -> common.models.load"),
        (
            "common.data.source_types",
            "from common.data.text import tokenize",
            "common.data.source_types <-> common.data.text",
        ),
    ],
)
def test_an_arrow_that_goes_upward_or_around_is_named(name, line, arrow):
    """The control."""
    changed = sources()
    changed[name] += f"\n{line}\n"
    assert any(arrow in found for found in upward(draw(changed)))


@pytest.mark.parametrize("path", sorted((ROOT / "common").rglob("*.py")), ids=lambda path: path.stem)
def test_files_classes_and_functions_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LARGEST["file"]
    for node in ast.walk(ast.parse(text)):
        if (most := LARGEST.get(type(node))) is not None:
            assert node.end_lineno - node.lineno < most, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


def hooks_of(config):
    """The commands of the pre-commit hooks, and the packages that they install."""
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    return [hook["entry"] for hook in hooks], {package for hook in hooks for package in hook["additional_dependencies"]}


def test_commits_are_checked_with_the_ruff_of_the_style_check():
    """Control: a different version is noticed."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    (pin,) = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("ruff==")]
    commands, packages = hooks_of(yaml.safe_load(text))
    assert [command.split()[:2] for command in commands] == [["ruff", "check"], ["ruff", "format"]]
    assert packages == {pin}
    assert hooks_of(yaml.safe_load(text.replace(pin, "ruff==0.1.0", 1)))[1] != {pin}


def test_the_workflow_runs_the_checks_of_this_repository():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1].endswith(" .ci/run") and os.access(ROOT / ".ci/run", os.X_OK)
    python = next(step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert python == "3.11" and job["timeout-minutes"] == 90


def module_state(text):
    """Variables of a module that its functions can change: lower-case names, and names after `global`."""
    tree = ast.parse(text)
    found = [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.Constant | ast.Dict | ast.List | ast.Set
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [target.id for target in targets if isinstance(target, ast.Name) and target.id.islower()]
    return found


def test_modules_have_no_state():
    """What a process remembers is in `common.process`. Controls: each way to keep a variable in a module."""
    assert {name: found for name, text in sources().items() if (found := module_state(text))} == {}
    for text in (
        "update = None",
        "locks: dict[str, int] = {}",
        "_count = 0",
        "def f():\n    global Watch\n    Watch = 1",
    ):
        assert len(module_state(text)) == 1, text
