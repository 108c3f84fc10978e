"""Which env workers and rollouts of a collection exchange their messages directly."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rl_core.api.errors import DataError, DeadlineExceeded, InfrastructureError, WorkerLost
from rl_core.channel import Channel
from rl_core.messages.calls import MethodResult
from rl_core.runner.collection import Collection
from rl_core.workers.result import WorkerErrors, WorkerGroupFuncResult
from tests.unit.embodied.test_refused_fields import job


def member(name, host, incarnation=1):
    group, _, rank = name.partition(":")
    return SimpleNamespace(
        name=name,
        group=group,
        rank=int(rank),
        host_token=host,
        id=(name, incarnation),
        incarnation=incarnation,
        state=SimpleNamespace(constructed=True),
    )


class Members:
    """The cluster of a run: members, and env workers that answer where they listen."""

    def __init__(self, *members):
        self.present, self.asked, self.error = list(members), [], None

    def members(self, group):
        return [one for one in self.present if one.group == group]

    def submit(self, name, method, args, kwargs, *, timeout):
        assert method == "direct_address" and not args and not kwargs and timeout == 7
        self.asked.append(name)
        future = Future()
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(MethodResult(value=f"{name} answer {len(self.asked)}", durations={}))
        return SimpleNamespace(future=future)


def collection(cluster, **fields):
    deadlines = {"rpc": 7, "rollout": 60, "weightSync": 20, "groupMethod": 100}
    spec = job(runtime={"deadlines": deadlines}, **fields)
    run = SimpleNamespace(epoch=0, cluster=cluster, applied=SimpleNamespace(spec=spec))
    run.stops = SimpleNamespace(wait=lambda result, seconds: result.wait(seconds))
    versions = SimpleNamespace(version_of=lambda key: 3, committed=3)
    return Collection(run, None, versions, observations=None, actions=None, trajectories=None)


def test_those_of_one_host_exchange_directly_and_others_by_the_channel():
    cluster = Members(
        *(member(f"env:{rank}", host) for rank, host in ((0, "a"), (2, "b"), (3, "c"))),
        *(member(f"rollout:{rank}", host) for rank, host in ((1, "b"), (4, "a"), (5, "b"))),
    )
    request = collection(cluster)._request(1)
    assert request.envs == (0, 2, 3) and request.rollouts == (1, 4, 5)
    assert {(env, at): request.address(env, at) for env in range(3) for at in range(3)} == {
        **{(env, at): None for env in range(3) for at in range(3)},
        (0, 1): "env:0 answer 1",
        (1, 0): "env:2 answer 2",
        (1, 2): "env:2 answer 2",
    }
    assert cluster.asked == ["env:0", "env:2"]  # nobody would use the address of the third


def test_an_env_worker_is_asked_once_and_again_when_another_process_takes_its_place():
    cluster = Members(member("env:0", "a"), member("env:1", "a"), member("rollout:0", "a"))
    collections = collection(cluster)
    assert (
        collections._request(1).direct
        == collections._request(2).direct
        == ((0, 0, "env:0 answer 1"), (1, 0, "env:1 answer 2"))
    )
    cluster.present[1] = member("env:1", "a", incarnation=2)
    assert collections._request(3).direct == ((0, 0, "env:0 answer 1"), (1, 0, "env:1 answer 3"))


def test_an_env_worker_that_is_lost_before_it_tells_its_address_is_a_failure_of_the_infrastructure():
    cluster = Members(member("env:0", "a"), member("rollout:0", "a"))
    collections, cluster.error = collection(cluster), InfrastructureError("lost")
    with pytest.raises(InfrastructureError, match="lost"):
        collections._request(1)
    assert collections.begin(2, version=3) is None
    cluster.error = None
    assert collections._request(3).direct == ((0, 0, "env:0 answer 3"),)


class Starting(Members):
    """A cluster whose members accept calls and do not answer."""

    def submit(self, name, method, args, kwargs, *, timeout):
        if method == "direct_address":
            return super().submit(name, method, args, kwargs, timeout=timeout)
        self.asked.append((name, method, timeout))
        return SimpleNamespace(future=Future(), cancel=lambda: None, describe=lambda: name)


def test_a_collection_that_begins_early_is_given_up_without_its_env_worker_or_its_weights():
    cluster = Starting(member("env:0", "a"), member("rollout:0", "a"), member("rollout:1", "a"))
    collections = collection(cluster)
    served = {"rollout:0": 3, "rollout:1": 3}
    collections._versions.version_of = lambda key: served[key[0]]
    pending = collections.begin(9, version=4)
    request = pending.request
    assert pending.version == 4 and (request.step, request.version, request.rollouts) == (9, 4, (0, 1))
    # The calls may last as long as a training, a weight sync and a collection together.
    assert cluster.asked[1:] == [
        ("env:0", "interact", 180),
        ("rollout:0", "generate", 180),
        ("rollout:1", "generate", 180),
    ]
    collections._versions.committed = 4
    assert not collections.is_intact(pending)
    served |= {"rollout:0": 4}
    assert not collections.is_intact(pending)  # the other one has not loaded the version
    served |= {"rollout:1": 4}
    assert collections.is_intact(pending)
    pending.envs[0].give_up()
    assert not collections.is_intact(pending)


def test_what_an_abandoned_collection_left_on_the_channels_is_deleted_when_a_later_one_has_ended():
    """Images of trajectories that nobody takes would fill the shared memory."""
    channels = [Channel.create(name, local=True) for name in ("observations", "actions", "trajectories")]
    collections = collection(Starting(member("env:0", "a"), member("rollout:0", "a")))
    collections._observations, collections._actions, collections._trajectories = channels
    collections._answers = lambda pending: []
    lost, kept = (collections.begin(step, version=3) for step in (2, 3))
    for pending in (lost, kept):
        for channel in channels[:2]:
            channel.put("message", key=pending.request.key(0, 0, 0))
        channels[2].put("trajectory", key=pending.request.trajectory_key(0))
    collections.abandon(lost)
    assert collections._finish(kept) == []

    def left(pending):
        keys = [pending.request.key(0, 0, 0)] * 2 + [pending.request.trajectory_key(0)]
        return [channel.qsize(key) for channel, key in zip(channels, keys, strict=True)]

    assert left(lost) == [0, 0, 0] and left(kept) == [1, 1, 1]


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([WorkerLost("rollout:0 is lost"), InfrastructureError("given up")], InfrastructureError),
        ([WorkerLost("rollout:0 is lost"), DataError("wrong actions")], WorkerErrors),
    ],
)
def test_a_collection_is_run_again_if_all_that_failed_are_losses(errors, expected):
    cluster = Starting(member("env:0", "a"), member("rollout:0", "a"), member("rollout:1", "a"))
    collections = collection(cluster)
    pending = collections.begin(9, version=3)
    pending.envs[0].give_up()
    for call, error in zip(list(pending.workers._calls.values())[1:], errors, strict=True):
        call.future.set_exception(error)
    with pytest.raises(expected) as raised:
        collections._answers(pending)
    assert type(raised.value) is expected


def test_a_collection_is_run_again_if_the_trajectories_reach_no_data_rank_in_time():
    collections = collection(Members())
    calls = [SimpleNamespace(future=Future(), cancel=lambda: None, describe=lambda: "actor") for _ in range(2)]
    for call in calls:
        call.future.set_exception(DeadlineExceeded("2 trajectories must come within 60 s, got 0"))
    with pytest.raises(InfrastructureError, match="got 0"):
        collections._wait(WorkerGroupFuncResult("actor", "recv_rollout_trajectories", dict(enumerate(calls))), 1.0)


@pytest.mark.parametrize(("present", "taking_part"), [(3, 3), (2, 3), (1, 2)])
def test_more_rollouts_than_groups_of_simulators_take_no_part_while_env_workers_are_missing(present, taking_part):
    options = {"id": "CartPole-v1", "numEnvs": 4, "autoReset": False}
    grpo = {"algorithm": {"name": "grpo", "groupSize": 2}, "env.options": options, "env.replicas": 3}
    members = [member(f"env:{rank}", "") for rank in range(present)] + [
        member(f"rollout:{rank}", "") for rank in range(3)
    ]
    request = collection(Members(*members), **grpo)._request(1)
    assert request.rollouts == tuple(range(taking_part))
