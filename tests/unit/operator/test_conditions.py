"""The table of reasons against the code that gives them, and the merging of conditions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_core.plan.failure_rules
import rljob_operator.reconcile
from rl_core.api.status import Condition
from rljob_operator.reconcile.conditions import REASONS, TYPES, Fact, merge
from rljob_operator.reconcile.events import EVENTS

PURE = ("condition_facts", "obstacles", "failures", "lifecycle", "events", "status", "reconciler")


def literals() -> Iterator[str]:
    """Yield the words the code can give as reasons."""
    folder = Path(str(rljob_operator.reconcile.__file__)).parent
    for path in (*(folder / f"{name}.py" for name in PURE), Path(str(rl_core.plan.failure_rules.__file__))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
                yield node.value
                yield node.value[0].upper() + node.value[1:]


def test_every_reason_of_the_table_can_be_given() -> None:
    given_words = set(literals())
    dead = {reason for reasons in REASONS.values() for reason in reasons} - given_words
    assert not dead and not set(EVENTS) - given_words


def test_every_condition_has_reasons_that_a_condition_may_hold() -> None:
    assert set(REASONS) == set(TYPES)
    for kind, reasons in REASONS.items():
        for reason, meaning in reasons.items():
            assert meaning
            Condition(type=kind, status="True", reason=reason, last_transition_time="2026-01-01T00:00:00Z")


statuses = st.sampled_from(["True", "False", "Unknown"])


@given(st.lists(st.tuples(statuses, st.sampled_from(["A", "B"]), st.integers(0, 100)), min_size=1, max_size=12))
def test_the_transition_time_moves_with_the_status_only(steps: list[tuple[str, str, int]]) -> None:
    before: dict[str, dict[str, str]] = {}
    now, changed, last = 0, 0, None
    for status, reason, seconds in steps:
        now += seconds
        changed = now if status != last else changed
        last = status
        merged = merge(before, dict.fromkeys(TYPES, Fact(status=status, reason=reason)), now=now, generation=4)
        assert [c["type"] for c in merged] == list(TYPES)
        assert {c["lastTransitionTime"] for c in merged} == {f"1970-01-01T00:{changed // 60:02}:{changed % 60:02}Z"}
        assert {c["observedGeneration"] for c in merged} == {4} and {c["reason"] for c in merged} == {reason}
        before = {c["type"]: c for c in merged}


@pytest.mark.parametrize("length", [3999, 4000, 4001, 50000])
def test_messages_stay_within_their_bound(length: int) -> None:
    merged = merge({}, dict.fromkeys(TYPES, Fact(status="True", reason="A", message="m" * length)), now=0, generation=1)
    assert len(merged[0]["message"]) == min(length, 4000)
