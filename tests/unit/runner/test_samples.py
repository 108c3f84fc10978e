"""The runner joins what the ranks kept of a step and writes it, and is never held up or failed by it."""

import threading

import numpy as np
import pytest

from rl_core.api.errors import WorkerLost
from rl_core.api.settings import SamplesSpec
from rl_core.messages.samples import StepSamples
from rl_core.observability.trackers import Trackers
from rl_core.runner.samples import MOST_WAITING, Samples
from rl_core.runner.step_state import FilteredGroup
from rl_core.samples.lines import FILTERED, TRAIN, VALIDATION, array_of
from rl_core.samples.printing import render_sample
from rl_core.samples.reader import SampleReader
from tests.unit.samples.kept import kept


class Answer:
    """What the ranks answer, or how they fail."""

    def __init__(self, *parts, error=None, after=None):
        self.parts, self.error, self.after = parts, error, after

    def wait(self, timeout=None):
        if self.after is not None:
            self.after.wait()
        if self.error is not None:
            raise self.error
        return list(self.parts)


class Table:
    """A tracker that remembers its tables."""

    def __init__(self):
        self.tables = []

    def log_config(self, config): ...

    def log(self, step, metrics): ...

    def finish(self, status): ...

    def log_samples(self, split, step, rows):
        self.tables.append((split, step, rows))


def make(tmp_path, trackers=None, **spec):
    return Samples(
        SamplesSpec(**spec),
        tmp_path / "samples",
        epoch=2,
        decode=chr,
        trackers=trackers or Trackers([]),
        wall=lambda: 1.0,
    )


def read(tmp_path, split=TRAIN):
    reader = SampleReader(tmp_path)
    reader.refresh()
    return [reader.read(found) for found in reader.every(split)]


def test_log_probs_of_the_rank_that_trained_a_row_meet_the_sample_of_the_rank_that_received_it(tmp_path):
    log_probs = np.array([np.nan, np.nan, -1, -2, -3], np.float32)
    first = StepSamples(samples=(kept("0-1", 1, row=1),), log_probs=())
    second = StepSamples(samples=(kept("0-1", 0, row=0),), log_probs=((1, log_probs),))
    table = Table()
    trackers = Trackers([table])
    samples = make(tmp_path, trackers)
    samples.add_step(5, 4, lambda: Answer(first, None, second))
    samples.add_validation(5, 5, [kept("val1-0", 0)])
    samples.close()
    zero, one = read(tmp_path)
    assert (zero["index"], one["index"], one["step"], one["version"], one["epoch"]) == (0, 1, 5, 4, 2)
    assert zero["trainer"] is None and np.array_equal(array_of(one, "trainer"), log_probs, equal_nan=True)
    assert one["pieces"] == [chr(number) for number in range(5)]
    assert read(tmp_path, VALIDATION)[0]["version"] == 5
    trackers.log(5, {})
    assert [(split, step, len(rows)) for split, step, rows in table.tables] == [(TRAIN, 5, 2), (VALIDATION, 5, 1)]
    assert table.tables[0][2][0].response == "answer"


def test_failed_samples_are_kept_with_their_error_and_as_many_as_groups(tmp_path):
    samples = make(tmp_path, groups=2)
    failed = [kept(f"0-{n}", reward=float("nan"), reason="error", error=f"ValueError {n}") for n in range(3)]
    samples.add_failed(1, 0, failed)
    samples.close()
    assert [(sample["error"], sample["reward"]) for sample in read(tmp_path)] == [
        ("ValueError 0", None),
        ("ValueError 1", None),
    ]
    assert "error: ValueError 0" in render_sample(read(tmp_path)[0])


def test_all_samples_of_a_filtered_group_are_kept_with_what_its_rewards_were(tmp_path):
    table = Table()
    trackers = Trackers([table])
    samples = make(tmp_path, trackers)
    groups = [FilteredGroup(group_id=f"0-{n}", token=f"0-{n}#1", step=3, version=2, why=f"why {n}") for n in (0, 1)]
    answer = [kept("0-1", 0, reward=1.0), kept("0-0", 0, reward=0.5), kept("0-1", 1, reward=1.0)]
    samples.add_filtered(groups, lambda: Answer(answer, ()))
    samples.add_filtered([], lambda: pytest.fail("there is nothing to ask for"))
    samples.close()
    found = read(tmp_path)
    assert [
        (sample["group"], sample["index"], sample["reward"], sample["step"], sample["version"]) for sample in found
    ] == [
        ("0-0", 0, 0.5, 3, 2),
        ("0-1", 0, 1.0, 3, 2),
        ("0-1", 1, 1.0, 3, 2),
    ]
    assert [(sample["filtered"], sample["reason"]) for sample in found[1:]] == [("why 1", "stop")] * 2
    assert "filtered, not trained: why 0" in render_sample(found[0])
    reader = SampleReader(tmp_path)
    reader.refresh()
    assert [one.entry.reason for one in reader.every(TRAIN)] == [FILTERED] * 3
    for index in (tmp_path / "samples").glob("*.index"):
        index.unlink()
    again = SampleReader(tmp_path)
    again.refresh()
    assert again.every(TRAIN) == reader.every(TRAIN)
    trackers.log(3, {})
    assert table.tables == []


def test_an_actor_that_is_lost_costs_the_filtered_groups_that_it_was_asked_for_only(tmp_path):
    samples = make(tmp_path)
    groups = [FilteredGroup(group_id=f"0-{n}", token=f"0-{n}#1", step=n, version=0, why="equal") for n in (0, 1, 2)]

    def lost():
        raise WorkerLost("actor:0 is lost")

    samples.add_filtered(groups[:1], lost)
    samples.add_filtered(groups[1:2], lambda: Answer(error=WorkerLost("actor:0 is lost")))
    samples.add_filtered(groups[2:], lambda: Answer([kept("0-2", 0)]))
    samples.close()
    assert [sample["group"] for sample in read(tmp_path)] == ["0-2"]


def test_a_rank_that_is_lost_costs_the_samples_of_its_step_only(tmp_path):
    samples = make(tmp_path)
    samples.add_step(1, 0, lambda: Answer(error=WorkerLost("actor:0 is lost")))
    samples.add_step(2, 1, lambda: Answer(StepSamples(samples=(kept(row=0),), log_probs=())))
    samples.close()
    assert [sample["step"] for sample in read(tmp_path)] == [2]


def test_slow_storage_leaves_steps_out_and_holds_nobody_up(tmp_path):
    samples, stuck = make(tmp_path), threading.Event()
    for step in range(1, MOST_WAITING + 3):
        samples.add_step(step, step, lambda: Answer(StepSamples(samples=(kept(row=0),), log_probs=()), after=stuck))
    stuck.set()
    samples.close()
    assert [sample["step"] for sample in read(tmp_path)] == list(range(1, MOST_WAITING + 1))


def test_a_job_that_keeps_none_asks_nobody_and_makes_no_folder(tmp_path):
    samples = make(tmp_path, groups=0)
    samples.add_step(1, 0, lambda: 1 / 0)
    samples.add_validation(0, 0, [])
    samples.close()
    assert not (tmp_path / "samples").exists()


def test_a_message_of_a_program_that_sends_token_ids_has_the_text_of_its_tokens(tmp_path):
    table = Table()
    trackers = Trackers([table])
    samples = make(tmp_path, trackers)
    messages = (("user", "", 2), ("assistant", "said", 3))
    empty = (("user", "2+2=", 4), ("assistant", "", 1))
    answer = StepSamples(samples=(kept(messages=messages, row=0), kept(messages=empty, row=1)), log_probs=())
    samples.add_step(1, 0, lambda: Answer(answer))
    samples.close()
    sample, ended_at_once = read(tmp_path)
    assert ended_at_once["messages"][1]["content"] == ""
    assert [message["content"] for message in sample["messages"]] == [chr(0) + chr(1), "said"]
    trackers.log(1, {})
    assert table.tables[0][2][0].prompt == chr(0) + chr(1)
