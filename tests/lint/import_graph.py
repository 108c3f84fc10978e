"""Which of our modules import which: the graph behind `circles.py` and the test that every module is used by some process."""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("rl_core", "operator/rljob_operator")
Graph = Mapping[str, frozenset[str]]
"""Module name -> names of the modules it imports."""


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the file of each of our modules by its import name."""
    found: dict[str, Path] = {}
    for source in SOURCES:
        folder = root / source
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def graph(files: Mapping[str, Path], *, types: bool) -> dict[str, frozenset[str]]:
    """Return which modules each of `files` imports, among them only, wherever the import stands.

    `types`: whether imports under `if TYPE_CHECKING` count. A package counts where it is imported by name, not where one of its
    modules is.
    """
    found = {}
    for name, path in files.items():
        tree = parsed(path)
        nodes = ast.walk(tree) if types else _executed(tree)
        found[name] = frozenset(_imports(nodes, name, path.name == "__init__.py", files)) - {name}
    return found


def _imports(nodes: Iterator[ast.AST], name: str, is_package: bool, known: Mapping[str, Path]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, name, is_package)
            wholes = [f"{base}.{alias.name}" for alias in node.names]
            yield from (found for whole in wholes for found in [whole if whole in known else base] if found in known)


def _base(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    """Return the absolute name of what `from ... import` reads from, relative dots resolved."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    package = parts[: len(parts) - node.level + is_package]
    return ".".join([*package, *([node.module] if node.module else [])])


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` but for those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _executed(other)
            continue
        yield child
        yield from _executed(child)
