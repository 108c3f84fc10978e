"""The process that runs an environment's code, started by `process.EnvProcess` as `python -m rl_core.envs.confined FD PARENT`.

It exchanges the records of `messages.envs` over the socket FD, one request at a time. While a request runs, the environment's code may call
groups of the job over the same socket. The code runs in the main thread, because libraries use signals; its output goes to the worker's log.
The process ends with the stream, and the kernel kills it when its worker dies. If user code forks and the copy returns from the
environment's code, the copy ends there: a second answer on the stream would be taken for the answer to the next request.
"""

import asyncio
import inspect
import io
import logging
import os
import resource
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.api.errors import ConfigError, RLJobError, RolloutDataFailure, public_type, text_of
from rl_core.api.user_code import describe, load_extensions, own_frames
from rl_core.envs import member_calls
from rl_core.envs.answers import answers_of
from rl_core.envs.registry import make_env
from rl_core.messages.embodied import SimulatorSettings
from rl_core.messages.envs import EnvFailure, EnvReady, EnvRow, EnvSettings
from rl_core.transports import pipe
from rl_core.workers.processes import die_with_parent

if TYPE_CHECKING:
    from rl_core.envs.simulator import SimulatorServer

DEFAULT_MEMORY_SHARE = 0.75
CGROUP_MEMORY, OOM_SCORE = Path("/sys/fs/cgroup/memory.max"), Path("/proc/self/oom_score_adj")
MAX_TRACEBACKS = 20
"""Tracebacks of user code that one process logs; answers contain the cause of every failure in any case."""
TRACEBACK_CHARACTERS = 32_768

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until the stream ends; return the exit code."""
    die_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="env child: %(levelname)s %(message)s")
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # Programs that user code starts must not keep the stream open.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # text that cannot be encoded must not fail the call
    copy_pid = os.getpid()
    try:
        source: EnvSettings | SimulatorSettings = pipe.receive_blocking(sock)
        if isinstance(source, EnvSettings):
            member_calls.connect(sock)
        try:
            server = Server(source) if isinstance(source, EnvSettings) else _simulator_server(source)
            end_copy(copy_pid)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - building runs user code
            end_copy(copy_pid, error)
            sock.sendall(pipe.pack(EnvFailure(type="ConfigError", message=_why_not_built(error, source.label))))
            return 2
        sock.sendall(pipe.pack(EnvReady(pid=copy_pid, max_turns=server.max_turns)))
        if not isinstance(server, Server):
            server.serve(sock)
        while True:
            sock.sendall(server.answer(pipe.receive_blocking(sock)))
            if server.spent:
                logger.warning(
                    "this process ends, because code that it was to give up still runs in it; another one takes its place"
                )
                os._exit(0)
    except (EOFError, ConnectionError):
        return 0


def memory_here() -> int:
    """Return the memory limit of this container in bytes, or the memory of the machine if it has none."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(CGROUP_MEMORY.read_text()))
    except (OSError, ValueError):  # no cgroup of version 2, or one without a limit
        return total


def end_copy(first: int, error: BaseException | None = None) -> None:
    """Exit if this process is a forked copy of the process with pid `first`; otherwise do nothing.

    The exit code is the one that Python would give for `error`; 0 for None.
    """
    if os.getpid() == first:
        return
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    os._exit(code if isinstance(code, int) else int(code is not None))


def _why_not_built(error: BaseException, label: str) -> str:
    if isinstance(error, ConfigError):
        return text_of(error)
    logger.error("%s could not be built", label, exc_info=error)
    return f"env.type: {label} could not be built: {describe(error)}; correct it"


def prepare_process(source: EnvSettings | SimulatorSettings) -> None:
    """Limit the memory of this process and load the extensions of the job, before it runs user code."""
    sys.path[:0] = source.search_path
    if source.memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (source.memory_bytes,) * 2)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (int(DEFAULT_MEMORY_SHARE * memory_here()),) * 2)
    # If memory runs out nevertheless, the kernel kills user code before the job's own processes.
    OOM_SCORE.write_text("1000")
    load_extensions(source.extensions)


def _simulator_server(source: SimulatorSettings) -> "SimulatorServer":
    from rl_core.envs.simulator import SimulatorServer  # gymnasium is imported only by processes that use it.

    prepare_process(source)
    return SimulatorServer(source)


class Server:
    """Builds one environment and answers the requests to it."""

    def __init__(self, source: EnvSettings) -> None:
        """Build the environment that `source` describes. Raises ConfigError when it cannot be built."""
        prepare_process(source)
        self._cpu_seconds = source.cpu_seconds
        self._name = source.label
        self._pid = os.getpid()
        self._tracebacks = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._env = make_env(source.type, source.options)
        if callable(getattr(self._env, "seed", None)):
            self._env.seed(source.seed)

    @property
    def max_turns(self) -> int | None:
        """Number of turns of an episode that the environment declares; None if it declares none."""
        declared = getattr(self._env, "max_turns", None)
        return declared if type(declared) is int else None

    def answer(self, rows: list[EnvRow]) -> bytes:
        """Run one request and return the packed answer. A failure of the environment is an error in the answer."""
        self._limit_cpu()
        try:
            result = self._env.step([row.messages for row in rows], [row.metadata for row in rows])
            if inspect.isawaitable(result):
                result = self._wait(result)
            end_copy(self._pid)
            weights = getattr(self._env, "reward_weights", None)
            return pipe.pack(answers_of(result, len(rows), what=self._name, reward_weights=weights))
        except BaseException as error:  # noqa: BLE001 - user code raises anything, and its sys.exit() is a data failure
            end_copy(self._pid, error)
            return pipe.pack(self._failure(error))

    @property
    def spent(self) -> bool:
        """Return whether the environment asks for the end of this process, because it could not stop its own code."""
        return bool(getattr(self._env, "spent", False))

    def _wait(self, awaitable: Any) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def finish() -> Any:
            return await awaitable

        return self._loop.run_until_complete(finish())

    def _limit_cpu(self) -> None:
        if self._cpu_seconds is not None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            soft = int(usage.ru_utime + usage.ru_stime) + self._cpu_seconds + 1
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))

    def _failure(self, error: BaseException) -> EnvFailure:
        cause = error.__cause__ if isinstance(error, RolloutDataFailure) else error
        text = own_frames(cause) if cause is not None else ""
        if text and self._tracebacks < MAX_TRACEBACKS:
            self._tracebacks += 1
            logger.error("%s raised:\n%s", self._name, text[:TRACEBACK_CHARACTERS])
        if isinstance(error, RLJobError):
            return EnvFailure(type=public_type(error).__name__, message=text_of(error))
        return EnvFailure(type="RolloutDataFailure", message=f"{self._name} raised {describe(error)}; correct it")
