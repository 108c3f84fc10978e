"""Find circles of files: files that import each other, directly or through others. `python -m tests.lint.circles`, run by `make lint`; exits 1 when it prints one.

An import counts wherever it stands. A late import inside a function hides a circle and does not take it away. One under
`if TYPE_CHECKING` does no harm when the program runs, but a reader of either file must read both: hand the part what it calls (a
function, a Protocol) instead of the whole it belongs to.
"""

import sys
from collections.abc import Mapping

from tests.lint.import_graph import Graph, graph, modules


def circles(imports: Graph) -> list[list[str]]:
    """Return a shortest circle through each module that is in one, each circle once, as the names along it."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(imports):
        circle = _shortest_way_back(imports, start)
        if circle:
            found.setdefault(frozenset(circle), circle)
    return list(found.values())


def _shortest_way_back(imports: Graph, start: str) -> list[str]:
    before: dict[str, str] = {}
    waiting = [start]
    for name in waiting:  # breadth first: the list grows while it is walked
        for other in sorted(imports.get(name, ())):
            if other == start:
                return _way(before, start, name)
            if other not in before:
                before[other] = name
                waiting.append(other)
    return []


def _way(before: Mapping[str, str], start: str, end: str) -> list[str]:
    way = [end]
    while way[-1] != start:
        way.append(before[way[-1]])
    return way[::-1]


def main() -> int:
    """Print each circle; return the exit code."""
    found = circles(graph(modules(), types=True))
    for circle in found:
        sys.stderr.write(f"files import each other in a circle: {' -> '.join([*circle, circle[0]])}\n")
    if found:
        sys.stderr.write("move what both need into a file of its own, or hand it over in the constructor\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
