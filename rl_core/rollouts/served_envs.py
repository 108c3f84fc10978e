"""`ServedEnvs`: the env workers that a rollout serves in one collection, and the messages that it exchanges with them.

`EnvConnections` has the direct connections to env workers of the same host, which are kept between collections.

Legend: B simulators, C actions of a chunk.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
from torch import Tensor

from rl_core.api.embodied import EmbodiedOptions
from rl_core.api.errors import DataError
from rl_core.api.records import EnvOutput
from rl_core.channel import Channel
from rl_core.channel.direct import DirectChannel, PeerLost
from rl_core.messages.embodied import CollectionRound
from rl_core.plan.routing import routes
from rl_core.rollouts.embodied import lost_output, merge_env_outputs
from rl_core.rollouts.observation_rows import ObservationRows, lend_rows
from rl_core.transports.direct import Connection, Mailbox
from rl_core.transports.shared_rows import Layout

Exchange = Channel | DirectChannel
Waiting = Callable[[str, str], AbstractContextManager[None]]
"""`waiting(what, who)` declares, while it is entered, that the worker waits for something of another worker."""


class ServedEnvs:
    """Receives the outputs of the env workers of one collection and sends them actions. Knows which of them are lost."""

    def __init__(
        self, round: CollectionRound, *, place: int, options: EmbodiedOptions, group: int, waiting: Waiting
    ) -> None:
        """Serve in `round` the env workers of the rollout at `place`. `group` is the number of simulators of a group."""
        self.round, self.place, self.stages = round, place, options.stages
        self._chunk, self._waiting = options.chunk, waiting
        per_stage = options.num_envs // options.stages
        parts = routes(per_stage, env_workers=len(round.envs), rollouts=len(round.rollouts), group=group)
        self.sources = [(route.env, route.size) for route in parts if route.rollout == place]
        """(place of an env worker, number of its simulators in a stage), in the order of the simulators. The same in each stage."""
        self.lost: set[int] = set()
        """Places of env workers that were lost in the collection."""
        self._latest: dict[tuple[int, int], EnvOutput] = {}
        """(stage, place of the env worker) -> its last output."""
        self.rows: list[ObservationRows] = []
        """Memory for large observations, by stage. Empty where they come in messages."""

    def key(self, stage: int, env: int) -> str:
        """Return the key of the messages of a stage of the env worker at place `env`."""
        return self.round.key(stage, env, self.place)

    def awaiting(self, env: int) -> AbstractContextManager[None]:
        """Declare that the rollout waits for observations of the env worker at place `env`."""
        return self._waiting("observations", f"env:{self.round.envs[env]}")

    async def receive(self, channel: Exchange, stage: int, *, begins: bool = False) -> EnvOutput:
        """Return the outputs of all env workers, merged in their order, as tensors.

        `begins`: they begin a rollout epoch. A lost env worker's simulators stay lost. Raises InfrastructureError if it never sent any.
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
        """Return the output that an env worker sent. Any other message means that it is lost; what stands for its output is returned."""
        if env not in self.lost and isinstance(message, EnvOutput) and message.obs is not None:
            output = message
        else:
            self.lost.add(env)
            output = lost_output(self._latest.get((stage, env)), self._chunk, begins=begins)
        self._latest[stage, env] = output
        return output

    def send(self, channel: Exchange, stage: int, actions: Tensor | np.ndarray) -> None:
        """Send each env worker the actions [B, C, ...] of its simulators. Raises DataError when their numbers are not those of the actions."""
        array = actions.detach().cpu().numpy() if isinstance(actions, Tensor) else actions
        if sum(size for _, size in self.sources) != len(array):
            raise DataError(
                f"actions must be as many as the simulators {[size for _, size in self.sources]}, got {len(array)}"
            )
        begin = 0
        for env, size in self.sources:
            self.send_to(env, channel, stage, array[begin : begin + size])
            begin += size

    def send_to(self, env: int, channel: Exchange, stage: int, actions: np.ndarray) -> None:
        """Send the env worker at place `env` the actions of its simulators, unless it is lost."""
        if env not in self.lost:
            try:
                channel.put(np.ascontiguousarray(actions), key=self.key(stage, env), async_op=True)
            except PeerLost:
                self.lost.add(env)

    @contextmanager
    def lent_rows(self, layout: Layout, *, decisions: int) -> Iterator[None]:
        """Lend memory for the large observations of `decisions` decisions to env workers of this host, while the block runs.

        `layout` has their types and shapes. It is empty where there are none, or where they shall come in messages.
        """
        near = any(self.round.address(env, self.place) is not None for env in range(len(self.round.envs)))
        simulators = sum(size for _, size in self.sources)
        self.rows = lend_rows(layout if near else {}, decisions=decisions, simulators=[simulators] * self.stages)
        reuse = False
        try:
            yield
            reuse = not self.lost  # the channel has copied the trajectories
        finally:
            rows, self.rows = self.rows, []
            for one in rows:
                one.release(reuse=reuse)

    def columns_of(self, env: int) -> dict[str, np.ndarray]:
        """Return where the simulators of an env worker put their large observations, by stage; see `CollectionRound.columns_key`."""
        places = [place for place, _ in self.sources]
        if env not in places:
            return {}
        begin = sum(size for _, size in self.sources[: places.index(env)])
        return {CollectionRound.columns_key(stage): rows.column(begin).pack() for stage, rows in enumerate(self.rows)}


class EnvConnections:
    """The direct connections of a rollout to env workers of its host."""

    def __init__(self, *, seconds: float) -> None:
        """`seconds` is the time in which an env worker must read what it is sent."""
        self._mailbox = Mailbox(seconds=seconds)
        self._by_address: dict[str, Connection] = {}

    def open(self, envs: ServedEnvs, *, observations: Channel, actions: Channel, seconds: float) -> DirectChannel:
        """Return this end of the exchange of a collection; connects to its env workers of this host, and tells them of the lent memory.

        Messages of other env workers go through the channels. `seconds` bounds the wait for one.
        """
        round, place = envs.round, envs.place
        self._mailbox.wait(0.0)  # notices which connections have ended
        self._mailbox.keep(round.prefix)
        self._by_address = {address: one for address, one in self._by_address.items() if not one.closed}
        exchange = DirectChannel(self._mailbox, get_from=observations, put_to=actions, seconds=seconds)
        for env in range(len(round.envs)):
            address = round.address(env, place)
            if address is None:
                continue
            connection = self._by_address.get(address)
            if connection is None:
                connection = self._by_address[address] = Connection.connect(address)
                self._mailbox.add(connection)
            self._mailbox.send(connection, round.opening_key(place), envs.columns_of(env))
            for stage in range(envs.stages):
                exchange.connect(envs.key(stage, env), connection)
        return exchange

    def close(self) -> None:
        """Close all connections."""
        self._mailbox.close()
