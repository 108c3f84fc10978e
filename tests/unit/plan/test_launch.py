"""The launch plan: pure, complete, one process per rank, every worker's identity readable, elastic roles independent."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity
from rl_core.api.job import RLJob
from rl_core.plan.launch import ContainerPlan, GpuClaim, LaunchPlan, PodPlan, Ports, ProcessPlan, build_launch_plan


def job(**blocks):
    written = {"model": {"path": "model"}, "data": {"train": "data.jsonl"}} | blocks
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}, "spec": written}
    )


def plan(written=None, **more):
    return build_launch_plan(written or job(rollout={"replicas": 2}), **({"name": "sums", "uid": "u-1"} | more))


def processes(found):
    return [process for pod in found.pods for container in pod.containers for process in container.processes]


def of_group(found, group):
    return [process for process in processes(found) if process.group == group]


def test_pods_and_processes_of_a_small_job():
    found = plan()
    assert [pod.name for pod in found.pods] == ["sums-actor-0", "sums-rollout-0", "sums-rollout-1", "sums-env-0"]
    assert [process.name for process in found.pods[0].containers[0].processes] == ["runner", "channel", "actor-0"]
    assert [process.restart for process in processes(found)] == [False, False, False, True, True, True]


def test_runner_and_channel_are_in_actor_0_only():
    found = plan(job(actor={"replicas": 2}, algorithm={"promptsPerStep": 32}))
    assert [process.name for process in found.pods[1].containers[0].processes] == ["actor-1"]
    assert len(of_group(found, "runner")) == len(of_group(found, "channel")) == 1


def test_a_spec_without_its_job_gives_the_same_plan():
    assert plan(job().spec) == plan(job())


def test_equal_arguments_give_equal_bytes_and_other_epochs_another_digest():
    assert plan().to_json() == plan().to_json() and plan().digest == plan().digest
    assert plan(epoch=1).digest != plan().digest
    assert len({plan().digest, plan(uid="u-2").digest, plan(namespace="b").digest}) == 3


def test_json_round_trip_is_exact_at_every_level():
    found = plan(job(actor={"gpus": 2, "processesPerPod": 2}, rollout={"gpus": 1}))
    pod = found.pods[0]
    for part in (found, pod, pod.containers[0], pod.containers[0].processes[2], pod.claim):
        again = type(part).from_json(part.to_json())
        assert again == part and again.to_json() == part.to_json() and again.digest == part.digest
    assert {type(part) for part in (found, pod, pod.containers[0], pod.claim)} == {
        LaunchPlan,
        PodPlan,
        ContainerPlan,
        GpuClaim,
    }
    assert json.loads(found.to_json())["pods"][0]["name"] == "sums-actor-0"


@settings(max_examples=40, deadline=None)
@given(
    replicas=st.integers(1, 3), per_pod=st.integers(1, 3), rollouts=st.integers(0, 4), envs=st.integers(1, 3),
    share=st.integers(0, 2), local=st.booleans(),
)  # fmt: skip
def test_ranks_are_dense_names_unique_and_devices_never_shared(replicas, per_pod, rollouts, envs, share, local):
    ranks = replicas * per_pod
    written = job(
        actor={"replicas": replicas, "processesPerPod": per_pod, "gpus": share * per_pod},
        algorithm={"promptsPerStep": ranks, "groupSize": 2},
        rollout={"gpus": share},
        env={"replicas": envs},
    )
    found = plan(written, replicas={"rollout": rollouts}, host="127.0.0.1" if local else None)
    for group, size in {"actor": ranks, "rollout": rollouts, "env": envs}.items():
        workers = of_group(found, group)
        assert [worker.rank for worker in workers] == list(range(size))
        assert {worker.env["WORLD_SIZE"] for worker in workers} <= {str(size)}
    names = [(pod.name, process.name) for pod in found.pods for c in pod.containers for process in c.processes]
    assert len(set(names)) == len(names)
    machines = [found.pods] if local else [[pod] for pod in found.pods]
    for pods in machines:
        devices = [
            d for pod in pods for c in pod.containers for process in c.processes for d in process.visible_devices
        ]
        assert sorted(map(int, devices)) == list(range(sum(pod.claim.count for pod in pods if pod.claim)))


def test_every_process_can_read_its_identity():
    found = plan(job(actor={"replicas": 2}, algorithm={"promptsPerStep": 32}), namespace="lab", epoch=3)
    for process in processes(found):
        who = Identity.from_env(process.env)
        assert (who.job, who.namespace, who.uid, who.epoch) == ("sums", "lab", "u-1", 3)
        assert (who.group, who.rank, who.name) == (process.group, process.rank, f"{process.group}:{process.rank}")
        assert who.hub == "tcp://sums-actor-0.sums.lab.svc:7700" and who.channel.endswith(":7701")
        assert who.incarnation == (0, 0) and who.curve_dir
    actor = Identity.from_env(of_group(found, "actor")[1].env)
    assert (actor.pod, actor.pod_index, actor.world_size) == ("sums-actor-1", 1, 2)


WORKER_VARIABLES = """
RLJOB_NAME RLJOB_NAMESPACE RLJOB_UID RLJOB_EPOCH RLJOB_ROLE RLJOB_POD RLJOB_POD_INDEX RLJOB_INCARNATION RLJOB_HUB
RLJOB_CHANNEL RLJOB_CURVE_DIR OMP_NUM_THREADS GROUP_NAME WORKER_NAME RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK
CLUSTER_NODE_RANK NODE_LOCAL_RANK NODE_LOCAL_WORLD_SIZE LOCAL_ACCELERATOR_RANK LOCAL_HARDWARE_RANKS VISIBLE_DEVICES
CUDA_DEVICE_ORDER ACCELERATOR_TYPE ISOLATE_ACCELERATOR NODE_GROUP_LABEL
"""


@pytest.mark.parametrize("group", ["actor", "rollout", "env"])
def test_workers_have_every_identity_variable(group):
    env = of_group(plan(), group)[0].env
    assert sorted(set(WORKER_VARIABLES.split()) - set(env)) == []
    assert all(isinstance(value, str) for value in env.values())


def test_only_pods_of_the_actor_are_told_where_the_job_is():
    found = plan(job(actor={"replicas": 2}, algorithm={"promptsPerStep": 32}))
    assert {process.group for process in processes(found) if "RLJOB_CONFIG" in process.env} == {
        "runner",
        "channel",
        "actor",
    }


def test_actors_share_one_rendezvous():
    found = plan(job(actor={"replicas": 2}, algorithm={"promptsPerStep": 32}), ports=Ports(master=9000))
    assert {(w.env["MASTER_ADDR"], w.env["MASTER_PORT"]) for w in of_group(found, "actor")} == {
        ("sums-actor-0.sums.default.svc", "9000")
    }


def test_replicas_of_rollouts_change_pods_of_rollouts_only():
    small, large = plan(replicas={"rollout": 1}), plan(replicas={"rollout": 3})
    assert len(large.pods_of("rollout")) == 3 and large.pods_of("rollout")[2].name == "sums-rollout-2"
    for role in ("actor", "env"):
        assert small.pods_of(role) == large.pods_of(role)


@pytest.mark.parametrize("replicas", [{"actor": 2}, {"rollout": -1}, {"runner": 1}])
def test_replicas_of_fixed_roles_are_refused(replicas):
    with pytest.raises(ConfigError, match="replicas may override rollout and env"):
        plan(replicas=replicas)


def test_accelerators_are_isolated_and_split_over_the_processes_of_a_pod():
    found = plan(job(actor={"gpus": 4, "processesPerPod": 2}, algorithm={"promptsPerStep": 32}))
    first, second = of_group(found, "actor")
    assert first.visible_devices == ("0", "1") and second.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert second.env["LOCAL_HARDWARE_RANKS"] == "2,3" and second.env["LOCAL_ACCELERATOR_RANK"] == "2"
    assert (second.env["LOCAL_RANK"], second.env["LOCAL_WORLD_SIZE"], second.env["NODE_LOCAL_RANK"]) == ("0", "1", "1")
    assert found.pods[0].claim == GpuClaim(count=4)


def test_cpu_processes_see_no_accelerator():
    for process in processes(plan()):
        if process.group in ("actor", "rollout", "env"):
            assert process.env["CUDA_VISIBLE_DEVICES"] == "" and process.visible_devices == ()
    assert plan().pods[0].claim is None


def test_accelerators_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="actor.gpus must be a multiple of processesPerPod 2, got 3"):
        plan(job(actor={"gpus": 3, "processesPerPod": 2}, algorithm={"promptsPerStep": 32}))


def test_variables_of_the_role_are_passed_and_never_replace_identity():
    found = plan(job(rollout={"env": {"LEVEL": "3"}, "threads": 4}))
    (worker,) = of_group(found, "rollout")
    assert worker.env["LEVEL"] == "3" and worker.env["OMP_NUM_THREADS"] == "4"
    assert "LEVEL" not in of_group(found, "actor")[0].env


def test_large_copies_pass_the_caches_unless_the_user_has_tuned_the_c_library():
    found = plan(job(rollout={"env": {"GLIBC_TUNABLES": "glibc.malloc.check=1"}}))
    assert of_group(found, "rollout")[0].env["GLIBC_TUNABLES"] == "glibc.malloc.check=1"
    for name in ("runner", "channel", "actor", "env"):
        assert of_group(found, name)[0].env["GLIBC_TUNABLES"] == "glibc.cpu.x86_non_temporal_threshold=0x1000000"


def test_the_runner_and_the_channel_have_the_actors_variables_as_in_its_container():
    found = plan(job(actor={"env": {"HF_ENDPOINT": "http://mirror"}, "threads": 4}))
    for process in found.pods[0].containers[0].processes:
        assert process.env["HF_ENDPOINT"] == "http://mirror"
    assert {of_group(found, name)[0].env["OMP_NUM_THREADS"] for name in ("runner", "channel")} == {"1"}
    assert not any("HF_ENDPOINT" in p.env for role in ("rollout", "env") for p in of_group(found, role))


def test_one_host_gets_loopback_addresses_and_the_given_ports():
    found = plan(host="127.0.0.1", ports=Ports(hub=1, channel=2, control=3, health=4, master=5), config="/run/job.json")
    runner, channel, actor = found.pods[0].containers[0].processes
    assert runner.ports == {"hub": 1, "control": 3} and channel.ports == {"channel": 2}
    assert actor.env["RLJOB_HUB"] == "tcp://127.0.0.1:1" and actor.env["MASTER_ADDR"] == "127.0.0.1"
    assert runner.env["RLJOB_CONFIG"] == "/run/job.json"
    assert isinstance(runner, ProcessPlan)


def test_on_a_cluster_env_and_rollout_workers_have_a_fixed_port_and_on_one_machine_free_ones():
    ports = {p.group: p.env.get("RLJOB_RPC_PORT") for p in processes(plan())}
    assert ports == {"runner": None, "channel": None, "actor": None, "rollout": "7705", "env": "7705"}
    assert not any("RLJOB_RPC_PORT" in p.env for p in processes(plan(host="127.0.0.1")))


def test_rollouts_have_a_fixed_endpoint_port_in_jobs_of_agent_programs_alone():
    def ports(written):
        return {p.group: p.env.get("RLJOB_ENDPOINT_PORT") for p in processes(plan(written))}

    none = dict.fromkeys(("runner", "channel", "actor", "rollout", "env"))
    assert ports(job()) == none
    assert ports(job(env={"type": "agent", "agent": "program:run"})) == none | {"rollout": "7706"}


def test_attempts_are_told_by_role_and_are_0_otherwise():
    found = {p.name: p.env["RLJOB_INCARNATION"] for p in processes(plan(attempts={"rollout": 3}))}
    assert found["rollout-0"] == found["rollout-1"] == "3.0"
    assert found["runner"] == found["actor-0"] == found["env-0"] == "0.0"


def test_a_plan_tells_only_what_differs_from_its_default_so_that_an_older_supervisor_reads_it():
    plan = PodPlan(name="a", role="env", index=0, containers=())
    assert json.loads(plan.to_json()) == {"name": "a", "role": "env", "index": 0, "containers": []}
    assert PodPlan.from_json(plan.to_json()) == plan


def listening(pod):
    """Return the TCP ports that the processes and supervisors of a pod listen on."""
    found = []
    for container in pod.containers:
        found.append(int(container.processes[0].env["RLJOB_HEALTH_PORT"]))
        for process in container.processes:
            found += process.ports.values()
            found += [int(process.env[key]) for key in ("RLJOB_RPC_PORT", "RLJOB_ENDPOINT_PORT") if key in process.env]
    if pod.role == "actor" and pod.index == 0:
        found.append(int(pod.containers[0].processes[-1].env["MASTER_PORT"]))
    return found


AGENTS = {"type": "agent", "agent": "program:run"}


def test_the_pods_of_a_job_on_one_nodes_network_have_ports_of_their_own():
    host = {"hostNetwork": True}
    written = job(
        actor={"replicas": 2, **host}, rollout={"replicas": 40, **host}, env=AGENTS, algorithm={"promptsPerStep": 32}
    )
    found = plan(written)
    ports = [port for pod in found.pods if pod.role != "env" for port in listening(pod)]
    assert len(set(ports)) == len(ports) and max(ports) < 30_000, "below the ports of nodes and the ephemeral ones"
    assert sorted(listening(found.pods[0])) == [7700, 7701, 7702, 7703, 7704], "where the operator finds the runner"
    assert all(sorted(listening(pod)) == [7703, 7705] for pod in found.pods_of("env"))
    assert listening(plan(written, replicas={"rollout": 3}).pods[3]) == listening(found.pods[3]), (
        "however many there are"
    )
    assert (
        plan(written, host="127.0.0.1").digest
        == plan(
            job(actor={"replicas": 2}, rollout={"replicas": 40}, env=AGENTS, algorithm={"promptsPerStep": 32}),
            host="127.0.0.1",
        ).digest
    )


@pytest.mark.parametrize("mode", ["colocated", "hybrid"])
@pytest.mark.parametrize("host", [False, True])
def test_the_containers_and_processes_of_a_pod_listen_on_different_ports(mode, host):
    actor, rollout = ({"replicas": count, "hostNetwork": host} for count in (2, 2 if mode == "colocated" else 4))
    algorithm = {"promptsPerStep": 32, "maxStaleness": 0}
    found = plan(job(actor=actor, rollout=rollout, env=AGENTS, algorithm=algorithm, placement={"mode": mode}))
    ports = [listening(pod) for pod in found.pods if pod.role != "env"]
    assert all(len(set(of_pod)) == len(of_pod) for of_pod in ports)
    if host:
        assert len({port for of_pod in ports for port in of_pod}) == sum(map(len, ports))


@pytest.mark.parametrize(
    ("blocks", "got"),
    [
        ({"actor": {"hostNetwork": True}}, "actor without rollout"),
        ({"rollout": {"hostNetwork": True}}, "rollout without actor"),
        (
            {
                "actor": {"hostNetwork": True},
                "rollout": {"hostNetwork": True},
                "groups": [{"name": "twin", "worker": "mine:Twin", "lifecycle": "gang"}],
            },
            "actor, rollout without twin",
        ),
    ],
)
def test_groups_with_weights_are_on_nodes_together_or_not_at_all(blocks, got):
    with pytest.raises(ConfigError, match=f"hostNetwork must be true .* got {got}: .* RDMA by a device plugin"):
        plan(job(**blocks))


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"env": {"initContainers": [{"name": "env"}]}}, "initContainers of env .* got env beside env; rename it"),
        (
            {
                "actor": {"replicas": 2, "initContainers": [{"name": "fetch"}]},
                "rollout": {"replicas": 2, "initContainers": [{"name": "fetch"}]},
                "placement": {"mode": "colocated"},
                "algorithm": {"maxStaleness": 0},
            },
            "initContainers of rollout .* got fetch beside actor, rollout, fetch; rename it",
        ),
    ],
    ids=["its role", "two roles of a pod"],
)
def test_an_init_container_with_the_name_of_another_container_of_its_pod_is_refused(blocks, words):
    with pytest.raises(ConfigError, match=words):
        plan(job(**blocks))
    assert plan(job(**blocks), host="127.0.0.1"), "on one machine there are no containers"
