"""A runner without training: a real hub, groups and control port, steps that only count. Told what to do by files in RLJOB_OUTPUT."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rl_core.api.identity import Identity
from rl_core.plan.signatures import Peer
from rl_core.runner.control import ControlServer
from rl_core.transports.curve import KeyRing
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.hub import Hub

OUT = Path(os.environ["RLJOB_OUTPUT"])


def wish(name, default):
    path = OUT / name
    return json.loads(path.read_text()) if path.exists() else default


def main():
    identity = Identity.from_env()
    keys = KeyRing(identity.curve_dir, "runner")
    if wish("bad_input", False):
        return 2
    hub = Hub(identity=identity, keys=keys, heartbeat_seconds=0.3, suspect_seconds=30, lost_seconds=60)
    cluster = Cluster(hub, sizes={"actor": 1, "rollout": wish("rollouts", 1)})
    actor = WorkerGroup.of("tests.integration.worker_samples:Sample", 1).launch(cluster, name="actor")
    rollout = WorkerGroup.of("tests.integration.worker_samples:Sample", 2).launch(cluster, name="rollout")
    history = OUT / "history.jsonl"

    def note(**what):
        with history.open("a") as file:
            file.write(json.dumps({"time": time.time(), "epoch": identity.epoch, **what}) + "\n")

    hub.add_listeners(
        joined=lambda m: note(event="joined", name=m.name, incarnation=m.incarnation, pid=m.pid),
        lost=lambda m, reason: note(event="lost", name=m.name, incarnation=m.incarnation, reason=reason),
    )
    hub.add_listeners(joined=lambda m: rollout.construct(m) if m.role == "rollout" else None)
    state = {"step": 0, "stop": False}

    def finish(_):
        state["stop"] = True
        return {"accepted": True}

    def status():
        stall = wish("stall", None)
        return {
            "schema": 1,
            "phase": "Generating",
            "epoch": identity.epoch,
            "step": state["step"],
            "stall": stall,
            "checkpoint": wish("checkpoint", None),
            "resume": os.environ["RLJOB_RESUME"],
        }

    token = (Path(identity.curve_dir) / "control.token").read_text().strip()
    ControlServer(
        "127.0.0.1",
        int(os.environ["RLJOB_CONTROL_PORT"]),
        peer=Peer(token=token, uid=identity.uid, epoch=identity.epoch),
        status=status,
        actions={"POST /finish": finish},
    )
    signal.signal(signal.SIGTERM, lambda *_: finish(None))
    hub.start()
    cluster.wait_ready(["actor", "rollout"], 120)
    note(event="ready")
    ended = threading.Event()
    while state["step"] < wish("steps", 10**9) and not state["stop"]:
        actor.add(state["step"]).wait(60)
        state["step"] += 1
        ended.wait(0.05)
    note(event="saved", step=state["step"])
    return wish("code", 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
