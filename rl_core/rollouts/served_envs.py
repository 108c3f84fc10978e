"""`ServedEnvs` exchanges messages between one rollout worker and its env workers during one collection.

A collection generates the trajectories of one training step, or runs one evaluation. The index of an env worker is its position in
`CollectionRequest.envs`, and that of a rollout worker is its position in `CollectionRequest.rollouts`.

`EnvConnections` holds the direct connections to env workers on the same host. They are kept between collections.

Legend: B number of simulators of a stage, C number of actions in one message (a chunk).
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any

import numpy as np
from torch import Tensor

from rl_core.api.embodied import EmbodiedOptions
from rl_core.api.errors import DataError
from rl_core.api.records import EnvOutput, record_of
from rl_core.channel import Channel
from rl_core.channel.direct import DirectChannel, PeerLost
from rl_core.messages.embodied import CollectionRequest
from rl_core.plan.routing import routes
from rl_core.rollouts.embodied import lost_output, merge_env_outputs
from rl_core.rollouts.observation_rows import ObservationRows, allocate_rows
from rl_core.transports.direct import Connection, Mailbox
from rl_core.transports.shared_memory import LentMemory
from rl_core.transports.shared_rows import Allocate, Layout

Exchange = Channel | DirectChannel
Waiting = Callable[[str, str], AbstractContextManager[None]]
"""`waiting(what, who)` returns a context manager. While its block runs, the worker reports that it waits for `what` from `who`."""


class ServedEnvs:
    """The env workers that one rollout worker serves in one collection.

    Receives what their simulators return, sends them actions, and records which env workers no longer answer.
    """

    def __init__(
        self, request: CollectionRequest, *, index: int, options: EmbodiedOptions, group: int, waiting: Waiting
    ) -> None:
        """Determine the env workers of the rollout worker with index `index` in `request`.

        `group` is the number of consecutive simulators that one rollout worker must serve together (GRPO compares them), or 1. See
        `plan.routing.routes`. `waiting` reports what the worker waits for.
        """
        self.request, self.index, self.stages = request, index, options.stages
        self._chunk, self._waiting = options.chunk, waiting
        per_stage = options.num_envs // options.stages
        parts = routes(per_stage, env_workers=len(request.envs), rollouts=len(request.rollouts), group=group)
        self.sources = [(route.env, route.size) for route in parts if route.rollout == index]
        """(index of an env worker, number of its simulators in a stage), in the order of the simulators. All stages have the same."""
        self.lost: set[int] = set()
        """Indices of the env workers that no longer answer in this collection."""
        self._latest: dict[tuple[int, int], EnvOutput] = {}
        """The last output of each env worker in each stage, by (stage, index of the env worker)."""
        self.rows: list[ObservationRows] = []
        """Shared memory for the large observations of each stage. Empty if they are sent in messages."""

    def key(self, stage: int, env: int) -> str:
        """Return the key of the messages of a stage that are exchanged with the env worker with index `env`."""
        return self.request.key(stage, env, self.index)

    def awaiting(self, env: int) -> AbstractContextManager[None]:
        """Return a context manager. While its block runs, the worker reports that it waits for observations from `env`."""
        return self._waiting("observations", f"env:{self.request.envs[env]}")

    async def receive(self, channel: Exchange, stage: int, *, begins: bool = False) -> EnvOutput:
        """Receive the outputs of one stage from all env workers in `sources`. Return them as tensors, merged in that order.

        `begins` says whether these are the first outputs of a rollout epoch. The output of a lost env worker is a placeholder. Raises
        InfrastructureError if an env worker is lost before its first output.
        """
        shards = []
        for env, _ in self.sources:
            message = None
            if env not in self.lost:
                with self.awaiting(env), suppress(PeerLost):
                    message = await channel.get_async(key=self.key(stage, env))
            shards.append(self.output_of(stage, env, message, begins=begins))
        sizes = [size for _, size in self.sources]
        if not self.rows:
            return merge_env_outputs(shards, sizes)
        rows = self.rows[stage]
        shards = rows.receive(shards, sizes, [env in self.lost for env, _ in self.sources])
        return rows.fill(merge_env_outputs(shards, sizes))

    def output_of(self, stage: int, env: int, message: Any, *, begins: bool) -> EnvOutput:
        """Return the output in `message`. If it has none, record the env worker `env` as lost.

        For a lost env worker, return a placeholder. Raises InfrastructureError if it had no output before.
        """
        output = record_of(EnvOutput, message) if isinstance(message, EnvOutput | Mapping) else None
        if env in self.lost or output is None or output.obs is None:
            self.lost.add(env)
            output = lost_output(self._latest.get((stage, env)), self._chunk, begins=begins)
        self._latest[stage, env] = output
        return output

    def send(self, channel: Exchange, stage: int, actions: Tensor | np.ndarray) -> None:
        """Send each env worker the actions of its simulators.

        Raises DataError unless `actions` [B, C, ...] has a row for each simulator.
        """
        array = actions.detach().cpu().numpy() if isinstance(actions, Tensor) else actions
        if sum(size for _, size in self.sources) != len(array):
            raise DataError(
                f"actions must be as many as the simulators {[size for _, size in self.sources]}, got {len(array)}"
            )
        start = 0
        for env, size in self.sources:
            self.send_to(env, channel, stage, array[start : start + size])
            start += size

    def send_to(self, env: int, channel: Exchange, stage: int, actions: np.ndarray) -> None:
        """Send the env worker `env` the actions of its simulators, unless it is lost."""
        if env not in self.lost:
            try:
                channel.put(np.ascontiguousarray(actions), key=self.key(stage, env), async_op=True)
            except PeerLost:
                self.lost.add(env)

    @asynccontextmanager
    async def allocated_rows(self, allocate: Allocate, layout: Layout, *, outputs: int) -> AsyncIterator[None]:
        """Provide shared memory into which env workers on this host write their large observations, until the `async with` block ends.

        Env workers learn of it when `EnvConnections.open` connects to them within the block. `layout` has the types and shapes of the
        observations, and the memory, from `allocate`, has room for `outputs` outputs of each simulator. Everything is sent in messages if
        `layout` is empty, if no env worker is on this host, or if there is no memory. At the end the memory is given back. It is never lent
        again if the block raised an exception or an env worker was lost.
        """
        has_local_env = any(self.request.address(env, self.index) is not None for env in range(len(self.request.envs)))
        simulators = sum(size for _, size in self.sources)
        self.rows = await allocate_rows(
            allocate, layout if has_local_env else {}, outputs=outputs, simulators=[simulators] * self.stages
        )
        reuse = False
        try:
            yield
            reuse = not self.lost
        finally:
            rows, self.rows = self.rows, []
            for stage_rows in rows:
                stage_rows.release(reuse=reuse)

    def row_memory(self) -> list[LentMemory]:
        """Return the memory of the rows of all stages, to pass as `lent` to `Channel.put_async`.

        The list is empty if an env worker was lost: it may still write to the memory, so that the observations must be copied.
        """
        return [] if self.lost else [stage_rows.lent for stage_rows in self.rows]

    def columns_of(self, env: int) -> dict[str, np.ndarray]:
        """Return where in shared memory the env worker `env` writes its large observations: a packed `ColumnAddress` for each stage.

        The keys are those of `CollectionRequest.columns_key`. The dict is empty if its observations are sent in messages.
        """
        served = [index for index, _ in self.sources]
        if env not in served:
            return {}
        first_column = sum(size for _, size in self.sources[: served.index(env)])
        return {
            CollectionRequest.columns_key(stage): rows.column(first_column).pack()
            for stage, rows in enumerate(self.rows)
        }


class EnvConnections:
    """The direct connections of a rollout worker to env workers on its host."""

    def __init__(self, *, seconds: float) -> None:
        """`seconds` is the time within which an env worker must read a message."""
        self._mailbox = Mailbox(seconds=seconds)
        self._by_address: dict[str, Connection] = {}

    def open(self, envs: ServedEnvs, *, observations: Channel, actions: Channel, seconds: float) -> DirectChannel:
        """Connect to the env workers on this host, send them the addresses of the shared memory, and return the channel of the collection.

        The messages of other env workers go through `observations` and `actions`; a receive from `observations` waits at most `seconds`.
        Raises InfrastructureError if an env worker cannot be reached.
        """
        request, index = envs.request, envs.index
        self._mailbox.wait(0.0)  # Updates `closed` of connections that have ended.
        self._mailbox.keep(request.prefix)
        self._by_address = {address: one for address, one in self._by_address.items() if not one.closed}
        exchange = DirectChannel(self._mailbox, get_from=observations, put_to=actions, seconds=seconds)
        for env in range(len(request.envs)):
            address = request.address(env, index)
            if address is None:
                continue
            connection = self._by_address.get(address)
            if connection is None:
                connection = self._by_address[address] = Connection.connect(address)
                self._mailbox.add(connection)
            self._mailbox.send(connection, request.opening_key(index), envs.columns_of(env))
            for stage in range(envs.stages):
                exchange.connect(envs.key(stage, env), connection)
        return exchange

    def close(self) -> None:
        """Close all connections."""
        self._mailbox.close()
