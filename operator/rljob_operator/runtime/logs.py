"""Log lines of the operator: one JSON object each, with the job, its epoch and the reconcile they belong to."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal

_NOTHING: Mapping[str, object] = MappingProxyType({})
_context: ContextVar[Mapping[str, object]] = ContextVar("rljob_log_context", default=_NOTHING)


@contextmanager
def context(**fields: object) -> Iterator[None]:
    """Add fields to every line logged inside the block, in this task and those it starts."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


class JsonFormatter(logging.Formatter):
    """One line of JSON per record: time, level, logger, message, the context's fields, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_context.get(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, `[job epoch reconcile]` and the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class' name
        """Return the line without its traceback."""
        fields = _context.get()
        prefix = f"[{' '.join(str(value) for value in fields.values())}] " if fields else ""
        return super().formatMessage(record).replace(record.message, prefix + record.message, 1)


def configure(*, level: str, form: Literal["json", "text"]) -> None:
    """Send all loggers to standard error in one form; kopf's own messages from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, root.level))
