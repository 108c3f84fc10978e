"""Adapts a launch plan to this machine: loopback addresses, local folders, and the attempt (number of the start) of each pod."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rl_core.plan.launch import LaunchPlan, PodPlan, Ports, ProcessPlan

LOOPBACK = "127.0.0.1"
_PORT = re.compile(r":(\d+)\Z")


def localise(plan: LaunchPlan, *, ports: Ports, curve_dir: Path, config: Path | None) -> LaunchPlan:
    """Return `plan` for this machine.

    A plan made for a cluster gets loopback addresses on `ports`; one made for loopback keeps its own. `curve_dir` is where the
    keys are; `config` (the resolved job) replaces a path that does not exist here.
    """

    def change(process: ProcessPlan) -> Mapping[str, str]:
        env = dict(process.env)
        env["RLJOB_CURVE_DIR"] = str(curve_dir)
        if "RLJOB_CONFIG" in env and config is not None and not Path(env["RLJOB_CONFIG"]).exists():
            env["RLJOB_CONFIG"] = str(config)
        if not env.get("RLJOB_HUB", "").startswith(f"tcp://{LOOPBACK}:"):
            env |= {"RLJOB_HUB": f"tcp://{LOOPBACK}:{ports.hub}", "RLJOB_CHANNEL": f"tcp://{LOOPBACK}:{ports.channel}"}
            local = {
                "RLJOB_CONTROL_PORT": str(ports.control),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(ports.master),
            }
            env |= {key: value for key, value in local.items() if key in env}
            for variable in ("RLJOB_RPC_PORT", "RLJOB_ENDPOINT_PORT"):  # one port per pod does not fit on one machine
                env.pop(variable, None)
        return env

    return replace(plan, pods=tuple(_with_env(pod, change) for pod in plan.pods))


def under_epoch(plan: LaunchPlan, epoch: int) -> LaunchPlan:
    """Return `plan` under another epoch."""

    def change(process: ProcessPlan) -> Mapping[str, str]:
        return {**process.env, "RLJOB_EPOCH": str(epoch)}

    return replace(plan, epoch=epoch, pods=tuple(_with_env(pod, change) for pod in plan.pods))


def as_attempt(pod: PodPlan, attempt: int) -> PodPlan:
    """Return `pod` with the number of its start, which is the first half of the incarnation of its processes."""
    return _with_env(pod, lambda process: {**process.env, "RLJOB_INCARNATION": f"{attempt}.0"})


def control_port(plan: LaunchPlan) -> int | None:
    """Return the port of the runner's control server; None when the plan has no runner."""
    for pod in plan.pods:
        for container in pod.containers:
            for process in container.processes:
                if process.group == "runner":
                    return int(process.env.get("RLJOB_CONTROL_PORT", process.ports.get("control", 0))) or None
    return None


def _with_env(pod: PodPlan, change: Callable[[ProcessPlan], Mapping[str, str]]) -> PodPlan:
    containers = tuple(
        replace(c, processes=tuple(replace(p, env=dict(change(p))) for p in c.processes)) for c in pod.containers
    )
    return replace(pod, containers=containers)
