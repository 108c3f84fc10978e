"""How a run that is asked to end leaves: what is told to the actors in which phase, and what is saved afterwards."""

import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_core.api.errors import ConfigError, InfrastructureError, StorageFull
from rl_core.api.job import RLJobSpec
from rl_core.runner import base
from rl_core.runner.base import RESUMABLE, Runner, Stopped
from rl_core.runner.reasoning import ReasoningRunner
from rl_core.runner.status import Phase
from rl_core.runner.steering import Steering, StopKind
from rl_core.runner.streaks import Streaks
from rl_core.workers.result import WorkerErrors


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

    def fact(self, name):
        return self.told.get(name, {})

    def count_failure(self, role, kind):
        self.told["failures"] = (role, kind)


class Actor:
    """Stands in for the actor group: notes calls."""

    def __init__(self):
        self.called = []

    def within(self, seconds):
        return self

    def cancel_training(self):
        self.called.append("cancel_training")

    def export_hf(self, path):
        self.called.append("export")
        return self

    def wait(self, timeout=None):
        return []


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
        self.sync, self.output = SimpleNamespace(confirm=lambda: None), Path("out")
        self._guard, self._pending = threading.Lock(), None

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


class Full(Loop):
    """A runner whose storage refuses `refusals` saves; `meanwhile(refusal)` happens at each."""

    def __init__(self, refusals, meanwhile=lambda number: None, *, patience=60.0):
        super().__init__()
        deadlines = self.spec.runtime.deadlines.model_copy(update={"degraded": patience})
        runtime = self.spec.runtime.model_copy(update={"deadlines": deadlines})
        self.spec = self.spec.model_copy(update={"runtime": runtime})
        self.refusals, self.meanwhile = refusals, meanwhile

    def save_checkpoint(self):
        if self.refusals:
            self.refusals -= 1
            self.meanwhile(self.refusals)
            raise StorageFull("checkpoint of step 3 could not be written: No space left on device")
        super().save_checkpoint()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(base, "ROOM_PAUSE", 0.0)


def test_a_finished_run_waits_for_room_and_saves_what_it_came_to():
    loop, phases = Full(refusals=3), []
    loop.steering.asked = SimpleNamespace(wait=lambda seconds: phases.append(loop.board.phase))
    loop.finish(resumable=False)
    assert loop.saved == [3] and loop.actor.called == ["export"] and phases == [Phase.CHECKPOINTING] * 3
    assert "No space left" in loop.board.told["checkpoint"]["error"], "told while it waited"


def test_a_full_storage_ends_the_run_as_no_restart_helps_and_the_model_is_tried_all_the_same():
    loop = Full(refusals=1000, patience=1e-9)
    with pytest.raises(ConfigError, match="No space left on device; then resume the run"):
        loop.finish(resumable=False)
    assert loop.saved == [] and loop.actor.called == ["export"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [(StopKind.FINISH, ConfigError), (StopKind.INTERRUPT, StorageFull), (StopKind.SUSPEND, StorageFull)],
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nobody_who_asked_for_the_end_is_kept_waiting_for_room(kind, error, when):
    loop = Full(refusals=1000, patience=1e9)
    if when == "before":
        loop.stop("enough", kind)
    else:
        loop.meanwhile = lambda left: left > 990 or loop.stop("enough", kind)
    with pytest.raises(error, match="No space left on device"), loop.board.during(Phase.CHECKPOINTING):
        loop.finish(resumable=False)
    assert loop.refusals >= 989 and loop.actor.called == ["export"]


def test_a_run_that_fails_while_it_waits_for_room_says_why():
    loop = Full(refusals=1000, patience=1e9)
    loop.meanwhile = lambda left: setattr(loop, "_failure", ConfigError("a rollout diverged") if left < 995 else None)
    with pytest.raises(ConfigError, match="a rollout diverged"):
        loop.finish(resumable=False)


def test_an_export_of_several_ranks_waits_for_room_too():
    loop, told = Full(refusals=0), InfrastructureError("actor rank 0 could not export the model")
    refusals = [WorkerErrors("actor.export_hf failed on 2 of 2 ranks", [StorageFull("no room"), told])] * 2

    def wait(timeout=None):
        if refusals:
            raise refusals.pop()
        return []

    loop.actor.wait = wait
    loop.finish(resumable=False)
    assert loop.saved == [3] and loop.actor.called == ["export"] * 3


def test_a_trained_step_whose_ledger_finds_no_room_is_not_left_as_if_it_were_unfinished():
    """Left by Stopped, the weights would be saved without it, and its groups trained once more."""
    loop, refusals = Loop(), []

    def append():
        refusals.append(1)
        if len(refusals) == 2:
            loop.stop("enough")
        raise StorageFull("the ledger could not be written")

    with loop.board.during(Phase.STARTING), pytest.raises(ConfigError, match="ledger could not be written"):
        loop.write_with_patience(append)
    assert len(refusals) == 2


class Program(ReasoningRunner, Loop):
    """The GRPO program from the step on that the loop has; notes the phase in which each part runs."""

    def __init__(self):
        Loop.__init__(self)
        self.phases, self.validation, self.ledger_file, self.version, self.epoch = {}, None, None, 3, 0
        self.accuracy, self.job = [], self.spec
        self.trackers = SimpleNamespace(log_config=lambda config: None)
        taken = SimpleNamespace(step=self.step + 1, version=3, admitted={})
        self.intake = SimpleNamespace(close=lambda: self.note("close", taken), acknowledge=lambda step: [])

    def note(self, part, value=None):
        self.phases[part] = self.board.phase
        return value

    def init_workers(self):
        self.note("init")

    def run_step(self):
        self.note("between")
        self.acknowledge()
        self.step = 10

    def take_changes(self):
        self.note("changes")

    def finish(self, *, resumable):
        self.note("finish")


def test_nothing_starts_between_two_phases_and_a_trained_step_is_not_left_half_written():
    program = Program()
    program.run()
    assert program.phases == {
        "init": Phase.STARTING,
        "between": Phase.GENERATING,
        "close": Phase.TRAINING,
        "changes": Phase.GENERATING,
        "finish": Phase.CHECKPOINTING,
    }
