"""The files that tell a run's history: ledger.jsonl and metrics.jsonl, cut back to the checkpoint on resume.

Afterwards both tell the history of the present weights only; the cut lines are kept in `*.lost.jsonl`. A checkpoint carries the extent
of both at its step: what is damaged or gone is told as such and never taken for lines of a history that is left.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import blake3

from rl_core.api.errors import DataError
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How much of a history file a checkpoint vouches for."""

    bytes: int
    lines: int
    digest: str
    """BLAKE3 of these bytes, hexadecimal."""


class Tally:
    """The extent of a file that only grows; each look reads what came since the last one, so that a later change is not taken for true."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = blake3.blake3()
        self._bytes = self._lines = 0

    def take(self) -> Extent:
        """Return the present extent, all of it on the disk; of a file that is gone the last one. Raises OSError when it cannot be synced."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut could leave less than the checkpoint vouches for
            file.seek(self._bytes)
            while block := file.read(1 << 20):
                self._hash.update(block)
                self._bytes += len(block)
                self._lines += block.count(b"\n")
        return Extent(bytes=self._bytes, lines=self._lines, digest=self._hash.hexdigest())


def verify(path: Path, saved: Extent) -> None:
    """Raise DataError naming the damage unless `path` begins with what a checkpoint vouches for."""
    data = _read(path)
    if len(data) < saved.bytes:
        damage = f"{len(data)} bytes are left of {saved.bytes}"
    elif blake3.blake3(data[: saved.bytes]).hexdigest() == saved.digest:
        return
    else:
        bad = _first_unreadable(data[: saved.bytes].splitlines(keepends=True))
        damage = "its bytes have changed" if bad is None else f"line {bad + 1} cannot be read"
    raise DataError(
        f"{path} must hold the {saved.lines} lines that were there when the checkpoint was made, got: {damage}"
    )


def take_over(source: Path, target: Path, saved: Extent) -> None:
    """Begin `target` with what a checkpoint vouches for of `source`, unless it is there; in place, as writers hold `target` open.

    Raises DataError for a damaged source, InfrastructureError when the storage refuses.
    """
    if len(_read(target)) >= saved.bytes:
        return
    verify(source, saved)
    try:
        with target.open("wb") as file:
            file.write(_read(source)[: saved.bytes])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_failure("the history of the run that this one goes on from", target, error) from error


def cut_back(path: Path, step: int, saved: Extent | None = None) -> int:
    """Keep what `saved` vouches for and the lines after it up to `step`; move the rest on to `<name>.lost.jsonl`.

    Return how many lines were moved. The file is truncated in place, so that writers that hold it open go on at its new end. Raises
    InfrastructureError when the storage refuses, DataError for a line that cannot be read before the last one where nothing vouches for
    the file: only the last can be torn by a crash. The file is then as it was.
    """
    data = _read(path)
    sure = 0 if saved is None else saved.bytes
    lines = data[sure:].splitlines(keepends=True)
    keep = next((number for number, line in enumerate(lines) if _step_of(line) > step), len(lines))
    if saved is None and step >= 0 and (bad := _first_unreadable(lines[:-1])) is not None:
        raise DataError(
            f"{path} must hold a JSON object with its step per line, got line {bad + 1}: {lines[bad][:80]!r}"
        )
    lost = lines[keep:]
    if not lost:
        return 0
    aside = path.with_suffix(".lost.jsonl")
    try:
        with aside.open("ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in lost)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_failure("the history of a run that is left", aside, error) from error
    os.truncate(path, sure + sum(len(line) for line in lines[:keep]))
    return len(lost)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _first_unreadable(lines: list[bytes]) -> int | None:
    return next((number for number, line in enumerate(lines) if _step_of(line) == math.inf), None)


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity for one that was torn by a crash or damaged."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def failures_before(output: Path) -> dict[str, int]:
    """Return the failures that the run in `output` counted in earlier epochs; none where no status tells."""
    try:
        found = json.loads((output / "status.json").read_text())["failures"]
        return {str(name): int(count) for name, count in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def now_text() -> str:
    """Return the present time, RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of `value` in one step."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(json.dumps(value, indent=1), encoding="utf-8")
    staging.replace(path)
