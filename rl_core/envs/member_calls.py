"""Calls from an environment or a reward function to a group of the job, such as a reward model or a judge.

    from rl_core.envs.member_calls import call_member

    def reward(prompts, completions, messages, **columns):
        return call_member("reward-model", "score", messages)

The group names `env` in its `callers`. The code of an environment has no keys and no addresses; the env worker makes the call for it.
"""

import os
import socket
import threading
from typing import Any

from rl_core.api.errors import ConfigError, InfrastructureError, RolloutDataFailure, error_types
from rl_core.messages.envs import EnvFailure, MemberAnswer, MemberCall
from rl_core.transports import pipe


class _Connection:
    """The stream to the env worker. The lock is held for one call, because threads of user code may call at the same time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stream: socket.socket | None = None
        self.pid = 0


_connection = _Connection()


def connect(stream: socket.socket) -> None:
    """Use `stream` for all calls of this process from now on."""
    _connection.stream, _connection.pid = stream, os.getpid()


def call_member(group: str, method: str, /, *arguments: Any) -> Any:
    """Call `method(*arguments)` of a member of `group`, with the rights of environments, and return the result. Blocks.

    Arguments and result are numbers, texts, bytes, numpy arrays, lists and mappings of these. If the member is lost, another one is called,
    so a method may run twice. Call it while the environment steps, which also bounds the time: envStep of `runtime.deadlines`.

    Raises ConfigError outside an environment of a job, InfrastructureError when no member answers in time, RolloutDataFailure when the
    method failed.
    """
    stream = _connection.stream
    if stream is None or _connection.pid != os.getpid():
        raise ConfigError(
            f"{group}.{method} can be called in a process of an environment only; call it from env.type or env.reward"
        )
    with _connection.lock:
        stream.sendall(pipe.pack(MemberCall(group=group, method=method, arguments=list(arguments))))
        answer = pipe.receive_blocking(stream)
    if isinstance(answer, MemberAnswer):
        return answer.value
    if not isinstance(answer, EnvFailure):
        raise InfrastructureError(
            f"{group}.{method} was answered with {type(answer).__name__}, which is no answer to a call"
        )
    kind = error_types().get(answer.type, RolloutDataFailure)
    raise (kind if issubclass(kind, InfrastructureError | ConfigError) else RolloutDataFailure)(answer.message)
