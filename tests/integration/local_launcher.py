"""A launcher of the sample plan as a process of its own, to be interrupted and killed: `python local_launcher.py OUTPUT`."""

import os
import sys

from rl_core.launch.local import LocalCluster
from rl_core.plan.launch import ContainerPlan, LaunchPlan, PodPlan, ProcessPlan
from tests import ROOT

HOST = ("python", "-m", "rl_core.workers.host")


def process(name, group, command, *, restart=False, **env):
    role = "actor" if group in ("runner", "channel") else group
    identity = {
        "RLJOB_NAME": "j", "RLJOB_UID": "u77", "RLJOB_EPOCH": "0", "RLJOB_ROLE": group, "RLJOB_POD": f"j-{role}-0",
        "RLJOB_HUB": "tcp://j-actor-0.j:7700", "RLJOB_CHANNEL": "tcp://j-actor-0.j:7701",
        "GROUP_NAME": group, "RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return ProcessPlan(name=name, group=group, rank=0, command=command, restart=restart, env=identity | env)


def pod(role, *children):
    return PodPlan(
        name=f"j-{role}-0",
        role=role,
        index=0,
        containers=(ContainerPlan(name=role, image_role=role, processes=children),),
    )


def sample_plan():
    """One actor pod with a runner that only counts steps, the real channel server and a worker; one rollout pod."""
    runner = process("runner", "runner", ("python", "-m", "tests.integration.fake_runner"), RLJOB_CONTROL_PORT="7702")
    channel = process("channel", "channel", ("python", "-m", "rl_core.channel"))
    actor = pod("actor", runner, channel, process("actor-0", "actor", HOST))
    rollout = pod("rollout", process("rollout-0", "rollout", HOST, restart=True))
    return LaunchPlan(job="j", namespace="default", uid="u77", epoch=0, pods=(actor, rollout))


if __name__ == "__main__":
    code = LocalCluster(sample_plan(), workdir=sys.argv[1]).run(on_interrupt=lambda text: print(text, flush=True))
    os._exit(code)
