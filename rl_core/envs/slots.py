"""The simulators of one vector environment: in child processes, which may hang or end, or in this process.

A slot is the place of one simulator. A simulator that fails is replaced, and the other slots go on.
"""

import asyncio
import concurrent.futures
import logging
import os
import select
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rl_core.api.errors import FrameError, InfrastructureError, RolloutDataFailure, RolloutTimeout
from rl_core.envs.process import EnvProcess
from rl_core.envs.simulator import Simulator, failure_of
from rl_core.envs.simulator_messages import (
    COLUMN,
    FAILURE,
    REQUEST,
    Request,
    answer_from_arrays,
    failure_from_arrays,
    request_to_arrays,
)
from rl_core.messages.embodied import SimulatorAnswer, SimulatorReset, SimulatorSettings
from rl_core.transports.direct import Connection
from rl_core.transports.shared_rows import ColumnAddress

logger = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = SimulatorAnswer | Exception


class Slots(Protocol):
    """Simulators by number."""

    def exchange(self, requests: Sequence[Request | None]) -> list[Outcome | None]:
        """Send each slot its request, None for no request, and return what each answered, or why it failed."""
        ...

    def write_to(self, columns: Sequence[ColumnAddress | None]) -> None:
        """Let each simulator write its observations into shared memory from now on, or return them in its answers where the entry is None."""
        ...

    def replace(self, index: int) -> None:
        """Replace the simulator of a slot by a new one that sends its observations in its answers. Raises what building one raises."""
        ...

    def close(self) -> None:
        """End all simulators."""
        ...


class LocalSlots:
    """Implements `Slots` by objects of this process: the quickest way for simulators that can be trusted."""

    def __init__(self, settings: SimulatorSettings, count: int) -> None:
        """Build `count` simulators."""
        self._settings = settings
        self._simulators = [Simulator(settings) for _ in range(count)]

    def exchange(self, requests: Sequence[Request | None]) -> list[Outcome | None]:
        """Run the requests one after the other."""
        return [
            None if request is None else self._run(simulator, request)
            for simulator, request in zip(self._simulators, requests, strict=True)
        ]

    def _run(self, simulator: Simulator, request: Request) -> Outcome:
        try:
            return simulator.reset(request) if isinstance(request, SimulatorReset) else simulator.chunk(request)
        except Exception as error:  # noqa: BLE001 - a simulator raises anything
            return RolloutDataFailure(failure_of(error).message)

    def write_to(self, columns: Sequence[ColumnAddress | None]) -> None:
        """Map the columns."""
        for simulator, column in zip(self._simulators, columns, strict=True):
            simulator.write_to({} if column is None else column.map())

    def replace(self, index: int) -> None:
        """Close the simulator and build another one."""
        _close(self._simulators[index])
        self._simulators[index] = Simulator(self._settings)

    def close(self) -> None:
        """Close the simulators."""
        for simulator in self._simulators:
            _close(simulator)


def _close(simulator: Simulator) -> None:
    try:
        simulator.close()
    except Exception:  # A simulator may raise anything, and one that has failed may be unable to close.
        logger.warning("a simulator raised as it was closed", exc_info=True)


@dataclass(frozen=True, slots=True)
class _Child:
    """A child process and the stream to it."""

    process: EnvProcess
    connection: Connection


class ProcessSlots:
    """Implements `Slots` by one child process per simulator.

    The caller's thread exchanges the messages. An event loop on a thread of its own starts and kills the processes: the kernel kills a child
    when the thread that started it ends.
    """

    def __init__(self, settings: SimulatorSettings, count: int, *, start_seconds: float, step_seconds: float) -> None:
        """Start `count` processes. Each must be ready within `start_seconds` and answer within `step_seconds`."""
        self._settings, self._start_seconds, self._step_seconds = settings, start_seconds, step_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="simulators", daemon=True)
        self._thread.start()
        self._children: list[_Child | None] = [None] * count
        try:
            self._wait(self._start_all(count))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the children, 0 for one that was not replaced yet."""
        return [0 if child is None else child.process.pid for child in self._children]

    def exchange(self, requests: Sequence[Request | None]) -> list[Outcome | None]:
        """Send all requests at once, then receive the answers."""
        outcomes: list[Outcome | None] = [None] * len(requests)
        waiting: dict[int, int] = {}
        poll = select.poll()
        for index, request in enumerate(requests):
            if request is None:
                continue
            if (child := self._children[index]) is None:
                outcomes[index] = InfrastructureError("the process of this simulator has not been started")
                continue
            try:
                child.connection.send(REQUEST, request_to_arrays(request))
            except InfrastructureError:
                outcomes[index] = self._ended(child)
                continue
            waiting[child.connection.socket.fileno()] = index
            poll.register(child.connection.socket, select.POLLIN)
        deadline = time.monotonic() + self._step_seconds
        while waiting:
            ready = poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
            for descriptor in [descriptor for descriptor, _ in ready] or list(waiting):
                index = waiting[descriptor]
                child = self._children[index]
                assert child is not None
                outcome = self._answer_of(child) if ready else self._late(child)
                if outcome is not None:
                    outcomes[index] = outcome
                    del waiting[descriptor]
                    poll.unregister(descriptor)
        return outcomes

    def write_to(self, columns: Sequence[ColumnAddress | None]) -> None:
        """Pass each process a file descriptor of the memory. The next `exchange` reports a process that has ended."""
        for child, column in zip(self._children, columns, strict=True):
            if child is None:
                continue
            with suppress(InfrastructureError):
                if column is None:
                    child.connection.send(COLUMN, {})
                    continue
                descriptor = column.open()
                try:
                    child.connection.send(COLUMN, {"address": column.pack()}, descriptor)
                finally:
                    os.close(descriptor)

    def replace(self, index: int) -> None:
        """End the process of a slot and start another one."""
        self._wait(self._replace(index))

    def close(self) -> None:
        """Kill the processes; idempotent."""
        if self._thread.is_alive():
            self._wait(self._kill_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _answer_of(self, child: _Child) -> Outcome | None:
        """Return the answer of a child, or its failure; None if its answer has not arrived completely."""
        try:
            for key, arrays in child.connection.receive():
                return RolloutDataFailure(failure_from_arrays(arrays)) if key == FAILURE else answer_from_arrays(arrays)
        except EOFError:
            return self._ended(child)
        except (FrameError, KeyError, TypeError, ValueError) as error:
            return InfrastructureError(f"{self._settings.label}: process {child.process.pid} answered badly: {error}")
        return None

    def _ended(self, child: _Child) -> InfrastructureError:
        return InfrastructureError(self._wait(child.process.how_it_ended()))

    def _late(self, child: _Child) -> RolloutTimeout:
        return RolloutTimeout(
            f"{self._settings.label}: process {child.process.pid} must answer within runtime.deadlines.envStep = "
            f"{self._step_seconds:g} s, got none"
        )

    async def _start_all(self, count: int) -> None:
        started = await asyncio.gather(*(self._start() for _ in range(count)), return_exceptions=True)
        self._children = [child if isinstance(child, _Child) else None for child in started]
        for child in started:
            if isinstance(child, BaseException):
                raise child

    async def _start(self) -> _Child:
        process = await EnvProcess.start(self._settings, deadline=self._start_seconds)
        return _Child(process, Connection(process.take_stream()))

    async def _replace(self, index: int) -> None:
        child, self._children[index] = self._children[index], None
        if child is not None:
            await _kill(child)
        self._children[index] = await self._start()

    async def _kill_all(self) -> None:
        await asyncio.gather(*(_kill(child) for child in self._children if child is not None))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()


async def _kill(child: _Child) -> None:
    await child.process.kill()
    child.connection.close()
