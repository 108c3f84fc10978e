"""What was asked of the run from outside: stop, checkpoint, changes of the spec, leaving members. Threads ask; the loop looks at boundaries."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from rl_core.api.errors import RLJobError
from rl_core.api.job import RLJobSpec
from rl_core.runner.changes import Change, Changes
from rl_core.runner.roster import LEAVING, Roster
from rl_core.workers.group import Cluster

logger = logging.getLogger(__name__)


class StopKind(StrEnum):
    """Why a run ends before its last step; of several requests the later of this list counts."""

    FINISH = "finish"
    """For good: checkpoint and model are saved, exit code 0."""
    INTERRUPT = "interrupt"
    """The pod must go (SIGTERM), or the job failed by a rule or a deadline: a checkpoint is saved within the grace, exit code 3."""
    SUSPEND = "suspend"
    """To be resumed: a checkpoint is saved, exit code 0, phase Suspended."""
    ROLLBACK = "rollback"
    """To be resumed from an older checkpoint: nothing is saved, exit code 3."""


KINDS = tuple(StopKind)
KIND_OF_REASON = {"suspend": StopKind.SUSPEND, "rollback": StopKind.ROLLBACK, "failed": StopKind.INTERRUPT}
"""Reasons of `POST /finish` that mean more than an early end."""


class Steering:
    """Requests that are not carried out yet."""

    def __init__(self, spec: RLJobSpec) -> None:
        """Begin with the spec the run was started with."""
        self.changes = Changes(spec)
        self.stop: tuple[StopKind, str] | None = None
        """Kind and reason of the stop that was asked for."""
        self.asked = threading.Event()
        """Whether a stop was asked for."""
        self._checkpoint = threading.Event()

    def ask_stop(self, kind: StopKind, reason: str) -> None:
        """Let the run end."""
        if self.stop is None or KINDS.index(kind) > KINDS.index(self.stop[0]):
            self.stop = (kind, reason)
        self.asked.set()

    def ask_checkpoint(self) -> None:
        """Let the next step boundary save a checkpoint."""
        self._checkpoint.set()

    def take_checkpoint(self) -> bool:
        """Return whether a checkpoint was asked for since the last call."""
        asked = self._checkpoint.is_set()
        self._checkpoint.clear()
        return asked


def drain(pods: Iterable[str], *, cluster: Cluster, roster: Roster) -> dict[str, list[str]]:
    """Begin to drain the members of `pods`; return {"draining": pods, "unknown": pods}. Repeating it changes nothing.

    Raises ValueError for an actor's pod: the gang does not shrink.
    """
    asked = list(dict.fromkeys(pods))
    members = list(cluster.members(drained=True))
    actors = sorted({member.pod for member in members if member.role == "actor" and member.pod in asked})
    if actors:
        raise ValueError(f"pods must be of rollouts or envs, got {', '.join(actors)}; the actor gang does not shrink")
    chosen = [member for member in members if member.pod in asked]
    roster.leave(member.name for member in chosen)
    for member in chosen:
        if member.state not in LEAVING:
            logger.info("%s (pod %s) drains", member.name, member.pod)
            cluster.retire(member.name).future.add_done_callback(lambda future, name=member.name: _told(name, future))  # type: ignore[misc]
    found = {member.pod for member in chosen}
    return {"draining": [pod for pod in asked if pod in found], "unknown": [pod for pod in asked if pod not in found]}


def _told(name: str, future: Any) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        logger.warning("%s could not be told to drain: %s", name, error)


class Controls:
    """The control calls by `METHOD /path`, as `ControlServer` takes them; all raise ValueError for a body that does not fit."""

    def __init__(
        self,
        steering: Steering,
        *,
        stop: Callable[[StopKind, str], None],
        drain: Callable[[list[str]], dict[str, list[str]]],
        applied_generation: Callable[[], int],
    ) -> None:
        """`stop(kind, reason)` ends the run; `drain(pods)` lets pods go."""
        self._steering, self._stop, self._drain, self._applied = steering, stop, drain, applied_generation

    def actions(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the functions by call."""
        return {
            "PUT /control": self.control,
            "POST /checkpoint": self.checkpoint,
            "POST /drain": self.drain,
            "POST /finish": self.finish,
        }

    def control(self, body: Any) -> dict[str, Any]:
        """Take `{generation, spec}`; the mutable fields apply at the next step boundary."""
        fields = _object(body, {"generation": int, "spec": dict})
        self._steering.changes.offer(fields["generation"], fields["spec"])
        return {"accepted": True, "appliedGeneration": self._applied()}

    def checkpoint(self, body: Any) -> dict[str, Any]:
        """Save a checkpoint at the next step boundary."""
        self._steering.ask_checkpoint()
        return {"accepted": True}

    def drain(self, body: Any) -> dict[str, Any]:
        """Take `{pods: [names]}`."""
        pods = _object(body, {"pods": list})["pods"]
        if not all(isinstance(pod, str) for pod in pods):
            raise ValueError(f"pods must be a list of pod names, got {pods!r}; correct it")
        try:
            return self._drain(pods)
        except RLJobError as error:
            raise ValueError(str(error)) from error

    def finish(self, body: Any) -> dict[str, Any]:
        """Take `{reason}` or nothing; suspend, rollback and failed keep the run resumable, any other reason ends it for good."""
        reason = str(_object({} if body is None else body, {}).get("reason") or "")
        self._stop(
            KIND_OF_REASON.get(reason, StopKind.FINISH), f"asked by POST /finish{f' ({reason})' if reason else ''}"
        )
        return {"accepted": True}


def _object(body: Any, fields: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(body, dict):
        wanted = f"an object with {', '.join(fields)}" if fields else "an object or nothing"
        raise ValueError(f"the body must be {wanted}, got {type(body).__name__}; send JSON")
    for name, kind in fields.items():
        if not isinstance(body.get(name), kind) or isinstance(body.get(name), bool):
            raise ValueError(f"{name} must be given as {kind.__name__}, got {body.get(name)!r}; correct it")
    return body


__all__ = ["Change", "Controls", "Steering", "StopKind", "drain"]
