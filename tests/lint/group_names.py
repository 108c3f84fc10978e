"""Counts the places that name one of the built-in groups by a literal, such as "rollout": code is to iterate over groups instead.

`MOST` is the present number. The check fails when there are more, so that the number only falls; lower it when you remove some.
Not counted are the definitions (rl_core/plan/groups.py), the schema (rl_core/api) and the built-in programs and their workers.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = frozenset({"actor", "rollout", "env"})
MOST = 40
EXEMPT = ("rl_core/plan/groups.py", "rl_core/api/")
"""The definitions of the groups, and the fields of the schema, which have their names."""
PROGRAMS = ("rl_core/runner/reasoning.py", "rl_core/runner/asynchronous.py")
"""The built-in programs, which are written for these groups."""


def main() -> int:
    """Print the count, and every place when there are too many; return the exit code."""
    places = [place for path in _files() for place in find(path)]
    if len(places) > MOST:
        sys.stderr.write("".join(f"{place}\n" for place in places))
        sys.stderr.write(
            f"{len(places)} literal names of groups, {MOST} allowed; iterate over groups_of(spec), or use ACTOR, ROLLOUT, ENV\n"
        )
        return 1
    sys.stdout.write(f"literal names of groups: {len(places)} (at most {MOST})\n")
    return 0


def _files() -> Iterator[Path]:
    for folder in ("rl_core", "operator"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(EXEMPT) and name not in PROGRAMS:
                yield path


def find(path: Path) -> Iterator[str]:
    """Yield `file:line: name` for each string literal that is the name of a group.

    The key `env` of a container, which holds the list of its environment variables, is a word of Kubernetes and not counted.
    """
    tree = ast.parse(path.read_text())
    variables = {
        key
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(value, ast.List)
    }
    for node in ast.walk(tree):
        if (
            node not in variables
            and isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in NAMES
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"


if __name__ == "__main__":
    sys.exit(main())
