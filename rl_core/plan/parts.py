"""The records of a launch plan, from one process up to all pods of a job. They convert to canonical JSON and back without loss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Self

from rl_core.plan.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """TCP ports of a job.

    hub, channel and control belong to the runner's pod, master to the gloo or NCCL rendezvous of a gang, health to every supervisor.
    """

    hub: int = 7700
    channel: int = 7701
    control: int = 7702
    health: int = 7703
    master: int = 7704
    rpc: int = 7705
    """RPC of the workers of elastic groups on a cluster, where network policies name it; elsewhere workers take a free port."""
    endpoint: int = 7706
    """OpenAI endpoint of rollouts on a cluster, in jobs whose environments are agent programs; elsewhere rollouts take a free port."""


def _slim(value: Any) -> Any:
    """Return the JSON form of a part of a plan, without the fields that hold their default."""
    if isinstance(value, _Plan):
        items = {field.name: (field, getattr(value, field.name)) for field in fields(value)}  # type: ignore[arg-type]
        return {name: _slim(item) for name, (field, item) in items.items() if item != _default(field)}
    return [_slim(item) for item in value] if isinstance(value, tuple) else value


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


class _Plan:
    """Base of all parts of a plan: conversion to canonical JSON and back."""

    __slots__ = ()

    def to_json(self) -> str:
        """Return the plan as canonical JSON.

        Fields that hold their default are left out, so that a supervisor of an older release can read a plan with a new field.
        """
        return json.dumps(_slim(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan that `to_json` wrote."""
        return cls._read(json.loads(text))

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**value)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuClaim(_Plan):
    """Accelerators of a pod."""

    count: int
    type: str | None = None
    """Device class; None = any."""
    shared: bool = False
    """Whether containers of the pod share the claim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlan(_Plan):
    """One process under a supervisor."""

    name: str
    """Unique inside the pod: runner, channel, actor-0, ..."""
    group: str
    rank: int
    command: tuple[str, ...]
    env: dict[str, str]
    visible_devices: tuple[str, ...] = ()
    ports: dict[str, int] = field(default_factory=dict)
    restart: bool = False
    """Whether the supervisor restarts the process when it ends, as those of elastic groups; otherwise its end ends the pod."""

    @property
    def placement(self) -> Placement:
        """Return the placement that the environment of the process holds; the runner and the channel server run on CPU."""
        return Placement.from_env(self.env)

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(
            **{**value, "command": tuple(value["command"]), "visible_devices": tuple(value.get("visible_devices", ()))}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerPlan(_Plan):
    """One container: one supervisor with its processes."""

    name: str
    image_role: str
    processes: tuple[ProcessPlan, ...]

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "processes": tuple(ProcessPlan._read(process) for process in value["processes"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class PodPlan(_Plan):
    """One pod, `<job>-<role>-<index>`."""

    name: str
    role: str
    index: int
    containers: tuple[ContainerPlan, ...]
    claim: GpuClaim | None = None

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        containers = tuple(ContainerPlan._read(container) for container in value["containers"])
        claim = GpuClaim._read(value["claim"]) if value.get("claim") else None
        return cls(**{**value, "containers": containers, "claim": claim})


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan(_Plan):
    """All pods of a job under one epoch."""

    job: str
    namespace: str
    uid: str
    epoch: int
    pods: tuple[PodPlan, ...]

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "pods": tuple(PodPlan._read(pod) for pod in value["pods"])})

    def pods_of(self, role: str) -> tuple[PodPlan, ...]:
        """Return the pods of one group, by index."""
        return tuple(pod for pod in self.pods if pod.role == role)
