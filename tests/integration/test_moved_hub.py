"""Actor-0 comes late and comes back elsewhere: its name leads to another address after each restart, and members follow it.

Real worker processes and hubs with keys; the C library's resolver answers from a file, as DNS does for a headless Service.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rl_core.api.errors import InfrastructureError
from rl_core.api.identity import Identity
from rl_core.api.job import RLJob
from rl_core.launch.ports import free_ports
from rl_core.plan.keys import key_files, write_key_folder
from rl_core.transports.curve import KeyRing
from rl_core.transports.rpc import RpcClient
from rl_core.workers.hub import Hub

HERE = Path(__file__).parent
NAME = "j-actor-0.j.default.svc"
JOB = RLJob.model_validate(
    {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "j"},
        "spec": {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "runtime": {"deadlines": {"heartbeat": 0.2, "suspect": 0.5, "lost": 2}},
        },
    }
)


@pytest.fixture(scope="module")
def resolver(tmp_path_factory):
    """The library that answers for NAME."""
    library = tmp_path_factory.mktemp("resolver") / "moving_name.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, HERE / "moving_name.c", "-ldl"]
    subprocess.run(command, check=True)
    return library


class Place:
    """Where the hub is, epoch after epoch; and the worker that looks for it."""

    def __init__(self, folder, resolver):
        self.name_file = folder / "address"
        self.name_file.touch()
        self.keys = folder / "keys"
        write_key_folder(self.keys, key_files(bytes(32), "u"))
        ports = free_ports()
        self.port, self.rpc_port = ports.hub, ports.channel
        self._resolver = resolver
        self._log = (folder / "worker.log").open("wb")
        self.hub = self.process = None

    def identity(self, role, epoch=0):
        return Identity(
            job="j", namespace="default", uid="u", epoch=epoch, role=role, pod="j-actor-0", pod_index=0,
            group=role, rank=0, world_size=1, hub=f"tcp://{NAME}:{self.port}", curve_dir=str(self.keys),
        )  # fmt: skip

    def start_worker(self):
        environ = {
            **os.environ, "RLJOB_NAME": "j", "RLJOB_UID": "u", "RLJOB_ROLE": "env", "RLJOB_POD": "j-env-0", "RANK": "0", "GROUP_NAME": "env",
            "RLJOB_HUB": f"tcp://{NAME}:{self.port}", "RLJOB_CURVE_DIR": str(self.keys), "RLJOB_POD_IP": "127.0.0.9",
            "RLJOB_RPC_PORT": str(self.rpc_port), "LD_PRELOAD": str(self._resolver), "MOVING_NAME": NAME,
            "MOVING_FILE": str(self.name_file),
        }  # fmt: skip
        command = [sys.executable, "-m", "rl_core.workers.host"]
        self.process = subprocess.Popen(command, env=environ, stdout=self._log, stderr=self._log)

    def move_hub(self, address, *, epoch):
        """End the hub, if any, and open it at another address of this machine under `epoch`; returns the event of a join."""
        if self.hub is not None:
            self.hub.close()
        joined = threading.Event()
        keys = KeyRing(self.keys, "runner")
        bind = f"tcp://{address}:{self.port}"
        self.hub = Hub(identity=self.identity("runner", epoch), job=JOB, keys=keys, bind=bind)
        self.hub.add_listeners(joined=lambda member: joined.set())
        self.hub.start()
        self.name_file.write_text(address)
        return joined

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.hub is not None:
            self.hub.close()
        self._log.close()


@pytest.fixture
def place(tmp_path, resolver):
    made = Place(tmp_path, resolver)
    yield made
    made.close()


def test_a_member_waits_for_a_name_that_comes_later_and_follows_it_to_other_addresses(place):
    place.start_worker()
    first = place.move_hub("127.0.0.2", epoch=1)
    assert first.wait(120), "the worker did not find the hub once its name was known"
    second = place.move_hub("127.0.0.3", epoch=2)
    assert second.wait(120), "the worker did not follow the name to another address"
    (member,) = place.hub.members()
    assert member.name == "env:0" and member.incarnation == (0, 0) and place.process.poll() is None


def test_a_worker_in_a_pod_is_reached_at_the_pods_address_and_its_fixed_port(place):
    place.start_worker()
    assert place.move_hub("127.0.0.2", epoch=0).wait(120)
    (member,) = place.hub.members()
    assert member.address == f"tcp://127.0.0.9:{place.rpc_port}"
    client = RpcClient(member.address, KeyRing(place.keys, "runner"), place.identity("runner"), service="env")
    try:
        with pytest.raises(InfrastructureError, match="env:0 holds no worker yet"):
            client.start_call("execute", (), {}, timeout=60, target="ping").result()
    finally:
        client.close()
