"""Cycles of receives are found from declared waits, and every member of one is told of it."""

from types import SimpleNamespace

import pytest

from rl_core.messages.members import DeclaredWait, MemberState
from rl_core.workers.receive_cycles import ReceiveCycles


def waiting(**waits):
    """Return members by name; each waits for the message of another one for some seconds."""
    return {
        name: SimpleNamespace(
            state=MemberState.READY,
            wait=DeclaredWait(what="a message", on=on, since_seconds=seconds, cause=None),
        )
        for name, (on, seconds) in waits.items()
    }


def test_every_member_of_a_cycle_is_told_although_the_first_has_given_up():
    members, now = waiting(a=("b", 6.0), b=("c", 5.0), c=("a", 4.0)), [100.0]
    cycles = ReceiveCycles(members.get, clock=lambda: now[0])
    assert cycles.ask("a", 6.0) == ["a", "b", "c"]
    members["a"].wait = None
    now[0] = 101.0
    assert cycles.ask("b", 6.0) == cycles.ask("c", 5.0) == ["a", "b", "c"]
    assert cycles.ask("b", 6.5) == []


def test_a_receive_that_began_after_the_cycle_was_found_is_not_part_of_it():
    members, now = waiting(a=("b", 6.0), b=("a", 5.0)), [100.0]
    cycles = ReceiveCycles(members.get, clock=lambda: now[0])
    assert cycles.ask("a", 6.0) == ["a", "b"]
    members["a"].wait = None
    now[0] = 110.0
    assert cycles.ask("b", 5.0) == []


@pytest.mark.parametrize(
    "waits",
    [
        {"a": ("b", 9.0)},
        {"a": ("b", 9.0), "b": ("a", 1.0)},
        {"a": ("b", 9.0), "b": ("c", 9.0), "c": ("b", 9.0)},
    ],
    ids=["no-cycle", "just-begun", "a-cycle-of-others"],
)
def test_other_waits_are_no_cycle(waits):
    assert ReceiveCycles(waiting(**waits).get, clock=lambda: 0.0).ask("a", 9.0) == []
