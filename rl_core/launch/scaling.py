"""How a local run follows its number of rollouts and envs: which pods to start, drain and end. Pure; the operator's part of scaling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ELASTIC = ("rollout", "env")
LEAVING = ("draining", "drained")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """What to do with pods, by name."""

    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


def follow(status: Mapping[str, Any], pods: Mapping[str, bool]) -> Moves:
    """Return the moves that bring the pods to what `/status` wants.

    `pods`: whether each known pod runs or is about to; False = it ended because it had drained.
    """
    members = [member for member in status.get("members", []) if member["role"] in ELASTIC]
    missing = [entry["pod"] for entry in status.get("missing", []) if entry["role"] in ELASTIC]
    drain: list[str] = []
    for role in status.get("roles", []):
        here = [m for m in members if m["role"] == role["name"] and m["state"] not in (*LEAVING, "lost")]
        surplus = len(here) - role["desired"]
        highest_first = sorted(here, key=lambda member: -member["index"])
        drain += [member["pod"] for member in highest_first[: max(surplus, 0)]]
    drained = [member["pod"] for member in members if member["state"] == "drained"]
    return Moves(
        start=tuple(pod for pod in missing if not pods.get(pod, False)),
        drain=tuple(pod for pod in drain if pods.get(pod, False)),
        end=tuple(pod for pod in drained if pods.get(pod, False)),
    )


def rollouts_wanted(status: Mapping[str, Any]) -> int | None:
    """Return how many rollouts the runner wants; None before it tells."""
    return next((int(role["desired"]) for role in status.get("roles", []) if role["name"] == "rollout"), None)
