"""A process that was given accelerators has them, or says which are missing; it never runs on less."""

import pynvml
import pytest

from rl_core.api.errors import ConfigError
from rl_core.workers.devices import device_uuids


def driver_is_there():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def test_no_accelerators_need_no_driver():
    assert device_uuids(()) == ()


def test_accelerators_that_are_not_there_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"accelerators 4711 were asked for and must be visible"):
        device_uuids(("4711",))


@pytest.mark.gpu
@pytest.mark.skipif(not driver_is_there(), reason="needs an NVIDIA driver")
def test_a_device_is_known_by_its_uuid_whichever_way_it_is_named():
    (uuid,) = device_uuids(("0",))
    assert uuid.startswith("GPU-") and device_uuids((uuid,)) == (uuid,)
