"""The termination message of a container, which the kubelet keeps after the container has ended.

It is one JSON object of at most 4096 bytes with the fields `reason`, `process`, `code`, `tail` (last log lines) and `summary` (last status
of the runner). The operator reads it from the pod's status. It therefore needs no permission to read logs, and it learns the last status of
a runner that ended between two polls.
"""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LIMIT = 4096
"""Bytes the kubelet keeps."""
REASON_LIMIT, SUMMARY_LIMIT = 1024, 2048
"""Bytes of two parts as JSON; the log lines get the rest."""
DEFAULT_PATH = "/dev/termination-log"
SUMMARY_FIELDS = (
    "epoch",
    "phase",
    "step",
    "totalSteps",
    "policyVersion",
    "reward",
    "appliedGeneration",
    "suspended",
    "streaks",
    "checkpoint",
    "failure",
)
"""Fields of the runner's status from which the operator makes the status of the job. `metrics` are added as far as they fit."""
FAILURE_LIMIT = 512
"""Bytes of a failure's message. The log lines have it in full."""


def write(
    path: Path, *, reason: str, code: int, process: str = "", tail: str = "", summary: Mapping[str, Any] | None = None
) -> None:
    """Write the termination message to `path`, if the kubelet has created this file.

    Outside a container there is no such file, and nothing is written. The arguments are those of `encode`. A failure to write is logged.
    """
    if not path.exists():
        return
    try:
        path.write_bytes(encode(reason=reason, code=code, process=process, tail=tail, summary=summary))
    except OSError as error:
        logger.warning("the termination message could not be written to %s: %s", path, error)


def encode(
    *, reason: str, code: int, process: str = "", tail: str = "", summary: Mapping[str, Any] | None = None
) -> bytes:
    """Return the termination message as JSON, shortened to LIMIT bytes.

    `reason` says why the pod ended, `process` names the process that caused it, `code` is its exit code, `tail` holds its last log lines
    and `summary` the runner's status (None: unknown). Of `tail` the newest characters that fit are kept.
    """
    fixed_fields = {
        "reason": _beginning(reason, REASON_LIMIT),
        "process": process,
        "code": int(code),
        "summary": None if summary is None else shorten(summary),
    }
    max_bytes = LIMIT - _size({**fixed_fields, "tail": ""})
    return _json({**fixed_fields, "tail": _end(tail, max_bytes)})


def read_summary(folder: Path, *, epoch: int) -> dict[str, Any] | None:
    """Return the last status that the runner of `epoch` wrote to `folder`.

    None when there is no such status, for example after a crash before the first step.
    """
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((folder / "status.json").read_bytes())
        if isinstance(status, dict) and status.get("epoch") == epoch:
            return status
    return None


def shorten(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of a runner's status that the operator reads, in at most SUMMARY_LIMIT bytes of JSON.

    When they are too long, metrics are left out first, then the longest field. NaN and infinity become null.
    """
    kept_fields = {field: _plain(status[field]) for field in SUMMARY_FIELDS if field in status}
    if isinstance(kept_fields.get("failure"), Mapping):
        kept_fields["failure"] = {
            **kept_fields["failure"],
            "message": _beginning(str(kept_fields["failure"].get("message", "")), FAILURE_LIMIT),
        }
    while _size(kept_fields) > SUMMARY_LIMIT:
        del kept_fields[max(kept_fields, key=lambda field: _size(kept_fields[field]))]
    metrics = status.get("metrics")
    selected: dict[str, Any] = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        if _size({**kept_fields, "metrics": {**selected, name: value}}) > SUMMARY_LIMIT:
            break
        selected[name] = _plain(value)
    return {**kept_fields, "metrics": selected} if selected else kept_fields


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _beginning(text: str, limit: int) -> str:
    """Return as much of the beginning of `text` as takes at most `limit` bytes as JSON."""
    return text[: _fitting(text, limit, lambda count: text[:count])]


def _end(text: str, limit: int) -> str:
    """Return as much of the end of `text` as takes at most `limit` bytes as JSON."""
    count = _fitting(text, limit, lambda count: text[len(text) - count :])
    return text[len(text) - count :]


def _fitting(text: str, limit: int, part: Callable[[int], str]) -> int:
    """Return the largest number of characters whose `part` fits; a character may take up to six bytes as JSON."""
    low, high = 0, min(len(text), max(limit, 0))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _size(part(middle)) - 2 <= limit else (low, middle - 1)
    return low


def _size(value: Any) -> int:
    return len(_json(value))


def _json(value: Any) -> bytes:
    """Return `value` as JSON in UTF-8; half characters of broken log lines become question marks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
