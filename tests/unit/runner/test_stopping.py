"""How a run that is asked to end hears of it: which wait ends, which work is finished first."""

import threading

import pytest

from rl_core.api.errors import ConfigError
from rl_core.runner import stopping
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
        self.phase = phase
        self.stops = StopController(lambda: self.phase)


@pytest.mark.parametrize("kind", list(StopKind))
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.GENERATING, Phase.VALIDATING, Phase.DEGRADED])
def test_a_stop_ends_the_wait_and_leaves_the_step(phase, kind):
    run = Run(phase)
    with pytest.raises(Stopped, match="enough"):
        run.stops.wait(Result(during=lambda: run.stops.stop("enough", kind)))
    assert run.stops.kind is kind


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.SYNCING, Phase.CHECKPOINTING])
def test_a_stop_lets_work_finish_that_cannot_be_left(phase):
    run = Run(phase)
    assert run.stops.wait(Result(during=lambda: run.stops.stop("enough"))) == [1]
    run.stops.check()
    with pytest.raises(Stopped):
        run.stops.raise_if_stop_requested()


def test_a_stop_cancels_the_work_that_can_be_cancelled_and_only_while_it_runs():
    run, cancelled = Run(Phase.TRAINING), []
    with run.stops.cancelling(lambda: cancelled.append("training")):
        run.stops.stop("enough")
        run.stops.stop("at once", StopKind.INTERRUPT)
    run.stops.stop("roll back", StopKind.ROLLBACK)
    assert cancelled == ["training", "training"]


def test_a_stop_that_comes_at_the_same_time_as_a_rollback_does_not_replace_it(monkeypatch):
    """The loop requests the rollback while the thread of SIGTERM compares its own kind with the request before."""
    run = Run(Phase.SYNCING)
    rollback = threading.Thread(target=run.stops.stop, args=("klBlowUp has fired", StopKind.ROLLBACK))

    class Kinds(tuple):
        def index(self, kind):
            if (
                kind is StopKind.FINISH and not rollback.ident
            ):  # the request before was read, the new one is not stored yet
                rollback.start()
                rollback.join(0.5)
            return super().index(kind)

    run.stops.stop("enough")
    monkeypatch.setattr(stopping, "KINDS", Kinds(stopping.KINDS))
    run.stops.stop("SIGTERM", StopKind.INTERRUPT)
    rollback.join(30)
    assert run.stops.kind is StopKind.ROLLBACK and run.stops.reason == "klBlowUp has fired"


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
