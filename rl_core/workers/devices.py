"""Which accelerators this process really has: their UUIDs for the hub, or a refusal to run on less than was asked for."""

from rl_core.api.errors import ConfigError


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


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
