"""The files that tell a run's history: ledger.jsonl and metrics.jsonl, cut back to the checkpoint on resume.

Afterwards both tell the history of the present weights only; the cut lines are kept in `*.lost.jsonl`.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any


class LedgerFile:
    """Appends one line per trained group, durable before the step counts as done."""

    def __init__(self, path: Path) -> None:
        """Append to `path`."""
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write the lines of one step in one piece."""
        self._file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cut_back(path: Path, step: int) -> int:
    """Keep the lines of `path` up to `step`; move later or torn ones to `<name>.lost.jsonl`; return how many were moved."""
    if not path.exists():
        return 0
    kept: list[str] = []
    lost: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        (kept if _step_of(line) <= step else lost).append(line)
    if not lost:
        return 0
    with path.with_suffix(".lost.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(line if line.endswith("\n") else line + "\n" for line in lost)
    staging = path.with_suffix(".cut")
    with staging.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)
    return len(lost)


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for one that was torn by a crash."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of `value` in one step."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(json.dumps(value, indent=1), encoding="utf-8")
    staging.replace(path)
