"""`RemoteEnvironment`: all env workers as one environment; called by `multi_turn` in rollout processes.

The rows that are stepped in one iteration of the event loop are sent as one `step_rows` call per env worker. Rows that come while a call is in
progress there are gathered for at most GATHER_S. A sample stays on its env worker, which has its episode; a new sample goes to the one with
the fewest rows in flight. If an env worker is lost, its samples fail with InfrastructureError, and the manager runs their groups again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import (
    DataError,
    DeadlineExceeded,
    InfrastructureError,
    RemoteError,
    RLJobError,
    RolloutDataFailure,
    RolloutTimeout,
    error_types,
)
from rl_core.api.records import EnvironmentInterface, EnvironmentReturn
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvRow

if TYPE_CHECKING:
    from rl_core.transports.rpc import RpcClient

ANSWER_MARGIN_S = 40.0
"""Seconds that an env worker gets in addition to two steps, so that its own error, which names the bad row, arrives first.

`envs.pool` tries a row at most twice, and may start a process in between.
"""

PATIENCE_MARGIN_S = 10.0
LOCATE_SECONDS = 5.0
"""How long `locate` waits for an env worker."""
GATHER_S = 0.005
"""Longest time that a row waits for others while its env worker is busy; it is sent earlier if a call ends."""


@dataclass(slots=True)
class _Row:
    """One row to be stepped: the message that is sent, and the future of its answer."""

    sent: EnvRow
    answer: asyncio.Future[EnvAnswer]

    @property
    def key(self) -> str:
        """Return the sample id."""
        return self.sent.key


@dataclass(slots=True)
class _Pod:
    """The rows of one env worker that have no answer yet."""

    rows: int = 0
    """Number of rows that were sent or are gathered."""
    calls: int = 0
    """Number of calls in progress."""
    gathered: list[_Row] = field(default_factory=list)
    """Rows for the next call."""
    timer: asyncio.TimerHandle | None = None


class RemoteEnvironment(EnvironmentInterface):
    """Runs environment steps on the env workers of a job."""

    def __init__(
        self,
        addresses: Sequence[str] | Callable[[], Sequence[str]],
        keys: Any = None,
        *,
        step_seconds: float = 120.0,
        connect: Callable[[str], RpcClient] | None = None,
        available: Callable[[], Awaitable[Any]] | None = None,
        waiting: Callable[[str], AbstractContextManager[None]] | None = None,
        reward_weights: Mapping[str, float] | None = None,
    ) -> None:
        """Create an environment over env workers.

        - `addresses`: addresses of the env workers, or a function that returns the present ones.
        - `keys`: CURVE keys for connections that are made when `connect` is None. These are not the sample ids that `step` calls keys.
        - `step_seconds`: deadline of one environment step.
        - `connect`: returns the RPC client for an address; None makes clients with `keys`, which `close` closes.
        - `available`: a coroutine that returns when the addresses may have changed; with None a step without any env worker fails at once.
        - `waiting`: declares a wait for an address while a block runs.
        - `reward_weights`: weights of rewards by name, in addition to those that env workers send.
        """
        self._addresses = addresses if callable(addresses) else lambda: addresses
        self._connect = connect or self._own_client
        self._keys = keys
        self._available = available
        self._waiting_for = waiting or (lambda address: nullcontext())
        self.answer_seconds = 2 * step_seconds + ANSWER_MARGIN_S
        self.step_limit_seconds = 2 * self.answer_seconds + PATIENCE_MARGIN_S
        """Seconds within which `step` returns or raises: they cover the wait for an env worker and the wait for its answer."""
        self.reward_weights = dict(reward_weights or {})
        self._clients: dict[str, RpcClient] = {}
        self._homes: dict[str, str] = {}
        self._pods: dict[str, _Pod] = {}
        self._waiting: list[_Row] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def step(
        self,
        message_log_batch: Sequence[Sequence[Mapping[str, Any]]],
        metadata_batch: Sequence[dict[str, Any] | None],
        *,
        keys: Sequence[str] | None = None,
        task_names: Sequence[str | None] | None = None,
    ) -> EnvironmentReturn:
        """Run one environment step for each row and return the answers in the order of rows.

        `keys` are sample ids, which keep the steps of an episode on one env worker; with None every log is an episode of its own. Raises
        the error of the first row that failed, and InfrastructureError when its env worker is lost.
        """
        if self._available is not None and not self._addresses():
            await self._pod_appears(self._available)
        count = len(message_log_batch)
        names = keys or [f"log-{id(log)}" for log in message_log_batch]
        tasks = task_names or [None] * count
        rows = [
            self._enqueue(EnvRow(key=name, messages=_plain(log), metadata=metadata, task_name=task))
            for name, log, metadata, task in zip(names, message_log_batch, metadata_batch, tasks, strict=True)
        ]
        answers = await asyncio.gather(*rows)
        for answer in answers:
            self.reward_weights |= answer.reward_weights or {}
        return EnvironmentReturn(
            observations=[answer.observation for answer in answers],
            metadata=[answer.metadata for answer in answers],
            next_stop_strings=[answer.stop_strings for answer in answers],
            rewards=_columns([answer.reward for answer in answers]),
            terminateds=[answer.terminated for answer in answers],
            answers=[answer.answer for answer in answers],
        )

    async def locate(self, keys: Sequence[str]) -> None:
        """Find the env workers that hold sessions of agent programs for the samples `keys`; the samples are then stepped there."""

        async def ask(address: str) -> None:
            with suppress(RLJobError):  # a lost worker has lost its sessions too
                for key in await self._connect(address).call("held_sessions", list(keys), timeout=LOCATE_SECONDS):
                    self._homes[key] = address

        await asyncio.gather(*(ask(address) for address in self._addresses()))

    def release(self, key: str) -> None:
        """Forget which env worker serves the sample with id `key`, because its episode has ended."""
        self._homes.pop(key, None)

    def close(self) -> None:
        """Cancel calls in flight and close the connections. May be called again."""
        for call in list(self._calls):
            call.cancel()
        for address, pod in self._pods.items():
            rows = self._gathered(pod)
            self._settle(rows, [_closed(address)] * len(rows))
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    async def _pod_appears(self, available: Callable[[], Awaitable[Any]]) -> None:
        """Wait for the first env worker, at most as long as a step may take; without one the caller then fails."""
        with suppress(TimeoutError), self._waiting_for("env"):
            async with asyncio.timeout(self.answer_seconds):
                while not self._addresses():
                    await available()

    def _own_client(self, address: str) -> RpcClient:
        if address not in self._clients:
            self._clients[address] = _rpc_client(address, self._keys)
        return self._clients[address]

    def _enqueue(self, env_row: EnvRow) -> asyncio.Future[EnvAnswer]:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        row = _Row(env_row, loop.create_future())
        self._waiting.append(row)
        return row.answer

    def _send(self) -> None:
        """Send the collected rows to their env workers; a busy one gets them when its call ends, or after GATHER_S."""
        rows, self._waiting = self._waiting, []
        addresses = set()
        for row in rows:
            if row.answer.done():
                continue
            try:
                address = self._home(row.key)
            except InfrastructureError as error:
                row.answer.set_exception(error)
            else:
                addresses.add(address)
                self._pods[address].gathered.append(row)
        for address in addresses:
            pod = self._pods[address]
            if not pod.calls:
                self._start_call(address)
            elif pod.timer is None:
                pod.timer = asyncio.get_running_loop().call_later(GATHER_S, self._start_call, address)

    def _start_call(self, address: str) -> None:
        pod = self._pods[address]
        rows = self._gathered(pod)
        if rows:
            pod.calls += 1
            task = asyncio.ensure_future(self._call(address, rows))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    @staticmethod
    def _gathered(pod: _Pod) -> list[_Row]:
        rows, pod.gathered = pod.gathered, []
        if pod.timer is not None:
            pod.timer.cancel()
            pod.timer = None
        return rows

    def _home(self, key: str) -> str:
        """Return the env worker of the sample, chosen at its first step, and count the row as in flight there."""
        live = list(self._addresses())
        address = self._homes.get(key)
        if address is not None and address not in live:
            self._homes.pop(key)
            raise InfrastructureError(f"env worker {address} is lost with the episode of sample {key}; it is run again")
        if address is None:
            if not live:
                raise InfrastructureError("no env worker is ready, got an empty list; wait for one to join")
            address = min(live, key=lambda candidate: self._pods.setdefault(candidate, _Pod()).rows)
            self._homes[key] = address
        self._pods.setdefault(address, _Pod()).rows += 1
        return address

    async def _call(self, address: str, rows: list[_Row]) -> None:
        try:
            answers = await self._answers(address, rows)
        except asyncio.CancelledError:
            self._settle(rows, [_closed(address)] * len(rows))
            raise
        except Exception as error:  # noqa: BLE001 - task boundary: every row of the call gets the failure
            failure = _call_failure(address, error)
            for row in rows:
                self._homes.pop(row.key, None)
            self._settle(rows, [failure] * len(rows))
        else:
            self._settle(rows, answers)
        finally:
            pod = self._pods[address]
            pod.calls -= 1
            pod.rows -= len(rows)
            self._start_call(address)

    async def _answers(self, address: str, rows: Sequence[_Row]) -> list[Any]:
        """Return an answer or a failure per row. Rows that cannot be encoded in one message are sent in two halves."""
        try:
            with self._waiting_for(address):
                answers = await self._connect(address).call(
                    "step_rows", [row.sent for row in rows], timeout=self.answer_seconds
                )
        except (TypeError, ValueError) as error:
            # An RLJobError was raised by the env worker. Any other error means that the rows cannot be encoded.
            if isinstance(error, RLJobError):
                raise
            if len(rows) == 1:
                return [RolloutDataFailure(f"sample {rows[0].key} cannot be sent to an env worker: {error}")]
            half = len(rows) // 2
            first, second = await asyncio.gather(
                self._answers(address, rows[:half]), self._answers(address, rows[half:])
            )
            return [*first, *second]
        if len(answers) != len(rows):
            raise RolloutDataFailure(f"step_rows must answer {len(rows)} rows, got {len(answers)}")
        return list(answers)

    @staticmethod
    def _settle(rows: Sequence[_Row], answers: Sequence[Any]) -> None:
        for row, answer in zip(rows, answers, strict=True):
            if row.answer.done():
                continue
            if isinstance(answer, BaseException):
                row.answer.set_exception(answer)
            elif isinstance(answer, EnvFailure):
                row.answer.set_exception(_row_failure(row.key, answer))
            else:
                row.answer.set_result(answer)


def _closed(address: str) -> InfrastructureError:
    return InfrastructureError(f"connection to env worker {address} was closed")


def _plain(log: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [{"role": str(message["role"]), "content": str(message["content"])} for message in log]


def _columns(rewards: list[Any]) -> Any:
    """Return rewards by name as one list per name, other rewards unchanged. All rows of a call must have the same form."""
    maps = [reward for reward in rewards if isinstance(reward, Mapping)]
    if not maps:
        return rewards
    if len(maps) < len(rewards):
        raise RolloutDataFailure("rewards of one environment must be all numbers or all maps, got both in one step")
    return {
        name: [reward.get(name) for reward in maps] for name in dict.fromkeys(n for mapping in maps for n in mapping)
    }


def _row_failure(key: str, failure: EnvFailure) -> RLJobError:
    kind = error_types().get(failure.type, RolloutDataFailure)
    text = f"environment step of sample {key}: {failure.message}"
    if issubclass(kind, DeadlineExceeded):
        return RolloutTimeout(text)
    return kind(text)


def _call_failure(address: str, error: Exception) -> RLJobError:
    """Return the failure of a whole call: a missed deadline, a data failure, or for anything else a lost env worker."""
    text = f"env worker {address}: {type(error).__name__}: {error}"
    if isinstance(error, DeadlineExceeded):
        failure: RLJobError = RolloutTimeout(text)
    elif isinstance(error, DataError | RemoteError):
        failure = RolloutDataFailure(text)
    else:
        failure = InfrastructureError(text)
    failure.__cause__ = error
    return failure


def _rpc_client(address: str, keys: Any) -> RpcClient:
    from rl_core.transports.rpc import RpcClient

    return RpcClient(address, keys)
