"""Finds functions, classes and methods that nothing refers to; `test_unused.py` uses it.

A definition counts as used if its name occurs outside its own body and outside unused code: as a name in a module that imports or
defines it, as an attribute, or as a word of a short string (`"module:Class"`, the name of a remote method). Only names are compared, so
a method that shares its name with a used one is not found. An import or an entry of `__all__` is not a use.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
WORD = re.compile(r"[A-Za-z_]\w*")
MAX_TEXT = 200
"""Longer strings are prose or source code and are not searched for names."""
PLAIN_DECORATORS = {
    *("property", "setter", "cached_property", "staticmethod", "classmethod", "abstractmethod", "override", "overload", "final"),
    *("dataclass", "total_ordering", "runtime_checkable", "contextmanager", "asynccontextmanager", "cache", "lru_cache"),
    *("no_grad", "inference_mode", "njit", "record"),
}  # fmt: skip
"""Decorators that do not call what they decorate. Any other may register it (typer, kopf, pydantic, pytest)."""


@dataclass(frozen=True)
class Definition:
    """A function or class; `owner` is the class of a method, else ""."""

    module: str
    owner: str
    name: str
    uses: Counter[str]
    """How often each name occurs in its own body."""

    def __str__(self) -> str:
        return f"{self.module}:{self.owner + '.' if self.owner else ''}{self.name}"

    @property
    def forms(self) -> tuple[str, ...]:
        """Return how a use of it looks: attributes are written with a leading dot."""
        return (f".{self.name}",) if self.owner else (self.name, f".{self.name}")


@dataclass(frozen=True)
class Code:
    """All definitions of some modules, and how often each name occurs in them and in the files of their users."""

    definitions: list[Definition]
    uses: Counter[str]

    @classmethod
    def read(cls, files: Mapping[str, Path], users: Iterable[Path] = ()) -> "Code":
        """Read `files` (module name -> file), whose definitions are examined, and `users`, which only use them."""
        definitions: list[Definition] = []
        uses: Counter[str] = Counter()
        for module, path in files.items():
            tree = ast.parse(path.read_text())
            bound = _bound(tree)
            definitions += _definitions(module, tree, bound)
            uses.update(_names(tree, bound))
        for path in users:
            text = path.read_text()
            if path.suffix == ".py":
                tree = ast.parse(text)
                uses.update(_names(tree, _bound(tree)))
            else:
                uses.update(f".{word}" for word in WORD.findall(text))
        return cls(definitions, uses)

    def unused(self, expected: Iterable[str] = ()) -> list[str]:
        """Return the definitions that nothing refers to, as "module:Class.method".

        `expected`: definitions of this form that count as used, with all that they use themselves.
        """
        kept = frozenset(expected)
        return sorted(map(str, _closure([one for one in self.definitions if str(one) not in kept], self.uses)))


def _closure(candidates: list[Definition], uses: Counter[str]) -> list[Definition]:
    """Return the unused candidates; code that only they use is unused as well."""
    result: list[Definition] = []
    while True:
        same_name: dict[str, list[Definition]] = {}
        for one in candidates:
            same_name.setdefault(one.name, []).append(one)
        found = [one for one in candidates if _is_unused(one, same_name[one.name], uses)]
        if not found:
            return result
        classes = {(one.module, one.name) for one in found if not one.owner}
        for one in found:
            if (one.module, one.owner) not in classes:  # the uses of a method are among those of its class
                uses = uses - one.uses
        result += found
        candidates = [one for one in candidates if one not in found]


def _is_unused(one: Definition, same_name: list[Definition], uses: Counter[str]) -> bool:
    """Return whether every use of `one`'s name is in the body of a definition of that name."""
    return all(uses[form] <= sum(other.uses[form] for other in same_name) for form in one.forms)


def _definitions(module: str, tree: ast.Module, bound: set[str]) -> Iterator[Definition]:
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef):
            continue
        if not _is_called_by_others(node):
            yield Definition(module, "", node.name, Counter(_names(node, bound)))
        if isinstance(node, ast.ClassDef) and not _is_protocol(node):
            for method in node.body:
                if isinstance(method, Function) and not _is_called_by_others(method):
                    yield Definition(module, node.name, method.name, Counter(_names(method, bound)))


def _is_called_by_others(node: Function | ast.ClassDef) -> bool:
    """Return whether Python (a dunder method) or a decorator may call it."""
    return (node.name.startswith("__") and node.name.endswith("__")) or any(map(_registers, node.decorator_list))


def _registers(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
    return name not in PLAIN_DECORATORS


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0].rpartition(".")[2] == "Protocol" for base in node.bases)


def _bound(tree: ast.Module) -> set[str]:
    """Return the names that a module imports or defines."""
    bound = {node.name for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    return bound


def _names(tree: ast.AST, bound: set[str]) -> Iterator[str]:
    """Yield every use in `tree`: names of `bound`, attributes, and words of short strings; docstrings are not searched."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in bound:
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _may_name(node.value):
            yield from (f".{word}" for word in WORD.findall(node.value))
        docstring = _docstring(node)
        waiting += [child for child in ast.iter_child_nodes(node) if child is not docstring]


def _may_name(text: str) -> bool:
    """Return whether a string may hold names: it is short and not a sentence."""
    return len(text) <= MAX_TEXT and re.search(r"[a-z] [a-z]", text) is None


def _docstring(node: ast.AST) -> ast.stmt | None:
    body = getattr(node, "body", None)
    if not isinstance(node, Function | ast.ClassDef | ast.Module) or not body or not isinstance(body[0], ast.Expr):
        return None
    return body[0] if isinstance(body[0].value, ast.Constant) else None
