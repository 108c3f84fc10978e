"""Where there are keys each role may call its own methods only: of the hub, and of a worker process."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from rl_core.api.errors import ConfigError
from rl_core.launch.ports import free_ports
from rl_core.messages.members import MemberId
from rl_core.plan.keys import key_files, write_key_folder
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import RpcClient
from rl_core.workers.group import Cluster, WorkerGroup
from rl_core.workers.hub import Hub
from tests import ROOT
from tests.integration.rpc_samples import identity


class Job:
    """A hub with keys, one env process that holds a worker, and clients of any role."""

    def __init__(self, folder):
        write_key_folder(folder, key_files(bytes(32), "u1"))
        self.folder, self.clients, self.joined = folder, [], threading.Event()
        self.hub = Hub(
            identity=identity("runner"), keys=KeyRing(folder, "runner"), bind=f"tcp://127.0.0.1:{free_ports().hub}"
        )
        self.hub.add_handlers({"admit": lambda entries: [True for _ in entries]}, role="actor")
        self.hub.add_listeners(joined=lambda member: self.joined.set())
        self.cluster = Cluster(self.hub, sizes={"env": 1})
        self.group = WorkerGroup.of("tests.integration.worker_samples:Guarded").launch(self.cluster, name="env")
        self.hub.start()
        environ = {
            **os.environ, "RLJOB_NAME": "j", "RLJOB_UID": "u1", "RLJOB_ROLE": "env", "RLJOB_POD": "j-env-0", "RLJOB_HUB": self.hub.address,
            "RLJOB_CURVE_DIR": str(folder), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self.process = subprocess.Popen([sys.executable, "-m", "rl_core.workers.host"], env=environ)

    def ask(self, role, address, service, method, *args, key=None):
        said = replace(identity(key or role), role=role)
        client = RpcClient(address, KeyRing(self.folder, key or role), said, service=service)
        self.clients.append(client)
        return client.call_sync(method, *args, timeout=60)

    def close(self):
        self.process.kill()
        self.process.wait()
        for client in self.clients:
            client.close()
        self.cluster.close()
        self.hub.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = Job(tmp_path_factory.mktemp("job") / "keys")
    try:
        assert made.joined.wait(60)
        made.group.construct(made.hub.get("env:0"), timeout=60)
        yield made
    finally:
        made.close()


def test_a_worker_answers_its_peers_what_it_names_and_the_runner_everything(job):
    address = job.hub.get("env:0").address
    assert job.ask("rollout", address, "env", "ask") == "answer"
    assert job.group.secret().wait(60) == ["kept"]
    for method, args in (("secret", ()), ("execute", ()), ("construct", ({"cls": "os:environ"},))):
        with pytest.raises(ConfigError, match=f"role rollout may not call '{method}'"):
            job.ask("rollout", address, "env", method, *args)


def test_the_hub_answers_each_role_its_own_methods(job):
    assert job.ask("actor", job.hub.address, "hub", "admit", [1]) == [True]
    assert (
        job.ask(
            "supervisor",
            job.hub.address,
            "hub",
            "child_ended",
            MemberId(name="env:0", incarnation=(0, 0)),
            3,
            key="env",
        )
        is None
    )
    for role, method in (("rollout", "admit"), ("env", "child_ended")):
        with pytest.raises(ConfigError, match=f"role {role} may not call '{method}'"):
            job.ask(role, job.hub.address, "hub", method)
