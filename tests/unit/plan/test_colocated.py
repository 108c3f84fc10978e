"""Colocated shapes: the same processes as the disaggregated plan, each pair on one claim, nobody in another's way."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.api.settings import PlacementSpec
from rl_core.plan.colocated import colocate
from rl_core.plan.launch import LaunchPlan, build_launch_plan
from rl_core.plan.slots import device_count, pod_of

SHAPES = ("containers", "processes")


def job(actor=1, rollout=1, gpus=1, rollout_gpus=None, **role):
    spec = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "actor": {"replicas": actor, "gpus": gpus, "processesPerPod": 1} | role,
        "rollout": {"replicas": rollout, "gpus": gpus if rollout_gpus is None else rollout_gpus} | role,
        "algorithm": {"promptsPerStep": 24 * actor},
    }
    written = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}, "spec": spec}
    return RLJob.model_validate(written)


def planned(written, **more):
    return build_launch_plan(written, **({"name": "sums", "uid": "u", "epoch": 2} | more))


def plan(*counts, **more):
    return planned(job(*counts, **more))


def colocated(written, mode="colocated"):
    """Return the spec with the mode, also of halves that the schema refuses."""
    mode = PlacementSpec.model_construct(mode=mode, component_placement={})
    return written.spec.model_copy(update={"placement": mode})


def processes(found):
    return {p.name: (p, pod) for pod in found.pods for c in pod.containers for p in c.processes}


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(SHAPES), count=st.integers(1, 4), gpus=st.integers(0, 4))
def test_every_process_is_there_once_with_its_identity_and_the_pair_shares_a_claim(shape, count, gpus):
    before = plan(count, count, gpus)
    after = colocate(before, shape=shape)
    assert sorted(processes(after)) == sorted(processes(before))
    for name, (process, pod) in processes(after).items():
        was, _ = processes(before)[name]
        moved = {"RLJOB_POD": pod.name, "RLJOB_HEALTH_PORT": process.env["RLJOB_HEALTH_PORT"]}
        assert process == replace(was, env={**was.env, **moved})
    for index in range(count):
        pair = [processes(after)[f"{role}-{index}"][1] for role in ("actor", "rollout")]
        assert pair[0].claim == pair[1].claim and (pair[0].claim is None) == (gpus == 0)
        assert pair[0] is pair[1]
    claims = [pod.claim for pod in after.pods if pod.claim is not None]
    assert all(claim.shared for claim in claims) and LaunchPlan.from_json(after.to_json()) == after


DRA = {"gpuAllocation": "dra", "deviceClass": "gpu.example.com"}


@pytest.mark.parametrize(("role", "shape"), [(DRA, "containers"), ({}, "processes")], ids=["claims", "device plugin"])
def test_the_plan_of_a_colocated_job_has_the_shape_that_its_allocation_can_share(role, shape):
    written = job(2, 2, 4, **role)
    assert planned(colocated(written)) == colocate(planned(written), shape=shape)


def test_on_one_machine_actor_and_rollout_of_a_colocated_job_see_the_same_accelerators():
    found = planned(colocated(job(2, 2, 2)), host="127.0.0.1")
    seen = {name: process.visible_devices for name, (process, _) in processes(found).items()}
    assert seen["actor-0"] == seen["rollout-0"] == ("0", "1") and seen["actor-1"] == seen["rollout-1"] == ("2", "3")


def test_on_one_machine_a_colocated_job_leaves_no_accelerator_out():
    written = job(2, 2, 1)
    env = written.spec.env.model_copy(update={"gpus": 1})
    found = planned(colocated(written).model_copy(update={"env": env}), host="127.0.0.1")
    assert processes(found)["env-0"][0].visible_devices == ("2",)


def test_a_hybrid_job_has_a_rollout_in_each_actor_pod_and_the_others_on_devices_of_their_own():
    """The devices of pods that run keep their numbers when rollouts are added."""
    written = job(2, 3, 2)
    env = written.spec.env.model_copy(update={"gpus": 1})
    spec = colocated(written, "hybrid").model_copy(update={"env": env})
    for replicas in (2, 3, 5):
        found = processes(planned(spec, host="127.0.0.1", replicas={"rollout": replicas}))
        where = {name: (pod.name, process.visible_devices) for name, (process, pod) in found.items()}
        assert where["rollout-0"] == where["actor-0"] == ("sums-actor-0", ("0", "1"))
        assert where["rollout-1"] == where["actor-1"] == ("sums-actor-1", ("2", "3"))
        own = [where[f"rollout-{index}"] for index in range(2, replicas)]
        numbers = [("4", "5"), ("7", "8"), ("9", "10")]
        assert own == [(f"sums-rollout-{index}", numbers[index - 2]) for index in range(2, replicas)]
        assert where["env-0"] == ("sums-env-0", ("6",))
        assert [pod_of(spec, "sums", "rollout", rank) for rank in range(replicas)] == [
            where[f"rollout-{rank}"][0] for rank in range(replicas)
        ]
    assert device_count(spec) == 2 + 1
    with pytest.raises(ConfigError, match="make them equal, or give rollout more replicas"):
        planned(spec, replicas={"rollout": 1})


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
@pytest.mark.parametrize("odd", [{"rollout": 2}, {"rollout_gpus": 2}], ids=["replicas", "gpus"])
def test_a_colocated_job_of_unequal_halves_is_refused(odd, host):
    with pytest.raises(ConfigError, match="must have equal replicas and gpus"):
        planned(colocated(job(**odd)), host=host)


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_with_ipc_rollouts_on_other_devices_than_those_of_the_actor_are_refused(host):
    spec = colocated(job(2, 2, 2))
    written = spec.model_copy(update={"weights": spec.weights.model_copy(update={"transport": "ipc"})})
    assert planned(written, host=host)
    more = {"rollout": spec.rollout.model_copy(update={"replicas": 3})}
    hybrid = {"placement": spec.placement.model_copy(update={"mode": "hybrid"})}
    with pytest.raises(
        ConfigError, match=r"weights\.transport ipc .* got rollout\.replicas 3 beside 2 of actor; write auto"
    ):
        planned(written.model_copy(update=more | hybrid), host=host)


def test_a_colocated_rollout_is_known_to_be_in_the_pod_of_its_actor():
    written = job(2, 2, 2)
    for spec in (written.spec, colocated(written)):
        found = processes(planned(spec))
        for name, (_, pod) in found.items():
            role, _, rank = name.rpartition("-")
            assert not role or pod_of(spec, "sums", role, int(rank)) == pod.name
    assert (device_count(written.spec), device_count(colocated(written))) == (4, 2)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"rollout": {"replicas": 2}}, "rollout.replicas must be actor.replicas .* got colocated with 2 beside 1"),
        ({"placement": {"mode": "hybrid"}, "actor": {"replicas": 2}}, "and no fewer with hybrid, got hybrid with 1 beside 2"),
        ({"algorithm": {"maxStaleness": 1}}, "algorithm.maxStaleness must be 0 with placement.mode colocated, .* got 1; write maxStaleness: 0"),
        ({"weights": {"transport": "nccl"}}, "weights.transport must not be nccl .* write auto"),
    ],
    ids=["unequal", "too few", "asynchronous", "nccl"],
)  # fmt: skip
def test_what_cannot_take_turns_is_refused_by_name(blocks, words):
    spec = {"model": {"path": "m"}, "data": {"train": "t"}, "placement": {"mode": "colocated"}}
    with pytest.raises(ValidationError, match=words):
        RLJobSpec.model_validate(spec | blocks)


def test_two_supervisors_of_a_pod_listen_on_different_ports():
    (pod,) = (pod for pod in colocate(plan(), shape="containers").pods if pod.role == "actor")
    ports = [container.processes[0].env["RLJOB_HEALTH_PORT"] for container in pod.containers]
    assert len(ports) == len(set(ports)) == 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("odd", [{"rollout": 2}, {"rollout_gpus": 2}], ids=["replicas", "gpus"])
def test_unequal_halves_are_refused(shape, odd):
    with pytest.raises(ConfigError, match="must have equal replicas and gpus"):
        colocate(plan(**odd), shape=shape)
