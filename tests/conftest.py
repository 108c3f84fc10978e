"""What all tests share: property tests judge what is computed, not how long a busy machine took for it; no test finds another's channels."""

import gc
import sys

import pytest
from hypothesis import HealthCheck, settings

from rl_core.api.imports import collection_paused

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import the tests without garbage collection, which then never looks at what they imported again."""
    with collection_paused():
        result = yield
    gc.freeze()
    return result


def pytest_runtest_setup():
    """Forget the names of local channels, which are the process's: what an exception of an earlier test holds may still live."""
    local = sys.modules.get("rl_core.channel.local")
    if local is not None:
        local._channels.clear()
