"""Closes the workers of a test, whose sockets and threads would otherwise be open until the end of all tests."""

import pytest

from tests.unit.embodied.workers import close_workers


@pytest.fixture(autouse=True)
def _workers_are_closed():
    yield
    close_workers()
