"""The simulators of one vector environment: in child processes, which may hang or end, or in this process.

A slot is the place of one simulator. A simulator that fails is replaced, and the other slots go on.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from rl_core.api.errors import DataError, DeadlineExceeded, InfrastructureError, RolloutDataFailure
from rl_core.envs.process import EnvProcess
from rl_core.envs.simulator import Simulator, failure_of
from rl_core.messages.embodied import SimulatorAnswer, SimulatorChunk, SimulatorReset, SimulatorSettings
from rl_core.messages.envs import EnvFailure

T = TypeVar("T")
Request = SimulatorReset | SimulatorChunk
Outcome = SimulatorAnswer | Exception


class Slots(Protocol):
    """Simulators by number."""

    def exchange(self, requests: Sequence[Request | None]) -> list[Outcome | None]:
        """Send each slot its request, None for no request, and return what each answered, or why it failed."""
        ...

    def replace(self, index: int) -> None:
        """Put a new simulator into a slot. Raises what building one raises."""
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

    def replace(self, index: int) -> None:
        """Build the simulator anew."""
        self._simulators[index] = Simulator(self._settings)

    def close(self) -> None:
        """Close the simulators."""
        for simulator in self._simulators:
            simulator.close()


class ProcessSlots:
    """Implements `Slots` by one child process per simulator.

    An event loop on a thread of its own talks to them: the kernel kills a child when the thread that started it ends.
    """

    def __init__(self, settings: SimulatorSettings, count: int, *, start_seconds: float, step_seconds: float) -> None:
        """Start `count` processes. Each must be ready within `start_seconds` and answer within `step_seconds`."""
        self._settings, self._start_seconds, self._step_seconds = settings, start_seconds, step_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="simulators", daemon=True)
        self._thread.start()
        self._children: list[EnvProcess | None] = [None] * count
        try:
            self._wait(self._start_all(count))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the children, 0 for one that was not replaced yet."""
        return [0 if child is None else child.pid for child in self._children]

    def exchange(self, requests: Sequence[Request | None]) -> list[Outcome | None]:
        """Send all requests at once."""
        return self._wait(self._exchange(requests))

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

    async def _start_all(self, count: int) -> None:
        started = await asyncio.gather(*(self._start() for _ in range(count)), return_exceptions=True)
        self._children = [child if isinstance(child, EnvProcess) else None for child in started]
        for child in started:
            if isinstance(child, BaseException):
                raise child

    async def _start(self) -> EnvProcess:
        return await EnvProcess.start(self._settings, deadline=self._start_seconds)

    async def _exchange(self, requests: Sequence[Request | None]) -> list[Outcome | None]:
        return await asyncio.gather(
            *(self._ask(child, request) for child, request in zip(self._children, requests, strict=True))
        )

    async def _ask(self, child: EnvProcess | None, request: Request | None) -> Outcome | None:
        if request is None:
            return None
        if child is None:
            return InfrastructureError("the process of this simulator has not been started")
        try:
            answer = await child.ask(request, SimulatorAnswer, deadline=self._step_seconds)
        except (DataError, DeadlineExceeded, InfrastructureError) as error:
            return error
        return RolloutDataFailure(answer.message) if isinstance(answer, EnvFailure) else answer

    async def _replace(self, index: int) -> None:
        child, self._children[index] = self._children[index], None
        if child is not None:
            await child.kill()
        self._children[index] = await self._start()

    async def _kill_all(self) -> None:
        await asyncio.gather(*(child.kill() for child in self._children if child is not None))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()
