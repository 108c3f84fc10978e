"""What is saved, when, and what a storage that refuses means."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_core.api.errors import ConfigError, InfrastructureError, StorageFull, WorkerLost
from rl_core.api.job import RLJobSpec
from rl_core.runner.changes import AppliedSpec
from rl_core.runner.device_schedule import DisaggregatedSchedule
from rl_core.runner.progress import RunProgress
from rl_core.runner.roster import Roster
from rl_core.runner.saving import Due, Saving
from rl_core.runner.status import Phase, StatusBoard
from rl_core.runner.stopping import StopController, StopKind
from rl_core.workers.result import WorkerErrors


class Checkpoints:
    """Stands in for runner.Checkpoints: refuses so many saves; `meanwhile(number)` happens at each refusal."""

    def __init__(self, refusals=0, meanwhile=lambda number: None):
        self.passing, self.pending, self.written, self.lost, self.written_at = [], [], False, [], 0.0
        self.states = []
        self.refusals, self.meanwhile, self.saved, self.last_step, self.asked = refusals, meanwhile, [], None, False

    def save(self, step, actor, state, **facts):
        if self.refusals:
            self.refusals -= 1
            self.meanwhile(self.refusals)
            raise StorageFull("checkpoint of step 3 could not be written: No space left on device")
        self.passing.append(facts["passing"])
        self.states.append(state)
        if facts["in_background"]:
            self.pending.append(step)
            return None
        self.saved.append(step)
        return "checkpoints/step-00000003"

    def settle(self, *, wait=False):
        if self.lost:
            raise self.lost.pop()
        if not self.pending or not (wait or self.written):
            return None
        self.last_step = self.pending.pop()
        self.saved.append(self.last_step)
        return f"checkpoints/step-{self.last_step:08d}"

    @property
    def writing(self):
        return bool(self.pending) and not self.written

    def set_aside_after(self, step):
        self.left_after = step
        return "checkpoints/step-00000001"

    def pop_request(self):
        asked, self.asked = self.asked, False
        return asked

    def describe(self, path):
        return {"path": path}


class Run:
    """Real parts around a storage; the clock moves a second at each look."""

    def __init__(self, refusals=0, *, patience=60.0, **spec):
        job = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"steps": 10}}
        job["runtime"] = {"deadlines": {"degraded": patience}}
        self.applied = AppliedSpec(RLJobSpec.model_validate(job | spec))
        cluster = SimpleNamespace(members=lambda *role, **also: [])
        presence = Roster(self.applied.spec, cluster, job="j", patient=False)
        self.board = StatusBoard(self.applied.spec, cluster, presence, epoch=0)
        self.stops = StopController(lambda: self.board.phase)
        self.checkpoints, self.exports, self.now = Checkpoints(refusals), [], 0.0
        self.progress = RunProgress(step=3, version=3)
        self.saving = Saving(
            self.applied,
            self.progress,
            self.checkpoints,
            board=self.board,
            stops=self.stops,
            output=Path("out"),
            schedule=DisaggregatedSchedule(),
            groups=[self],
            weights_digest=lambda: "d",
            room_pause=0.0,
            clock=self.look,
        )

    def look(self):
        self.now += 1.0
        return self.now

    def export_hf(self, path):
        self.exports.append(path)
        return self

    def wait(self, timeout=None):
        return []


def test_a_checkpoint_is_due_by_period_on_request_and_at_the_end():
    run = Run(checkpoint={"everySteps": 5})
    assert run.saving.due() is None
    run.checkpoints.asked = True
    assert run.saving.due() is Due.LASTING and run.saving.due() is None
    run.progress.step = 5
    assert run.saving.due() is Due.LASTING
    run.progress.step = 10
    assert run.saving.due() is Due.LASTING


def test_between_periods_a_checkpoint_is_due_by_time_while_saving_is_cheap_and_no_rule_counts():
    run = Run(checkpoint={"everySteps": 100, "everySeconds": 60})
    run.now += 50.0
    assert run.saving.due() is None
    run.now += 10.0
    run.board.set(streaks={"klBlowUp": 1})
    assert run.saving.due() is None, "weights that a rule may roll back"
    run.board.set(streaks={"klBlowUp": 0})
    assert run.saving.due() is Due.PASSING
    run.saving.try_save(Due.PASSING)  # takes a second or two by this clock, less than 2 % of a minute or more
    assert run.checkpoints.passing == [True] and run.saving.due() is None
    run.now += 60.0
    assert run.saving.due() is Due.PASSING
    run.checkpoints.meanwhile, run.checkpoints.refusals = (lambda number: setattr(run, "now", run.now + 5.0)), 1
    run.saving.try_save(Due.PASSING)
    run.now += 1000.0
    assert run.saving.due() is None, "saving costs more than 2 %"


def test_without_a_period_nothing_is_saved_by_time_either():
    run = Run(checkpoint={"everySteps": None, "everySeconds": 60})
    run.now += 1000.0
    assert run.saving.due() is None
    run.progress.step = 10
    assert run.saving.due() is Due.LASTING, "the end"


@pytest.mark.parametrize("later", [StopKind.INTERRUPT, StopKind.SUSPEND, None])
def test_a_run_that_is_rolled_back_saves_nothing_whatever_else_is_asked(later):
    run = Run()
    run.stops.stop("failurePolicy.klBlowUp has fired", StopKind.ROLLBACK)
    if later is not None:
        run.stops.stop("later", later)
    run.checkpoints.asked = True
    run.progress.step = 10
    assert not run.saving.due()
    run.saving.finish(resumable=True)
    assert run.checkpoints.saved == [] and run.exports == []


def test_a_run_whose_numbers_went_wrong_goes_back_to_before_they_did():
    run = Run(
        failurePolicy={
            "nonFiniteLoss": {"steps": 2, "action": "Pause"},
            "rewardCollapse": {"below": 0.1, "action": "Pause"},
        }
    )
    run.board.set(streaks={"nonFiniteLoss": 2, "rewardCollapse": 3, "klBlowUp": 0})
    run.stops.stop("failurePolicy.nonFiniteLoss has fired", StopKind.ROLLBACK)
    run.saving.finish(resumable=True)
    assert run.checkpoints.left_after == 1 and run.board.fact("checkpoint")["path"] == "checkpoints/step-00000001"


def test_a_run_that_is_to_be_resumed_saves_a_checkpoint_and_no_model():
    run = Run()
    run.stops.stop("SIGTERM", StopKind.INTERRUPT)
    run.saving.finish(resumable=True)
    assert run.checkpoints.saved == [3] and run.exports == []


def test_a_step_that_is_saved_already_is_not_saved_again():
    run = Run()
    run.checkpoints.last_step = 3
    run.saving.save()
    assert run.checkpoints.saved == []


def test_an_asynchronous_checkpoint_is_told_of_when_it_is_written_and_waited_for_at_the_end():
    run = Run(checkpoint={"everySteps": 3, "asynchronous": True})
    run.saving.try_save()
    run.saving.settle()
    assert run.checkpoints.saved == [] and "path" not in run.board.fact("checkpoint")
    run.checkpoints.written = True
    run.saving.settle()
    assert run.checkpoints.saved == [3] and run.board.fact("checkpoint")["path"] == "checkpoints/step-00000003"
    run.checkpoints.written, run.progress.step = False, 6
    run.saving.try_save()
    run.progress.step = 9
    run.saving.try_save()
    assert run.checkpoints.saved == [3, 6], "one is written at a time"
    run.stops.stop("SIGTERM", StopKind.INTERRUPT)
    run.saving.finish(resumable=True)
    assert run.checkpoints.saved == [3, 6, 9], "that of the last step, not a second one"
    run.progress.step = 10
    run.saving.try_save()
    assert run.checkpoints.saved[-1] == 10, "the last step's is waited for"


def test_a_save_is_due_only_when_the_last_one_is_written_and_the_loop_never_waits_for_it():
    run = Run(checkpoint={"everySteps": 3, "asynchronous": True})
    assert run.saving.due() is Due.LASTING
    run.saving.try_save()
    for step in (4, 5, 6, 7):
        run.progress.step = step
        run.checkpoints.asked = True
        run.saving.settle()
        assert run.saving.due() is None, "the checkpoint of step 3 is being written"
    run.checkpoints.written, run.checkpoints.asked = True, False
    run.saving.settle()
    assert run.saving.due() is Due.LASTING, "that of step 6 is owed"
    assert run.saving.due() is None
    run.checkpoints.written = False
    run.saving.try_save()
    run.progress.step = 10
    assert run.saving.due() is Due.LASTING, "the last step is saved, whatever is being written"


def test_the_share_of_saving_counts_the_whole_write_in_the_background():
    """A copy of a second whose write takes 100 s is not cheap: by time it is made at most every 5,000 s."""
    run = Run(checkpoint={"everySteps": 100, "everySeconds": 60, "asynchronous": True})
    run.now += 60.0
    assert run.saving.due() is Due.PASSING
    run.saving.try_save(Due.PASSING)
    run.checkpoints.written, run.checkpoints.written_at = True, run.now + 100.0
    run.saving.settle()
    run.now += 1000.0
    assert run.saving.due() is None


def test_objects_of_a_program_are_saved_and_restored_by_name():
    run, saved = Run(), {}
    counter = SimpleNamespace(state_dict=lambda: {"count": 7}, load_state_dict=saved.update)
    run.saving.register("counter", counter)
    for name in ("counter", "step", "history"):
        with pytest.raises(ValueError, match="must be unused"):
            run.saving.register(name, counter)
    run.saving.save()
    assert run.checkpoints.states[-1]["counter"] == {"count": 7}
    checkpoint = SimpleNamespace(path="checkpoints/step-00000003")
    run.checkpoints.find = lambda resume, first_epoch: checkpoint
    run.checkpoints.restore = lambda found, load: run.checkpoints.states[-1]
    run.saving.restore()
    assert saved == {"count": 7}
    del run.checkpoints.states[-1]["counter"]
    with pytest.raises(ConfigError, match="must hold the state of counter"):
        run.saving.restore()


def test_an_asynchronous_checkpoint_that_failed_is_told_at_the_next_step_and_a_lost_rank_ends_the_run():
    run = Run(checkpoint={"everySteps": 3, "asynchronous": True})
    run.saving.try_save()
    run.checkpoints.lost = [WorkerLost("actor:1 is gone"), StorageFull("No space left on device")]
    run.saving.settle()
    status = run.board.snapshot()
    assert status["failures"] == {"runner/checkpoint": 1} and "No space left" in status["checkpoint"]["error"]
    with pytest.raises(WorkerLost):
        run.saving.settle()


def test_training_goes_on_when_a_periodic_checkpoint_is_refused():
    run = Run(refusals=1)
    run.saving.try_save()
    status = run.board.snapshot()
    assert status["failures"] == {"runner/checkpoint": 1} and "No space left" in status["checkpoint"]["error"]


def test_a_finished_run_waits_for_room_and_saves_what_it_came_to():
    run, phases = Run(refusals=3), []
    run.checkpoints.meanwhile = lambda number: phases.append(run.board.phase)
    run.saving.finish(resumable=False)
    assert run.checkpoints.saved == [3] and run.exports == ["out/model"] and phases == [Phase.CHECKPOINTING] * 3


def test_a_full_storage_ends_the_run_as_no_restart_helps_and_the_model_is_tried_all_the_same():
    run = Run(refusals=1000, patience=3.0)
    with pytest.raises(ConfigError, match="No space left on device; then begin the run again, which has no checkpoint"):
        run.saving.finish(resumable=False)
    assert run.checkpoints.saved == [] and run.exports == ["out/model"]


def test_a_run_with_a_checkpoint_is_told_the_step_from_which_it_goes_on():
    run = Run(patience=3.0)
    run.checkpoints.last_step = run.progress.step

    def export_hf(path):
        raise StorageFull("the exported model could not be written: No space left on device")

    run.export_hf = export_hf
    with pytest.raises(
        ConfigError,
        match="exported model could not be written: No space left on device; then resume the run from step 3",
    ):
        run.saving.finish(resumable=False)


def test_the_status_names_what_waits_for_disk_space_until_it_is_written():
    run, seen = Run(refusals=3), []

    def look(left):
        seen.append([(wait.on, wait.what) for wait in run.board._waits([])])

    run.checkpoints.meanwhile = look
    run.saving.finish(resumable=False)
    assert seen == [[], [("disk space", "the last checkpoint")], [("disk space", "the last checkpoint")]]
    assert run.board._waits([]) == []


@pytest.mark.parametrize(
    ("kind", "error"),
    [(StopKind.FINISH, ConfigError), (StopKind.INTERRUPT, StorageFull), (StopKind.SUSPEND, StorageFull)],
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nobody_who_asked_for_the_end_is_kept_waiting_for_room(kind, error, when):
    run = Run(refusals=1000, patience=1e9)
    if when == "before":
        run.stops.stop("enough", kind)
    else:
        run.checkpoints.meanwhile = lambda left: left > 990 or run.stops.stop("enough", kind)
    with pytest.raises(error, match="No space left on device"), run.board.during(Phase.CHECKPOINTING):
        run.saving.finish(resumable=False)
    assert run.checkpoints.refusals >= 989 and run.exports == ["out/model"]


def test_a_run_that_fails_while_it_waits_for_room_says_why():
    run = Run(refusals=1000, patience=1e9)
    run.checkpoints.meanwhile = lambda left: left > 995 or run.stops.fail(ConfigError("a rollout diverged"))
    with pytest.raises(ConfigError, match="a rollout diverged"):
        run.saving.finish(resumable=False)


def test_an_export_of_several_ranks_waits_for_room_too():
    run, told = Run(), InfrastructureError("actor rank 0 could not export the model")
    refusals = [WorkerErrors("actor.export_hf failed on 2 of 2 ranks", [StorageFull("no room"), told])] * 2

    def wait(timeout=None):
        if refusals:
            raise refusals.pop()
        return []

    run.wait = wait
    run.saving.finish(resumable=False)
    assert run.checkpoints.saved == [3] and run.exports == ["out/model"] * 3


def test_a_trained_step_whose_ledger_finds_no_room_is_not_left_as_if_it_were_unfinished():
    """Left by Stopped, the weights would be saved without it, and its groups trained once more."""
    run, refusals = Run(), []

    def append():
        refusals.append(1)
        if len(refusals) == 2:
            run.stops.stop("enough")
        raise StorageFull("the ledger could not be written")

    with pytest.raises(ConfigError, match="ledger could not be written"):
        run.saving.with_retries(append)
    assert len(refusals) == 2
