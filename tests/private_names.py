"""Finds private names of other libraries, and assignments to the names of other libraries, in Python sources."""

import ast
import re
from collections.abc import Iterator

OURS = ("common", "tools", "recipes", "launchers")
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields", "_make"}  # of os and of named tuples
STRINGS = {"_bundled", "_sysconfigdata", "_type", "_column"}  # of files and columns
STRINGS |= {"_grouped_mm"}  # an operator
HOOKS = {"_init_weights", "_no_split_modules"}  # of transformers; our models define them too


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(re.match("_(?!_|$)", part) for part in name.split("."))


def dotted(node: ast.AST) -> str:
    """The text of a chain of attributes, such as torch.ops.aten; of other expressions the last attributes only."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def own_attributes(trees: list[ast.Module]) -> set[str]:
    """Names of attributes that the sources define: of methods, class variables and instances."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                names |= {part.name} if isinstance(part, ast.FunctionDef) else set()
                targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if dotted(node.value) == "self" else set()
    return names - HOOKS


class _File:
    def __init__(self, tree: ast.Module, own: set[str]):
        self.tree, self.own = tree, own
        self.foreign, self.modules, self.operators = set(), set(), {"torch.ops"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None)
                for alias in node.names:
                    bound = alias.asname or (alias.name if module else alias.name.split(".")[0])
                    is_ours = (module or alias.name).split(".")[0] in OURS
                    (self.modules if is_ours else self.foreign).add(bound)
            elif isinstance(node, ast.Assign) and dotted(node.value).startswith("torch.ops"):
                self.operators |= {dotted(target) for target in node.targets}

    def names(self) -> Iterator[tuple[int, str]]:
        strings = (node for node in ast.walk(self.tree) if isinstance(node, ast.JoinedStr))
        formatted = {id(part) for node in strings for part in node.values}
        for node in ast.walk(self.tree):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Import):
                yield from ((line, alias.name) for alias in node.names if is_private(alias.name))
            elif isinstance(node, ast.ImportFrom):
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                yield from ((line, name) for name in names if is_private(name) and name.split(".")[0] not in OURS)
            elif isinstance(node, ast.Attribute):
                yield from ((line, name) for name in self._of_attribute(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in formatted:
                is_name = re.fullmatch(r"(\w+\.)*_[a-z]\w*(\.\w+)*", node.value)
                if is_name and is_private(node.value) and node.value not in STRINGS | self.own:
                    yield line, node.value
            elif isinstance(node, ast.Call):
                function = dotted(node.func)
                yield from ((line, f"{function}({key.arg}=)") for key in node.keywords if is_private(key.arg or ""))
                if function == "setattr" and self._is_foreign(node.args[0]):
                    yield line, f"setattr({dotted(node.args[0])})"

    def _of_attribute(self, node: ast.Attribute) -> Iterator[str]:
        base, name = dotted(node.value), dotted(node)
        is_operator = any(base == one or base.startswith(f"{one}.") for one in self.operators)
        if is_private(node.attr) and node.attr not in DOCUMENTED | self.own and base not in self.modules:
            if not is_operator:
                yield name
        elif isinstance(node.ctx, ast.Store) and self._is_foreign(node.value):
            yield f"{name} ="

    def _is_foreign(self, node: ast.AST) -> bool:
        """Whether it is a module or class of another library; Python's hooks in `sys` are meant to be set."""
        return (root := dotted(node).split(".")[0]) in self.foreign and root != "sys"


def find_private_names(sources: dict[str, str]) -> list[str]:
    """One line for each place: file, line and name. sources: {file: text}."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    own = own_attributes(list(trees.values()))
    return [f"{path}:{line} {name}" for path, tree in trees.items() for line, name in _File(tree, own).names()]
