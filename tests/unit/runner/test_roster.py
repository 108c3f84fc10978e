"""Who is wanted, who leaves, who is missing since when; and who is told to drain."""

from types import SimpleNamespace

import pytest

from rl_core.api.job import RLJobSpec
from rl_core.runner.roster import Roster
from rl_core.runner.steering import Controls, Steering, StopKind, drain

BASE = {"model": {"path": "m"}, "data": {"train": "t"}}


def spec(replicas=2, envs=1, **actor):
    return RLJobSpec.model_validate(
        {**BASE, "rollout": {"replicas": replicas}, "env": {"replicas": envs}, "actor": actor}
    )


def member(name, state="serving"):
    role, _, rank = name.partition(":")
    return SimpleNamespace(name=name, role=role, state=state, pod=f"j-{role}-{rank}", rank=int(rank))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_missing_are_told_with_their_pods_from_the_start_or_from_their_loss_on(clock):
    roster = Roster(spec(replicas=2, processesPerPod=2), job="j", clock=clock)
    here = [member("actor:0"), member("rollout:0"), member("env:0")]
    clock.now += 5
    assert [(m.name, m.pod, m.since_seconds) for m in roster.missing(here)] == [
        ("actor:1", "j-actor-0", 5),
        ("rollout:1", "j-rollout-1", 5),
    ]
    here = [member("actor:0"), member("actor:1"), member("rollout:0"), member("rollout:1"), member("env:0")]
    assert roster.missing(here) == []
    clock.now += 10
    assert [(m.name, m.since_seconds) for m in roster.missing(here[:3] + here[4:])] == [("rollout:1", 0)]
    clock.now += 4
    here[2] = member("rollout:0", "lost")
    assert [(m.name, m.since_seconds) for m in roster.missing([here[0], here[1], here[2], here[4]])] == [
        ("rollout:0", 0),
        ("rollout:1", 4),
    ]


def test_a_member_that_drains_is_neither_wanted_nor_missing_until_it_is_wanted_again(clock):
    roster = Roster(spec(replicas=3), job="j", clock=clock)
    roster.leave(["rollout:2"])
    assert roster.wanted("rollout") == ["rollout:0", "rollout:1"]
    here = [
        member("actor:0"),
        member("rollout:0"),
        member("rollout:1"),
        member("rollout:2", "drained"),
        member("env:0"),
    ]
    assert roster.missing(here) == []
    roster.adopt(spec(replicas=2))
    assert roster.wanted("rollout") == ["rollout:0", "rollout:1"]
    roster.adopt(spec(replicas=3))
    assert [m.name for m in roster.missing(here)] == ["rollout:2"]


def test_a_change_of_another_role_brings_nobody_back():
    roster = Roster(spec(replicas=3), job="j")
    roster.leave(["rollout:0"])
    roster.adopt(spec(replicas=3, envs=2))
    assert roster.wanted("rollout") == ["rollout:1", "rollout:2"] and len(roster.wanted("env")) == 2


class FakeCluster:
    """Stands in for workers.cluster.Cluster: members, and who was told to retire."""

    def __init__(self, *members):
        self.there, self.retired = list(members), []

    def members(self, drained=False):
        return self.there

    def retire(self, name):
        self.retired.append(name)
        return SimpleNamespace(future=SimpleNamespace(add_done_callback=lambda callback: None))


def test_drain_tells_each_member_once_and_names_unknown_pods():
    cluster = FakeCluster(member("rollout:0"), member("rollout:1", "draining"), member("env:0"))
    roster = Roster(spec(), job="j")
    told = drain(
        ["j-rollout-0", "j-rollout-1", "j-env-0", "j-rollout-7", "j-rollout-0"], cluster=cluster, roster=roster
    )
    assert told == {"draining": ["j-rollout-0", "j-rollout-1", "j-env-0"], "unknown": ["j-rollout-7"]}
    assert cluster.retired == ["rollout:0", "env:0"] and roster.wanted("rollout") == roster.wanted("env") == []


def test_an_actor_pod_cannot_be_drained():
    cluster = FakeCluster(member("actor:0"), member("rollout:0"))
    with pytest.raises(ValueError, match=r"must be of rollouts or envs, got j-actor-0"):
        drain(["j-rollout-0", "j-actor-0"], cluster=cluster, roster=Roster(spec(), job="j"))
    assert cluster.retired == []


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ([("finish", "a"), ("interrupt", "b")], "interrupt"),
        ([("suspend", "a"), ("interrupt", "b")], "suspend"),
        ([("rollback", "a"), ("interrupt", "b"), ("suspend", "c")], "rollback"),
        ([("interrupt", "a"), ("interrupt", "b")], "interrupt"),
    ],
)
def test_of_several_stops_the_one_that_saves_less_counts_and_its_first_reason(asked, kind):
    steering = Steering(spec())
    for wanted, reason in asked:
        steering.ask_stop(StopKind(wanted), reason)
    assert steering.stop[0] == kind and steering.stop[1] == next(reason for wanted, reason in asked if wanted == kind)


@pytest.fixture
def controls():
    calls = []
    steering = Steering(spec())
    made = Controls(
        steering,
        stop=lambda kind, reason: calls.append((kind, reason)),
        drain=lambda pods: calls.append(pods) or {"draining": pods, "unknown": []},
        applied_generation=lambda: 4,
    )
    made.calls, made.steering = calls, steering
    return made


def test_control_calls_reach_what_they_are_for(controls):
    whole = spec(replicas=3).model_dump(mode="json", by_alias=True)
    assert controls.control({"generation": 5, "spec": whole}) == {"accepted": True, "appliedGeneration": 4}
    assert controls.steering.changes.take().spec.rollout.replicas == 3
    assert controls.drain({"pods": ["a"]})["draining"] == ["a"]
    controls.checkpoint(None)
    assert controls.steering.take_checkpoint() and not controls.steering.take_checkpoint()
    for reason, kind in (
        ("suspend", "suspend"),
        ("rollback", "rollback"),
        ("failed", "interrupt"),
        ("enough", "finish"),
    ):
        controls.finish({"reason": reason})
        assert controls.calls[-1] == (kind, f"asked by POST /finish ({reason})")
    controls.finish(None)
    assert controls.calls[-1] == ("finish", "asked by POST /finish")


@pytest.mark.parametrize(
    ("call", "body", "told"),
    [
        ("control", None, "must be an object with generation, spec"),
        ("control", {"generation": "1", "spec": {}}, "generation must be given as int"),
        ("control", {"generation": True, "spec": {}}, "generation must be given as int"),
        ("control", {"generation": 1}, "spec must be given as dict"),
        ("drain", {"pods": "a"}, "pods must be given as list"),
        ("drain", {"pods": [1]}, "pods must be a list of pod names"),
        ("finish", ["suspend"], "must be an object or nothing, got list"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_by_field(controls, call, body, told):
    with pytest.raises(ValueError, match=told):
        getattr(controls, call)(body)
    assert not controls.calls
