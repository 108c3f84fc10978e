"""The matcher of failure rules, the pause after repeated ends, stalls: what operator and local launcher share."""

import itertools
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.failure import FailurePolicySpec, FailureRule, StallSpec
from rl_core.plan.failure_rules import (
    Budget,
    PodEnd,
    PodFailures,
    add_failure,
    contains,
    fired_rule,
    rule_on,
    rule_on_stall,
    stall_action_is_due,
)

text = st.text(alphabet="ab ", max_size=12)


def rule(**fields):
    return FailureRule.model_validate({"action": "RestartJob", **fields})


@given(text, st.text(alphabet="ab* ", min_size=1, max_size=6))
def test_a_pattern_matches_as_a_shell_pattern_with_stars_around_it_would(message, pattern):
    assert contains(message, pattern) is fnmatchcase(message, f"*{pattern}*")


def test_a_pattern_cannot_hold_up_the_operator():
    assert not contains("a" * 4096, "a*" * 100 + "b")


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"exitCodes": [1, 137]}, True),
        ({"exitCodes": [1]}, False),
        ({"reasons": ["Evicted", "OOMKilled"]}, True),
        ({"reasons": ["Evicted"]}, False),
        ({"podConditions": ["DisruptionTarget"]}, False),
        ({"podConditions": ["Ready"]}, True),
        ({"messagePattern": "out of*memory"}, True),
        ({"messagePattern": "memory*out of"}, False),
        ({"roles": ["rollout"], "exitCodes": [137]}, True),
        ({"roles": ["env"], "exitCodes": [137]}, False),
        ({"exitCodes": [137], "reasons": ["Evicted"]}, False),
    ],
)
def test_all_given_matchers_must_match_and_one_entry_of_a_list_is_enough(fields, matches):
    end = PodEnd(
        role="rollout", code=137, reasons=("OOMKilled",), conditions=("Ready",), message="ran out of GPU memory"
    )
    assert (rule_on(end, [rule(**fields)]).rule == 0) is matches


@pytest.mark.parametrize("role", ["actor", "rollout", "env"])
@pytest.mark.parametrize(
    ("code", "conditions", "init", "action", "counted"),
    [
        (137, ("DisruptionTarget",), False, "restart", False),
        (2, ("DisruptionTarget",), False, "restart", False),
        (2, (), False, "FailJob", True),
        (4, (), False, "FailJob", True),
        (2, (), True, "restart", True),
        (None, (), False, "restart", True),
        (0, (), False, "restart", True),
        (3, (), False, "restart", True),
        (255, (), False, "restart", True),
    ],
)
def test_the_default_rules_are_those_of_the_protocol(role, code, conditions, init, action, counted):
    ruling = rule_on(PodEnd(role=role, code=code, conditions=conditions, init=init), [])
    restart = "RestartJob" if role == "actor" else "RestartPod"
    assert (ruling.action, ruling.counted, ruling.rule) == (restart if action == "restart" else action, counted, None)


def test_the_actor_restarts_as_a_gang_whatever_a_rule_says_of_its_pod():
    end = PodEnd(role="actor", code=1)
    assert rule_on(end, [rule(exitCodes=[1], action="RestartRole")]).action == "RestartJob"
    assert rule_on(end, [rule(exitCodes=[1], action="FailJob")]).action == "FailJob"


@given(st.lists(st.floats(0.0, 2000.0), min_size=1, max_size=40))
def test_five_ends_in_ten_minutes_cost_no_pause_and_pauses_stay_within_bounds(gaps):
    ends, now, times = PodFailures(), 0.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        ends = add_failure(ends, now)
        recent = [at for at in times if now - at <= 600]
        assert 0 <= ends.backoff <= 300 and len(ends.times) <= 6
        if len(recent) > 5:
            assert ends.backoff >= 10
        if len(recent) == 1:
            assert ends.backoff == 0, "a pod that lived for the window starts anew"
        assert ends.retry_at == (now + ends.backoff if ends.backoff else 0.0)


def test_the_pause_doubles_up_to_five_minutes():
    ends, pauses = PodFailures(), []
    for _ in range(13):
        ends = add_failure(ends, 1000.0)
        pauses.append(ends.backoff)
    assert pauses == [0] * 5 + [10, 20, 40, 80, 160, 300, 300, 300]


@given(st.floats(1, 3000), st.lists(st.floats(0.1, 200), min_size=1, max_size=60))
def test_a_silence_is_acted_on_when_it_has_lasted_as_long_once_more(bound, steps):
    now, acts = bound, []
    for step in steps:
        if stall_action_is_due(now, at=now, acted_at=acts[-1] if acts else None):
            acts.append(now)
        now += step
    assert acts[0] == bound
    assert all(later - earlier >= max(earlier, 60.0) * 0.999 for earlier, later in itertools.pairwise(acts))


@pytest.mark.parametrize("action", ["RestartRole", "RestartJob", "Pause", "FailJob"])
def test_shortage_is_no_failure(action):
    assert rule_on_stall(StallSpec(action=action), "WaitingForPods", acts=0)[0] == "Ignore"


@pytest.mark.parametrize(
    ("sink", "acts", "expected"),
    [
        ("WaitingForRollout", 0, ("RestartRole", "rollout")),
        ("WaitingForEnv", 0, ("RestartRole", "env")),
        ("WaitingForEnv", 1, ("RestartJob", "actor")),
        ("WaitingForActor", 0, ("RestartJob", "actor")),
        ("Deadlock", 0, ("RestartJob", "actor")),
        ("never heard of", 0, ("RestartJob", "actor")),
    ],
)
def test_a_role_is_restarted_once_and_then_the_job(sink, acts, expected):
    assert rule_on_stall(StallSpec(), sink, acts=acts) == expected


def test_semantic_rules_fire_at_their_number_of_steps():
    policy = FailurePolicySpec.model_validate({"rewardCollapse": {"below": 0.1, "steps": 3, "action": "Pause"}})
    assert fired_rule(policy, {"rewardCollapse": 2, "klBlowUp": 99}) is None
    trip = fired_rule(policy, {"rewardCollapse": 3})
    assert trip is not None and (trip.rule, trip.action) == ("rewardCollapse", "Pause")


def test_a_mismatch_is_told_with_its_numbers():
    policy = FailurePolicySpec.model_validate({"mismatch": {"kl": 0.01, "action": "FailJob"}})
    numbers = {"mismatch/kl": 0.25, "mismatch/max_ratio": 7.0, "mismatch/share_clipped": None}
    trip = fired_rule(policy, {"mismatch": 3}, numbers)
    assert trip is not None and (trip.reason, trip.action, trip.steps) == ("PolicyMismatch", "FailJob", 3)
    assert trip.message == (
        "mismatch/kl above failurePolicy.mismatch.kl 0.01 (now mismatch/kl 0.25, mismatch/max_ratio 7) for 3 or more steps in a row"
    )
    assert "(now" not in fired_rule(policy, {"mismatch": 3}).message


@pytest.mark.parametrize("streaks", [None, [], "x", {"rewardCollapse": "3"}, {"rewardCollapse": None}])
def test_streaks_that_make_no_sense_trip_nothing(streaks):
    policy = FailurePolicySpec.model_validate({"rewardCollapse": {"below": 0.1, "steps": 1, "action": "Pause"}})
    assert fired_rule(policy, streaks) is None


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_a_pod_that_somebody_deleted_does_not_count(role):
    ruling = rule_on(PodEnd(role=role, code=3, deleted=True), [])
    assert (ruling.action, ruling.counted) == ("RestartJob" if role == "actor" else "RestartPod", False)


def test_steps_beyond_the_last_charge_give_restarts_back_one_by_one():
    budget = Budget().consume(restarts=1, step=7, every=10).consume(restarts=1, stall_actions=1, step=12, every=10)
    assert budget == Budget(restarts=2, stall_actions=1, forgive_at=22)
    assert budget.replenish(21, every=10) == budget
    assert budget.replenish(22, every=10) == Budget(restarts=1, forgive_at=32)
    assert budget.replenish(32, every=10) == Budget() == budget.replenish(999, every=10)


def test_a_run_that_fails_at_the_same_step_again_and_again_gets_nothing_back():
    budget = Budget()
    for _ in range(3):
        budget = budget.replenish(30, every=10).consume(restarts=1, step=30, every=10)
    assert budget == Budget(restarts=3, forgive_at=40)


def test_without_a_number_of_steps_nothing_is_given_back():
    budget = Budget().consume(restarts=1, step=0, every=None)
    assert budget.replenish(10**6, every=None).restarts == 1
