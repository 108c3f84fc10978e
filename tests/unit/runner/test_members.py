"""Bringing a member in and letting go of one that is lost; waits that have a bound locally and none in a cluster."""

import threading
from types import SimpleNamespace

import pytest
from account import Account

from rl_core.api.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rl_core.api.job import RLJobSpec
from rl_core.messages.members import MemberState
from rl_core.messages.weights import ReceiverAck
from rl_core.runner.members import Members
from rl_core.runner.phases import DisaggregatedPhases
from rl_core.runner.presence import Presence
from rl_core.runner.status import StatusBoard
from rl_core.runner.stopping import Stopped
from rl_core.workers.member import Member


def member(role="rollout", *, state=MemberState.READY, incarnation=(0, 0), version=None):
    return Member(
        name=f"{role}:0", role=role, group=role, rank=0, pod=f"j-{role}-0", address="tcp://127.0.0.1:1", pid=1, host_token="",
        incarnation=incarnation, state=state, policy_version=version,
    )  # fmt: skip


class Cluster:
    """Stands in for workers.Cluster and its hub: one rollout, whose `init_worker` fails `failures` times."""

    def __init__(self, there=None, *, failures=0, error=None):
        self.there, self.failures, self.error = there or member(), failures, error or InfrastructureError("no route")
        self.calls, self.given_up, self.told = [], [], []
        self.hub = SimpleNamespace(get=lambda name: self.there, give_up=lambda *args: self.given_up.append(args))
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
    def __init__(self, cluster, *, patient=False, pauses=(0.0, 0.0, 0.0)):
        self.spec = RLJobSpec.model_validate(
            {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"replicas": 1}}
        )
        self.cluster, self.account, self.failures = cluster, Account(), []
        self.presence = Presence(self.spec, cluster, job="j", patient=patient)
        self.board = StatusBoard(self.spec, cluster, self.presence, epoch=0)
        groups = dict.fromkeys(("actor", "rollout", "env"), cluster.group)
        self.members = Members(
            cluster,
            groups,
            self.presence,
            self.board,
            self.account.dispatcher,
            DisaggregatedPhases(),
            self.spec.runtime.deadlines,
            start_args=("trajectories", "validation"),
            fail=self.failures.append,
            pauses=pauses,
        )

    def joined(self):
        self.members._pool.shutdown(wait=True)


@pytest.mark.parametrize("failures", [0, 2, 3])
def test_a_live_member_that_cannot_join_is_given_up_and_does_not_wait_for_ever(failures):
    run = Run(Cluster(failures=failures))
    run.members.welcome(run.cluster.there)
    run.joined()
    assert run.cluster.calls == [("init_worker",)] * min(failures + 1, 3)
    given_up = [(run.cluster.there, "it could not join in 3 attempts: no route")]
    assert run.cluster.given_up == (given_up if failures == 3 else [])


def test_a_rollout_pulls_and_starts_once_there_are_weights_and_again_after_it_was_lost():
    run = Run(Cluster())
    run.members.open("tcp://publisher")
    run.joined()
    serves = [("init_worker",), ("join", "tcp://publisher"), ("start_rollout", "trajectories", "validation")]
    assert run.cluster.calls == serves
    run.members._bring_in(run.cluster.there)
    assert run.cluster.calls == serves, "it serves already"
    assert run.cluster.constructed == 1, "to be constructed again ends what it serves"
    run.members.lost(run.cluster.there, "frozen")
    run.members._bring_in(run.cluster.there)
    assert run.cluster.calls == [*serves, *serves[1:]], "the engine it built stays"


def test_a_rollout_whose_engine_is_slower_than_the_weights_is_not_stopped_by_its_second_welcome():
    run = Run(Cluster())
    call = run.cluster.call

    def weights_come_meanwhile(name, method, *args, timeout):
        run.members._publisher = "tcp://publisher"
        return call(name, method, *args, timeout=timeout)

    run.cluster.call = weights_come_meanwhile
    run.members._bring_in(run.cluster.there)  # welcomed at its hello
    run.members._bring_in(run.cluster.there)  # and by `open`
    assert [name for name, *_ in run.cluster.calls] == ["init_worker", "join", "start_rollout"]
    assert run.cluster.constructed == 1


def test_a_rollout_that_is_lost_while_it_is_brought_in_is_brought_in_again():
    run = Run(Cluster())
    call = run.cluster.call

    def lost_meanwhile(name, method, *args, timeout):
        if method == "init_worker":
            run.members.lost(run.cluster.there, "no heartbeat")
        return call(name, method, *args, timeout=timeout)

    run.cluster.call = lost_meanwhile
    run.members._publisher = "tcp://publisher"
    run.members._bring_in(run.cluster.there)
    run.members._bring_in(run.cluster.there)
    assert [name for name, *_ in run.cluster.calls] == ["init_worker", *["join", "start_rollout"] * 2]


def test_what_another_process_would_fail_at_too_ends_the_run():
    run = Run(Cluster(failures=9, error=ConfigError("no such reward")))
    run.members.welcome(run.cluster.there)
    run.joined()
    assert [str(error) for error in run.failures] == ["no such reward"] and len(run.cluster.calls) == 1


def test_a_lost_rollout_frees_the_sync_and_its_groups_are_given_out_again():
    run = Run(Cluster())
    run.account.dispatcher.open(1, 0)
    held = run.account.lease()
    run.members.lost(member(state=MemberState.LOST), "no heartbeat")
    assert [lease.group_id for lease in run.account.lease(who="rollout:1")] == [lease.group_id for lease in held]
    assert run.cluster.told == [("rollout:0", "no heartbeat")]
    assert run.board.snapshot({}, [])["failures"] == {"rollout/lost": 1}


def test_a_lost_env_is_counted_and_concerns_no_sync():
    run = Run(Cluster())
    run.members.lost(member("env", state=MemberState.LOST), "no heartbeat")
    assert run.cluster.told == [] and run.board.snapshot({}, [])["failures"] == {"env/lost": 1}


def test_a_rollout_that_drained_is_no_failure():
    run = Run(Cluster())
    run.members.lost(member(state=MemberState.DRAINED), "it drained")
    assert run.cluster.told == [("rollout:0", "it drained")] and run.board.snapshot({}, [])["failures"] == {}


def test_a_local_wait_for_rollouts_ends_with_who_is_there_and_what_they_serve():
    run = Run(Cluster(member(state=MemberState.SERVING, version=2)))
    with pytest.raises(
        DeadlineExceeded, match=r"must serve the present weights, got 0: rollout:0 serving \(version 2\)"
    ):
        run.members.await_rollouts(3, begun=True, limit=-1.0, at=lambda: None)


def test_a_wait_in_a_cluster_has_no_bound_and_ends_at_its_point():
    run, looks = Run(Cluster(member(state=MemberState.JOINING)), patient=True), []

    def heed():
        looks.append(run.board.phase)
        if len(looks) == 3:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        run.members.await_rollouts(3, begun=True, limit=-1.0, at=heed)
    assert looks == ["Degraded"] * 3


def test_a_join_wakes_the_wait():
    run = Run(Cluster(member(state=MemberState.JOINING)))
    joins = threading.Thread(target=run.members.open, args=("tcp://publisher",))

    def heed():
        run.cluster.there = member(state=MemberState.SERVING, version=3)
        if not joins.ident:
            joins.start()

    run.members.await_rollouts(3, begun=False, limit=60.0, at=heed)
    joins.join()
