"""`EnvProcess`: one env child process, seen from the worker: start, call with a deadline, kill. `pool` owns several."""

import asyncio
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rl_core.api.errors import (
    ConfigError,
    DeadlineExceeded,
    FrameError,
    InfrastructureError,
    RLJobError,
    RolloutDataFailure,
    RolloutTimeout,
    public_type,
    text_of,
)
from rl_core.envs.output import PipeCopier
from rl_core.messages.embodied import SimulatorSettings
from rl_core.messages.envs import EnvAnswer, EnvFailure, EnvReady, EnvRow, EnvSettings, MemberAnswer, MemberCall
from rl_core.plan.launch import CURVE_PATH
from rl_core.transports import pipe
from rl_core.workers import processes

KEY_FOLDER, OUTPUT = "RLJOB_CURVE_DIR", "RLJOB_OUTPUT"
HIDDEN_ENV = ("RLJOB_CURVE_DIR", "RLJOB_EVENTS_FD", "RLJOB_CONFIG", "RLJOB_HUB", "RLJOB_CHANNEL")
"""Variables that are not passed to user code: keys, addresses and the launcher's pipe."""
PRIVATE = ".rljob"
"""The launcher's folder inside the output folder."""
MARK = "RLJOB_ENV_PROCESS"
"""Environment variable that names the env process to which a program belongs."""
LAST_ANSWER_SECONDS = 1.0
"""How long to wait for a last answer after the process has ended."""

logger = logging.getLogger(__name__)
CallMember = Callable[[MemberCall], Awaitable[Any]]
"""Calls a member of a group of the job for the code of an environment; returns its value."""


class EnvProcess:
    """A child process that has built its environment. It serves one call at a time."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        relay: PipeCopier,
        label: str,
        mark: str,
        call_member: CallMember | None,
    ) -> None:
        self._process = process
        self._call_member = call_member
        self._marked_variable = mark
        """`NAME=value` in its environment, inherited by all processes that it starts."""
        self._reader, self._writer = reader, writer
        self._label = label
        self._relay = relay
        self._exit = asyncio.create_task(process.wait())
        self.max_turns: int | None = None
        """Turns of an episode that the environment declares; known once the child has started."""

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not been seen to end."""
        return not self._exit.done()

    async def ended_or(self, event: asyncio.Event) -> None:
        """Wait until the process ends or `event` is set."""
        wake = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({wake, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wake.cancel()

    @classmethod
    async def start(
        cls,
        source: EnvSettings | SimulatorSettings,
        *,
        deadline: float,
        quiet: bool = False,
        call_member: CallMember | None = None,
    ) -> Self:
        """Start a child process and wait until it has built its environment.

        - `deadline`: seconds until it must have built the environment.
        - `quiet`: discard what its code prints.
        - `call_member`: carries out calls of its code to worker groups of the job. None refuses such calls.

        Raises ConfigError when the environment cannot be built, DeadlineExceeded, and InfrastructureError when the child ended.
        """
        child = await cls._spawn(
            source.label, hidden_folders(os.environ) if source.barrier else [], quiet=quiet, call_member=call_member
        )
        try:
            answer = await child._exchange(source, deadline)
            if isinstance(answer, EnvFailure):
                raise ConfigError(answer.message)
            if not isinstance(answer, EnvReady):
                raise InfrastructureError(child._unexpected_answer(answer))
            child.max_turns = answer.max_turns
        except TimeoutError as error:
            await child.kill()
            raise DeadlineExceeded(
                f"{source.label}: a process must be ready within runtime.deadlines.envReset = {deadline:g} s, got none; "
                "raise it, or import less in the environment's module"
            ) from error
        except BaseException:
            await child.kill()
            raise
        return child

    @classmethod
    async def _spawn(cls, label: str, hidden: list[str], *, quiet: bool, call_member: CallMember | None) -> Self:
        own_end, child_end = socket.socketpair()
        printed, output = os.pipe()
        marked_variable = f"{MARK}={uuid.uuid4().hex}"
        try:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-P",
                    "-u",
                    "-m",
                    "rl_core.envs.confined",
                    str(child_end.fileno()),
                    str(os.getpid()),
                    *hidden,
                ),
                pass_fds=(child_end.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # the whole group can be killed, and Ctrl-C does not reach it
                env=child_environment(os.environ) | dict([marked_variable.split("=")]),
            )
        except OSError as error:
            own_end.close()
            os.close(printed)
            raise InfrastructureError(f"{label}: a process could not be started: {error}") from error
        finally:
            child_end.close()
            os.close(output)
        reader, writer = await asyncio.open_connection(sock=own_end)
        relay = PipeCopier(printed, lambda data: None) if quiet else PipeCopier(printed)
        return cls(process, reader, writer, relay, label, marked_variable, call_member)

    async def call(self, rows: list[EnvRow], *, deadline: float) -> list[EnvAnswer] | EnvFailure:
        """Send `rows` to the child and return one answer per row, or one EnvFailure when the environment failed as a whole.

        After `deadline` seconds the child is killed and RolloutTimeout is raised. Raises InfrastructureError when the child ends.
        """
        try:
            answer = await self._exchange(rows, deadline)
            if isinstance(answer, EnvFailure):
                return answer
            if not isinstance(answer, list) or not all(isinstance(row_answer, EnvAnswer) for row_answer in answer):
                raise InfrastructureError(self._unexpected_answer(answer))
            if len(answer) != len(rows):
                raise InfrastructureError(
                    f"{self._label}: process {self.pid} answered {len(answer)} rows, asked for {len(rows)}; "
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

    def take_stream(self) -> socket.socket:
        """Return the connection to the child, for use by any one thread in place of `call`."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]
        stream = socket.socket(fileno=os.dup(self._writer.get_extra_info("socket").fileno()))
        stream.setblocking(True)
        return stream

    def _unexpected_answer(self, answer: Any) -> str:
        return (
            f"{self._label}: process {self.pid} answered with {type(answer).__name__}, which is no answer to what it "
            "was asked; something else writes to its connection"
        )

    async def _exchange(self, message: Any, deadline: float) -> Any:
        packed = pipe.pack(message)
        answer = asyncio.create_task(self._send_and_receive(packed))
        try:
            async with asyncio.timeout(deadline):
                await asyncio.wait({answer, self._exit}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait({answer}, timeout=LAST_ANSWER_SECONDS)
            if not answer.done():
                raise InfrastructureError(await self.how_it_ended())
            return answer.result()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise InfrastructureError(await self.how_it_ended()) from error
        except FrameError as error:
            raise InfrastructureError(
                f"{self._label}: process {self.pid} answered with a malformed message: {error}"
            ) from error
        finally:
            answer.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await answer

    async def _send_and_receive(self, packed: bytes) -> Any:
        self._writer.write(packed)
        await self._writer.drain()
        while isinstance(message := await pipe.receive(self._reader), MemberCall):
            self._writer.write(await self._called(message))
            await self._writer.drain()
        return message

    async def _called(self, call: MemberCall) -> bytes:
        """Return the packed answer to a call that the environment's code makes to a group of the job."""
        try:
            if self._call_member is None:
                raise ConfigError(
                    f"{self._label} calls {call.group}.{call.method}, but no group of a job is at hand here"
                )
            return pipe.pack(MemberAnswer(value=await self._call_member(call)))
        except RLJobError as error:
            return pipe.pack(EnvFailure(type=public_type(error).__name__, message=text_of(error)))
        except (TypeError, ValueError) as error:
            return pipe.pack(
                EnvFailure(type=RolloutDataFailure.__name__, message=f"{call.group}.{call.method}: {error}")
            )

    async def how_it_ended(self) -> str:
        """Return a text about the end of the child, once it has ended or closed its connection."""
        await asyncio.wait({self._exit}, timeout=LAST_ANSWER_SECONDS)
        code = self._process.returncode
        if code is None:
            exit_text = "closed its connection"
        elif code < 0:
            exit_text = f"was killed by {processes.signal_name(-code)}"
        else:
            exit_text = f"ended with exit code {code}"
        return f"{self._label}: process {self.pid} {exit_text} before it answered; see the env log for its last output"

    async def kill(self) -> None:
        """Kill the child and the processes that it started, and reap it."""
        with suppress(ProcessLookupError, PermissionError):
            # Not Process.kill, which may reap the child before its watcher does.
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.shield(self._exit)
        # A program in a session of its own is not in the child's process group, but has inherited the marked variable. One that was
        # started without it lives until the worker ends, when the supervisor kills all remaining processes.
        await asyncio.to_thread(processes.kill_with_environment, self._marked_variable)
        self._relay.close()
        self._writer.close()
        with suppress(ConnectionError, OSError):
            await self._writer.wait_closed()


def hidden_folders(environ: Mapping[str, str]) -> list[str]:
    """Return the folders that are hidden from user code: keys, and the launcher's part of the output folder. Never empty."""
    private = Path(environ[OUTPUT]) / PRIVATE if OUTPUT in environ else None
    return [environ.get(KEY_FOLDER) or CURVE_PATH, *([str(private)] if private is not None else [])]


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a child: all but keys, addresses and pipes of the job."""
    return {key: value for key, value in environ.items() if key not in HIDDEN_ENV}
