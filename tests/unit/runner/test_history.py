"""Cutting back: the files tell the history of the present weights only."""

import errno
import json
import os
from pathlib import Path

import pytest

from rl_core.api.errors import DataError, StorageFull
from rl_core.observability import append as appending
from rl_core.runner.history import LedgerFile, Tally, cut_back, verify


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_after_the_checkpoint_and_torn_ones_are_moved_not_lost(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = LedgerFile(path)
    ledger.write({"step": step, "group_id": f"0-{step}"} for step in (1, 2, 3))
    with path.open("a") as file:
        file.write('{"step": 2, "gro')
    assert cut_back(path, 2) == 2
    assert [line["step"] for line in lines(path)] == [1, 2]
    ledger.write([{"step": 3, "group_id": "0-9"}])  # opened before the cut
    ledger.close()
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    lost = (tmp_path / "ledger.lost.jsonl").read_text().splitlines()
    assert json.loads(lost[0])["step"] == 3 and lost[1] == '{"step": 2, "gro'


def test_nothing_to_cut_leaves_the_file_untouched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n')
    assert cut_back(path, 1) == 0 and cut_back(tmp_path / "absent.jsonl", 0) == 0
    assert not (tmp_path / "metrics.lost.jsonl").exists()


def test_a_step_that_finds_no_room_leaves_no_torn_line_and_is_written_when_there_is(tmp_path, monkeypatch):
    path, room, refusals = tmp_path / "ledger.jsonl", [30], []

    def write(file, data):
        if not room:
            return written(file, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = written(file, data[: room[0]])
        room[0] -= count
        return count

    def attempt(append):
        try:
            append()
        except StorageFull as error:
            refusals.append((str(error), path.read_text()))
            room.clear()
            append()

    written = os.write
    ledger = LedgerFile(path, retrying=attempt)
    monkeypatch.setattr(appending.os, "write", write)
    ledger.write([{"step": 1}])
    ledger.write([{"step": 2, "group_id": "0-1"}, {"step": 2, "group_id": "0-2"}])
    ledger.close()
    ((told, left),) = refusals
    assert f"ledger of trained groups could not be written to {path}: No space left on device" in told
    assert left == '{"step":1}\n'
    assert [line["step"] for line in lines(path)] == [1, 2, 2]


def test_lines_that_find_no_room_aside_stay_where_they_are(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    path.with_suffix(".lost.jsonl").symlink_to(Path("/dev/full"))
    with pytest.raises(StorageFull, match="history of a run that is left"):
        cut_back(path, 1)
    assert [line["step"] for line in lines(path)] == [1, 2]


@pytest.fixture
def vouched(tmp_path):
    """Return a file of steps 1 to 4 and its extent at step 3."""
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2)))
    tally = Tally(path)
    tally.take()
    with path.open("a") as file:
        file.write('{"step": 3}\n')
    extent = tally.take()
    with path.open("a") as file:
        file.write('{"step": 4}\n')
    return path, extent


def test_what_a_checkpoint_vouches_for_stays_and_the_rest_is_moved(vouched):
    path, extent = vouched
    assert extent.lines == 3
    verify(path, extent)
    assert cut_back(path, 3, extent) == 1 and [line["step"] for line in lines(path)] == [1, 2, 3]
    verify(path, extent)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda data: data.replace(b"2", b"3", 1), "got: its bytes have changed"),
        (lambda data: data.replace(b"step", b"s\xffep", 1), "got: line 1 cannot be read"),
        (lambda data: data[:-20], "bytes are left of 36"),
        (lambda data: b"", "got: 0 bytes are left of 36"),
    ],
    ids=["a flipped bit", "not UTF-8", "truncated", "emptied"],
)
def test_a_damaged_history_is_told_and_left_as_it_is(vouched, harm, told):
    path, extent = vouched
    path.write_bytes(harm(path.read_bytes()))
    damaged = path.read_bytes()
    with pytest.raises(DataError, match=f"ledger.jsonl must hold the 3 lines .*{told}"):
        verify(path, extent)
    assert path.read_bytes() == damaged


def test_a_missing_history_is_told(vouched):
    path, extent = vouched
    path.unlink()
    with pytest.raises(DataError, match="0 bytes are left of 36"):
        verify(path, extent)


def test_where_nothing_vouches_for_a_file_only_its_last_line_may_be_torn(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\xffp": 2}\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        cut_back(path, 3)
    assert path.stat().st_size == 36
    assert cut_back(path, -1) == 3  # a history that begins anew keeps everything aside, readable or not
