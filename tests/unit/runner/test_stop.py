"""How a run that is asked to end leaves: what is told to the actors in which phase, and what is saved afterwards."""

from contextlib import contextmanager

import pytest

from rl_core.api.job import RLJobSpec
from rl_core.runner.base import RESUMABLE, Runner, Stopped
from rl_core.runner.status import Phase
from rl_core.runner.steering import Steering, StopKind
from rl_core.runner.streaks import Streaks


class Board:
    """Stands in for the status board: a phase, and facts that are told."""

    def __init__(self):
        self.phase, self.told = Phase.STARTING, {}

    @contextmanager
    def during(self, phase):
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def set(self, **facts):
        self.told |= facts


class Actor:
    """Stands in for the actor group: notes calls."""

    def __init__(self):
        self.called = []

    def within(self, seconds):
        return self

    def cancel_training(self):
        self.called.append("cancel_training")


class Loop(Runner):
    """A runner without processes."""

    ready = True

    def __init__(self, **policy):
        algorithm = {"steps": 10}
        job = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": algorithm, "failurePolicy": policy}
        self.spec = RLJobSpec.model_validate(job)
        self.steering, self.board, self.actor = Steering(self.spec), Board(), Actor()
        self.streaks = Streaks(self.spec.failure_policy)
        self.step, self.saved, self._failure = 3, [], None

    def _interrupt(self):
        self.actor.called.append("wait ended")

    def save_checkpoint(self):
        self.saved.append(self.step)


@pytest.mark.parametrize(
    ("phase", "told", "left"),
    [
        (Phase.GENERATING, ["wait ended"], True),
        (Phase.TRAINING, ["cancel_training"], False),
        (Phase.SYNCING, [], False),
        (Phase.CHECKPOINTING, [], False),
    ],
)
@pytest.mark.parametrize("kind", list(StopKind))
def test_a_stop_ends_the_wait_for_groups_cancels_a_training_and_lets_the_rest_finish(phase, told, left, kind):
    loop = Loop()
    with loop.board.during(phase):
        loop.check()
        loop.stop("enough", kind)
        assert loop.actor.called == told
        if left:
            with pytest.raises(Stopped, match="enough"):
                loop.check()
        else:
            loop.check()


RULES = {
    "nonFiniteLoss": ({"steps": 2}, {"train/loss": float("nan")}),
    "rewardCollapse": ({"below": 0.1, "steps": 2}, {"reward/mean": 0.0}),
    "klBlowUp": ({"above": 1.0, "steps": 2}, {"train/approx_kl": 5.0}),
}


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("later", ["SIGTERM", "suspend", "nothing"])
def test_a_rule_that_rolls_back_lets_nothing_be_saved_whatever_else_is_asked(rule, later):
    fields, wrong = RULES[rule]
    loop = Loop(**{rule: {**fields, "action": "RestartFromCheckpoint"}})
    loop.watch_numbers(wrong)
    loop.steering.ask_checkpoint()
    assert not loop.stopping and loop.checkpoint_due()
    loop.watch_numbers(wrong)
    assert loop.board.told["streaks"][rule] == 2, "the operator reads it too"
    loop.steering.ask_checkpoint()
    if later != "nothing":
        loop.stop(later, StopKind.INTERRUPT if later == "SIGTERM" else StopKind.SUSPEND)
    assert not loop.checkpoint_due() and f"failurePolicy.{rule} has fired" in loop.stop_reason
    loop.step = loop.spec.algorithm.steps  # also after the last step: exit code 0 would end the job with these weights
    assert loop.ended_early() == "Interrupted"
    loop.finish(resumable=loop.ended_early() in RESUMABLE)
    assert loop.saved == []


@pytest.mark.parametrize("action", ["Pause", "FailJob"])
def test_a_rule_that_ends_the_job_otherwise_saves_for_whoever_looks_at_it(action):
    loop = Loop(klBlowUp={"above": 1.0, "action": action})
    loop.watch_numbers({"train/approx_kl": 5.0})
    assert not loop.stopping
    loop.stop("asked by POST /finish (failed)", StopKind.INTERRUPT)
    assert loop.ended_early() == "Interrupted"
    loop.finish(resumable=True)
    assert loop.saved == [3]
