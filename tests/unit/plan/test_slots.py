"""Placement of a job's processes: typed, told by the environment, and a written block is honoured or refused by name."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.api.errors import ConfigError, PlacementError, PlacementRangeError
from rl_core.api.job import RLJobSpec
from rl_core.api.settings import PlacementSpec
from rl_core.plan.launch import build_launch_plan
from rl_core.plan.placement import Placement
from rl_core.plan.slots import device_count, idle_accelerators

ROLES = ("actor", "rollout", "env")


def spec(component_placement=None, **blocks):
    written = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"promptsPerStep": 24}} | blocks
    if component_placement is not None:
        written["placement"] = written.get("placement", {}) | {"componentPlacement": component_placement}
    return RLJobSpec.model_validate(written)


GPUS = {
    "actor": {"gpus": 4, "processesPerPod": 4},
    "rollout": {"gpus": 2, "replicas": 2},
}
"""Four accelerators of one actor pod, four of two rollout pods."""


def plan(of_spec, **more):
    return build_launch_plan(of_spec, **({"name": "sums", "uid": "u"} | more))


def workers(found, role):
    return [p for pod in found.pods_of(role) for c in pod.containers for p in c.processes if p.group == role]


def processes(found):
    return [process for pod in found.pods for container in pod.containers for process in container.processes]


def devices(found):
    return {role: [",".join(p.visible_devices) for p in workers(found, role)] for role in ROLES}


# --- the record and the environment ------------------------------------------------------------------------------------------


@given(
    data=st.data(), isolated=st.booleans(), kind=st.sampled_from([None, "GPU", "H200"]),
    own=st.lists(st.integers(0, 15), max_size=4, unique=True), label=st.sampled_from(["cluster", "node", "west"]),
)  # fmt: skip
def test_a_placement_is_read_as_it_was_written(data, isolated, kind, own, label):
    numbers = data.draw(st.tuples(*[st.integers(0, 99)] * 5))
    placement = Placement(
        **dict(zip(["rank", "cluster_node_rank", "placement_node_rank", "local_rank", "local_world_size"], numbers, strict=True)),
        accelerator_type=kind, visible_accelerators=[str(n) for n in own], local_accelerator_rank=own[0] if own else -1,
        local_hardware_ranks=own, node_group_label=label, isolate_accelerator=isolated,
    )  # fmt: skip
    assert Placement.from_env(placement.to_env()) == placement


def test_a_process_that_nobody_placed_is_alone_without_accelerators():
    alone = Placement.from_env({})
    assert (alone.rank, alone.local_world_size, alone.local_accelerator_rank, alone.node_group_label) == (
        0,
        1,
        -1,
        "node",
    )
    assert alone.visible_accelerators == alone.local_hardware_ranks == [] and alone.accelerator_type is None


@pytest.mark.parametrize(
    "name", ["CLUSTER_NODE_RANK", "LOCAL_ACCELERATOR_RANK", "LOCAL_HARDWARE_RANKS", "ISOLATE_ACCELERATOR"]
)
def test_a_variable_that_is_no_number_is_named(name):
    with pytest.raises(ConfigError, match=f"environment variable {name} must hold integers, got 'two'; start"):
        Placement.from_env({name: "two"})


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["cluster", "one machine"])
def test_every_process_of_a_plan_has_its_placement_and_sees_what_it_says(host):
    found = plan(spec(**GPUS, env={"replicas": 2}), host=host)
    for process in processes(found):
        assert process.placement == Placement.from_env(process.env) and process.placement.rank == process.rank
        assert tuple(process.placement.visible_accelerators) == process.visible_devices
        assert process.env.get("CUDA_VISIBLE_DEVICES", "") == ",".join(process.visible_devices)
    actor = workers(found, "actor")[3].placement
    assert (actor.local_rank, actor.local_world_size, actor.local_hardware_ranks, actor.accelerator_type) == (
        3,
        4,
        [3],
        "GPU",
    )
    env = workers(found, "env")[1].placement
    assert (env.placement_node_rank, env.local_accelerator_rank, env.node_group_label) == (1, -1, "node")


def test_identity_variables_of_an_isolated_and_of_a_sharing_process():
    place = {
        "rank": 5, "cluster_node_rank": 1, "placement_node_rank": 1, "local_rank": 2, "local_world_size": 4, "accelerator_type": "GPU",
        "node_group_label": "cluster",
    }  # fmt: skip
    alone = Placement(
        **place,
        visible_accelerators=["6"],
        local_accelerator_rank=6,
        local_hardware_ranks=[6],
        isolate_accelerator=True,
    )
    assert alone.to_env() == {
        "RANK": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1", "CLUSTER_NODE_RANK": "1",
        "NODE_LOCAL_RANK": "2", "NODE_LOCAL_WORLD_SIZE": "4", "LOCAL_ACCELERATOR_RANK": "6", "LOCAL_HARDWARE_RANKS": "6",
        "VISIBLE_DEVICES": "6", "CUDA_VISIBLE_DEVICES": "6", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "ACCELERATOR_TYPE": "GPU", "ISOLATE_ACCELERATOR": "1",
        "NODE_GROUP_LABEL": "cluster",
    }  # fmt: skip
    sharing = Placement(
        **place,
        visible_accelerators=list("0123"),
        local_accelerator_rank=0,
        local_hardware_ranks=[3],
        isolate_accelerator=False,
    )
    assert (sharing.to_env()["LOCAL_RANK"], sharing.to_env()["LOCAL_WORLD_SIZE"]) == ("3", "4")


# --- a written block that the pods can honour ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        {"actor": "0-3", "rollout": "4-7"},
        {"actor": "0-3:0-3", "rollout": "4-7:0-1"},
        {"actor": "0-1,2-3", "rollout": " 4 - 7 , "},
    ],
)
@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["cluster", "one machine"])
def test_a_block_that_says_what_the_pods_are_gives_the_same_plan(written, host):
    assert plan(spec(written, **GPUS), host=host) == plan(spec(**GPUS), host=host)


def test_the_written_order_decides_which_accelerators_of_one_machine_a_role_has():
    swapped = {"rollout": "0-3", "actor": "4-7"}
    found = plan(spec(swapped, **GPUS), host="127.0.0.1")
    assert devices(found) == {"actor": ["4", "5", "6", "7"], "rollout": ["0,1", "2,3"], "env": [""]}
    assert plan(spec(swapped, **GPUS)) == plan(spec(**GPUS)), "each pod of a cluster numbers its own"


def test_on_cpu_the_resources_are_process_slots():
    blocks = {"actor": {"processesPerPod": 2}, "rollout": {"replicas": 3}}
    assert plan(spec({"actor": "0-1", "rollout": "2-4"}, **blocks)) == plan(spec(**blocks))
    assert plan(spec({"actor": "0-1", "rollout": "2-4", "env": 5}, **blocks)) == plan(spec(**blocks))


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.integers(1, 3), per_pod=st.integers(1, 3), rollouts=st.integers(1, 4), share=st.integers(1, 3),
    envs=st.integers(0, 2), first=st.permutations(ROLES),
)  # fmt: skip
def test_roles_one_after_the_other_in_any_order_are_honoured(replicas, per_pod, rollouts, share, envs, first):
    blocks = {
        "actor": {"replicas": replicas, "processesPerPod": per_pod, "gpus": per_pod},
        "rollout": {"replicas": rollouts, "gpus": share},
        "env": {"replicas": max(envs, 1), "gpus": int(envs > 0)},
        "algorithm": {"promptsPerStep": replicas * per_pod},
    }
    sizes = {"actor": replicas * per_pod, "rollout": rollouts * share, "env": envs}
    written, start = {}, 0
    for role in first:
        if sizes[role]:
            written[role] = f"{start}-{start + sizes[role] - 1}"
            start += sizes[role]
    found = devices(plan(spec(written, **blocks), host="127.0.0.1"))
    for role, ranks in written.items():
        low, high = map(int, ranks.split("-"))
        assert [int(d) for text in found[role] for d in text.split(",")] == list(range(low, high + 1))


def test_pods_that_scaling_adds_leave_the_accelerators_of_others_as_they_are():
    blocks = GPUS | {"env": {"gpus": 1}}
    small, large = (plan(spec(**blocks), host="127.0.0.1", replicas={"rollout": n}) for n in (2, 4))
    assert devices(small) == {"actor": ["0", "1", "2", "3"], "rollout": ["4,5", "6,7"], "env": ["8"]}
    assert devices(large) == {"actor": ["0", "1", "2", "3"], "rollout": ["4,5", "6,7", "9,10", "11,12"], "env": ["8"]}
    assert [pod.to_json() for pod in small.pods_of("env")] == [pod.to_json() for pod in large.pods_of("env")]


# --- what cannot be honoured -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"actor": "0-3", "rollout": "4-8"}, r"component rollout: part '4-8': rank 8 is out of range \[0, 7\]"),
        ({"actor": "0-3"}, "'rollout' must be one of actor; add it"),
        ({"actor,rollout": "0-3"}, "mode must be colocated for these sets, got disaggregated"),
        ({"actor": "0-3", "rollout": "2-5"}, "disjoint"),
        ({"actor": "0-2", "rollout": "4-7"}, r"component actor must be what its pods are \(4 processes with 1 accelerators each: actor.replicas 1, gpus 4, 4 processes per pod\), got 3 processes on 3 from 0 to 2; write 0-3, or change the fields of actor"),
        ({"actor": "0-3", "rollout": "4-5"}, r"component rollout must be .*got 1 processes on 2 from 4 to 5; write 4-7"),
        ({"actor": "0-3:0-1", "rollout": "4-7"}, "component actor: 4 resources make 4 processes of 1, got 2 processes"),
        ({"actor": "0-1,4-5", "rollout": "6-7"}, "component actor: resource ranks must be contiguous"),
        ({"actor": "0-3", "rollout": "4-7", "env": "0"}, r"actor.gpus 4, rollout.gpus 2, env.gpus 0; give each of them gpus, or leave env out"),
    ],
)  # fmt: skip
def test_a_block_that_the_pods_cannot_honour_is_refused_with_the_way_out(written, words):
    with pytest.raises(PlacementError, match=rf"^placement.componentPlacement.*{words}"):
        plan(spec(written, **GPUS))


def test_env_on_accelerators_of_others_is_refused():
    with pytest.raises(
        PlacementError, match=r"must give env resources of its own.*write ranks that no other group has"
    ):
        plan(spec({"actor": "0-3", "rollout": "4-7", "env": "0"}, **GPUS, env={"gpus": 1}))


@settings(max_examples=60, deadline=None)
@given(replicas=st.integers(1, 3), gpus=st.integers(0, 8), engine=st.sampled_from(["hf", "sglang"]))
def test_each_accelerator_of_an_actor_has_a_process_unless_the_job_says_how_many_there_are(replicas, gpus, engine):
    blocks = {"actor": {"replicas": replicas, "gpus": gpus}, "rollout": {"engine": engine, "gpus": 1}}
    written = spec(**blocks, algorithm={"promptsPerStep": replicas * max(gpus, 1)})
    assert written.actor.world_size == replicas * max(gpus, 1)
    found = devices(plan(written))["actor"]
    assert found == [str(number) for number in range(gpus)] * replicas if gpus else [""] * replicas
    assert not list(idle_accelerators(written))


JUDGE = {"name": "judge", "worker": "rl_core.groups.judge:Judge"}


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"actor": {"gpus": 8, "processesPerPod": 1}}, "actor.processesPerPod must be actor.gpus 8, as a training process uses one accelerator, got 1; remove processesPerPod"),
        ({"actor": {"gpus": 4, "processesPerPod": 4}}, None),
        ({"actor": {"processesPerPod": 4}}, None),
        ({"rollout": {"gpus": 2}}, "rollout.gpus must be 1 with engine hf, which generates on one accelerator, got 2; choose engine sglang, or raise replicas instead"),
        ({"rollout": {"gpus": 2, "engine": "sglang"}}, None),
        ({"groups": [JUDGE | {"gpus": 2}]}, "group judge: gpus must be processesPerPod 1, as a process of rl_core.groups.judge:Judge uses one accelerator, got 2; raise processesPerPod or replicas, or lower gpus"),
        ({"groups": [JUDGE | {"gpus": 2, "processesPerPod": 2}]}, None),
        ({"groups": [JUDGE | {"gpus": 2, "worker": "own:Judge"}]}, None),
    ],
)  # fmt: skip
def test_accelerators_that_no_process_would_use_are_named_with_the_way_out(blocks, words):
    assert list(idle_accelerators(spec(**blocks))) == ([words] if words else [])


def test_throughput_is_per_device_also_where_an_engine_has_several():
    assert device_count(spec(**{**GPUS, "rollout": GPUS["rollout"] | {"engine": "sglang"}})) == 4 + 2 * 2


def test_range_errors_keep_their_type():
    with pytest.raises(PlacementRangeError):
        plan(spec({"actor": "0-3", "rollout": "4-99999999999"}, **GPUS))


def test_accelerators_that_a_process_would_not_use_are_refused_where_a_block_numbers_them():
    with pytest.raises(
        PlacementError, match="2 processes with 2 accelerators each: actor.replicas 1, gpus 4, 2 processes per pod"
    ):
        plan(spec({"actor": "0-3", "rollout": "4-5"}, actor={"gpus": 4, "processesPerPod": 2}, rollout={"gpus": 2}))


HYBRID = {
    "placement": {"mode": "hybrid"},
    "actor": {"gpus": 2, "processesPerPod": 2},
    "rollout": {"gpus": 2, "replicas": 3},
}


def test_a_hybrid_block_gives_the_first_rollouts_the_devices_of_the_actor_and_further_ones_their_own():
    written = {"actor": "0-1", "rollout": "0-5:0-2"}
    assert plan(spec(written, **HYBRID), host="127.0.0.1") == plan(spec(**HYBRID), host="127.0.0.1")
    with pytest.raises(
        PlacementError, match=r"must begin actor and rollout at one resource with mode hybrid.*write both from 4"
    ):
        plan(spec({"actor": "4-5", "rollout": "0-5:0-2"}, **HYBRID))
    with pytest.raises(PlacementError, match=r"got 6 processes on 6 from 0 to 5; write 0-5:0-2, or change"):
        plan(spec({"actor": "0-1", "rollout": "0-5"}, **HYBRID))


JUDGES = {"groups": [{"name": "judge", "worker": "mine:Judge", "replicas": 2, "gpus": 1}]}


def test_a_declared_group_is_placed_by_its_name():
    written = {"judge": "0-1", "rollout": "2-5:0-1", "actor": "6-9"}
    found = plan(spec(written, **GPUS, **JUDGES), host="127.0.0.1")
    assert [",".join(process.visible_devices) for process in workers(found, "judge")] == ["0", "1"]
    assert devices(found)["actor"] == ["6", "7", "8", "9"] and devices(found)["rollout"] == ["2,3", "4,5"]
    in_turn = plan(spec(**GPUS, **JUDGES), host="127.0.0.1")
    assert [",".join(process.visible_devices) for process in workers(in_turn, "judge")] == ["8", "9"]
    with pytest.raises(
        PlacementError, match=r"component judge must be what its pods are .*write 8-9, or change the fields of judge"
    ):
        plan(spec({"actor": "0-3", "rollout": "4-7:0-1", "judge": "8-9:0"}, **GPUS, **JUDGES))


@pytest.mark.parametrize("key", ["judges", "actor,judges", "actor,,rollout", ""])
def test_a_placement_names_groups_of_the_job(key):
    words = (
        f'placement.componentPlacement must name groups of the job, got ["{key}"]; correct them or declare the groups'
    )
    with pytest.raises(ValidationError, match=re.escape(words)):
        spec({key: "0"}, **JUDGES)


def test_a_group_whose_name_contains_a_roles_name_does_not_number_it():
    groups = [{"name": "rollout-judge", "worker": "mine:Judge"}]
    rollout = {"autoscale": {"max": 4}}
    assert spec({"rollout-judge": "0"}, groups=groups, rollout=rollout)
    with pytest.raises(
        ValidationError, match="rollout.autoscale needs rollouts that placement neither pairs nor numbers"
    ):
        spec({"rollout-judge": "0", " rollout ": "1"}, groups=groups, rollout=rollout)


@pytest.mark.parametrize(
    "text", ["0", "0-3", " 0 - 3 : 0 - 1 ", "all", "all:0-1", "0-1,2,3:4-5", "0-1,", "0,,1", "2-5:0-1,8,9-10:3-6"]
)
def test_the_schema_takes_every_map_of_the_grammar(text):
    assert PlacementSpec(component_placement={"actor": text}).component_placement == {"actor": text}


@pytest.mark.parametrize("text", ["", "a", "0..3", "0:all", "-1", "0:", "0:1:2", "\u0663", True, None, 1.5, ["0-1"]])
def test_the_schema_refuses_what_is_no_map(text):
    with pytest.raises(ValidationError):
        PlacementSpec(component_placement={"actor": text})


def test_a_refused_map_says_what_a_map_is():
    words = "must be ranks[:processes], joined by commas, such as 0-3 or 4-7:0-1, got 0..3; write it so, in quotes"
    with pytest.raises(ValidationError, match=re.escape(words)):
        PlacementSpec(component_placement={"actor": "0..3"})
