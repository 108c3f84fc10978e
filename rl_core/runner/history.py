"""The files that tell a run's history: ledger.jsonl and metrics.jsonl, cut back to the checkpoint on resume.

Afterwards both tell the history of the present weights only; the cut lines are kept in `*.lost.jsonl`.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_core.checkpoint.files import write_failure
from rl_core.observability.append import AppendFile


class LedgerFile:
    """Appends one line per trained group, durable before the step counts as done."""

    def __init__(self, path: Path, *, attempt: Callable[[Callable[[], None]], None] = lambda write: write()) -> None:
        """Append to `path`; `attempt` is given each write and may try it again."""
        self._path = path
        self._attempt = attempt
        self._file = AppendFile(path)

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write the lines of one step in one piece. Raises InfrastructureError when the storage refuses; nothing is written then."""
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        self._attempt(lambda: self._append(data))

    def _append(self, data: bytes) -> None:
        try:
            self._file.append(data, sync=True)
        except OSError as error:
            raise write_failure("the ledger of trained groups", self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cut_back(path: Path, step: int) -> int:
    """Keep the lines of `path` up to `step`; move those from the first later or torn one on to `<name>.lost.jsonl`.

    Return how many were moved. The file is truncated in place, so that writers that hold it open go on at its new end. Raises
    InfrastructureError when the storage refuses; the file is then as it was.
    """
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    keep = next((number for number, line in enumerate(lines) if _step_of(line) > step), len(lines))
    lost = lines[keep:]
    if not lost:
        return 0
    aside = path.with_suffix(".lost.jsonl")
    try:
        with aside.open("a", encoding="utf-8") as file:
            file.writelines(line if line.endswith("\n") else line + "\n" for line in lost)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_failure("the history of a run that is left", aside, error) from error
    os.truncate(path, sum(len(line.encode()) for line in lines[:keep]))
    return len(lost)


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for one that was torn by a crash."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def now_text() -> str:
    """Return the present time, RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of `value` in one step."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(json.dumps(value, indent=1), encoding="utf-8")
    staging.replace(path)
