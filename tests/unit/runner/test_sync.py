"""A sync and its content check: who serves a version is known, and weights that score a prompt differently end the run."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_core.api.errors import DeadlineExceeded, WeightsDiverged, WorkerLost
from rl_core.api.job import RLJobSpec
from rl_core.messages.groups import ProbeAnswer
from rl_core.messages.members import MemberState
from rl_core.messages.weights import LateReport, PublishReport
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.content_check import ContentCheck
from rl_core.runner.device_schedule import DisaggregatedSchedule
from rl_core.runner.member_versions import MemberVersions
from rl_core.runner.roster import Roster
from rl_core.runner.sync import WeightSync
from rl_core.runner.workload import Workload


class FakeResult:
    def __init__(self, value):
        self.value = value

    def wait(self, timeout=None):
        return self.value


class FakeActor:
    """Stands in for the actor group: acknowledges for every receiver, scores every sequence with -1."""

    patches = {}

    def sync_model_to_rollout(self, version, receivers, min_acks):
        names = [receiver.name for receiver in receivers]
        assert all(one.devices == (f"GPU of {one.name}",) for one in receivers)
        return FakeResult(
            [
                PublishReport(
                    version=version,
                    digest="d",
                    acked=tuple(names),
                    failed={},
                    seconds=0.1,
                    bytes=8,
                    transport="shared",
                    copy_seconds=0.01,
                    sync_seconds=0.09,
                    apply_seconds=0.05,
                    pause_seconds=0.06,
                    **self.patches,
                )
            ]
        )

    def score(self, ids, prompt_length):
        return FakeResult([None, [-1.0] * (len(ids) - prompt_length)])


class FakeCluster:
    def __init__(self, answers):
        self.answers = answers

    def members(self, role=None):
        return [
            SimpleNamespace(
                name=name,
                group=name.partition(":")[0],
                address=f"tcp://{name}",
                host_token="h",
                device_uuids=(f"GPU of {name}",),
                state=MemberState.SERVING,
                incarnation=(0, 0),
                policy_version=0,
            )
            for name in self.answers
            if role in (None, name.partition(":")[0])
        ]

    def submit(self, name, method, args, kwargs, *, timeout):
        assert method == "probe"
        future = Future()
        if isinstance(answer := self.answers[name], Exception):
            future.set_exception(answer)
        else:
            future.set_result(SimpleNamespace(value=answer))
        return SimpleNamespace(future=future)


class Run:
    """A sync over fakes of the cluster and the actors, with real parts between."""

    def __init__(self, answers, actor=None, *, content_check=True, cluster=FakeCluster):
        weights, quick = {"contentCheck": content_check}, {"deadlines": {"heartbeat": 0.05}}
        spec = RLJobSpec.model_validate(
            {"model": {"path": "m"}, "data": {"train": "t"}, "weights": weights, "runtime": quick}
        )
        applied, self.cluster = AppliedSpec(spec), cluster(answers)
        self.actor = actor(self.cluster) if actor else FakeActor()
        self.roster = Roster(spec, self.cluster, job="j", patient=False)
        self.check = ContentCheck(
            applied, cluster=self.cluster, actor=self.actor, schedule=DisaggregatedSchedule(), prompt_ids=[1, 2]
        )
        self.rejoined, self.served = [], []
        self.versions = MemberVersions(lambda processes, version: self.served.append((list(processes), version)))
        self.versions.proved([(name, (0, 0)) for name in answers], 0)
        self.served.clear()
        self.sync = WeightSync(
            applied,
            cluster=self.cluster,
            actor=self.actor,
            members=SimpleNamespace(rejoin=self.rejoined.extend),
            versions=self.versions,
            roster=self.roster,
            workload=Workload(),
            check=self.check,
        )


def probe(*logprobs, version=3):
    return ProbeAnswer(ids=(5,) * len(logprobs), logprobs=logprobs, version=version)


def test_agreeing_rollouts_pass_and_are_known_to_serve():
    run = Run({"rollout:0": probe(-1.0, -1.0005), "rollout:1": probe(-1.0, -0.9995)})
    run.sync.publish(3)
    run.check.confirm()
    assert run.roster.serving("rollout", 3) == 2 and run.roster.serving("rollout", 2) == 0 and run.sync.digest == "d"
    assert run.served == [([("rollout:0", (0, 0)), ("rollout:1", (0, 0))], 3)]
    assert run.sync.metrics() == {
        "weights/version": 3.0,
        "weights/publish_seconds": 0.1,
        "weights/apply_seconds": 0.05,
        "weights/pause_seconds": 0.06,
        "weights/bytes": 8.0,
        "weights/failed_receivers": 0.0,
        "weights/late_receivers": 0.0,
        "weights/content_check_passed_total": 2.0,
        "weights/content_check_skipped_total": 0.0,
    }


def test_the_share_that_changed_and_who_passed_a_version_on_are_told():
    run = Run({"rollout:0": probe(-1.0)})
    run.actor.patches = {"patch_share": 0.25, "patched": ("rollout:0",), "relayed": ("rollout:0",)}
    run.sync.publish(3)
    metrics = run.sync.metrics()
    assert (metrics["weights/patch_share"], metrics["weights/patched_receivers"]) == (0.25, 1.0)
    assert metrics["weights/relayed_receivers"] == 1.0


@pytest.mark.parametrize("wrong", [-1.01, float("nan")], ids=["other weights", "nan"])
def test_a_rollout_that_scores_differently_ends_the_run_by_name(wrong):
    run = Run({"rollout:0": probe(-1.0), "rollout:1": probe(wrong)})
    run.sync.publish(3)
    with pytest.raises(
        WeightsDiverged, match="rollout:1 must score a fixed prompt like the trainer at version 3 within 0.001"
    ):
        run.check.confirm()


def test_the_next_sync_does_not_start_before_the_check_of_the_last_is_in():
    run = Run({"rollout:0": probe(-2.0)})
    run.sync.publish(3)
    with pytest.raises(WeightsDiverged):
        run.sync.publish(4)


def test_a_rollout_lost_meanwhile_or_already_further_is_not_judged():
    run = Run({"rollout:0": WorkerLost("gone"), "rollout:1": probe(-9.0, version=4)})
    run.sync.publish(3)
    run.check.confirm()
    assert run.sync.metrics()["weights/content_check_skipped_total"] == 2.0


def test_members_of_other_groups_get_the_weights_but_count_for_no_rollout_and_are_not_probed():
    run = Run({"inference:0": WorkerLost("it has no such method"), "rollout:0": probe(-1.0)}, LosingActor)
    run.actor.lost = ()
    run.sync.publish(3)
    run.check.confirm()
    assert run.actor.asked == [(["inference:0", "rollout:0"], 1)] and run.roster.serving("rollout", 3) == 1
    counts = run.sync.metrics()
    assert counts["weights/content_check_passed_total"] == 1.0
    assert counts["weights/content_check_skipped_total"] == 0.0


@pytest.mark.parametrize("state", MemberState)
def test_a_member_gets_the_next_version_once_it_has_weights_and_takes_calls(state):
    """One that has pulled counts although its heartbeat still says READY: it would never get the version otherwise."""
    member = SimpleNamespace(name="rollout:0", incarnation=(0, 1), state=state)
    versions = MemberVersions(lambda processes, version: None)
    assert versions.receivers([member]) == []
    versions.proved([("rollout:0", (0, 1))], 2)
    takes_calls = state in (MemberState.READY, MemberState.UPDATING, MemberState.SERVING)
    assert versions.receivers([member]) == ([member] if takes_calls else [])


class SilentCluster(FakeCluster):
    """A cluster whose rollouts 1 and 2 have been silent for a while; rollout 2 never had weights."""

    def members(self, role=None):
        found = super().members(role)
        for member in found[1:]:
            member.state = MemberState.SUSPECT
        return found


def test_a_member_that_is_silent_during_a_publication_pulls_the_version_when_it_is_here_again():
    """It may return as the same process, without registering anew: nothing else would bring it the version."""
    run = Run({f"rollout:{rank}": probe(-1.0) for rank in range(3)}, content_check=False, cluster=SilentCluster)
    run.versions.forget(("rollout:2", (0, 0)))
    run.sync.publish(3)
    assert run.rejoined == ["rollout:1"] and run.served == [([("rollout:0", (0, 0))], 3)]


def test_the_check_can_be_switched_off():
    run = Run({"rollout:0": probe(-9.0)}, content_check=False)
    run.sync.publish(3)
    run.check.confirm()


class LateActor(FakeActor):
    """One receiver is late: `ended` has the report of its end."""

    def __init__(self, cluster):
        self.ended = Future()

    def sync_model_to_rollout(self, version, receivers, min_acks):
        (report,) = super().sync_model_to_rollout(version, receivers, min_acks).value
        return FakeResult([replace(report, acked=("rollout:0",), late=("rollout:1",))])

    def execute_on(self, rank):
        assert rank == 0
        return SimpleNamespace(late_receivers=lambda: SimpleNamespace(wait=lambda seconds: [self.ended.result(60)]))


def late(**report):
    """Publish version 3 to one rollout that takes it and one that is late; return the run when that one has ended with `report`."""
    run = Run({"rollout:0": probe(-1.0), "rollout:1": probe(-1.0, version=2)}, LateActor)
    run.sync.publish(3)
    assert run.served == [([("rollout:0", (0, 0))], 3)] and run.roster.serving("rollout", 3) == 1
    run.check.confirm()
    assert run.sync.metrics()["weights/late_receivers"] == run.sync.metrics()["weights/content_check_passed_total"] == 1
    waits = [thread for thread in threading.enumerate() if thread.name == "late-receivers"]
    run.actor.ended.set_result(LateReport(**report))
    for thread in waits:
        thread.join(60)
    return run


def test_a_late_rollout_counts_once_it_serves():
    run = late(version=3, acked=("rollout:1",), failed={})
    assert run.served[1:] == [([("rollout:1", (0, 0))], 3)] and run.rejoined == []


def test_a_late_rollout_that_fails_joins_again():
    run = late(version=3, acked=(), failed={"rollout:1": "it did not stop"})
    assert run.rejoined == ["rollout:1"] and run.versions.version_of(("rollout:1", (0, 0))) == 0


def test_what_becomes_of_late_rollouts_at_a_newer_version_says_nothing_of_this_one():
    run = late(version=4, acked=("rollout:1",), failed={"rollout:1": "it did not stop"})
    assert len(run.served) == 1 and run.rejoined == []


class LosingActor(FakeActor):
    """Too few acknowledge as long as `lost` members are asked; then the hub knows of the loss."""

    def __init__(self, cluster, lost=("rollout:0",)):
        self.cluster, self.lost, self.asked = cluster, lost, []

    def sync_model_to_rollout(self, version, receivers, min_acks):
        names = [receiver.name for receiver in receivers]
        self.asked.append((names, min_acks))
        if set(names) & set(self.lost):
            for name in self.lost:
                self.cluster.answers.pop(name, None)
            return FailingResult(DeadlineExceeded("too few"))
        return super().sync_model_to_rollout(version, receivers, min_acks)


class FailingResult(FakeResult):
    def wait(self, timeout=None):
        raise self.value


def test_a_version_is_published_though_its_only_rollout_dies_while_it_is_sent():
    run = Run({"rollout:0": probe(-1.0)}, LosingActor)
    run.sync.publish(3)
    assert run.actor.asked == [(["rollout:0"], 1), ([], 0)] and run.roster.serving("rollout", 3) == 0


class RefusedActor(LosingActor):
    """Nobody acknowledges, and nobody is lost by that."""

    def __init__(self, cluster):
        super().__init__(FakeCluster({}), lost=("rollout:0",))


class LateCluster(FakeCluster):
    """Tells only at its third look that the engine of a rollout starts anew."""

    looks = 0

    def members(self, role=None):
        self.looks += 1
        found = super().members(role)
        for member in found:
            member.state = MemberState.SERVING if self.looks < 3 else MemberState.CONSTRUCTING
        return found


def test_a_version_is_published_though_the_hub_hears_later_than_the_publisher_that_an_engine_is_gone():
    run = Run({"rollout:0": probe(-1.0)}, RefusedActor, cluster=LateCluster)
    run.sync.publish(3)
    assert run.actor.asked == [(["rollout:0"], 1), ([], 0)]


def test_a_rollout_that_lives_and_does_not_acknowledge_is_an_error():
    run = Run({"rollout:0": probe(-1.0)})
    run.actor.sync_model_to_rollout = lambda *args: FailingResult(DeadlineExceeded("too few"))
    with pytest.raises(DeadlineExceeded, match="too few"):
        run.sync.publish(3)
