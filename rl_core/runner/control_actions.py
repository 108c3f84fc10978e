"""The functions behind `PUT /control`, `POST /checkpoint`, `/drain` and `/finish`.

Each function checks the body of the call and stores the request. The training loop handles it at the next step boundary.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from rl_core.api.errors import RLJobError
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.roster import LEAVING, Roster
from rl_core.runner.stopping import StopController, StopKind
from rl_core.workers.group import Cluster

logger = logging.getLogger(__name__)
KIND_OF_REASON = {"suspend": StopKind.SUSPEND, "rollback": StopKind.ROLLBACK, "failed": StopKind.INTERRUPT}
"""Reasons of `POST /finish` that mean more than an early end."""


def drain(pods: Iterable[str], *, cluster: Cluster, roster: Roster) -> dict[str, list[str]]:
    """Begin to drain the members of `pods`; return {"draining": names of pods, "unknown": names of pods}. Idempotent.

    Raises ValueError for a pod of a gang, which does not shrink.
    """
    requested = list(dict.fromkeys(pods))
    members = list(cluster.members(drained=True))
    gangs = [group.name for group in roster.groups.values() if not group.elastic]
    gang_pods = sorted({member.pod for member in members if member.role in gangs and member.pod in requested})
    if gang_pods:
        raise ValueError(
            f"pods must be of elastic groups, got {', '.join(gang_pods)}; a gang ({', '.join(gangs)}) does not shrink"
        )
    leaving = [member for member in members if member.pod in requested]
    roster.leave(member.name for member in leaving)
    for member in leaving:
        if member.state not in LEAVING:
            logger.info("%s (pod %s) drains", member.name, member.pod)
            cluster.retire(member.name).future.add_done_callback(partial(_log_failure, member.name))
    draining = {member.pod for member in leaving}
    drained_pods = [pod for pod in requested if pod in draining]
    return {"draining": drained_pods, "unknown": [pod for pod in requested if pod not in draining]}


def _log_failure(name: str, future: Any) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        logger.warning("%s could not be told to drain: %s", name, error)


class ControlActions:
    """The actions that `ControlServer` serves. All raise ValueError for a body with missing or wrong fields."""

    def __init__(
        self,
        applied: AppliedSpec,
        stops: StopController,
        *,
        ask_checkpoint: Callable[[], None],
        drain: Callable[[list[str]], dict[str, list[str]]],
        applied_generation: Callable[[], int],
    ) -> None:
        """`ask_checkpoint()` requests a checkpoint at the next step boundary, `drain(pods)` begins to drain pods.

        `applied_generation()` is the generation of the job that the run follows.
        """
        self._spec, self._stops = applied, stops
        self._ask_checkpoint, self._drain, self._applied = ask_checkpoint, drain, applied_generation

    def by_path(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the actions by `METHOD /path`."""
        return {
            "PUT /control": self.control,
            "POST /checkpoint": self.checkpoint,
            "POST /drain": self.drain,
            "POST /finish": self.finish,
        }

    def control(self, body: Any) -> dict[str, Any]:
        """Accept `{generation, spec}`; the mutable fields apply at the next step boundary."""
        fields = _object(body, {"generation": int, "spec": dict})
        self._spec.offer(fields["generation"], fields["spec"])
        return {"accepted": True, "appliedGeneration": self._applied()}

    def checkpoint(self, body: Any) -> dict[str, Any]:
        """Save a checkpoint at the next step boundary."""
        self._ask_checkpoint()
        return {"accepted": True}

    def drain(self, body: Any) -> dict[str, Any]:
        """Begin to drain the pods of `{pods: [names]}`."""
        pods = _object(body, {"pods": list})["pods"]
        if not all(isinstance(pod, str) for pod in pods):
            raise ValueError(f"pods must be a list of pod names, got {pods!r}; correct it")
        try:
            return self._drain(pods)
        except RLJobError as error:
            raise ValueError(str(error)) from error

    def finish(self, body: Any) -> dict[str, Any]:
        """Request the end of the run; the body is `{reason}` or nothing.

        The reasons "suspend", "rollback" and "failed" keep the run resumable. Any other reason, or none, ends it for good: the last
        checkpoint and the model are saved.
        """
        reason = str(_object({} if body is None else body, {}).get("reason") or "")
        text = f"asked by POST /finish{f' ({reason})' if reason else ''}"
        self._stops.stop(text, KIND_OF_REASON.get(reason, StopKind.FINISH))
        return {"accepted": True}


def _object(body: Any, fields: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(body, dict):
        expected = f"an object with {', '.join(fields)}" if fields else "an object or nothing"
        raise ValueError(f"the body must be {expected}, got {type(body).__name__}; send JSON")
    for name, kind in fields.items():
        if not isinstance(body.get(name), kind) or isinstance(body.get(name), bool):
            raise ValueError(f"{name} must be given as {kind.__name__}, got {body.get(name)!r}; correct it")
    return body
