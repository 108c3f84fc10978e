"""`DirectChannel`: the exchange of observations and actions between an env worker and a rollout.

Two processes on the same host exchange messages by a direct connection, all others by the channels of the job.
"""

import asyncio
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from rl_core.api.errors import InfrastructureError
from rl_core.api.records import EnvOutput
from rl_core.channel.channel import Channel
from rl_core.transports.direct import SLICE, Connection, Mailbox

OUTPUT_FIELDS = tuple(field.name for field in fields(EnvOutput) if field.name != "final_info")
ACTIONS = "actions"
GONE = "the other end of a collection is gone; the collection is run again"
MIXED_SLICE = 0.001
"""Seconds of one wait for direct connections where messages may come by channels as well."""


class PeerLost(InfrastructureError):
    """The process at the other end of a direct connection is gone."""


class DirectChannel:
    """One end of the direct connections of a collection. Used in place of the channels for observations and actions."""

    def __init__(self, mailbox: Mailbox, *, get_from: Channel, put_to: Channel, seconds: float) -> None:
        """`mailbox` has the direct connections of this process. Keys without a connection use the channels `get_from` and `put_to`.

        A receive from a channel waits at most `seconds`: the longest time that the collection may take.
        """
        self._mailbox, self._get_from, self._put_to, self._seconds = mailbox, get_from, put_to, seconds
        self._connections: dict[str, Connection] = {}
        self._from_channel: dict[str, asyncio.Future[Any]] = {}
        """Pending receives from the channel, by key. The runner reports there that the other process of a key is lost."""

    def connect(self, key: str, connection: Connection) -> None:
        """Exchange the messages of `key` by a direct connection from now on."""
        self._connections[key] = connection

    async def accept(self, key: str) -> tuple[Mapping[str, np.ndarray], Connection]:
        """Return the first message of `key`, and the connection from which it comes."""
        while (message := self._mailbox.take(key)) is None:
            self._mailbox.wait(SLICE)
            await asyncio.sleep(0)
        return message

    def put(self, item: Any, key: str, async_op: bool = True) -> None:
        """Send observations or actions to the process that receives `key`. Raises PeerLost when that process has ended."""
        connection = self._connections.get(key)
        if connection is None:
            self._put_to.put(item, key=key, async_op=async_op)
        else:
            try:
                self._mailbox.send(connection, key, to_arrays(item))
            except InfrastructureError as error:
                raise PeerLost(str(error)) from error

    async def get_async(self, key: str) -> Any:
        """Return the next observations or actions, as `Channel.get_async` does. Raises PeerLost when the process that sends them is gone."""
        connection = self._connections.get(key)
        if connection is None:
            return await self._get_from.get_async(key=key, timeout=self._seconds)
        while (message := self._mailbox.take(key)) is None:
            if connection.closed:
                raise PeerLost(GONE)
            if key in self._from_channel and self._from_channel[key].done():
                return self._from_channel[key].result()
            arrived = self._mailbox.wait(SLICE)
            if (message := self._mailbox.take(key)) is not None:
                break
            if not arrived:
                self._listen([key])
            await asyncio.sleep(0)  # other tasks of the loop may run, and this one may be cancelled
        return from_arrays(message[0])

    async def get_any(self, keys: Collection[str], seconds: float = math.inf) -> dict[str, Any]:
        """Return the next message of each of `keys` that has one, by key. Waits at most `seconds` for the first; returns none after that.

        A PeerLost takes the place of the messages of a process that is gone.
        """
        deadline = time.monotonic() + seconds
        remote = [key for key in keys if key not in self._connections]
        self._listen(remote)
        while True:
            self._mailbox.wait(0.0)
            messages = {key: message for key in keys if (message := self._take_arrived(key)) is not None}
            remaining = deadline - time.monotonic()
            if messages or remaining <= 0:
                return messages
            if len(remote) == len(keys):
                pending = [self._from_channel[key] for key in keys]
                await asyncio.wait(
                    pending, timeout=None if remaining == math.inf else remaining, return_when=asyncio.FIRST_COMPLETED
                )
                continue
            if not self._mailbox.wait(min(remaining, MIXED_SLICE if remote else SLICE)):
                self._listen(keys)
            await asyncio.sleep(0)

    def _listen(self, keys: Collection[str]) -> None:
        """Start to receive the next messages of those `keys` that have no direct connection."""
        for key in keys:
            if key not in self._from_channel:
                self._from_channel[key] = asyncio.ensure_future(
                    self._get_from.get_async(key=key, timeout=self._seconds)
                )

    def _take_arrived(self, key: str) -> Any | None:
        """Return the next message of `key` if it has arrived, PeerLost if its sender has gone, else None."""
        if (message := self._mailbox.take(key)) is not None:
            return from_arrays(message[0])
        if key in self._from_channel and self._from_channel[key].done():
            return self._from_channel.pop(key).result()
        connection = self._connections.get(key)
        if connection is not None and connection.closed:
            return PeerLost(GONE)
        return None

    def disconnect(self) -> None:
        """Close the direct connections of the collection, so that the other ends know that nothing follows."""
        for connection in self._connections.values():
            self._mailbox.remove(connection)

    def close(self) -> None:
        """Cancel the pending receives. The connections are kept for the next collection."""
        for pending in self._from_channel.values():
            pending.cancel()


def to_arrays(item: EnvOutput | np.ndarray) -> dict[str, Any]:
    """Return observations or actions as arrays by name. `final_info` is left out: it is for the env worker."""
    if not isinstance(item, EnvOutput):
        return {ACTIONS: item}
    arrays: dict[str, Any] = {}
    for name in OUTPUT_FIELDS:
        value = getattr(item, name)
        if type(value) is dict:
            arrays |= {f"{name}.{inner}": array for inner, array in value.items()}
        elif value is not None:
            arrays[name] = value
    return arrays


def from_arrays(arrays: Mapping[str, np.ndarray]) -> EnvOutput | np.ndarray:
    """Return what was given to `to_arrays`. Observations may be empty, because all are in shared memory."""
    if ACTIONS in arrays:
        return arrays[ACTIONS]
    values: dict[str, Any] = {"obs": {} if arrays else None}
    for name, array in arrays.items():
        outer, dot, inner = name.partition(".")
        if not dot:
            values[name] = array
        else:
            values.setdefault(outer, {})[inner] = array
    return EnvOutput(**values)
