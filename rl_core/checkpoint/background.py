"""Runs work of a checkpoint in a background thread and returns a future of its result. Imports no torch."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(work: Callable[[], T]) -> "Future[T]":
    """Run `work` on a thread of its own; return the future of its value or error.

    The thread is a daemon, so a process that has to end does not wait for a checkpoint that will not be published.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - the future carries it to whoever asks
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
