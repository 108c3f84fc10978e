"""Calls to members by name: what fails, and what must never wait for the I/O thread."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_core.api.errors import ConfigError, DeadlineExceeded, WorkerLost
from rl_core.api.identity import Identity
from rl_core.messages.calls import WorkerSpec
from rl_core.messages.members import MemberState
from rl_core.runner.stopping import Stopped
from rl_core.transports.sockets import IoThread
from rl_core.workers.cluster import Cluster
from rl_core.workers.group import WorkerGroup
from rl_core.workers.member import Member
from rl_core.workers.membership import Change

SPEC = WorkerSpec(path="m:C", args=[], kwargs={})


def member(rank, state=MemberState.JOINING, restarts=0):
    return Member(
        name=f"env:{rank}", role="env", group="env", rank=rank, pod=f"j-env-{rank}", address=f"tcp://127.0.0.1:{9000 + rank}",
        pid=1, host_token="", incarnation=(0, restarts), state=state, reason="it ended",
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
    members, watchers = {f"env:{rank}": member(rank) for rank in range(8)}, []
    hub = SimpleNamespace(
        job=None, keys=None, identity=identity(), clock=lambda: 0.0, get=members.get, add_watcher=watchers.append,
        members=lambda: list(members.values()),
    )  # fmt: skip
    made = Cluster(hub, sizes={"env": 8})
    yield SimpleNamespace(members=members, cluster=made, watcher=watchers[0])
    made.close()


def test_joins_and_losses_are_handled_while_the_io_thread_is_busy(job):
    pending = job.cluster.construct("env:0", SPEC, timeout=60).future
    busy, free = threading.Event(), threading.Event()
    IoThread.shared().call_soon(lambda: (busy.set(), free.wait(60)))
    assert busy.wait(60)
    try:
        joined = []
        job.cluster.on_joined(lambda member: joined.append(job.cluster.construct(member.name, SPEC, timeout=60)))
        job.members["env:0"] = member(0, MemberState.LOST)
        job.watcher(Change("lost", job.members["env:0"], "it ended"))
        job.members["env:0"] = member(0)
        job.watcher(Change("joined", job.members["env:0"]))
        assert not free.is_set() and len(joined) == 9
    finally:
        free.set()
    assert isinstance(pending.exception(60), WorkerLost)
    assert not joined[-1].future.done()


def test_the_error_of_a_construction_is_raised_for_the_group(job):
    ended = threading.Event()
    job.cluster.construct("env:0", SPEC, timeout=0.01).future.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)
    with pytest.raises(DeadlineExceeded, match="not answered"):
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


def test_a_call_to_a_member_that_is_lost_while_a_connection_to_it_is_made_fails_at_once(job):
    """The loss is reported after the look at the member and before the call."""
    get, reported = job.cluster.hub.get, []

    def lose(name):
        seen = get(name)
        job.members[name] = member(0, MemberState.LOST)
        reported.append(threading.Thread(target=job.watcher, args=(Change("lost", job.members[name], "it ended"),)))
        reported[0].start()
        return seen

    job.cluster.hub.get = lose
    future = job.cluster.construct("env:0", SPEC, timeout=60).future
    with pytest.raises(WorkerLost, match="it ended"):
        future.result(60)
    reported[0].join()


def test_a_loss_that_is_reported_late_leaves_the_calls_to_the_replacement_alone(job):
    lost = member(0, MemberState.LOST)
    job.members["env:0"] = replace(member(0, restarts=1), address="tcp://127.0.0.1:9100")
    future = job.cluster.construct("env:0", SPEC, timeout=60).future
    job.watcher(Change("lost", lost, "it ended"))
    IoThread.shared().run(lambda: None)  # what the watcher has scheduled there is done
    assert not future.done()


@pytest.mark.parametrize(
    "options", [{"placement_strategy": object()}, {"isolate_gpu": False}], ids=["placement", "devices"]
)
def test_a_placement_that_cannot_be_honoured_any_more_is_refused(job, options):
    with pytest.raises(ConfigError, match=r"spec\.placement"):
        WorkerGroup.of("module:Class").launch(job.cluster, name="env", **options)
