"""Checks texts for what a reader cannot follow. `python -m tests.lint.pages`, run by `make lint`; exits 1 when it prints something.

- A citation of a page that is not in the repository, such as `NAME.md 4`, or of a numbered invariant. State the rule itself, or link to
  a page under docs/.
- A line of README.md or docs/ with more than 140 characters.
- A link of README.md or docs/ to a file that is not in the repository.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("rl_core", "operator", "helm", "docs", "tests", "examples", "benchmarks", "worker_images", "README.md")
SUFFIXES = frozenset({".py", ".md", ".yaml", ".tpl", ".go", ".txt"})
MAX_LINE = 140
CITATION = re.compile(
    r"\b[a-z_]+\.md,? (?:section )?\d|\b(?:protocol|design|findings|style)\.md\b|\b[Ii]nvariants? I\d|[(\"]I[1-9][):, ]|\bspecs/"
)

LINK = re.compile(r"\]\(([^)#\s]*)(?:#[^)\s]*)?\)")


def citations(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of each line that cites a page or an invariant that is not in the repository."""
    for number, line in enumerate(text.splitlines(), start=1):
        if CITATION.search(line):
            yield number, line.strip()


def broken_links(page: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, message) of each link of a page to a file that does not exist. Links to the web are not checked."""
    for number, line in enumerate(text.splitlines(), start=1):
        for target in LINK.findall(line):
            if target and "://" not in target and not (page.parent / target).exists():
                yield number, f"links to {target}, which does not exist"


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of each line that is too long."""
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_LINE:
            yield number, f"{len(line)} characters, at most {MAX_LINE}: {line[:60]}..."


def main() -> int:
    """Print what is found; return the exit code."""
    names = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    problems = []
    for name in names.splitlines():
        path = ROOT / name
        if path.suffix not in SUFFIXES or path == Path(__file__) or not path.is_file():
            continue
        text = path.read_text()
        problems += [
            f"{name}:{number}: cites what is not in the repository: {line}" for number, line in citations(text)
        ]
        if path.suffix == ".md" and (name == "README.md" or name.startswith("docs/")):
            found = [*long_lines(text), *broken_links(path, text)]
            problems += [f"{name}:{number}: {line}" for number, line in found]
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
