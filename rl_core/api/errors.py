"""The errors of rljob: each says which party can mend it (configuration, infrastructure, data).

Every layer raises these and nothing else across its border. `kind` travels with an error over RPC, so that the far side
can rebuild the same type. Exit codes of processes follow from the kind: ConfigError 2, InfrastructureError 3, DataError 4.
"""

import asyncio
import reprlib
from typing import Any

MAX_TEXT = 16_384
"""Characters of an error that are sent; those of user code may be of any size."""


class RLJobError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(RLJobError, ValueError):
    """A setting is wrong or cannot be honoured; nothing but an edit of the job helps."""


class PlacementError(ConfigError, AssertionError):
    """A placement map breaks a rule of the grammar or does not fit the inventory."""


class PlacementRangeError(PlacementError, IndexError):
    """A placement names a node or resource outside the inventory."""


class CapacityError(ConfigError):
    """The job needs more memory than a device or host has."""


class RolloutConfigError(ConfigError, AssertionError):
    """A rollout setting is wrong."""


class InfrastructureError(RLJobError):
    """A process, a connection or a machine failed; the same work may succeed elsewhere."""


class WorkerLost(InfrastructureError):
    """A worker process is gone."""


class EpochFenced(InfrastructureError):
    """The sender belongs to an older epoch or incarnation and must stop."""


class FrameError(InfrastructureError):
    """A message on the wire is malformed, damaged or of another version; it was dropped."""


class GenerationUnavailable(InfrastructureError):
    """The generation backend cannot serve."""


class GymTransportError(InfrastructureError):
    """A gym server did not answer for some rows."""


class StorageFull(InfrastructureError):
    """A disk or a quota is full. Only its owner can free space."""


class WeightsDiverged(InfrastructureError):
    """A rollout scores a fixed prompt differently from the trainer: it does not serve the trained weights."""


class DataError(RLJobError):
    """A sample, a reward or a file is wrong; the same work would fail again."""


class RolloutDataFailure(DataError):
    """One sample cannot be generated or scored."""


class SamplingExhausted(DataError):
    """Dynamic sampling used up its rounds without finding enough informative groups."""


class RemoteError(RLJobError):
    """User or library code failed in a remote method: group, rank, method, type and traceback are in the text."""


class DeadlineExceeded(RLJobError, TimeoutError):
    """The deadline of a wait has passed. The text says which members or answers are missing, and for how long."""


class Deadlock(DeadlineExceeded):
    """Workers wait for messages of each other in a cycle; the text names them in order."""


class RolloutTimeout(DeadlineExceeded):
    """A rollout or an environment step missed its deadline."""


class RolloutRedispatchExhausted(RLJobError):
    """A prompt failed in every attempt and the budget of consecutive drops is used up."""


class ChannelClosed(RLJobError):
    """The channel or key is closed and drained."""


class ProducerLost(ChannelClosed, InfrastructureError):
    """The channel is empty and its last registered producer is gone."""


class ChannelFull(RLJobError, asyncio.QueueFull):
    """No room in the channel and the caller did not want to wait."""


class ChannelEmpty(RLJobError, asyncio.QueueEmpty):
    """Nothing in the channel and the caller did not want to wait."""


def text_of(error: BaseException, *, limit: int = MAX_TEXT) -> str:
    """Return what `error` says of itself as text that can be sent: an error of user code may have none, or hold half characters.

    Beyond `limit` characters it is cut.
    """
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - whatever its class does, its reader must hear of it
        text = f"(its text cannot be made: {type(broken).__name__})"
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text)} characters)"
    return text.encode("utf-8", "replace").decode()


def shown(value: Any) -> str:
    """Return the repr of `value` for an error message, shortened. Values without a working repr are allowed too."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def exit_code(error: BaseException) -> int:
    """Return the documented exit code of a process that ends with `error`: 2 configuration, 4 data, otherwise 3."""
    if isinstance(error, ConfigError):
        return 2
    return 4 if isinstance(error, DataError) else 3


def error_types() -> dict[str, type[RLJobError]]:
    """Return the public error types by name, to rebuild an error that arrived by RPC."""
    types: dict[str, type[RLJobError]] = {}
    pending: list[type[RLJobError]] = [RLJobError]
    while pending:
        kind = pending.pop()
        if kind.__module__ == __name__:
            types[kind.__name__] = kind
        pending.extend(kind.__subclasses__())
    return types


def public_type(error: RLJobError) -> type[RLJobError]:
    """Return the class of `error`, or its nearest base class, that an error sent between processes can name."""
    types = error_types()
    return next(types[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in types)
