"""What the operator's unit tests share: a loop whose time jumps, and an API server in memory behind the `Cluster` port."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rljob_operator.runtime import status_patch
from tests.unit.operator.fake_cluster import FakeCluster, merge_patch


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: when nothing is ready, the loop's time jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("the loop would wait for ever: nothing is ready and no timer is set")
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@pytest.fixture
def fake_time() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine to its end in a loop whose sleeps take no time; loop.time() starts at 0."""

    def run(scenario: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
            return runner.run(scenario)

    return run


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def merged() -> Callable[[Any, Any], Any]:
    """Apply the difference of two statuses to the first, by RFC 7386."""
    return lambda old, new: merge_patch(old, status_patch.difference(old, new))
