"""`processes.json`: every live process of a local run with its place, kept current, so that a person can find it."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_core.runner.history import write_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEntry:
    """One line of the file."""

    role: str
    """actor, rollout or env for the workers; runner, channel, supervisor, env-child, engine for the others."""
    index: int
    """Index of its pod inside the pod's role."""
    rank: int | None
    """Rank in its group; None for supervisors and engines."""
    pid: int
    pod: str
    """Name of its pod, `<job>-<role>-<index>`."""


class ProcessRegistry:
    """The live processes by pid, mirrored into a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[int, ProcessEntry] = {}
        self._parents: dict[int, int] = {}
        self._write()

    def entries(self) -> list[ProcessEntry]:
        """Return the live processes by pod, role and rank."""
        return sorted(self._entries.values(), key=lambda entry: (entry.pod, entry.role, entry.rank or 0, entry.pid))

    def add(self, entry: ProcessEntry, *, parent: int | None = None) -> None:
        """Add a started process. It is removed together with its `parent`."""
        self._entries[entry.pid] = entry
        if parent is not None:
            self._parents[entry.pid] = parent
        self._write()

    def remove(self, pid: int) -> None:
        """Remove an ended process and all its descendants."""
        removed, descendants = set(), {pid}
        while descendants:
            removed |= descendants
            descendants = {child for child, parent in self._parents.items() if parent in removed} - removed
        for removed_pid in removed:
            self._entries.pop(removed_pid, None)
            self._parents.pop(removed_pid, None)
        self._write()

    def _write(self) -> None:
        entries: list[dict[str, Any]] = [asdict(entry) for entry in self.entries()]
        try:
            write_json(self._path, entries)
        except OSError as error:  # A full disk must not end the run.
            logger.warning("%s could not be written: %s", self._path, error)
