"""docs/operations.md tells each reason and event that the operator writes, in its words, with what to do."""

from pathlib import Path

import pytest

from rljob_operator.reconcile.conditions import REASONS, TYPES
from rljob_operator.reconcile.events import EVENTS

DOC = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


def rows(heading):
    """Return the first table below a heading, as tuples of cells."""
    text = DOC.partition(f"{heading}\n")[2].partition("\n#")[0]
    table = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table]


@pytest.mark.parametrize("condition", TYPES)
def test_each_reason_has_its_meaning_and_a_way_out(condition):
    told = rows(f"### {condition}")
    assert {reason: meaning for reason, meaning, _ in told} == dict(REASONS[condition])
    assert all(way_out for _, _, way_out in told)


def test_each_event_has_its_meaning():
    assert dict(rows("## Events")) == dict(EVENTS)
