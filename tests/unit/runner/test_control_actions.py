"""The control calls: who is told to drain, what reaches which part, what is refused by field."""

from types import SimpleNamespace

import pytest

from rl_core.runner.changes import AppliedSpec
from rl_core.runner.control_actions import ControlActions, drain
from rl_core.runner.status import Phase
from rl_core.runner.stopping import StopController
from tests.unit.runner.test_roster import member, roster, spec


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
    present = roster(spec())
    told = drain(
        ["j-rollout-0", "j-rollout-1", "j-env-0", "j-rollout-7", "j-rollout-0"], cluster=cluster, roster=present
    )
    assert told == {"draining": ["j-rollout-0", "j-rollout-1", "j-env-0"], "unknown": ["j-rollout-7"]}
    assert cluster.retired == ["rollout:0", "env:0"] and present.wanted("rollout") == present.wanted("env") == []


def test_an_actor_pod_cannot_be_drained():
    cluster = FakeCluster(member("actor:0"), member("rollout:0"))
    with pytest.raises(ValueError, match=r"must be of elastic groups, got j-actor-0"):
        drain(["j-rollout-0", "j-actor-0"], cluster=cluster, roster=roster(spec()))
    assert cluster.retired == []


class Asked:
    """The control calls over real parts; what drains and what is to be saved is noted."""

    def __init__(self):
        self.applied = AppliedSpec(spec())
        self.stops = StopController(lambda: Phase.STARTING)
        self.drained, self.checkpoints = [], []
        self.calls = ControlActions(
            self.applied,
            self.stops,
            ask_checkpoint=lambda: self.checkpoints.append(1),
            drain=lambda pods: self.drained.append(pods) or {"draining": pods, "unknown": []},
            applied_generation=lambda: 4,
        )


def test_control_calls_reach_what_they_are_for():
    asked = Asked()
    whole = spec(replicas=3).model_dump(mode="json", by_alias=True)
    assert asked.calls.control({"generation": 5, "spec": whole}) == {"accepted": True, "appliedGeneration": 4}
    assert asked.applied.take().spec.rollout.replicas == 3
    assert asked.calls.drain({"pods": ["a"]})["draining"] == ["a"]
    asked.calls.checkpoint(None)
    assert asked.checkpoints == [1]


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        ({"reason": "suspend"}, "suspend", "asked by POST /finish (suspend)"),
        ({"reason": "rollback"}, "rollback", "asked by POST /finish (rollback)"),
        ({"reason": "failed"}, "interrupt", "asked by POST /finish (failed)"),
        ({"reason": "enough"}, "finish", "asked by POST /finish (enough)"),
        (None, "finish", "asked by POST /finish"),
    ],
)
def test_the_reason_of_a_finish_says_whether_the_run_is_to_be_resumed(body, kind, reason):
    asked = Asked()
    asked.calls.finish(body)
    assert (asked.stops.kind, asked.stops.reason) == (kind, reason)


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
def test_a_body_that_does_not_fit_is_refused_by_field(call, body, told):
    asked = Asked()
    with pytest.raises(ValueError, match=told):
        getattr(asked.calls, call)(body)
    assert not asked.drained and not asked.stops.stop_requested and asked.applied.take() is None
