"""Scaling of a local run: which pods to start, drain and end, as the operator decides on a cluster. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.plan.groups import BUILT_IN, ROLLOUT, GroupKind

LEAVING = ("draining", "drained")


@dataclass(frozen=True, kw_only=True, slots=True)
class PodChanges:
    """Names of the pods to start, to drain and to end."""

    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


def follow(
    status: Mapping[str, Any],
    pods: Mapping[str, bool],
    groups: Mapping[str, GroupKind] = BUILT_IN,
    *,
    draining: Collection[str],
) -> PodChanges:
    """Return the pods to start, to drain and to end, so that each elastic worker group gets the size that the runner's status asks for.

    `pods` maps each known pod to True if it runs or is starting, and to False if it has drained and ended. `draining` has the names of the
    pods that drain because of an earlier call. Only these are ended: where the status says of another pod that it has drained, it means an
    earlier pod of the same name, and the one that runs has not registered yet.
    """
    elastic = {group.name for group in groups.values() if group.elastic}
    members = [member for member in status.get("members", []) if member["role"] in elastic]
    missing = [entry["pod"] for entry in status.get("missing", []) if entry["role"] in elastic]
    drain: list[str] = []
    for role in status.get("roles", []):
        present = [m for m in members if m["role"] == role["name"] and m["state"] not in (*LEAVING, "lost")]
        surplus = len(present) - role["desired"]
        highest_first = sorted(present, key=lambda member: -member["index"])
        drain += [member["pod"] for member in highest_first[: max(surplus, 0)]]
    working = {member["pod"] for member in members if member["state"] not in ("drained", "lost")}
    drained = [member["pod"] for member in members if member["state"] == "drained" and member["pod"] not in working]
    return PodChanges(
        start=tuple(pod for pod in dict.fromkeys(missing) if not pods.get(pod, False)),
        drain=tuple(pod for pod in dict.fromkeys(drain) if pods.get(pod, False)),
        end=tuple(pod for pod in dict.fromkeys(drained) if pods.get(pod, False) and pod in draining),
    )


def rollouts_wanted(status: Mapping[str, Any]) -> int | None:
    """Return the number of rollouts that the runner wants, None before it has reported one."""
    return next((int(role["desired"]) for role in status.get("roles", []) if role["name"] == ROLLOUT), None)
