"""The accelerators that a process can use: their UUIDs, or an error when fewer are visible than the job asked for."""

import logging
from collections.abc import Iterable

from rl_core.api.errors import ConfigError

logger = logging.getLogger(__name__)


def device_uuids(visible: tuple[str, ...]) -> tuple[str, ...]:
    """Return the UUIDs of the devices named in `visible` (indices or UUIDs of this host); empty for none.

    Raises ConfigError when one is not there: a job that asks for accelerators never runs on the CPU instead.
    """
    if not visible:
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(v)) if v.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(v.encode())
            for v in visible
        ]
        return tuple(_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"accelerators {','.join(visible)} were asked for and must be visible, got: {error}; lower `gpus` or use another machine"
        ) from error


def audit(visible: Iterable[tuple[str, ...]], *, exclusive: bool = False) -> tuple[str, ...]:
    """Return the UUIDs of all accelerators that the processes of a container were given, before any of them starts.

    `exclusive`: the container must see no others, as in a pod whose cluster hands out accelerators; seeing more is logged, since it
    means that another pod's can be used by mistake. Raises ConfigError when one is missing.
    """
    wanted = tuple(sorted({device for devices in visible for device in devices}))
    uuids = device_uuids(wanted)
    if uuids:
        logger.info("accelerators: %s", ", ".join(uuids))
        if exclusive and (seen := _count()) > len(uuids):
            logger.warning(
                "%s accelerators were asked for and %s are visible; is the device plugin in use?", len(uuids), seen
            )
    return uuids


def _count() -> int:
    import pynvml

    return int(pynvml.nvmlDeviceGetCount())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
