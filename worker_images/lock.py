"""Compile `requirements/*.txt` from the extras of pyproject.toml, with the versions of the environment (`requirements/all.txt`).

    python worker_images/lock.py [--check]      (make lock)

Actor and rollout share the layer of `torch-*.txt`; `actor.txt` and `rollout-*.txt` hold what each needs beyond it. `build.txt` holds the
tools that make the images. Each requirement carries the digests of all its files, of every platform.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "worker_images" / "requirements"
UV = (
    *("uv", "pip", "compile", "--quiet", "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_34"),
    *("--generate-hashes", "--no-header", "--no-annotate"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """One compiled file."""

    extra: str | None = None
    """An extra of pyproject.toml."""
    excludes: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    """Files with packages that no extra brings, or whose requirer is excluded."""
    without: str | None = None
    """A compiled file whose packages are taken away: a layer below brings them."""


LOCKS = {
    "torch-cuda.txt": Lock(extra="rollout", excludes=("not-in-torch.txt",)),
    "torch-cpu.txt": Lock(extra="rollout", excludes=("not-in-torch.txt", "cuda-only.txt"), adds=("cpu-keeps.txt",)),
    "actor.txt": Lock(extra="actor", excludes=("not-in-torch.txt",), without="torch-cuda.txt"),
    "rollout-cuda.txt": Lock(extra="rollout", without="torch-cuda.txt"),
    "rollout-cpu.txt": Lock(
        extra="rollout",
        excludes=("cuda-only.txt", "not-on-cpu.txt"),
        adds=("rollout-cpu-keeps.txt",),
        without="torch-cuda.txt",
    ),
    "env.txt": Lock(extra="env"),
    "operator.txt": Lock(extra="operator", excludes=("not-in-operator.txt",)),
    "build.txt": Lock(adds=("build-tools.txt",)),
}


def compiled(lock: Lock) -> str:
    """Return the pinned requirements of one file; uv's failure raises CalledProcessError."""
    extra = ("--extra", lock.extra, "pyproject.toml") if lock.extra else ()
    with tempfile.NamedTemporaryFile(suffix=".txt") as output:
        subprocess.run(
            [
                *UV,
                *("--constraints", "requirements/all.txt", "--output-file", output.name),
                *(argument for name in lock.excludes for argument in ("--excludes", str(FOLDER / name))),
                *extra,
                *(str(FOLDER / name) for name in lock.adds),
            ],
            cwd=ROOT,
            check=True,
        )
        text = Path(output.name).read_text()
    below = requirements(compiled(LOCKS[lock.without])) if lock.without else []
    return "".join(requirement for requirement in requirements(text) if requirement not in below)


def requirements(text: str) -> list[str]:
    """Return each requirement of a file with the lines of its hashes, which are indented."""
    return re.findall(r"^\S.*\n(?:[ \t].*\n)*", text, re.MULTILINE)


def main() -> int:
    """Write the files, or with --check say which of them would change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file would change")
    check = parser.parse_args().check
    stale = []
    for name, lock in LOCKS.items():
        path, text = FOLDER / name, compiled(lock)
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text)
    if check and stale:
        sys.stderr.write(
            f"worker_images/requirements must fit pyproject.toml, stale: {', '.join(stale)}; run make lock\n"
        )
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
