"""What the key of one group cannot do to the members of another: each attack is a call over real sockets with the env's key."""

from dataclasses import replace

import pytest

from rl_core.api.errors import ConfigError, RLJobError
from rl_core.api.identity import Identity
from rl_core.messages.members import (
    WIRE_VERSION,
    Heartbeat,
    HelloAccepted,
    HelloReport,
    MemberId,
    MemberState,
    MemberView,
)
from rl_core.transports import curve, rpc_server
from rl_core.transports.rpc import RpcClient
from rl_core.workers.hub import Hub
from tests.curve_keys import generate_keys

ACTOR, ENV = (MemberId(name=name, incarnation=(0, 0)) for name in ("actor:0", "env:0"))
DRAINING = Heartbeat(state=MemberState.DRAINING)


def identity(role):
    return Identity(
        job="j",
        namespace="n",
        uid="u",
        epoch=0,
        role=role,
        pod=f"j-{role}-0",
        pod_index=0,
        group=role,
        rank=0,
        world_size=2,
    )


def hello(role="env"):
    member = MemberView(
        name=f"{role}:0", role=role, group=role, rank=0, pod=f"j-{role}-0", pid=10, host_token="", address="tcp://127.0.0.1:9000",
        incarnation=(0, 0),
    )  # fmt: skip
    return HelloReport(wire_version=WIRE_VERSION, uid="u", epoch=0, member=member, registration=1)


class Job:
    """A hub with keys whose member actor:0 has registered, and clients with any key."""

    def __init__(self, folder):
        for name, text in generate_keys(["runner", "actor", "rollout", "env"]).items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o400)
        self.folder, self.clients = folder, []
        self.hub = Hub(
            identity=identity("runner"), keys=curve.KeyRing(folder, "runner"), bind="tcp://127.0.0.1:0"
        ).start()
        self.actor, self.env = self.connect("actor"), self.connect("env")
        assert isinstance(self.actor.call_sync("hello", hello("actor"), timeout=30), HelloAccepted)

    def connect(self, role, key=None, **changes):
        """Return a client with the key of `key`, that of its role where None."""
        ring = curve.KeyRing(self.folder, key or role)
        self.clients.append(RpcClient(self.hub.address, ring, replace(identity(role), **changes), service="hub"))
        return self.clients[-1]

    def state(self, name="actor:0"):
        return self.hub.get(name).state

    def close(self):
        for client in self.clients:
            client.close()
        self.hub.close()


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("method", "args"), [("goodbye", (ACTOR,)), ("heartbeat", (ACTOR, DRAINING))], ids=["ends", "drains"]
)
def test_an_env_ends_and_drains_no_actor(job, method, args):
    with pytest.raises(ConfigError, match=f"env env:0 must not call '{method}' for actor:0"):
        job.env.call_sync(method, *args, timeout=30)
    assert job.state() is MemberState.JOINING


def test_an_env_that_says_it_is_a_supervisor_reports_no_actor_as_dead(job):
    supervisor = job.connect("supervisor", key="env", group="env")
    with pytest.raises(ConfigError, match="supervisor env:0 must not call 'child_ended' for actor:0"):
        supervisor.call_sync("child_ended", ACTOR, 1, timeout=30)
    assert job.state() is MemberState.JOINING


def test_a_key_proves_no_other_group_not_even_for_a_supervisor(job):
    supervisor = job.connect("supervisor", key="env", group="actor")
    with pytest.raises(RLJobError, match="the key is that of group env, the message says actor"):
        supervisor.call_sync("child_ended", ACTOR, 1, timeout=2)
    worker = job.connect("env", group="actor")
    with pytest.raises(RLJobError, match="the key is that of group env, the message says actor"):
        worker.call_sync("goodbye", ACTOR, timeout=2)
    assert job.state() is MemberState.JOINING


@pytest.mark.parametrize("name", ["actor:0", "env:1"])
def test_a_process_says_hello_under_its_own_name_only(job, name):
    report = hello()
    with pytest.raises(ConfigError, match=f"must not call 'hello' for {name}"):
        job.env.call_sync("hello", replace(report, member=replace(report.member, name=name)), timeout=30)


def test_a_process_says_hello_in_its_own_group_only(job):
    report = hello()
    with pytest.raises(ConfigError, match="a process of group env must not say hello as one of 'actor'"):
        job.env.call_sync("hello", replace(report, member=replace(report.member, group="actor")), timeout=30)


def test_another_pod_with_the_same_key_speaks_for_no_member(job, monkeypatch):
    """All envs have one key. What tells their pods apart is the address from which each is connected."""
    assert isinstance(job.env.call_sync("hello", hello(), timeout=30), HelloAccepted)
    monkeypatch.setattr(rpc_server, "_host_of", lambda frame: "10.0.0.9")
    other, supervisor = job.connect("env"), job.connect("supervisor", key="env", group="env")
    with pytest.raises(ConfigError, match="must come from its own pod, got it from 10.0.0.9"):
        other.call_sync("goodbye", ENV, timeout=30)
    with pytest.raises(ConfigError, match="must come from its own pod, got it from 10.0.0.9"):
        supervisor.call_sync("child_ended", ENV, 1, timeout=30)
    assert not other.call_sync("heartbeat", ENV, DRAINING, timeout=30).known
    assert job.state("env:0") is MemberState.JOINING


def test_a_member_speaks_for_itself_and_its_supervisor_reports_its_end(job):
    assert isinstance(job.env.call_sync("hello", hello(), timeout=30), HelloAccepted)
    assert job.env.call_sync("heartbeat", ENV, Heartbeat(state=MemberState.READY), timeout=30).known
    supervisor = job.connect("supervisor", key="env", group="env")
    supervisor.call_sync("child_ended", ENV, 137, timeout=30)
    assert job.state("env:0") is MemberState.LOST
