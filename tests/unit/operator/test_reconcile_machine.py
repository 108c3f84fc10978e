"""A job among dying pods, dying nodes, quotas, user edits and operators killed between any two effects, against the invariants."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_core.api.status import RLJobStatus
from rljob_operator.model import Plan
from rljob_operator.reconcile import reconcile
from rljob_operator.reconcile.conditions import REASONS, TYPES
from tests.unit.operator.simulator import CONFIG, World, make_job, role_of, uid_of

TERMINAL = ("Succeeded", "Failed")


class JobMachine(RuleBasedStateMachine):
    """Every plan is checked before it is carried out; every status after."""

    @initialize(
        actors=st.integers(1, 3),
        rollouts=st.integers(1, 3),
        steps=st.integers(3, 25),
        restarts=st.integers(0, 4),
        suspended=st.booleans(),
        deletion=st.sampled_from(["KeepAll", "KeepActor", "DeletePods"]),
    )
    def start(self, actors: int, rollouts: int, steps: int, restarts: int, suspended: bool, deletion: str) -> None:
        self.world = World(
            make_job(
                actor={"replicas": actors},
                rollout={"replicas": rollouts, "minReplicas": 1, "maxReplicas": 6},
                env={"replicas": 1},
                algorithm={"steps": steps, "promptsPerStep": 12},
                failurePolicy={"maxRestarts": restarts},
                deletionPolicy={"onSuccess": deletion, "onFailure": deletion},
                suspend=suspended,
            )
        )
        self.before: dict[str, Any] = {}

    # --- what the operator does --------------------------------------------------------------------------------------

    def checked(self) -> Plan:
        """Make a plan and check it."""
        world, plan = self.world, self.world.plan()
        made = [pod["metadata"]["name"] for pod in plan.create]
        gone = [deletion.name for deletion in plan.delete]
        assert len(set(made)) == len(made) and len(set(gone)) == len(gone)
        assert not set(made) & (set(gone) | set(world.pods)), "made while there"
        by_name = {name: uid_of(pod) for name, pod in world.pods.items()}
        assert all(by_name.get(d.name) == d.uid for d in plan.delete if d.kind == "Pod"), "deleted without its uid"
        status = plan.status if plan.status is not None else world.status
        if int(status["epoch"]) > int(world.status.get("epoch", 0)) > 0 or (
            status["phase"] in TERMINAL and world.phase not in TERMINAL
        ):
            assert not plan.delete and not plan.create, "an intent is written alone"
        if status["phase"] in (*TERMINAL, "Suspended", "Suspending"):
            assert not plan.create
        if plan.status is not None:
            RLJobStatus.model_validate(plan.status)
            assert [c["type"] for c in plan.status["conditions"]] == list(TYPES)
            assert all(c["reason"] in REASONS[c["type"]] for c in plan.status["conditions"])
        return plan

    @rule()
    def operator_acts(self) -> None:
        self.world.apply(self.checked())

    @rule(effects=st.integers(0, 6))
    def operator_is_killed_after(self, effects: int) -> None:
        self.world.apply(self.checked(), at_most=effects)

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0, 40.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(rounds=st.integers(1, 15))
    def both_go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.apply(self.checked())
            self.world.tick()
            self.remember()

    # --- what happens to it ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 2, 3, 4, 137, 143]))
    def pod_ends(self, data: st.DataObject, code: int) -> None:
        self.world.end_pod(data.draw(st.sampled_from(sorted(self.world.pods))), code)

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data(), disruption=st.sampled_from(["", "PreemptionByScheduler", "EvictionByEvictionAPI"]))
    def pod_is_deleted(self, data: st.DataObject, disruption: str) -> None:
        self.world.delete_pod(data.draw(st.sampled_from(sorted(self.world.pods))), disruption=disruption)

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data())
    def pod_vanishes(self, data: st.DataObject) -> None:
        del self.world.pods[data.draw(st.sampled_from(sorted(self.world.pods)))]

    @rule(node=st.sampled_from(["node-0", "node-1", "node-2"]))
    def node_dies(self, node: str) -> None:
        self.world.kill_node(node)

    @rule()
    def nodes_come_back(self) -> None:
        self.world.dead_nodes.clear()

    @rule(suspend=st.booleans())
    def user_suspends_or_resumes(self, suspend: bool) -> None:
        self.world.edit(suspend=suspend)

    @rule(replicas=st.integers(1, 5))
    def user_scales(self, replicas: int) -> None:
        self.world.edit(rollout={"replicas": replicas, "minReplicas": 1})

    @rule(quota=st.one_of(st.none(), st.integers(0, 4)))
    def quota_changes(self, quota: int | None) -> None:
        self.world.quota = quota

    @rule(broken=st.booleans())
    def registry_changes(self, broken: bool) -> None:
        self.world.no_image = broken

    @rule(
        reason=st.sampled_from(["WaitingForRollout", "WaitingForEnv", "WaitingForActor", "WaitingForPods", "Deadlock"])
    )
    def runner_stalls(self, reason: str) -> None:
        if self.world.runner:
            self.world.stall = {"reason": reason, "message": "no progress", "since": 400.0, "waits": []}

    @rule()
    def runner_goes_on(self) -> None:
        self.world.stall = None

    @rule(silent=st.booleans())
    def network_changes(self, silent: bool) -> None:
        self.world.silent_since = self.world.now if silent else None

    # --- what always holds -------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Compare the status with the one before."""
        status, before = self.world.status, self.before
        if before:
            assert status["epoch"] >= before["epoch"]
            if (
                status["epoch"] == before["epoch"] and before["phase"] != "Starting"
            ):  # the first report has the step that was resumed
                assert status.get("step", 0) >= before.get("step", 0)
                assert status.get("policyVersion", 0) >= before.get("policyVersion", 0)
            assert status["totalRestarts"] >= max(before["totalRestarts"], status["restarts"])
            assert status["restarts"] >= before["restarts"] or status["step"] >= before["forgiveAtStep"]
            if before["phase"] in TERMINAL:
                volatile = ("roles", "rollout", "columns")
                assert {k: v for k, v in status.items() if k not in volatile} == {
                    k: v for k, v in before.items() if k not in volatile
                }
        self.before = status

    @invariant()
    def history_makes_sense(self) -> None:
        if not hasattr(self, "world"):
            return
        self.remember()
        if self.world.phase == "Suspended":
            assert not self.world.pods

    @invariant()
    def a_status_is_written_once(self) -> None:
        """With its own status written and nothing else changed, reconcile has nothing to write after the intents are through."""
        if not hasattr(self, "world"):
            return
        world, job = self.world, dict(self.world.job)
        observed = world.observed()
        for _ in range(4):
            plan = reconcile(job, observed, world.now, config=CONFIG, known=world.parsed)
            if plan.status is None:
                return
            job = {**job, "status": plan.status}
        raise AssertionError("the status never settles")

    def teardown(self) -> None:
        """When nothing goes wrong any more, the job comes to rest: ended, suspended, or with every wanted pod there."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.dead_nodes.clear()
        world.quota, world.no_image, world.stall, world.silent_since = None, False, None, None
        for _ in range(900):
            plan = self.checked()
            world.apply(plan)
            self.remember()
            if world.phase in (*TERMINAL, "Suspended") and plan.status is None and not plan.delete:
                break
            world.tick(0.0 if plan.requeue_after == 0 else 1.0)
        assert world.phase in (*TERMINAL, "Suspended"), world.status
        if world.phase == "Suspended":
            assert world.job["spec"]["suspend"] and not world.pods
        names = [role_of(pod) for pod in world.pods.values()]
        if world.phase in TERMINAL and world.job["spec"]["deletionPolicy"]["onSuccess"] == "DeletePods":
            assert not names


JobMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("RLJOB_EXAMPLES", "50")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
test_a_job_among_faults_keeps_every_invariant = JobMachine.TestCase
