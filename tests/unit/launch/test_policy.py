"""The operator's rules on one machine: what follows the end of a pod and a stall."""

import pytest

from rl_core.api.failure import FailurePolicySpec, StallSpec
from rl_core.launch.policy import Action, RestartPolicy


class Clock:
    """Time that tests move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def policy(max_restarts=3, action="RestartRole", clock=None):
    return RestartPolicy(
        FailurePolicySpec(max_restarts=max_restarts, stall=StallSpec(action=action)), clock=clock or Clock()
    )


@pytest.mark.parametrize("role", ["actor", "rollout", "env"])
@pytest.mark.parametrize("code", [2, 4])
def test_bad_input_and_bad_data_of_any_role_fail_the_run_with_that_code(role, code):
    decision = policy().pod_ended(role, 0, code, "why")
    assert (decision.action, decision.code, decision.reason) == (Action.FAIL, code, "why")


@pytest.mark.parametrize("code", [1, 3, 137, 139, 143])
def test_any_other_end_of_an_actor_pod_restarts_the_gang_until_the_budget_is_used_up(code):
    rules = policy(max_restarts=2)
    assert [rules.pod_ended("actor", i % 2, code, "died").action for i in range(2)] == [Action.RESTART_JOB] * 2
    last = rules.pod_ended("actor", 0, code, "died")
    assert (last.action, last.code) == (Action.FAIL, 3) and "maxRestarts" in last.reason and rules.restarts == 2


def test_the_runners_pod_that_is_done_finishes_the_run_and_another_actors_does_not():
    assert policy().pod_ended("actor", 0, 0, "").action is Action.FINISH
    assert policy().pod_ended("actor", 1, 0, "").action is Action.NONE


@pytest.mark.parametrize("role", ["rollout", "env"])
@pytest.mark.parametrize("code", [0, 3, 137])
def test_a_rollout_or_env_pod_is_replaced_and_costs_the_run_nothing(role, code):
    rules = policy(max_restarts=0)
    decision = rules.pod_ended(role, 1, code, "died")
    assert (decision.action, decision.pause, rules.restarts) == (Action.RESTART_POD, 0.0, 0)


def test_a_pod_that_ends_more_than_five_times_in_ten_minutes_is_backed_off_up_to_five_minutes():
    clock = Clock()
    rules = policy(clock=clock)
    pauses = [rules.pod_ended("env", 0, 3, "died").pause for _ in range(12)]
    assert pauses == [0.0] * 5 + [10, 20, 40, 80, 160, 300, 300]
    assert rules.pod_ended("env", 1, 3, "died").pause == 0.0
    clock.now = 601
    assert rules.pod_ended("env", 0, 3, "died").pause == 0.0


def stall(reason, since=30.0):
    return {"reason": reason, "message": "nobody moves", "since": since}


@pytest.mark.parametrize(
    ("reason", "role"), [("WaitingForRollout", "rollout"), ("WaitingForEnv", "env")], ids=["rollout", "env"]
)
def test_a_stall_restarts_the_role_waited_for_once_and_then_the_job(reason, role):
    rules = policy()
    first = rules.stalled(stall(reason))
    assert (first.action, first.role) == (Action.RESTART_ROLE, role) and "nobody moves" in first.reason
    rules.stalled(None)
    assert rules.stalled(stall(reason)).action is Action.RESTART_JOB


@pytest.mark.parametrize("reason", ["WaitingForActor", "WaitingForWeights", "ChannelFull", "Deadlock"])
def test_a_stall_in_the_gang_restarts_the_job(reason):
    assert policy().stalled(stall(reason)).action is Action.RESTART_JOB


def test_missing_pods_trigger_nothing():
    assert policy(action="FailJob").stalled(stall("WaitingForPods")).action is Action.NONE


@pytest.mark.parametrize(("action", "expected"), [("FailJob", Action.FAIL), ("RestartJob", Action.RESTART_JOB)])
def test_the_written_action_wins(action, expected):
    assert policy(action=action).stalled(stall("WaitingForEnv")).action is expected


def test_one_stall_is_acted_on_once_and_again_only_when_it_lasts_as_long_once_more():
    clock = Clock()
    rules = policy(clock=clock)
    actions = []
    for at in (0, 1, 50, 99, 101):
        clock.now = at
        actions.append(rules.stalled(stall("WaitingForEnv", since=100.0 + at)).action)
    assert actions == [Action.RESTART_ROLE, Action.NONE, Action.NONE, Action.NONE, Action.RESTART_JOB]


def test_the_users_rules_come_before_the_default_ones():
    spec = FailurePolicySpec.model_validate(
        {
            "maxRestarts": 1,
            "rules": [
                {"roles": ["env"], "exitCodes": [2], "action": "RestartPod"},
                {"exitCodes": [9], "action": "RestartJob", "countTowardsLimit": False},
                {"messagePattern": "disk*full", "action": "FailJob"},
            ],
        }
    )
    rules = RestartPolicy(spec, clock=Clock())
    assert rules.pod_ended("env", 0, 2, "").action is Action.RESTART_POD
    assert rules.pod_ended("rollout", 0, 9, "").action is Action.RESTART_JOB and rules.restarts == 0
    failed = rules.pod_ended("rollout", 0, 1, "the disk of x is full")
    assert (failed.action, failed.code) == (Action.FAIL, 3)


@pytest.mark.parametrize(
    ("action", "expected"),
    [("RestartFromCheckpoint", Action.RESTART_JOB), ("Pause", Action.PAUSE), ("FailJob", Action.FAIL)],
)
def test_bad_numbers_are_acted_on_as_written(action, expected):
    spec = FailurePolicySpec.model_validate({"klBlowUp": {"above": 1.0, "steps": 2, "action": action}})
    rules = RestartPolicy(spec, clock=Clock())
    assert rules.reported({"streaks": {"klBlowUp": 1}}).action is Action.NONE
    decision = rules.reported({"streaks": {"klBlowUp": 2}})
    assert decision.action is expected and "klBlowUp" in decision.reason


def test_finished_steps_give_restarts_and_acts_on_stalls_back():
    rules = RestartPolicy(FailurePolicySpec(max_restarts=1, forgive_after_steps=10), clock=Clock())
    rules.reported({"step": 3, "stall": stall("WaitingForEnv")})
    rules.reported({"step": 5})
    assert rules.pod_ended("actor", 0, 3, "died").action is Action.RESTART_JOB and rules.restarts == 1
    rules.reported({"step": 14})
    assert rules.pod_ended("actor", 0, 3, "died").action is Action.FAIL
    rules.reported({"step": 15})
    assert rules.restarts == 0
    assert rules.reported({"step": 15, "stall": stall("WaitingForEnv")}).action is Action.RESTART_ROLE
