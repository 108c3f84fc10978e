"""Calls to members by name: what fails, and what the I/O thread must never wait for."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rl_core.api.errors import ConfigError, DeadlineExceeded, WorkerLost
from rl_core.api.identity import Identity
from rl_core.messages.calls import WorkerSpec
from rl_core.messages.members import MemberState
from rl_core.runner.stopping import Stopped
from rl_core.transports.sockets import IoThread
from rl_core.workers import cluster as module
from rl_core.workers.cluster import Cluster
from rl_core.workers.group import WorkerGroup
from rl_core.workers.member import Member

SPEC = WorkerSpec(path="m:C", args=[], kwargs={})


def member(rank, state=MemberState.JOINING):
    return Member(
        name=f"env:{rank}", role="env", group="env", rank=rank, pod=f"j-env-{rank}", address=f"tcp://127.0.0.1:{9000 + rank}",
        pid=1, host_token="", incarnation=(0, 0), state=state, reason="it ended",
    )  # fmt: skip


def identity():
    return Identity(
        job="j",
        namespace="n",
        uid="u",
        epoch=0,
        role="runner",
        pod="p",
        pod_index=0,
        group="runner",
        rank=0,
        world_size=1,
    )


@pytest.fixture
def job():
    members = {f"env:{rank}": member(rank) for rank in range(8)}
    hub = SimpleNamespace(
        job=None, keys=None, identity=identity(), clock=lambda: 0.0, get=members.get, add_watcher=lambda _: None
    )
    made = Cluster(hub, sizes={"env": 8})
    yield SimpleNamespace(members=members, cluster=made)
    made.close()


def test_eight_constructions_that_fail_do_not_hold_up_the_io_thread(job, monkeypatch):
    """A construction fails on the I/O thread at the very moment at which another thread connects to the next member."""
    io, begun = IoThread.shared(), []

    class Client:
        """Waits for the I/O thread while it is made, as a real one does; there the last construction fails meanwhile."""

        def __init__(self, address, keys, identity, *, service):
            self.address = address
            io.run(lambda: [future.set_exception(DeadlineExceeded("no answer")) for future in begun[-1:]], timeout=5.0)

        def start_call(self, *args, **options):
            begun.append(Future())
            return begun[-1]

        def close(self):
            pass

    monkeypatch.setattr(module, "RpcClient", Client)
    calls = [job.cluster.construct(name, SPEC, timeout=60) for name in job.members]
    assert [call.future.done() for call in calls] == [True] * 7 + [False]
    with pytest.raises(DeadlineExceeded, match="no answer"):
        job.cluster.missing(["env"])


def test_a_stop_ends_the_wait_for_processes_at_its_next_look(job):
    now, looks = [0.0], []
    hub = job.cluster.hub
    hub.revision, hub.clock = 0, lambda: now[0]

    def wait_changed(version, seconds):
        now[0] += seconds

    def stop_at_3():
        looks.append(now[0])
        if now[0] >= 3.0:
            raise Stopped("the user asked for it")

    hub.wait_changed = wait_changed
    with pytest.raises(Stopped):
        job.cluster.wait_ready(["env"], 600.0, on_poll=stop_at_3)
    assert looks == [0.0, 1.0, 2.0, 3.0]


def test_a_call_to_a_member_that_is_lost_while_a_connection_to_it_is_made_fails_at_once(job, monkeypatch):
    class Client:
        def __init__(self, address, keys, identity, *, service):
            self.address = address
            job.members["env:0"] = member(0, MemberState.LOST)

        def close(self):
            pass

    monkeypatch.setattr(module, "RpcClient", Client)
    with pytest.raises(WorkerLost, match="it ended"):
        job.cluster.construct("env:0", SPEC, timeout=60).future.result(0)


@pytest.mark.parametrize(
    "options", [{"placement_strategy": object()}, {"isolate_gpu": False}], ids=["placement", "devices"]
)
def test_a_placement_that_cannot_be_honoured_any_more_is_refused(job, options):
    with pytest.raises(ConfigError, match=r"spec\.placement"):
        WorkerGroup.of("module:Class").launch(job.cluster, name="env", **options)
