"""Cutting back: the files tell the history of the present weights only."""

import json

from rl_core.runner.history import LedgerFile, cut_back


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
