"""Worker classes that child processes of the tests import by name."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import ClassVar

from rl_core.api.errors import ConfigError, DataError
from rl_core.workers.worker import Worker, worker_timer


class Sample(Worker):
    """Does small things of every kind."""

    def __init__(self, base=0, *, fail=None):
        self.base = base
        self.epochs = []
        self.made_at = (self.rank, self.world_size, self.epoch)
        if fail == "config":
            raise ConfigError("model.path must exist")
        if fail == "other":
            raise KeyError("no such thing")

    def add(self, x):
        self.record_progress("adds")
        return self.base + x + self.rank

    def made(self):
        return {
            "made_at": self.made_at,
            "pid": os.getpid(),
            "epochs": list(self.epochs),
            "torch": "torch" in sys.modules,
        }

    def fail_on(self, ranks, kind="value"):
        if self.rank in ranks:
            raise {"value": ValueError("bad luck"), "data": DataError("bad sample")}[kind]
        return self.rank

    def leave(self):
        raise SystemExit(7)

    def run_dry(self):
        return next(iter(()))

    def block(self, seconds):
        self.record_progress("blocked")
        time.sleep(seconds)
        return "done"

    def hold(self, path):
        """Block until a file is there; `path`.held tells that it has begun."""
        with open(f"{path}.held", "w"):
            pass
        while not os.path.exists(path):
            time.sleep(0.01)
        return "done"

    async def nap(self, seconds):
        with self.waiting("a nap", "nobody"):
            await asyncio.sleep(seconds)
        return "rested"

    @Worker.timer("inner")
    def timed(self):
        with worker_timer("block"):
            pass
        return True

    async def ask_hub(self, value):
        return await self.hub_call("echo", value)

    def names(self, role=None):
        return [m.name for m in self.members(role)]

    async def call_peer(self, name, x):
        member = next(m for m in self.members() if m.name == name)
        return await self.peer(member.address).call("add", x, timeout=5)

    def be(self, state, version):
        self.set_policy_version(version, f"digest-{version}")
        self.set_state(state)

    def spawn_stray(self):
        """Start a process in a session of its own, as user code may."""
        stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        return stray.pid

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def double(x):
        return 2 * x

    def on_new_epoch(self, epoch):
        self.epochs.append(epoch)


class Guarded(Worker):
    """Answers rollouts one question."""

    peer_methods: ClassVar = {"rollout": frozenset({"ask"})}

    async def ask(self):
        return "answer"

    async def secret(self):
        return "kept"
