"""docs/runbook.md explains each reason and event that the operator writes, and says what to do about each reason."""

import re
from pathlib import Path

import pytest

from rljob_operator.reconcile.conditions import REASONS, TYPES
from rljob_operator.reconcile.events import EVENTS

DOC = (Path(__file__).parents[3] / "docs" / "runbook.md").read_text()
ENTRY = re.compile(r"^- \*\*(\w+)\*\*: (.+)\.\n((?:  .+\n)*)", re.MULTILINE)
"""A reason, its meaning on the same line, and the indented lines that say what to do."""


def section(heading):
    """Return the text below a heading, up to the next heading."""
    return DOC.partition(f"\n{heading}\n")[2].partition("\n#")[0]


def rows(heading):
    """Return the first table below a heading, as tuples of cells."""
    table = [line for line in section(heading).splitlines() if line.startswith("| ")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table]


@pytest.mark.parametrize("condition", TYPES)
def test_each_reason_has_its_meaning_and_a_remedy(condition):
    entries = ENTRY.findall(section(f"### {condition}"))
    assert {reason: meaning for reason, meaning, _ in entries} == dict(REASONS[condition])
    assert all(remedy.strip() for _, _, remedy in entries)


def test_each_event_has_its_meaning():
    assert dict(rows("## Events")) == dict(EVENTS)
