"""How a run that is asked to end hears of it: which wait ends, which work is finished first."""

import pytest

from rl_core.api.errors import ConfigError
from rl_core.runner.status import Phase
from rl_core.runner.stopping import StopController, StopKind, Stopped
from rl_core.workers.result import CallCancelled


class Result:
    """Stands in for a call on the actor group: `during` happens while the loop waits; a cancelled call raises."""

    def __init__(self, during=lambda: None):
        self.cancelled, self._during = False, during

    def cancel(self):
        self.cancelled = True

    def wait(self, timeout=None):
        self._during()
        if self.cancelled:
            raise CallCancelled("actor.recv_batch was cancelled")
        return [1]


class Run:
    def __init__(self, phase):
        self.phase, self.told = phase, []
        self.stops = StopController(lambda: self.phase, cancel_training=lambda: self.told.append("cancel_training"))


@pytest.mark.parametrize("kind", list(StopKind))
@pytest.mark.parametrize("phase", [Phase.GENERATING, Phase.VALIDATING])
def test_a_stop_ends_the_wait_for_groups_and_leaves_the_step(phase, kind):
    run = Run(phase)
    with pytest.raises(Stopped, match="enough"):
        run.stops.wait(Result(during=lambda: run.stops.stop("enough", kind)))
    assert run.stops.kind is kind and run.told == []


@pytest.mark.parametrize(
    ("phase", "told"), [(Phase.TRAINING, ["cancel_training"]), (Phase.SYNCING, []), (Phase.CHECKPOINTING, [])]
)
def test_a_stop_cancels_a_training_and_lets_the_rest_finish(phase, told):
    run = Run(phase)
    assert run.stops.wait(Result(during=lambda: run.stops.stop("enough"))) == [1]
    run.stops.check()
    assert run.told == told and run.stops.asked
    with pytest.raises(Stopped):
        run.stops.leave_if_asked()


@pytest.mark.parametrize("phase", list(Phase))
def test_a_failure_ends_every_wait_with_its_own_error(phase):
    run, error = Run(phase), ConfigError("a rollout diverged")
    with pytest.raises(ConfigError, match="a rollout diverged"):
        run.stops.wait(Result(during=lambda: run.stops.fail(error)))
    with pytest.raises(ConfigError, match="a rollout diverged"):
        run.stops.wait(Result())


def test_a_stop_asked_for_before_the_wait_is_not_waited_past():
    run = Run(Phase.GENERATING)
    run.stops.stop("enough")
    with pytest.raises(Stopped):
        run.stops.wait(Result(during=lambda: pytest.fail("it waited")))


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ([("finish", "a"), ("interrupt", "b")], "interrupt"),
        ([("suspend", "a"), ("interrupt", "b")], "suspend"),
        ([("rollback", "a"), ("interrupt", "b"), ("suspend", "c")], "rollback"),
        ([("interrupt", "a"), ("interrupt", "b")], "interrupt"),
    ],
)
def test_of_several_stops_the_one_that_saves_less_counts_and_its_first_reason(asked, kind):
    stops = Run(Phase.STARTING).stops
    for wanted, reason in asked:
        stops.stop(reason, StopKind(wanted))
    assert stops.kind == kind and stops.reason == next(reason for wanted, reason in asked if wanted == kind)
