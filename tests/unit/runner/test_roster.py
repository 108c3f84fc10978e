"""Who is wanted, who leaves, who is missing since when, and who serves which version."""

from types import SimpleNamespace

import pytest

from rl_core.api.job import RLJobSpec
from rl_core.runner.roster import Roster

BASE = {"model": {"path": "m"}, "data": {"train": "t"}}


def spec(replicas=2, envs=1, **actor):
    return RLJobSpec.model_validate(
        {**BASE, "rollout": {"replicas": replicas}, "env": {"replicas": envs}, "actor": actor}
    )


def member(name, state="serving", *, version=None, incarnation=(0, 0)):
    role, _, rank = name.partition(":")
    facts = {"policy_version": version, "incarnation": incarnation}
    return SimpleNamespace(name=name, role=role, state=state, pod=f"j-{role}-{rank}", rank=int(rank), **facts)


def roster(wanted, *members, clock=None, patient=False):
    there = SimpleNamespace(members=lambda role=None, **also: [m for m in members if role in (None, m.role)])
    return Roster(wanted, there, job="j", patient=patient, **({"clock": clock} if clock else {}))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_missing_are_told_with_their_pods_from_the_start_or_from_their_loss_on(clock):
    present = roster(spec(replicas=2, processesPerPod=2), clock=clock)
    here = [member("actor:0"), member("rollout:0"), member("env:0")]
    clock.now += 5
    assert [(m.name, m.pod, m.since_seconds) for m in present.missing(here)] == [
        ("actor:1", "j-actor-0", 5),
        ("rollout:1", "j-rollout-1", 5),
    ]
    here = [member("actor:0"), member("actor:1"), member("rollout:0"), member("rollout:1"), member("env:0")]
    assert present.missing(here) == []
    clock.now += 10
    assert [(m.name, m.since_seconds) for m in present.missing(here[:3] + here[4:])] == [("rollout:1", 0)]
    clock.now += 4
    here[2] = member("rollout:0", "lost")
    assert [(m.name, m.since_seconds) for m in present.missing([here[0], here[1], here[2], here[4]])] == [
        ("rollout:0", 0),
        ("rollout:1", 4),
    ]


def test_a_member_that_drains_is_neither_wanted_nor_missing_until_it_is_wanted_again(clock):
    present = roster(spec(replicas=3), clock=clock)
    present.leave(["rollout:2"])
    assert present.wanted("rollout") == ["rollout:0", "rollout:1"]
    here = [
        member("actor:0"),
        member("rollout:0"),
        member("rollout:1"),
        member("rollout:2", "drained"),
        member("env:0"),
    ]
    assert present.missing(here) == []
    present.adopt(spec(replicas=2))
    assert present.wanted("rollout") == ["rollout:0", "rollout:1"]
    present.adopt(spec(replicas=3))
    assert [m.name for m in present.missing(here)] == ["rollout:2"]


def test_a_change_of_another_role_brings_nobody_back():
    present = roster(spec(replicas=3))
    present.leave(["rollout:0"])
    present.adopt(spec(replicas=3, envs=2))
    assert present.wanted("rollout") == ["rollout:1", "rollout:2"] and len(present.wanted("env")) == 2


def test_who_serves_a_version_says_so_or_has_acknowledged_it():
    here = [member("rollout:0", version=3), member("rollout:1", version=2), member("rollout:2", "updating", version=3)]
    present = roster(spec(replicas=3), *here)
    assert present.serving("rollout", 3) == 1
    present.acknowledged(3, [("rollout:1", (0, 0))])
    assert present.serving("rollout", 3) == 2 and present.serving("rollout", 4) == 0


def test_the_acknowledgement_of_a_killed_rollout_is_not_its_successor_s():
    """Counted by name, a process without weights let minReplicas pass with nobody serving."""
    present = roster(spec(), member("rollout:0", "joining", incarnation=(0, 1)))
    present.acknowledged(3, [("rollout:0", (0, 0))])
    assert present.serving("rollout", 3) == 0


@pytest.mark.parametrize(("patient", "waited", "expected"), [(False, 99.0, 3), (True, 1.0, 3), (True, 99.0, 1)])
def test_a_start_waits_for_all_and_in_a_cluster_after_a_while_for_those_that_are_here(patient, waited, expected):
    present = roster(spec(replicas=3), member("rollout:0"), patient=patient)
    assert present.quorum("rollout", 1, waited=waited, grace=10.0) == expected


def test_only_a_cluster_is_short_of_members():
    here = [member("rollout:0"), member("env:0", "joining")]
    assert roster(spec(), *here, patient=True).short()
    assert not roster(spec(), *here).short()
    assert not roster(spec(), member("rollout:0"), member("env:0", "ready"), patient=True).short()
