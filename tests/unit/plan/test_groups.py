"""Groups as data: what each group of a job is, and what the keys of the groups permit."""

import importlib
from dataclasses import replace

import pytest

from rl_core.api.backends import ENGINES, TRAINERS
from rl_core.api.errors import ConfigError
from rl_core.api.failure import StallSpec
from rl_core.api.identity import Identity
from rl_core.api.job import RLJobSpec
from rl_core.api.roles import RoleSpec
from rl_core.launch.scaling import follow
from rl_core.plan.capacity import ModelFacts, estimate
from rl_core.plan.failure_rules import PodEnd, rule_on, rule_on_stall
from rl_core.plan.groups import (
    ACTOR,
    BUILT_IN,
    ENV,
    KINDS_VARIABLE,
    ROLLOUT,
    ChannelUse,
    Group,
    GroupKind,
    Lifecycle,
    WeightSource,
    groups_of,
    kinds_of_environment,
)  # fmt: skip
from rl_core.plan.keys import key_files, write_key_folder
from rl_core.plan.launch import build_launch_plan
from rl_core.transports.curve import KeyRing

FACTS = ModelFacts(
    parameters=1_000_000, layer=50_000, hidden=64, layers=4, vocab=1_000, heads=4, kv_heads=4, head_dim=16, head_norms=False, inner=256,
    max_length=512,
)  # fmt: skip


def spec(**blocks):
    return RLJobSpec.model_validate({"model": {"path": "m"}, "data": {"train": "d.jsonl"}} | blocks)


def test_a_job_has_actors_rollouts_and_envs_in_this_order():
    groups = groups_of(
        spec(actor={"replicas": 2, "processesPerPod": 4}, rollout={"replicas": 3}, algorithm={"promptsPerStep": 32})
    )
    assert list(groups) == list(BUILT_IN) == [ACTOR, ROLLOUT, ENV] == ["actor", "rollout", "env"]
    assert {name: group.world_size for name, group in groups.items()} == {ACTOR: 8, ROLLOUT: 3, ENV: 1}
    assert {name: group.lifecycle for name, group in groups.items()} == {
        ACTOR: Lifecycle.GANG, ROLLOUT: Lifecycle.ELASTIC, ENV: Lifecycle.ELASTIC,
    }  # fmt: skip
    assert [name for name, group in groups.items() if group.pulls_weights] == [ROLLOUT]
    assert groups[ROLLOUT].weights is WeightSource.PULLS


@pytest.mark.parametrize("backend", TRAINERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_worker_classes_are_those_of_backend_and_engine(backend, engine):
    groups = groups_of(spec(actor={"backend": backend}, rollout={"engine": engine}))
    assert (groups[ACTOR].worker, groups[ROLLOUT].worker) == (TRAINERS[backend], ENGINES[engine])


def test_the_worker_class_of_envs_exists():
    module, _, name = groups_of(spec())[ENV].worker.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_choices_of_the_schema_are_those_of_the_tables():
    properties = RLJobSpec.model_json_schema()["$defs"]
    assert properties["ActorSpec"]["properties"]["backend"]["enum"] == list(TRAINERS)
    assert properties["RolloutSpec"]["properties"]["engine"]["enum"] == list(ENGINES)


def test_env_keys_use_no_channel_and_rollout_keys_only_put():
    assert not BUILT_IN[ENV].channels
    assert {use for uses in BUILT_IN[ROLLOUT].channels.values() for use in uses} == {ChannelUse.PUT}


def test_a_declared_group_that_pulls_weights_may_be_called_by_the_actor_that_sends_them():
    group = {"name": "scorer", "worker": "own:Scorer", "callers": ["env"], "weights": "pulls"}
    scorer = groups_of(spec(groups=[group]))["scorer"]
    assert scorer.pulls_weights and scorer.holds_model and scorer.callers == {ACTOR, ENV}
    assert not groups_of(spec(groups=[group | {"weights": "none"}]))["scorer"].holds_model


JUDGE = "judge"


@pytest.fixture
def four():
    """Return a spec and its groups with a fourth one, as a later program may add it."""
    job = spec(env={"replicas": 2})
    kind = GroupKind(
        name=JUDGE,
        weights=WeightSource.PULLS,
        callers=frozenset({ROLLOUT}),
        channels={"verdicts": frozenset({ChannelUse.PUT})},
    )
    pods = RoleSpec(gpus=2, threads=3, env={"COLOUR": "blue"})
    judge = Group.of_kind(kind, worker="my.module:Judge", spec=pods, replicas=3, processes_per_pod=2)
    return job, groups_of(job) | {JUDGE: judge}


class TestAFourthGroup:
    @pytest.mark.parametrize("host", [None, "127.0.0.1"])
    def test_has_pods_and_processes_with_devices_and_ports(self, four, host):
        job, groups = four
        plan = build_launch_plan(job, name="sums", uid="u", groups=groups, host=host, replicas={JUDGE: 4})
        pods = plan.pods_of(JUDGE)
        assert [pod.name for pod in pods] == [f"sums-judge-{index}" for index in range(4)]
        assert all(pod.claim.count == 2 and pod.containers[0].image_role == JUDGE for pod in pods)
        processes = [process for pod in pods for process in pod.containers[0].processes]
        assert [process.name for process in processes] == [f"judge-{rank}" for rank in range(8)]
        assert all(process.restart and process.env["COLOUR"] == "blue" for process in processes)
        assert {process.env["OMP_NUM_THREADS"] for process in processes} == {"3"}
        assert {process.env["WORLD_SIZE"] for process in processes} == {"8"}
        ports = [process.env.get("RLJOB_RPC_PORT") for process in processes]
        assert ports == ([None] * 8 if host else ["7705", "7715"] * 4), "its own in the pod"
        devices = [",".join(process.visible_devices) for process in processes]
        assert devices == ([str(number) for number in range(8)] if host else ["0", "1"] * 4)
        assert [Identity.from_env(process.env).name for process in processes] == [f"judge:{rank}" for rank in range(8)]

    def test_leaves_the_pods_of_the_others_as_they_are(self, four):
        job, groups = four
        before = build_launch_plan(job, name="sums", uid="u")
        after = build_launch_plan(job, name="sums", uid="u", groups=groups)
        told = [process.env for pod in after.pods for c in pod.containers for process in c.processes]
        assert all(set(kinds_of_environment(env)) == set(groups) for env in told)
        assert kinds_of_environment(told[0])[JUDGE].callers == {ROLLOUT} and kinds_of_environment({}) == BUILT_IN
        others = [_untold(pod) for pod in after.pods if pod.role != JUDGE]
        assert others == list(before.pods)

    def test_that_is_a_gang_meets_at_its_own_pod_0(self, four):
        job, groups = four
        gang = replace(groups[JUDGE], lifecycle=Lifecycle.GANG)
        plan = build_launch_plan(job, name="sums", uid="u", groups=groups | {JUDGE: gang})
        (env,) = {process.env["MASTER_ADDR"] for pod in plan.pods_of(JUDGE) for process in pod.containers[0].processes}
        assert env == "sums-judge-0.sums.default.svc"
        assert "RLJOB_CONTROL_PORT" not in plan.pods_of(JUDGE)[0].containers[0].processes[0].env
        local = build_launch_plan(
            job, name="sums", uid="u", groups=groups | {JUDGE: replace(gang, replicas=1)}, host="127.0.0.1"
        )
        assert len(local.pods_of(JUDGE)) == 1
        several = {name: replace(group, replicas=2) for name, group in ((ACTOR, groups[ACTOR]), (JUDGE, gang))}
        with pytest.raises(ConfigError, match="one gang of several processes.*got actor, judge"):
            build_launch_plan(job, name="sums", uid="u", groups=groups | several, host="127.0.0.1")
        with pytest.raises(ConfigError, match="override rollout and env with"):
            build_launch_plan(job, name="sums", uid="u", groups=groups | {JUDGE: gang}, replicas={JUDGE: 2})

    def test_has_keys_that_open_what_its_entry_says(self, four, tmp_path):
        _, groups = four
        write_key_folder(tmp_path, key_files(bytes(32), "u", groups))
        ring = KeyRing(tmp_path, JUDGE, groups)
        assert set(ring.publics) == {"runner", "channel", "actor", "rollout", "env", "judge", "supervisor"}
        assert ring.callers[JUDGE] == {"runner", ROLLOUT} and JUDGE in ring.callers["weights"]
        assert JUDGE in ring.callers["hub"] and JUDGE not in ring.callers[ENV]
        assert key_files(bytes(32), "u").items() < key_files(bytes(32), "u", groups).items()

    def test_is_in_the_estimate_of_memory(self, four):
        job, groups = four
        report = estimate(job, FACTS, groups=groups)
        assert report.processes[JUDGE] == 2 and JUDGE not in report.on_cpu
        rows = {row.phase: row.parts for row in report.rows if row.role == JUDGE}
        assert rows["idle"]["weights"] == rows["sync"]["weights"] == FACTS.parameters * 4, (
            "it pulls the weights, float32"
        )
        without = {JUDGE: replace(groups[JUDGE], weights=WeightSource.NONE)}
        assert estimate(job, FACTS, groups=groups | without).peak(JUDGE) == report.peak(ENV)

    @pytest.mark.parametrize(
        ("lifecycle", "action"), [(Lifecycle.ELASTIC, "RestartPod"), (Lifecycle.GANG, "RestartJob")]
    )
    def test_fails_as_its_lifecycle_says(self, four, lifecycle, action):
        _, groups = four
        groups[JUDGE] = replace(groups[JUDGE], lifecycle=lifecycle)
        assert rule_on(PodEnd(role=JUDGE, code=1), [], groups).action == action
        asked = "RestartRole" if lifecycle is Lifecycle.ELASTIC else "RestartJob"
        assert rule_on_stall(StallSpec(), "WaitingForJudge", acts=0, groups=groups)[0] == asked

    def test_is_scaled_by_a_local_run(self, four):
        _, groups = four
        status = {
            "members": [
                {"role": JUDGE, "state": "serving", "index": index, "pod": f"j-judge-{index}"} for index in (0, 1)
            ],
            "roles": [{"name": JUDGE, "desired": 1}],
        }
        assert follow(status, {"j-judge-0": True, "j-judge-1": True}, groups, draining=()).drain == ("j-judge-1",)


def _untold(pod):
    """Return a planned pod whose processes are not told of further groups."""
    (container,) = pod.containers
    processes = [
        replace(process, env={name: value for name, value in process.env.items() if name != KINDS_VARIABLE})
        for process in container.processes
    ]
    return replace(pod, containers=(replace(container, processes=tuple(processes)),))
