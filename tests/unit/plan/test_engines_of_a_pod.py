"""Several engines in a rollout pod: each is a rollout of its own, with its rank, its accelerators and its ports."""

import pytest

from rl_core.api.errors import ConfigError
from rl_core.plan import autoscale
from rl_core.plan.groups import ROLLOUT, groups_of
from rl_core.plan.slots import colocated_pods, colocated_rollouts, device_count, idle_accelerators, pod_of
from rl_core.runner.time_sharing import ColocatedSchedule
from tests.unit.plan.test_capacity import qwen3_8b
from tests.unit.plan.test_launch import AGENTS, job, listening, of_group, plan

TWO = {"engine": "sglang", "gpus": 4, "engineArgs": {"tp_size": 2}}


def devices(found, group=ROLLOUT):
    return [list(process.visible_devices) for process in of_group(found, group)]


def test_members_are_numbered_over_the_pods_and_each_has_its_own_accelerators_and_ports():
    written = job(actor={"gpus": 2}, rollout=TWO | {"replicas": 2}, env=AGENTS)
    found = plan(written)
    members = of_group(found, ROLLOUT)
    assert [member.env["WORKER_NAME"] for member in members] == [f"rollout:{rank}" for rank in range(4)]
    assert {member.env["WORLD_SIZE"] for member in members} == {"4"} and all(member.restart for member in members)
    assert devices(found) == [["0", "1"], ["2", "3"]] * 2, "of its pod"
    assert devices(plan(written, host="127.0.0.1")) == [["2", "3"], ["4", "5"], ["6", "7"], ["8", "9"]]
    assert [pod.claim.count for pod in found.pods_of(ROLLOUT)] == [4, 4]
    for pod in found.pods_of(ROLLOUT):
        assert sorted(listening(pod)) == [7703, 7705, 7706, 7715, 7716]
    assert [pod_of(written.spec, "sums", ROLLOUT, rank) for rank in range(4)] == [
        f"sums-rollout-{index}" for index in (0, 0, 1, 1)
    ]
    assert device_count(written.spec) == 2 + 8 and not list(idle_accelerators(written.spec))


def test_scaling_adds_whole_pods():
    written = job(rollout=TWO)
    names = [member.env["WORKER_NAME"] for member in of_group(plan(written, replicas={ROLLOUT: 2}), ROLLOUT)]
    assert names == [f"rollout:{rank}" for rank in range(4)]


def test_on_the_network_of_a_node_no_two_engines_of_a_job_have_a_port_in_common():
    host = {"hostNetwork": True}
    written = job(actor=host, rollout=TWO | {"replicas": 3} | host, env=AGENTS)
    found = plan(written)
    ports = [port for pod in found.pods if pod.role != "env" for port in listening(pod)]
    assert len(set(ports)) == len(ports) and max(ports) < 30_000
    with pytest.raises(ConfigError, match="hostNetwork needs ports below 30000, 10 for each engine, got"):
        plan(job(actor=host, rollout=TWO | {"replicas": 1024, "gpus": 16} | host))


@pytest.mark.parametrize("allocation", [{}, {"gpuAllocation": "dra", "deviceClass": "gpu.example.com"}])
def test_colocated_engines_have_the_devices_of_their_pod_of_the_actor(allocation):
    written = job(
        actor={"gpus": 4} | allocation,
        rollout=TWO | allocation,
        placement={"mode": "colocated"},
        algorithm={"promptsPerStep": 32},
    )
    found = plan(written)
    assert [pod.name for pod in found.pods] == ["sums-actor-0", "sums-env-0"]
    assert devices(found) == [["0", "1"], ["2", "3"]] and devices(found, "actor") == [[str(n)] for n in range(4)]
    assert devices(plan(written, host="127.0.0.1")) == [["0", "1"], ["2", "3"]]
    assert (colocated_pods(written.spec), colocated_rollouts(written.spec), device_count(written.spec)) == (1, 2, 4)
    assert [pod_of(written.spec, "sums", ROLLOUT, rank) for rank in (0, 1)] == ["sums-actor-0"] * 2
    assert ColocatedSchedule(written.spec, cluster=None, actor=None)._colocated == {"rollout:0", "rollout:1"}


def test_a_written_placement_numbers_the_accelerators_of_engines():
    placed = {"componentPlacement": {"rollout": "0-3", "actor": "4-5"}}
    written = job(actor={"gpus": 2}, rollout=TWO, placement=placed)
    assert devices(plan(written, host="127.0.0.1")) == [["0", "1"], ["2", "3"]]


def test_as_many_rollouts_must_serve_as_are_sure_to_be_in_the_least_number_of_pods():
    for replicas, least in ((1, 1), (2, 3), (4, 7)):
        group = groups_of(job(rollout=TWO | {"replicas": replicas, "minReplicas": replicas}).spec)[ROLLOUT]
        assert (group.world_size, group.min_members) == (2 * replicas, least)
    assert groups_of(job(rollout=TWO | {"minReplicas": 0}).spec)[ROLLOUT].min_members == 0


def test_autoscaling_counts_pods():
    one = {"replicas": 2, "maxReplicas": 8, "autoscale": {"max": 8}}
    many = job(rollout=TWO | one).spec.rollout
    hungry = {"starved": 0.0, "trainer_starved": 0.5, "seconds": 60.0}
    wanted = autoscale.decide(
        job(rollout=one).spec.rollout, autoscale.IdleShares(rollouts=2, **hungry), on_policy=False
    )
    assert autoscale.decide(many, autoscale.IdleShares(rollouts=4, **hungry), on_policy=False) == wanted
    assert wanted.replicas == 4
    assert autoscale.decide(many, autoscale.IdleShares(rollouts=5, **hungry), on_policy=False) is None


def test_an_engine_has_the_memory_of_its_own_accelerators_and_its_host_that_of_all_engines():
    one, two = (qwen3_8b(rollout=rollout) for rollout in ({"gpus": 2}, TWO))
    assert one.peak(ROLLOUT) == two.peak(ROLLOUT)
    assert [report.processes[ROLLOUT] for report in (one, two)] == [1, 2]
    assert qwen3_8b(gib=9, rollout=TWO).fits_with[ROLLOUT] == "tp_size 4 in rollout.engineArgs"
