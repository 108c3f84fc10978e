"""The stall detector reports which member waits for which."""

import pytest

from rl_core.messages.members import WaitCause
from rl_core.runner.stall import StallDetector, Wait, explain, find_cycle


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def wait(who, on, what="a record", seconds=5.0, cause=None):
    return Wait(who=who, on=on, what=what, since_seconds=seconds, cause=cause)


def test_progress_of_any_kind_is_not_a_stall():
    clock = FakeClock()
    detector = StallDetector(10, clock=clock)
    for count in range(5):
        clock.now += 9
        assert detector.report(count, []) is None
    clock.now += 10
    stall = detector.report(4, [wait("runner", "rollout")])
    assert stall["reason"] == "WaitingForRollout"
    assert "no progress for 10 s (limit 10 s): runner waits for rollout (a record, 5 s)" in stall["message"]


def test_the_default_bound_is_five_median_steps_but_at_least_five_minutes():
    detector = StallDetector(None, clock=FakeClock())
    assert detector.limit == 300
    for seconds in (100, 100, 1000):
        detector.step_took(seconds)
    assert detector.limit == 500


@pytest.mark.parametrize(
    ("edges", "reason"),
    [
        ([wait("runner", "rollout"), wait("rollout:0", "env:0")], "WaitingForEnv"),
        ([wait("actor:0", "rollout:1")], "WaitingForRollout"),
        ([wait("rollout:0", "actor:0", "version 3", cause=WaitCause.WEIGHTS)], "WaitingForWeights"),
        ([wait("rollout:0", "trajectories", cause=WaitCause.CHANNEL_FULL)], "ChannelFull"),
        ([wait("actor:0", "rollout:0"), wait("rollout:0", "actor:0")], "Deadlock"),
        ([wait("rollout:0", "env:0", "the full weight of a record")], "WaitingForEnv"),
        ([], "WaitingForActor"),
    ],
    ids=["env behind rollout", "rollout", "weights", "full", "cycle", "words of a text", "nobody tells"],
)
def test_the_sink_of_the_waits_is_told(edges, reason):
    assert explain(edges, [])[0] == reason


def test_a_program_that_declares_no_wait_is_named_with_its_line():
    clock = FakeClock()
    detector = StallDetector(10, clock=clock, program_place=lambda: "own.py:3 in step")
    detector.report(1, [])
    clock.now = 10
    assert detector.report(1, [])["message"].endswith(": nobody declares a wait; the program runs own.py:3 in step")
    edges = [wait("actor:0", "rollout")]
    assert explain(edges, [], program_place="own.py:3 in step")[1].endswith("; the program runs own.py:3 in step")
    assert "own.py" not in detector.report(1, [*edges, wait("runner", "rollout")])["message"]


def test_idle_rollouts_do_not_hide_one_that_hangs():
    edges = [wait("actor:0", "rollout"), wait("rollout:0", "channel:prompts", "prompts"), wait("runner", "rollout")]
    reason, told = explain(edges, [], ["rollout:0", "rollout:1"])
    assert reason == "WaitingForRollout" and told.endswith("; rollout:1 declares none")
    behind = [*edges, wait("rollout:1", "env", "environment step")]
    assert explain(behind, [], ["rollout:0", "rollout:1"])[0] == "WaitingForEnv"
    nothing_came = [*edges, wait("rollout:1", "channel:prompts", "prompts")]
    assert explain(nothing_came, [], ["rollout:0", "rollout:1"])[0] == "WaitingForActor"


def test_a_pull_of_weights_that_hangs_is_the_reason_while_the_actor_waits_for_trajectories():
    pulls = wait("rollout:0", "actor", "weights", cause=WaitCause.WEIGHTS)
    edges = [wait("actor:0", "rollout", "trajectories"), pulls, wait("runner", "rollout")]
    assert explain(edges, [])[0] == "WaitingForWeights"
    assert explain([pulls, wait("runner", "actor", "training")], [])[0] == "WaitingForActor", "it hangs in training"


def test_missing_pods_come_first():
    assert explain([wait("runner", "rollout")], ["rollout:1"]) == ("WaitingForPods", "missing rollout:1")


def test_a_cycle_is_listed_in_order():
    assert find_cycle({"a": "b", "b": "c", "c": "b"}) == ["b", "c"]
    assert find_cycle({"a": "b", "b": "c"}) == []
