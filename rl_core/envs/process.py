"""One env child process seen from the worker: start, call with a deadline, kill. `pool` owns a handful of them."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rl_core.api.base import Spec
from rl_core.api.errors import ConfigError, DeadlineExceeded, FrameError, InfrastructureError, RolloutTimeout
from rl_core.api.roles import EnvSpec
from rl_core.envs import wire
from rl_core.envs.base import parse_config
from rl_core.workers import processes

HIDDEN_ENV = ("RLJOB_CURVE_DIR", "RLJOB_EVENTS_FD", "RLJOB_CONFIG", "RLJOB_HUB", "RLJOB_CHANNEL")
"""Variables user code has no business with: keys, addresses and the launcher's pipe."""
LAST_WORDS_SECONDS = 1.0
"""How long an answer may still be read after the process that sent it has ended."""

logger = logging.getLogger(__name__)


class LimitsSpec(Spec):
    """`env.options.limits`, for every type of environment."""

    memory_bytes: int | None = None
    """Address space of one process; beyond it user code gets MemoryError. null = unlimited."""
    cpu_seconds: int | None = None
    """CPU time of one step; beyond it the process is killed. null = only the deadline on the clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSource:
    """What a child needs to build the environment."""

    type: str
    """Registered name or `module:Class`."""
    label: str
    """How errors call it: `reward score:fn`, `environment math`."""
    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    """Fields of LimitsSpec."""
    seed: int = 0
    """Given to the environment's `seed` after it is built."""
    extensions: list[str] = field(default_factory=list)
    """`spec.extensions`."""
    search_path: list[str] = field(default_factory=list)
    """Folders put in front of `sys.path`: where user code lies."""

    @classmethod
    def from_spec(
        cls, spec: EnvSpec, *, seed: int = 0, extensions: list[str] | None = None, search_path: list[str] | None = None
    ) -> Self:
        """Return the source of a job's `spec.env`. Raises ConfigError for bad `limits`."""
        options = dict(spec.options)
        limits = parse_config(LimitsSpec, options.pop("limits", None), where="env.options.limits")
        if spec.reward is not None:
            options["reward"] = spec.reward
        return cls(
            type=spec.type,
            label=f"reward {spec.reward}" if spec.reward is not None else f"environment {spec.type}",
            options=options,
            limits=limits.model_dump(exclude_none=True),
            seed=seed,
            extensions=list(extensions or ()),
            search_path=[str(folder) for folder in search_path or ()],
        )


class EnvProcess:
    """A child that has built its environment. One call at a time."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        label: str,
    ) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._label = label
        self._ended = asyncio.create_task(process.wait())

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether the process has not ended, as far as is known."""
        return not self._ended.done()

    async def ended_or(self, event: asyncio.Event) -> None:
        """Wait until the process ends or `event` is set."""
        wake = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({wake, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wake.cancel()

    @classmethod
    async def start(cls, source: EnvSource, *, deadline: float) -> Self:
        """Start a child and wait until it has built its environment.

        Raises ConfigError (the environment cannot be built), DeadlineExceeded, InfrastructureError (the child ended).
        """
        child = await cls._spawn(source.label)
        try:
            answer = await child._exchange(asdict(source), deadline)
        except TimeoutError as error:
            await child.kill()
            raise DeadlineExceeded(
                f"{source.label}: a process must be ready within runtime.deadlines.envReset = {deadline:g} s, got none; "
                "raise it, or import less in the environment's module"
            ) from error
        except BaseException:
            await child.kill()
            raise
        if "error" in answer:
            await child.kill()
            raise ConfigError(str(answer["error"]["message"]))
        return child

    @classmethod
    async def _spawn(cls, label: str) -> Self:
        near, far = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-u", "-m", "rl_core.envs.child", str(far.fileno()), str(os.getpid())),
                pass_fds=(far.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # so that what user code starts is killed with it, and Ctrl-C does not reach it
                env=child_environment(os.environ),
            )
        except OSError as error:
            near.close()
            raise InfrastructureError(f"{label}: a process could not be started: {error}") from error
        finally:
            far.close()
        reader, writer = await asyncio.open_connection(sock=near)
        return cls(process, reader, writer, label)

    async def call(self, rows: list[dict[str, Any]], *, deadline: float) -> dict[str, Any]:
        """Return the child's answer, {rows} or {error}.

        Past the deadline the child is killed and RolloutTimeout raised; a child that ends raises InfrastructureError.
        """
        try:
            answer = await self._exchange({"rows": rows}, deadline)
            if "error" not in answer and len(answer["rows"]) != len(rows):
                raise InfrastructureError(
                    f"{self._label}: process {self.pid} answered {len(answer['rows'])} rows, asked for {len(rows)}; "
                    "something else writes to its connection"
                )
            return answer
        except TimeoutError as error:
            await self.kill()
            raise RolloutTimeout(
                f"{self._label}: a step of {len(rows)} rows must end within runtime.deadlines.envStep = {deadline:g} s, "
                f"got no answer; process {self.pid} was killed"
            ) from error
        except InfrastructureError:
            await self.kill()
            raise

    async def _exchange(self, message: Any, deadline: float) -> dict[str, Any]:
        packed = wire.pack(message)
        answer = asyncio.create_task(self._send_and_receive(packed))
        try:
            async with asyncio.timeout(deadline):
                await asyncio.wait({answer, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait({answer}, timeout=LAST_WORDS_SECONDS)
            if not answer.done():
                raise InfrastructureError(await self._obituary())
            return answer.result()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise InfrastructureError(await self._obituary()) from error
        except FrameError as error:
            raise InfrastructureError(
                f"{self._label}: process {self.pid} answered with a malformed message: {error}"
            ) from error
        finally:
            answer.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await answer

    async def _send_and_receive(self, packed: bytes) -> dict[str, Any]:
        self._writer.write(packed)
        await self._writer.drain()
        answer: dict[str, Any] = await wire.receive(self._reader)
        return answer

    async def _obituary(self) -> str:
        await asyncio.wait({self._ended}, timeout=LAST_WORDS_SECONDS)
        code = self._process.returncode
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {processes.signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        return f"{self._label}: process {self.pid} {how} before it answered; see the env log for its last output"

    async def kill(self) -> None:
        """Kill the child and what it started, and reap it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(
                self._process.pid, signal.SIGKILL
            )  # not Process.kill, which may reap the child before its watcher
        await asyncio.shield(self._ended)
        self._writer.close()
        with suppress(ConnectionError, OSError):
            await self._writer.wait_closed()


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables a child gets: all but keys, addresses and pipes of the job."""
    return {key: value for key, value in environ.items() if key not in HIDDEN_ENV}
