"""Log format of every process: role and rank, policy version, module, message.

`configure_logging` is called once by each process's entry point; libraries only use `logging.getLogger(__name__)`. Lines are text, or JSON
objects with RLJOB_LOG_FORMAT=json. They go to standard error, which the supervisor forwards.
"""

import json
import logging
import os
import sys
import time
from typing import TextIO

from rl_core.api.identity import Identity

_LEVELS = {"DEBUG": "D", "INFO": "I", "WARNING": "W", "ERROR": "E", "CRITICAL": "C"}


class _Context:
    """What this process is and which policy version it holds."""

    role = "-"
    rank: int | None = None
    epoch: int | None = None
    policy_version: int | None = None


def configure_logging(
    identity: Identity | None = None, *, role: str | None = None, level: str | None = None, stream: TextIO | None = None
) -> None:
    """Configure the log of this process: write to `stream`, by default standard error, and name the process's identity in each line.

    `role` is the name of a process without an identity. `level` defaults to RLJOB_LOG_LEVEL, and to INFO without that.
    """
    if role is not None:
        _Context.role = role
    if identity is not None:
        _Context.role = identity.role
        _Context.rank = identity.rank if identity.is_worker else None
        _Context.epoch = identity.epoch
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if os.environ.get("RLJOB_LOG_FORMAT") == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel((level or os.environ.get("RLJOB_LOG_LEVEL", "INFO")).upper())


def set_policy_version(version: int | None) -> None:
    """Add the policy version to the lines that follow; None removes it."""
    _Context.policy_version = version


def set_epoch(epoch: int) -> None:
    """Add the epoch to the lines that follow."""
    _Context.epoch = epoch


def source() -> str:
    """Return the name of this process in log lines: `rollout:0`, or the role alone if it has only one process."""
    return _Context.role if _Context.rank is None else f"{_Context.role}:{_Context.rank}"


class _TextFormatter(logging.Formatter):
    """`12:30:01.250 I rollout:0 v3 rl_core.rollouts: text`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        version = "" if _Context.policy_version is None else f" v{_Context.policy_version}"
        head = (
            f"{clock}.{int(record.msecs):03d} {_LEVELS.get(record.levelname, '?')} {source()}{version} {record.name}: "
        )
        text = head + record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _JsonFormatter(logging.Formatter):
    """One object per line: time (seconds), level, role, rank, epoch, policy_version, logger, message, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "role": _Context.role,
            "rank": _Context.rank,
            "epoch": _Context.epoch,
            "policy_version": _Context.policy_version,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps({key: value for key, value in fields.items() if value is not None})
