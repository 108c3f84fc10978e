"""In which order actor and rollouts give devices up and take them, and what becomes of a rollout that is lost meanwhile."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rl_core.api.errors import DeadlineExceeded, InfrastructureError, RemoteError, WorkerLost
from rl_core.api.job import RLJobSpec
from rl_core.messages.members import MemberState
from rl_core.runner.device_schedule import DisaggregatedSchedule
from rl_core.runner.time_sharing import ColocatedSchedule, build_device_schedule
from rl_core.workers.member import Member

ALL = ["gradients", "optimizer", "weights"]
AWAKE = ["kv_cache", "weights"]


def rollout(rank, state=MemberState.SERVING):
    return Member(
        name=f"rollout:{rank}", role="rollout", group="rollout", rank=rank, pod=f"j-actor-{rank}", address="tcp://127.0.0.1:1",
        pid=1, host_token="", incarnation=(0, 0), state=state, policy_version=0, last_seen=90.0,
    )  # fmt: skip


class Job:
    """Stands in for the cluster, its hub and the actor group; keeps in `log` who was told to occupy what."""

    def __init__(self, *members, mode="colocated", pairs=None, offload=None):
        self.there, self.log, self.errors, self.given_up = list(members) or [rollout(0)], [], {}, []
        pairs = pairs or len(self.there)
        self.hub = SimpleNamespace(
            clock=lambda: 100.0, declare_lost=lambda member, reason: self.given_up.append((member.name, reason))
        )
        self.spec = RLJobSpec.model_validate(
            {
                "model": {"path": "m"},
                "data": {"train": "t"},
                "placement": {"mode": mode},
                "actor": {"replicas": pairs, "offload": offload or {}},
                "rollout": {"replicas": len(self.there)},
                "algorithm": {"promptsPerStep": 12},
            }
        )
        self.schedule = build_device_schedule(self.spec, cluster=self, actor=self)

    def members(self, role):
        return self.there if role == "rollout" else []

    def occupy(self, parts):
        self.log.append(("actor", parts))
        return SimpleNamespace(wait=lambda seconds: [{"offload/bytes": 8.0, "offload/seconds": s} for s in (0.5, 0.25)])

    def submit(self, name, method, args, kwargs, *, timeout):
        assert method == "occupy"
        self.log.append((name, args[0]))
        future = Future()
        if error := self.errors.get(name):
            future.set_exception(error)
        else:
            future.set_result(None)
        return SimpleNamespace(future=future)

    def call(self, name, method, parts, token, *, timeout):
        self.submit(name, method, [parts, token], {}, timeout=timeout).future.result()

    def told(self):
        log, self.log = self.log, []
        return log


def test_a_hybrid_rollout_with_devices_of_its_own_keeps_them_and_waits_for_nobody():
    job = Job(rollout(0), rollout(1), mode="hybrid", pairs=1)
    with job.schedule.training():
        assert job.told() == [("rollout:0", []), ("actor", ALL)]
        with job.schedule.joining("rollout:1"):
            assert job.told() == []
        assert [holder["name"] for holder in job.schedule.devices()["holders"]] == []
    with job.schedule.generating():
        assert job.told() == [("actor", []), ("rollout:0", AWAKE)]
        assert [holder["name"] for holder in job.schedule.devices()["holders"]] == ["rollout:0"]


def test_who_gives_memory_up_does_so_before_the_other_takes_it():
    job = Job()
    with job.schedule.training():
        assert job.told() == [("rollout:0", []), ("actor", ALL)]
    with job.schedule.syncing():
        assert job.told() == [("actor", ["weights"]), ("rollout:0", ["weights"])]
    with job.schedule.generating():
        assert job.told() == [("actor", []), ("rollout:0", AWAKE)]
    with job.schedule.generating():
        assert job.told() == [], "nobody has to move"
    with job.schedule.training():
        assert job.told() == [("rollout:0", []), ("actor", ALL)]


def test_optimizer_state_that_is_to_be_offloaded_is_not_brought_back_for_the_whole_training():
    job = Job(offload={"optimizer": True})
    with job.schedule.training():
        assert job.told() == [("rollout:0", []), ("actor", ["gradients", "weights"])]


def test_a_step_tells_the_bytes_of_all_ranks_and_the_seconds_of_the_slowest():
    job = Job()
    for use in (job.schedule.training, job.schedule.syncing):
        with use():
            pass
    assert job.schedule.metrics() == {"offload/bytes": 32.0, "offload/seconds": 1.0} and job.schedule.metrics() == {}


def test_a_rollout_that_is_lost_loses_the_devices_and_the_actor_goes_on():
    job = Job(rollout(0), rollout(1), rollout(2, MemberState.JOINING))
    job.errors = {"rollout:0": WorkerLost("its process ended"), "rollout:1": DeadlineExceeded("frozen")}
    with job.schedule.training():
        assert job.told() == [("rollout:0", []), ("rollout:1", []), ("actor", ALL)]
    assert job.given_up == [("rollout:1", "it did not hand the devices over: frozen")], "the other one is lost already"


def test_a_rollout_that_comes_back_is_put_to_sleep_and_wakes_when_rollouts_have_the_devices():
    job = Job()
    with job.schedule.training():
        job.told()
        joining = job.schedule.joining("rollout:0")
        job.schedule._lease._seconds = 0.0
        with pytest.raises(DeadlineExceeded, match="held by training"):
            joining.__enter__()
        assert job.told() == [("rollout:0", [])]
    with job.schedule.generating():
        job.told()
        with job.schedule.joining("rollout:0"):
            assert job.told() == [("rollout:0", AWAKE)]
        job.errors = {"rollout:0": InfrastructureError("it holds no worker yet")}
        with job.schedule.joining("rollout:0"):
            pass
        job.errors = {"rollout:0": RemoteError("occupy raised")}
        with pytest.raises(RemoteError, match="occupy raised"):
            job.schedule.joining("rollout:0").__enter__()


def test_the_status_tells_who_has_the_devices_and_when_that_ends_without_a_sign_of_life():
    job = Job()
    assert job.schedule.devices()["use"] is None and job.schedule.devices()["holders"] == []
    with job.schedule.generating():
        told = job.schedule.devices()
    assert (told["use"], told["token"]) == ("generating", 1)
    assert told["holders"] == [{"name": "rollout:0", "expiresIn": job.spec.runtime.deadlines.lost - 10.0}]


def test_one_field_says_whether_devices_are_shared():
    assert isinstance(Job().schedule, ColocatedSchedule)
    alone = Job(mode="disaggregated").schedule
    assert isinstance(alone, DisaggregatedSchedule) and alone.devices() is None
