"""Bringing a member in and letting go of one that is lost; waits that have a bound locally and none in a cluster."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.messages.members import MemberState
from rl_core.messages.weights import ReceiverAck
from rl_core.plan.groups import BUILT_IN, GroupKind, WeightSource
from rl_core.runner.device_schedule import DisaggregatedSchedule
from rl_core.runner.joining import build_strategies
from rl_core.runner.member_versions import MemberVersions
from rl_core.runner.members import Members
from rl_core.runner.roster import Roster
from rl_core.runner.status import StatusBoard
from rl_core.runner.stopping import Stopped
from rl_core.workers.member import Member
from tests.unit.runner.account import Account


def member(role="rollout", rank=0, *, state=MemberState.READY, incarnation=(0, 0), version=None):
    return Member(
        name=f"{role}:{rank}", role=role, group=role, rank=rank, pod=f"j-{role}-{rank}", address="tcp://127.0.0.1:1", pid=1, host_token="",
        incarnation=incarnation, state=state, policy_version=version,
    )  # fmt: skip


class Cluster:
    """Stands in for workers.Cluster and its hub: one rollout, whose `init_worker` fails `failures` times."""

    def __init__(self, there=None, *, failures=0, error=None):
        self.there, self.failures, self.error = there or member(), failures, error or InfrastructureError("no route")
        self.calls, self.given_up, self.told = [], [], []
        self.hub = SimpleNamespace(get=lambda name: self.there, declare_lost=lambda *args: self.given_up.append(args))
        self.constructed = 0
        self.group = SimpleNamespace(construct=self.construct, execute_on=lambda *ranks: self)

    def construct(self, one):
        self.constructed += 1

    def members(self, role=None, **also):
        return [self.there] if role in (None, self.there.role) else []

    def call(self, name, method, *args, timeout):
        self.calls.append((method, *args))
        if [name for name, *_ in self.calls].count("init_worker") <= self.failures:
            raise self.error
        return ReceiverAck(version=0, digest="d")

    def receiver_lost(self, name, reason):
        self.told.append((name, reason))


class Run:
    def __init__(self, cluster, *, patient=False, pauses=(0.0, 0.0, 0.0), schedule=None):
        self.spec = RLJobSpec.model_validate(
            {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"replicas": 1}}
        )
        self.cluster, self.account, self.failures = cluster, Account(), []
        self.roster = Roster(self.spec, cluster, job="j", patient=patient)
        self.board = StatusBoard(self.spec, cluster, self.roster, epoch=0)
        self.versions = MemberVersions(self.account.dispatcher.record_served)
        self.strategies = build_strategies(
            BUILT_IN.values(),
            dict.fromkeys(BUILT_IN, cluster.group),
            cluster=cluster,
            versions=self.versions,
            release=self.account.dispatcher.owner_lost,
            schedule=schedule or DisaggregatedSchedule(),
            seconds=30.0,
            start_args=("trajectories", "validation"),
        )
        self.members = Members(
            cluster,
            self.strategies,
            self.roster,
            self.board,
            self.spec.runtime.deadlines,
            fail=self.failures.append,
            pauses=pauses,
        )

    def wait_joined(self):
        with self.members._changed:
            assert self.members._changed.wait_for(lambda: not self.members._joining, 30)


@pytest.mark.parametrize("failures", [0, 2, 3])
def test_a_live_member_that_cannot_join_is_given_up_and_does_not_wait_for_ever(failures):
    run = Run(Cluster(failures=failures))
    run.members.joined(run.cluster.there)
    run.wait_joined()
    assert run.cluster.calls == [("init_worker",)] * min(failures + 1, 3)
    given_up = [(run.cluster.there, "it could not join in 3 attempts: no route")]
    assert run.cluster.given_up == (given_up if failures == 3 else [])


def test_a_rollout_pulls_and_starts_once_there_are_weights_and_again_after_it_was_lost():
    run = Run(Cluster())
    run.members.open("tcp://publisher")
    run.wait_joined()
    serves = [("init_worker",), ("join", "tcp://publisher"), ("start_serving", "trajectories", "validation")]
    assert run.cluster.calls == serves
    run.members._bring_in(run.cluster.there)
    assert run.cluster.calls == serves, "it serves already"
    assert run.cluster.constructed == 1, "to be constructed again ends what it serves"
    run.members.lost(run.cluster.there, "frozen")
    run.members._bring_in(run.cluster.there)
    assert run.cluster.calls == [*serves, *serves[1:]], "the engine it built stays"


def test_members_of_other_groups_that_pull_start_without_the_channels_of_rollouts():
    kind = GroupKind(name="inference", weights=WeightSource.PULLS)
    cluster = Cluster()
    (strategy,) = build_strategies(
        [kind],
        dict.fromkeys(("inference", "actor"), cluster.group),
        cluster=cluster,
        versions=MemberVersions(lambda processes, version: None),
        release=lambda name, incarnation: None,
        schedule=DisaggregatedSchedule(),
        seconds=30.0,
        start_args=("trajectories", "validation"),
    ).values()
    strategy.publisher = "tcp://publisher"
    assert strategy.bring_in(cluster.there)
    assert cluster.calls == [("init_worker",), ("join", "tcp://publisher"), ("start_serving",)]


def test_a_rollout_whose_engine_is_slower_than_the_weights_is_not_stopped_by_its_second_welcome():
    run = Run(Cluster())
    call = run.cluster.call

    def weights_come_meanwhile(name, method, *args, timeout):
        run.strategies["rollout"].publisher = "tcp://publisher"
        return call(name, method, *args, timeout=timeout)

    run.cluster.call = weights_come_meanwhile
    run.members._bring_in(run.cluster.there)  # welcomed at its hello
    run.members._bring_in(run.cluster.there)  # and by `open`
    assert [name for name, *_ in run.cluster.calls] == ["init_worker", "join", "start_serving"]
    assert run.cluster.constructed == 1


def test_a_rollout_that_is_lost_while_it_is_brought_in_is_brought_in_again():
    run = Run(Cluster())
    call = run.cluster.call

    def lost_meanwhile(name, method, *args, timeout):
        if method == "init_worker":
            run.members.lost(run.cluster.there, "no heartbeat")
        return call(name, method, *args, timeout=timeout)

    run.cluster.call = lost_meanwhile
    run.strategies["rollout"].publisher = "tcp://publisher"
    run.members._bring_in(run.cluster.there)
    run.members._bring_in(run.cluster.there)
    assert [name for name, *_ in run.cluster.calls] == ["init_worker", *["join", "start_serving"] * 2]


def test_what_another_process_would_fail_at_too_ends_the_run():
    run = Run(Cluster(failures=9, error=ConfigError("no such reward")))
    run.members.joined(run.cluster.there)
    run.wait_joined()
    assert [str(error) for error in run.failures] == ["no such reward"] and len(run.cluster.calls) == 1


def test_a_lost_rollout_frees_the_sync_and_its_groups_are_given_out_again():
    run = Run(Cluster())
    run.account.steps.open(1, 0)
    held = run.account.lease()
    run.members.lost(member(state=MemberState.LOST), "no heartbeat")
    assert [lease.group_id for lease in run.account.lease(who="rollout:1")] == [lease.group_id for lease in held]
    assert run.cluster.told == [("rollout:0", "no heartbeat")]
    assert run.board.snapshot()["failures"] == {"rollout/lost": 1}


def test_a_lost_env_is_counted_and_concerns_no_sync():
    run = Run(Cluster())
    run.members.lost(member("env", state=MemberState.LOST), "no heartbeat")
    assert run.cluster.told == [] and run.board.snapshot()["failures"] == {"env/lost": 1}


def test_a_rollout_that_drained_is_no_failure():
    run = Run(Cluster())
    run.members.lost(member(state=MemberState.DRAINED), "it drained")
    assert run.cluster.told == [("rollout:0", "it drained")] and run.board.snapshot()["failures"] == {}


def test_a_local_wait_for_rollouts_ends_with_who_is_there_and_what_they_serve():
    run = Run(Cluster(member(state=MemberState.SERVING, version=2)))
    with pytest.raises(
        DeadlineExceeded, match=r"must serve the present weights, got 0: rollout:0 serving \(version 2\)"
    ):
        run.members.await_rollouts(3, begun=True, limit=-1.0, at=lambda: None)


def test_a_wait_in_a_cluster_has_no_bound_and_ends_at_its_point():
    run, looks = Run(Cluster(member(state=MemberState.JOINING)), patient=True), []

    def handle_requests():
        looks.append(run.board.phase)
        if len(looks) == 3:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        run.members.await_rollouts(3, begun=True, limit=-1.0, at=handle_requests)
    assert looks == ["Degraded"] * 3


@pytest.mark.parametrize("await_group", ["await_gangs", "await_weightless"])
def test_a_local_wait_for_processes_ends_with_a_stop(await_group):
    run = Run(Cluster(member(state=MemberState.JOINING)))
    run.cluster.wait_ready = lambda groups, seconds, *, on_poll: on_poll()

    def stop():
        raise Stopped("the user asked for it")

    with pytest.raises(Stopped):
        getattr(run.members, await_group)(600.0, at=stop)


@pytest.mark.parametrize(("begun", "phase"), [(False, "starting"), (True, "degraded")])
def test_a_wait_for_rollouts_is_told(begun, phase):
    run, told = Run(Cluster(member(state=MemberState.JOINING))), []

    def look():
        status = run.board.snapshot()
        assert status["phase"].lower() == phase
        told.extend(status["waits"])
        raise Stopped("suspend")

    with pytest.raises(Stopped):
        run.members.await_rollouts(3, begun=begun, limit=60.0, at=look)
    assert [(wait["who"], wait["on"], wait["what"]) for wait in told] == [("runner", "rollout", "to serve version 3")]


def test_a_join_wakes_the_wait():
    run = Run(Cluster(member(state=MemberState.JOINING)))
    joins = threading.Thread(target=run.members.open, args=("tcp://publisher",))

    def handle_requests():
        run.cluster.there = member(state=MemberState.SERVING, version=3)
        if not joins.ident:
            joins.start()

    run.members.await_rollouts(3, begun=False, limit=60.0, at=handle_requests)
    joins.join()


class Crowd(Cluster):
    """Many members. A call of `slow`, (group, method), waits until `full` lets it go."""

    def __init__(self, members, *, slow, full):
        super().__init__(members[0])
        self.crowd, self.slow, self.full = members, slow, full
        self.hub = SimpleNamespace(get=lambda name: next(m for m in members if m.name == name))
        self.done = []

    def members(self, group=None, **also):
        return [m for m in self.crowd if group in (None, m.group)]

    def construct(self, joining):
        self._pass(joining.name, "construct")

    def call(self, name, method, *args, timeout):
        self._pass(name, method)
        return ReceiverAck(version=0, digest="d")

    def _pass(self, name, method):
        if (name.partition(":")[0], method) == self.slow:
            self.full.wait(30)
        self.done.append((name, method))


def test_32_slow_rollouts_do_not_delay_an_environment():
    rollouts, env, go_on = [member(rank=rank) for rank in range(32)], member("env"), threading.Event()
    run = Run(Crowd([*rollouts, env], slow=("rollout", "construct"), full=go_on))
    for joining in (*rollouts, env):
        run.members.joined(joining)
    with run.members._changed:
        assert run.members._changed.wait_for(lambda: "env:0" not in run.members._joining, 30)
    assert run.cluster.done == [("env:0", "construct")], "no rollout is constructed yet"
    go_on.set()
    run.wait_joined()


def test_256_engines_are_built_side_by_side():
    rollouts = [member(rank=rank) for rank in range(256)]
    everyone = threading.Barrier(256)
    run = Run(Crowd(rollouts, slow=("rollout", "init_worker"), full=everyone))
    for joining in rollouts:
        run.members.joined(joining)
    run.wait_joined()
    assert not everyone.broken and len(run.cluster.done) == 512


def test_a_slow_pull_holds_up_no_publication_and_ends_with_the_version_that_was_published_meanwhile():
    run, pulled = Run(Cluster()), []

    def pull(name, method, *args, timeout):
        run.cluster.calls.append((method, *args))
        if method == "join":
            pulled.append(len(pulled))
            if len(pulled) == 1:  # the publication begins and ends while this member pulls the version before
                with run.versions.publishing(5):
                    assert run.versions.receivers([run.cluster.there]) == [], "it has no weights yet"
            return ReceiverAck(version=4 if len(pulled) == 1 else 5, digest="d")
        return None

    run.cluster.call = pull
    run.members.open("tcp://publisher")
    run.wait_joined()
    assert [method for method, *_ in run.cluster.calls] == ["init_worker", "join", "start_serving", "join"]
    assert run.versions.version_of(("rollout:0", (0, 0))) == 5


def test_a_member_that_pulled_while_a_version_is_published_waits_for_its_end_with_a_deadline():
    run = Run(Cluster())
    run.strategies["rollout"]._seconds = 0.01
    with run.versions.publishing(5):
        run.members.open("tcp://publisher")
        run.wait_joined()
    given_up = (
        "it could not join in 3 attempts: rollout:0 has pulled weights; the publication under way must end within 0 s"
    )
    assert [reason for _, reason in run.cluster.given_up] == [given_up]


def test_a_pull_that_a_publication_ends_is_no_failure_where_the_member_holds_the_published_version():
    run, process = Run(Cluster()), ("rollout:0", (0, 0))

    def pull(name, method, *args, timeout):
        run.cluster.calls.append((method, *args))
        joins = [name for name, *_ in run.cluster.calls].count("join")
        if method == "join" and joins == 1:
            run.versions.proved([("rollout:9", (0, 0))], 5)  # published while it pulled version 4
            return ReceiverAck(version=4, digest="d")
        if method == "join":
            run.versions.proved([process], 6)
            raise InfrastructureError("replaced by a newer offer")
        return None

    run.cluster.call = pull
    run.members.open("tcp://publisher")
    run.wait_joined()
    assert run.cluster.given_up == [] and run.versions.version_of(process) == 6


@pytest.mark.parametrize("failures", [1, 9], ids=["once", "always"])
def test_a_bug_in_a_join_is_logged_and_tried_again_and_ends_the_run_in_its_words_if_it_stays(failures, caplog):
    run = Run(Cluster(failures=failures, error=ValueError("no such field")))
    run.members.joined(run.cluster.there)
    run.wait_joined()
    ends = ["rollout:0 could not join, the runner failed with ValueError: no such field"]
    assert [str(error) for error in run.failures] == (ends if failures == 9 else [])
    assert "ValueError" in caplog.text and run.cluster.given_up == []


def test_the_devices_are_taken_to_build_an_engine_and_to_pull_and_not_to_construct():
    run = Run(Cluster(), schedule=(schedule := Joining()))
    run.cluster.group.construct = lambda joining: schedule.log.append("construct")
    call = run.cluster.call
    run.cluster.call = lambda name, method, *args, timeout: (
        schedule.log.append(method),
        call(name, method, *args, timeout=timeout),
    )[1]
    run.members.open("tcp://publisher")
    run.wait_joined()
    assert schedule.log == ["construct", "(", "init_worker", ")", "(", "join", ")", "start_serving"]


class Joining(DisaggregatedSchedule):
    """Keeps in `log` when a joining member has the devices."""

    def __init__(self):
        self.log = []

    @contextmanager
    def joining(self, name):
        self.log.append("(")
        yield
        self.log.append(")")
