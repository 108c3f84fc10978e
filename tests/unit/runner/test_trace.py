"""The trace of a run: spans of a sample follow each other without a gap, whatever the clocks of the hosts say."""

import concurrent.futures
import json
import threading
from itertools import pairwise

from rl_core.api.records import GroupTimes
from rl_core.observability.traces import TraceFolder
from rl_core.runner.step_state import GroupSpan
from rl_core.runner.trace import Span, Trace

PARTS = [Span("step", 100.0, 108.0), Span("rollout", 100.0, 104.0), Span("inference", 104.0, 105.0), Span("train", 105.0, 107.0), Span("sync", 107.0, 108.0)]  # fmt: skip


def group(group_id="0-7", *, rollout_clock=0.0, trains=True):
    """A group of two samples given out at 100.5 of the runner's clock; its rollout has a clock of its own."""
    at = rollout_clock
    samples = [[at + 0.1, at + 1.0, at + 1.2, at + 2.0, at + 2.1], [at + 0.1, at + 2.5, at + 2.6]]
    times = GroupTimes(
        samples=samples, rollout="rollout:0", given=100.5, began=at, sent=at + 2.75, stored=at + 3.0,
        versions=[(3, 4), (4, 4)],
    )  # fmt: skip
    return GroupSpan(group_id=group_id, rank=0, trains=trains, decided=103.75, times=times)


def written(tmp_path, *groups, parts=PARTS):
    trace = Trace(TraceFolder(tmp_path), epoch=2, clock=lambda: 0.0, wall=lambda: 0.0)
    trace.add(5, 5, parts, groups)
    trace.close()
    (path,) = tmp_path.glob("*.json")
    assert path.name == "e0002-s0000005.json"
    return json.loads(path.read_text().rstrip().removesuffix(",") + "]")


def row_of(events, name):
    """Return (name, begin, end) of the spans on the row of the span `name`, in seconds, in order."""
    (found,) = [event for event in events if event["ph"] == "X" and event["name"] == name]
    mine = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (found["pid"], found["tid"])]
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in mine]


def test_a_sample_has_its_turns_then_the_wait_for_its_siblings_and_a_group_its_way_to_training(tmp_path):
    events = written(tmp_path, group())
    assert row_of(events, "0-7_g0") == [
        ("0-7_g0", 100.5, 103.25), ("lease", 100.5, 100.6), ("generate", 100.6, 101.5), ("env", 101.5, 101.7),
        ("generate", 101.7, 102.5), ("env", 102.5, 102.6), ("siblings", 102.6, 103.25),
    ]  # fmt: skip
    assert row_of(events, "0-7") == [
        ("0-7", 103.25, 107.0), ("put", 103.25, 103.5), ("admit", 103.5, 103.75), ("hold", 103.75, 104.0), ("score", 104.0, 105.0),
        ("train", 105.0, 107.0),
    ]  # fmt: skip
    loop = row_of(events, "sync")
    assert [name for name, _, _ in loop] == ["step", "rollout", "inference", "train", "sync"]
    (sample,) = [event for event in events if event["name"] == "0-7_g0"]
    assert sample["args"] == {"group": "0-7", "sample": 0, "versions": [3, 4]}
    start, end = (next(event for event in events if event["ph"] == mark) for mark in "sf")
    assert start["id"] == end["id"] and (start["pid"], start["tid"]) == (sample["pid"], sample["tid"])


def test_clocks_that_differ_by_days_between_hosts_move_nothing(tmp_path):
    same, apart = tmp_path / "same", tmp_path / "apart"
    assert written(same, group()) == written(apart, group(rollout_clock=-262_144.0))


def test_spans_never_go_back_where_messages_took_time(tmp_path):
    """The rollout's times lie early by the time of the lease's message; what would overlap is cut."""
    late = group()
    late.times.stored = 1.0  # it would have been stored before it was sent
    chain = row_of(written(tmp_path, late), "0-7")[1:]
    assert all(before[2] == after[1] for before, after in pairwise(chain)) and all(b <= e for _, b, e in chain)


def test_a_group_that_was_refused_ends_with_the_refusal(tmp_path):
    events = written(tmp_path, group(trains=False))
    assert [name for name, _, _ in row_of(events, "0-7")] == ["0-7", "put", "admit"]


def test_storage_that_is_slower_than_the_steps_costs_gaps_and_no_memory(tmp_path, caplog):
    release, folder = threading.Event(), TraceFolder(tmp_path)
    whole = folder.append

    def slow(text, *, name):
        release.wait(30)
        whole(text, name=name)

    folder.append = slow
    trace = Trace(folder, epoch=0)
    for step in range(50):
        trace.add(step, step, PARTS)
    release.set()
    trace.close()
    (path,) = tmp_path.glob("*.json")
    assert path.read_text().count('"name":"sync"') <= 6 and caplog.text.count("has gaps") == 1


def test_the_end_of_a_run_waits_for_a_storage_that_hangs_for_at_most_10_seconds(tmp_path, caplog, monkeypatch):
    release, folder, limits = threading.Event(), TraceFolder(tmp_path), []
    wait = concurrent.futures.wait

    def wait_briefly(writes, seconds):
        limits.append(seconds)
        return wait(writes, 0.01)

    monkeypatch.setattr(concurrent.futures, "wait", wait_briefly)
    folder.append = lambda text, *, name: release.wait(30)
    trace = Trace(folder, epoch=0)
    trace.add(1, 1, PARTS)
    trace.close()
    release.set()
    assert limits == [10.0] and "the trace lacks its last 1 writes" in caplog.text
