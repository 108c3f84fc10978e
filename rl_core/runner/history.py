"""The history files of a run, ledger.jsonl and metrics.jsonl, and how a resume cuts them back to its checkpoint.

After a resume both files describe the steps of the current weights only. Lines of later steps are moved to `*.lost.jsonl`. A checkpoint
stores the size and digest of both files at its step. If these bytes are damaged or missing, the resume fails with an error; damaged lines
are never removed silently as if they belonged to later steps.
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
    """Appends one line per trained prompt group, before the step counts as done.

    Lines are synced to disk with the next checkpoint (`Tally.take`). A resume moves later lines to `*.lost.jsonl` anyway, so a sync of
    each step, which takes about 5 ms, would not save anything after a power cut.
    """

    def __init__(self, path: Path, *, retrying: Callable[[Callable[[], None]], None] = lambda write: write()) -> None:
        """Append to the file `path`. `retrying(write)` calls the function `write`, and may repeat it while the storage fails."""
        self._path = path
        self._retrying = retrying
        self._file = AppendFile(path)

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write the lines of one step at once. Raises InfrastructureError if the storage fails; nothing is written then."""
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        self._retrying(lambda: self._append(data))

    def _append(self, data: bytes) -> None:
        try:
            self._file.append(data)
        except OSError as error:
            raise write_failure("the ledger of trained groups", self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """The part of a history file that belongs to a checkpoint: its first `bytes` bytes."""

    bytes: int
    lines: int
    digest: str
    """BLAKE3 of these bytes, hexadecimal."""


class Tally:
    """Computes the extent of a file that is only appended to, reading each byte once.

    Bytes that were read are not read again, so a later change of them does not enter the digest and is detected on resume.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = blake3.blake3()
        self._bytes = self._lines = 0

    def take(self) -> Extent:
        """Sync the file to disk and return its extent; if the file is gone, return the last one. Raises OSError if it cannot be synced."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            os.fsync(file.fileno())  # Otherwise a power cut could lose lines that the checkpoint refers to.
            file.seek(self._bytes)
            while block := file.read(1 << 20):
                self._hash.update(block)
                self._bytes += len(block)
                self._lines += block.count(b"\n")
        return Extent(bytes=self._bytes, lines=self._lines, digest=self._hash.hexdigest())


def verify(path: Path, saved: Extent) -> None:
    """Raise DataError, describing the damage, unless `path` begins with exactly the bytes of `saved`."""
    data = _read(path)
    if len(data) < saved.bytes:
        damage = f"{len(data)} bytes are left of {saved.bytes}"
    elif blake3.blake3(data[: saved.bytes]).hexdigest() == saved.digest:
        return
    else:
        bad_line = _first_unreadable(data[: saved.bytes].splitlines(keepends=True))
        damage = "its bytes have changed" if bad_line is None else f"line {bad_line + 1} cannot be read"
    raise DataError(
        f"{path} must hold the {saved.lines} lines that were there when the checkpoint was made, got: {damage}"
    )


def take_over(source: Path, target: Path, saved: Extent) -> None:
    """Copy the first `saved.bytes` bytes of `source` to `target`, unless `target` has as many already.

    `target` is written in place, because other writers have it open. Raises DataError if `source` is damaged, InfrastructureError if the
    storage fails.
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
    """Move the lines of steps after `step` to `<name>.lost.jsonl`; return how many lines were moved.

    The bytes of `saved` are kept in any case. From the first later line that is of a greater step or cannot be parsed, everything is moved:
    only a crash can leave such a line. The file is truncated in place, so that writers that have it open continue at its new end.

    Without `saved`, a line before the last one that cannot be parsed raises DataError, because a crash can only damage the last one. Raises
    InfrastructureError if the storage fails. After an error the file is unchanged.
    """
    data = _read(path)
    sure = 0 if saved is None else saved.bytes
    lines = data[sure:].splitlines(keepends=True)
    num_kept = next((index for index, line in enumerate(lines) if _step_of(line) > step), len(lines))
    if saved is None and step >= 0 and (bad_line := _first_unreadable(lines[:-1])) is not None:
        raise DataError(
            f"{path} must hold a JSON object with its step per line, got line {bad_line + 1}: {lines[bad_line][:80]!r}"
        )
    removed = lines[num_kept:]
    if not removed:
        return 0
    backup = path.with_suffix(".lost.jsonl")
    try:
        with backup.open("ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in removed)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_failure("the history of a run that is left", backup, error) from error
    os.truncate(path, sure + sum(len(line) for line in lines[:num_kept]))
    return len(removed)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _first_unreadable(lines: list[bytes]) -> int | None:
    return next((index for index, line in enumerate(lines) if _step_of(line) == math.inf), None)


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity for one that was torn by a crash or damaged."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def failures_before(output: Path) -> dict[str, int]:
    """Return the numbers of failures by kind that the run in `output` counted in earlier epochs; empty without a readable status file."""
    try:
        counts = json.loads((output / "status.json").read_text())["failures"]
        return {str(name): int(count) for name, count in counts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def now_text() -> str:
    """Return the present time, RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path`, replacing the file atomically."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(json.dumps(value, indent=1), encoding="utf-8")
    staging.replace(path)
