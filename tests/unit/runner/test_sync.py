"""The content check: served weights that score a prompt differently end the run (I2)."""

import contextlib
import threading
from types import SimpleNamespace

import pytest

from rl_core.api.errors import DeadlineExceeded, WeightsDiverged, WorkerLost
from rl_core.api.job import RLJobSpec
from rl_core.messages.weights import PublishReport
from rl_core.runner.sync import WeightSync, sync_metrics


class FakeResult:
    def __init__(self, value):
        self.value = value

    def wait(self, timeout=None):
        return self.value


class FakeActor:
    """Stands in for the actor group: acknowledges for every receiver, scores every sequence with -1."""

    def sync_model_to_rollout(self, version, receivers, min_acks):
        names = [receiver.name for receiver in receivers]
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
                )
            ]
        )

    def score(self, ids, prompt_length):
        return FakeResult([None, [-1.0] * (len(ids) - prompt_length)])


class FakeCluster:
    def __init__(self, answers):
        self.answers = answers

    def members(self, role):
        return [
            SimpleNamespace(name=name, address=f"tcp://{name}", host_token="h", state="serving")
            for name in self.answers
        ]

    def call(self, name, method, *args, timeout):
        assert method == "probe"
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


def make(answers, **weights):
    spec = RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "weights": weights})
    membership = SimpleNamespace(sync_lock=threading.Lock(), rejoin=lambda names: None)
    return WeightSync(spec, cluster=FakeCluster(answers), actor=FakeActor(), membership=membership, probe_prompt=[1, 2])


def probe(*logprobs, version=3):
    return {"ids": [5] * len(logprobs), "logprobs": list(logprobs), "version": version}


def test_agreeing_rollouts_pass_and_are_counted_as_served():
    sync = make({"rollout:0": probe(-1.0, -1.0005), "rollout:1": probe(-1.0, -0.9995)})
    report = sync.publish(3)
    sync.confirm()
    assert report.acked == ("rollout:0", "rollout:1") and sync.acked_at(3) == {"rollout:0", "rollout:1"}
    assert sync.acked_at(2) == frozenset() and sync.digest == "d"
    assert sync_metrics(report) == {
        "weights/version": 3.0,
        "weights/publish_seconds": 0.1,
        "weights/apply_seconds": 0.05,
        "weights/pause_seconds": 0.06,
        "weights/bytes": 8.0,
        "weights/failed_receivers": 0.0,
    }


@pytest.mark.parametrize("wrong", [-1.01, float("nan")], ids=["other weights", "nan"])
def test_a_rollout_that_scores_differently_ends_the_run_by_name(wrong):
    sync = make({"rollout:0": probe(-1.0), "rollout:1": probe(wrong)})
    sync.publish(3)
    with pytest.raises(
        WeightsDiverged, match="rollout:1 must score a fixed prompt like the trainer at version 3 within 0.001"
    ):
        sync.confirm()


def test_the_next_sync_does_not_start_before_the_check_of_the_last_is_in():
    sync = make({"rollout:0": probe(-2.0)})
    sync.publish(3)
    with pytest.raises(WeightsDiverged):
        sync.publish(4)


def test_a_rollout_lost_meanwhile_or_already_further_is_not_judged():
    sync = make({"rollout:0": WorkerLost("gone"), "rollout:1": probe(-9.0, version=4)})
    sync.publish(3)
    with contextlib.closing(sync):
        sync.confirm()


def test_the_check_can_be_switched_off():
    sync = make({"rollout:0": probe(-9.0)}, contentCheck=False)
    sync.publish(3)
    sync.confirm()


class LosingActor(FakeActor):
    """Too few acknowledge as long as `lost` members are asked; then the hub knows of the loss."""

    def __init__(self, cluster, lost):
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
    sync = make({"rollout:0": probe(-1.0)})
    sync._actor = LosingActor(sync._cluster, ["rollout:0"])
    assert sync.publish(3).acked == ()
    assert sync._actor.asked == [(["rollout:0"], 1), ([], 0)]


def test_a_rollout_that_lives_and_does_not_acknowledge_is_an_error():
    sync = make({"rollout:0": probe(-1.0)})
    sync._actor.sync_model_to_rollout = lambda *args: FailingResult(DeadlineExceeded("too few"))
    with pytest.raises(DeadlineExceeded, match="too few"):
        sync.publish(3)
