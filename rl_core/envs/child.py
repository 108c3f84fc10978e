"""The process that runs an environment's code: `python -m rl_core.envs.child FD`, started by `process.EnvProcess`.

Protocol over the socket FD, one request at a time: first {type, options, ...} of `process.EnvSource`, answered by
{ready: True} or {error}; then {rows: [{messages, metadata}]}, answered by {rows: [...]} or {error: {type, message}}. The
environment's code runs in the main thread (libraries use signals); what it prints goes to the worker's log. The process
ends with the stream, and is killed by the kernel when its worker dies.
"""

import asyncio
import inspect
import logging
import resource
import socket
import sys
import traceback
from typing import Any

from rl_core.api.errors import ConfigError, RLJobError, text_of
from rl_core.api.user_code import describe, load_extensions
from rl_core.envs import wire
from rl_core.envs.registry import make_env
from rl_core.envs.rows import rows_of, with_weights
from rl_core.workers.processes import die_with_parent

MAX_TRACEBACKS = 20
"""Tracebacks of user code written to the log by one process; the answers name the cause of every failure."""

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until the stream ends; return the exit code."""
    die_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="env child: %(levelname)s %(message)s")
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # a program started by user code must not keep the stream open
    try:
        start = wire.receive_blocking(sock)
        try:
            server = Server(start)
        except Exception as error:  # noqa: BLE001 - building runs user code
            sock.sendall(
                wire.pack({"error": {"type": "ConfigError", "message": _why_not_built(error, start["label"])}})
            )
            return 2
        sock.sendall(wire.pack({"ready": True}))
        while True:
            sock.sendall(server.answer(wire.receive_blocking(sock)))
    except (EOFError, ConnectionError):
        return 0


def _why_not_built(error: Exception, label: str) -> str:
    if isinstance(error, ConfigError):
        return text_of(error)
    logger.error("%s could not be built", label, exc_info=error)
    return f"env.type: {label} could not be built: {describe(error)}; correct it"


class Server:
    """One environment and the calls to it."""

    def __init__(self, start: dict[str, Any]) -> None:
        sys.path[:0] = start["search_path"]
        limits = start["limits"]
        if limits.get("memory_bytes"):
            resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"],) * 2)
        self._cpu_seconds: int | None = limits.get("cpu_seconds")
        self._name: str = start["label"]
        self._tracebacks = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        load_extensions(start["extensions"])
        self._env = make_env(start["type"], start["options"])
        if callable(getattr(self._env, "seed", None)):
            self._env.seed(start["seed"])

    def answer(self, request: dict[str, Any]) -> bytes:
        """Return the packed answer to one request; whatever the environment does wrong becomes an error in it."""
        self._limit_cpu()
        try:
            rows = request["rows"]
            result = self._env.step([row["messages"] for row in rows], [row["metadata"] for row in rows])
            if inspect.isawaitable(result):
                result = self._wait(result)
            answers = rows_of(result, len(rows), what=self._name)
            return wire.pack({"rows": with_weights(answers, getattr(self._env, "reward_weights", None))})
        except BaseException as error:  # noqa: BLE001 - user code raises anything, and its sys.exit() is a data failure
            return wire.pack({"error": self._describe(error)})

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

    def _describe(self, error: BaseException) -> dict[str, str]:
        if isinstance(error, RLJobError):
            return {"type": type(error).__name__, "message": text_of(error)}
        if self._tracebacks < MAX_TRACEBACKS:
            self._tracebacks += 1
            logger.error("%s raised:\n%s", self._name, "".join(traceback.format_exception(error)))
        return {"type": "RolloutDataFailure", "message": f"{self._name} raised {describe(error)}; correct it"}


if __name__ == "__main__":
    sys.exit(main())
