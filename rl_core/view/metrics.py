"""The metrics of a run as columns, read from metrics.jsonl as it grows; and what went wrong at which step."""

import json
import math
import threading
from pathlib import Path
from typing import Any

FAILURES = "failures_total/"
DURATIONS = ("time/step", "time/validation", "time/checkpoint")
"""Parts of the time between two lines."""


class MetricColumns:
    """All metrics by name. May be used by several threads."""

    def __init__(self, path: Path) -> None:
        """`path`: metrics.jsonl, which need not be there yet."""
        self._path = path
        self._offset = self._inode = 0
        self._lines: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def lines(self) -> list[dict[str, Any]]:
        """Return all whole lines so far; damaged ones are left out. A file that was cut back or replaced (a resumed run) is read anew."""
        with self._lock:
            try:
                stat = self._path.stat()
                size = stat.st_size
                if size < self._offset or stat.st_ino != self._inode:
                    self._offset, self._inode, self._lines = 0, stat.st_ino, []
                if size > self._offset:
                    with self._path.open("rb") as file:
                        file.seek(self._offset)
                        data = file.read()
                    data = data[: data.rfind(b"\n") + 1]
                    self._offset += len(data)
                    self._lines = self._lines + [
                        line for text in data.splitlines() if (line := _line(text)) is not None
                    ]
            except OSError:
                return []
            return self._lines

    def names(self) -> list[str]:
        """Return the names of all metrics, in order."""
        return sorted(set().union(*self.lines()) - {"step"})

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return the pairs (step, value) of a metric, without the steps in which it is missing or not a number."""
        return [(line["step"], line[name]) for line in self.lines() if _is_number(line.get(name))]

    def hours(self) -> list[tuple[int, float]]:
        """Return (step, hours since the start): the sum of the measured times of all lines up to the step."""
        total, hours_by_step = 0.0, []
        for line in self.lines():
            total += sum(line[part] for part in DURATIONS if _is_number(line.get(part)))
            hours_by_step.append((line["step"], total / 3600))
        return hours_by_step

    def events(self) -> list[dict[str, Any]]:
        """Return restarts and failures as {step, kind, text}: where the epoch or a count of failures is larger than in the line before."""
        found_events: list[dict[str, Any]] = []
        previous: dict[str, Any] = {}
        failures = [name for name in self.names() if name.startswith(FAILURES)]
        for line in self.lines():
            epoch: Any = line.get("epoch")
            last_epoch: Any = previous.get("epoch", epoch)
            if _is_number(epoch) and _is_number(last_epoch) and epoch > last_epoch:
                found_events.append({"step": line["step"], "kind": "restart", "text": f"restarted, attempt {epoch:g}"})
            for name in failures:
                count: Any = line.get(name)
                if _is_number(count) and count > (previous.get(name) or 0):
                    increase = count - (previous.get(name) or 0)
                    text = f"{name.removeprefix(FAILURES)}: {increase:g} more"
                    found_events.append({"step": line["step"], "kind": "failure", "text": text})
            previous = line
        return found_events


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and type(fields.get("step")) is int else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
