"""docs/architecture.md tells the true path of a group: real steps are traced and held against it."""

import re
from pathlib import Path

import pytest

from tests.e2e.harness import assert_trained_once

ROOT = Path(__file__).parents[2]
TRACING = Path(__file__).with_name("tracing")
BESIDE = ("transports/", "channel/", "workers/")
"""Carry whatever they are given."""
MOST_FILES = 30


def tour() -> list[str]:
    """Return the files of the tour, in its order."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text[text.index("## The path of a group, file by file") :]
    return re.findall(r"^ *([a-z_0-9/]+\.py)\b", section.split("```")[1], re.MULTILINE)


@pytest.fixture
def trace(tmp_path):
    folder = tmp_path / "trace"
    folder.mkdir()
    (folder / "switch").write_bytes(b"0")
    return folder


def turn(trace, state):
    with (trace / "switch").open("r+b") as file:
        file.write(state)


def test_every_file_that_is_handed_a_group_is_on_the_tour_and_the_tour_is_short(start, trace, tiny):
    run = start(algorithm={"steps": 4}, samples={"groups": 0, "validationGroups": 0})
    run.env |= {"PYTHONPATH": f"{tiny}:{TRACING}", "RLJOB_TEST_TRACE": str(trace)}
    run.start()
    run.at_step(1)
    turn(trace, b"1")
    run.at_step(3)
    turn(trace, b"0")
    assert run.wait() == 0, run.text + run.logs()
    assert_trained_once(run, steps=4, groups=4)
    names = {name for file in trace.glob("*.files") for name in file.read_text().splitlines()}
    found = {name.rpartition("/rl_core/")[2] for name in names}
    found = {name for name in found if not name.startswith(BESIDE)}
    assert found == set(tour()), "docs/architecture.md and the run differ"
    assert len(found) <= MOST_FILES
