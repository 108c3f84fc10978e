"""Chrome trace files: a viewer opens them, also cut ones; the folder stays bounded; full storage costs a gap and no more."""

import json
import logging

import pytest

from rl_core.observability.append import AppendFile
from rl_core.observability.traces import TraceEvents, TraceFolder, TraceRows


def read(path):
    """Read as the viewers do: an array without its end, and of a line that was cut nothing."""
    head, *lines = path.read_text().split("\n")
    assert head == "["
    return [json.loads(line.removesuffix(",")) for line in lines[:-1]]


def one_span(name, began, ended):
    events = TraceEvents(TraceRows())
    events.span((1, 1), name, began, ended, {"step": 3})
    return events.text()


def test_a_file_is_an_array_whose_end_a_crash_may_have_cut(tmp_path):
    folder = TraceFolder(tmp_path / "traces")
    for number in range(3):
        folder.append(one_span(f'a "{number}"', 10.0 + number, 10.5 + number), name="e0")
    folder.close()
    path = tmp_path / "traces" / "e0.json"
    assert json.loads(path.read_text().rstrip().removesuffix(",") + "]") == read(path)
    assert read(path)[1] == {
        "ph": "X", "pid": 1, "tid": 1, "ts": 11_000_000, "dur": 500_000, "name": 'a "1"', "args": {"step": 3},
    }  # fmt: skip
    path.write_bytes(path.read_bytes()[:-20])
    assert [event["name"] for event in read(path)] == ['a "0"', 'a "1"']


def test_the_folder_keeps_the_newest_files_of_a_bounded_size_and_each_names_its_rows(tmp_path):
    folder, rows = TraceFolder(tmp_path, file_bytes=400, kept=3), TraceRows()
    for step in range(40):
        if folder.full:
            rows.name_again()
        events = TraceEvents(rows)
        events.span(rows.row("runner", 1, "loop"), "step", step, step + 1, {})
        folder.append(events.text(), name=f"e0000-s{step:07d}")
    folder.close()
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 3 and all(path.stat().st_size < 800 for path in files)
    found = [read(path) for path in files]
    assert max(event["ts"] for event in found[-1] if "ts" in event) == 39_000_000, "the newest is there"
    for events in found:
        assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["runner", "loop"]


def test_spans_that_overlap_lie_in_slots_of_their_own_and_a_free_one_is_used_again():
    rows = TraceRows()
    a, b = rows.slot("rollout:0", 0.0, 2.0, of="sample"), rows.slot("rollout:0", 1.0, 3.0, of="sample")
    assert a != b and a[0] == b[0]
    assert rows.slot("rollout:0", 2.0, 4.0, of="sample") == a
    assert rows.slot("rollout:1", 0.0, 9.0, of="sample")[0] != a[0]


def test_storage_that_refuses_costs_a_gap_and_is_told_once(tmp_path, monkeypatch, caplog: pytest.LogCaptureFixture):
    folder = TraceFolder(tmp_path)
    folder.append(one_span("before", 0, 1), name="e0")

    def refuse(self, data, *, sync=False):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(AppendFile, "append", refuse)
        folder.append(one_span("lost", 1, 2), name="e0")
        folder.append(one_span("lost", 2, 3), name="e0")
    folder.append(one_span("after", 3, 4), name="e0")
    folder.close()
    assert [event["name"] for event in read(tmp_path / "e0.json")] == ["before", "after"]
    assert caplog.text.count("has a gap") == 1
