"""Checks which accelerators this process can use, and returns their UUIDs."""

import logging
from collections.abc import Iterable

from rl_core.api.errors import ConfigError

logger = logging.getLogger(__name__)


def device_uuids(visible: tuple[str, ...]) -> tuple[str, ...]:
    """Return the UUIDs of the devices in `visible`, which are indices or UUIDs of devices of this host.

    Returns () for an empty tuple. Raises ConfigError when a device cannot be found: a job that asks for accelerators never falls back to
    the CPU.
    """
    if not visible:
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(device))
            if device.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(device.encode())
            for device in visible
        ]
        return tuple(_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"accelerators {','.join(visible)} were asked for and must be visible, got: {error}; lower `gpus` or use another machine"
        ) from error


def check_visible_devices(visible: Iterable[tuple[str, ...]], *, exclusive: bool = False) -> tuple[str, ...]:
    """Check that all accelerators assigned to the processes of a container are visible, and return their UUIDs.

    `visible` holds the devices of each process. `exclusive` says that the container should see no other devices, because Kubernetes assigns
    them; additional devices are logged as a warning. Raises ConfigError when an assigned device cannot be found.
    """
    all_devices = tuple(sorted({device for devices in visible for device in devices}))
    uuids = device_uuids(all_devices)
    if uuids:
        logger.info("accelerators: %s", ", ".join(uuids))
        if exclusive and (num_visible := _count()) > len(uuids):
            logger.warning(
                "%s accelerators were asked for and %s are visible; is the device plugin in use?",
                len(uuids),
                num_visible,
            )
    return uuids


def _count() -> int:
    import pynvml

    return int(pynvml.nvmlDeviceGetCount())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
