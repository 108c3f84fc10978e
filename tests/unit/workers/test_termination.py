"""The last word is one JSON object of at most 4096 bytes, whatever it is made of, and keeps the newest lines."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.workers import termination

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=6),
    max_leaves=20,
)
STATUS = st.none() | st.dictionaries(
    st.sampled_from([*termination.SUMMARY_FIELDS, "metrics", "members"]), VALUES | st.text(min_size=500, max_size=5000)
)
TEXT = st.text(max_size=300) | st.builds(
    lambda text, count: text * count, st.text(min_size=1, max_size=8), st.integers(0, 3000)
)
SURROGATES = st.text(st.characters(codec=None), max_size=3000)


def strict(text):
    """Read JSON that has no NaN and no infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@settings(max_examples=300, deadline=None)
@given(
    reason=TEXT | SURROGATES,
    tail=TEXT | SURROGATES,
    process=st.text(max_size=60),
    status=STATUS,
    code=st.integers(0, 255),
)
def test_it_is_always_json_of_at_most_4096_bytes(reason, tail, process, status, code):
    message = termination.encode(reason=reason, code=code, process=process, tail=tail, summary=status)
    assert len(message) <= 4096
    word = strict(message.decode("utf-8"))
    assert set(word) == {"reason", "process", "code", "tail", "summary"} and word["code"] == code
    assert word["process"] == process and (word["summary"] is None) == (status is None)


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=60), max_size=300))
def test_it_keeps_the_newest_lines_and_wastes_no_room(lines):
    tail = "\n".join(lines)
    message = termination.encode(reason="why", code=1, tail=tail)
    kept = strict(message)["tail"]
    assert tail.endswith(kept)
    assert kept == tail or len(message) > 4096 - 12  # one character takes at most twelve bytes as JSON


def test_metrics_go_before_facts_and_the_longest_fact_before_the_others():
    facts = {"epoch": 3, "step": 7, "phase": "Failed"}
    many = {f"metric/{number}": float(number) for number in range(500)}
    found = termination.shorten({**facts, "metrics": many, "members": ["x"] * 1000})
    assert found.items() >= facts.items() and 10 < len(found["metrics"]) < 500 and "members" not in found
    found = termination.shorten({**facts, "checkpoint": {"path": "/" + "p" * 4000}, "metrics": {"a": 1.0}})
    assert found == {**facts, "metrics": {"a": 1.0}}


def test_a_long_failure_is_told_from_its_beginning():
    found = termination.shorten({"epoch": 1, "failure": {"type": "DataError", "message": "begin " + "x" * 9000}})
    assert found["failure"]["type"] == "DataError" and found["failure"]["message"].startswith("begin x")


def test_nothing_is_written_where_no_kubelet_made_a_file(tmp_path):
    termination.write(tmp_path / "absent", reason="why", code=1)
    assert list(tmp_path.iterdir()) == []


def test_a_status_is_read_only_for_the_epoch_that_wrote_it(tmp_path):
    assert termination.read_summary(tmp_path, epoch=1) is None
    for text, expected in (("{", None), ("[]", None), ('{"epoch": 2}', None), ('{"epoch": 1}', {"epoch": 1})):
        (tmp_path / "status.json").write_text(text)
        assert termination.read_summary(tmp_path, epoch=1) == expected
