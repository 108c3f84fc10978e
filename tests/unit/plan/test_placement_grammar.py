"""The placement map: the worked example, every rule with its words, and maps generated from what they must mean."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.errors import PlacementError, PlacementRangeError
from rl_core.plan.placement import PlacementPart, parse_placement, parse_ranks


def assigned(value, total):
    return {process: list(ranks) for part in parse_placement(value, total) for process, ranks in part.assignments()}


def test_worked_example():
    found = assigned("2-5:0-1,8,9-10:3-6", 12)
    assert found == {0: [2, 3], 1: [4, 5], 2: [8], 3: [9], 4: [9], 5: [10], 6: [10]}


def each(ranks, *, processes=1, first=0):
    """Return consecutive processes, as many on each rank."""
    return {first + index: [rank] for index, rank in enumerate(rank for rank in ranks for _ in range(processes))}


@pytest.mark.parametrize(
    ("value", "total", "expected"),
    [
        ("all", 16, each(range(16))),
        ("3", 16, each([3])),
        ("0,2,3", 16, each([0, 2, 3])),
        ("0-3", 16, each(range(4))),
        ("0-3,5,14", 16, each([0, 1, 2, 3, 5, 14])),
        ("0-3,4-7", 8, each(range(8))),
        ("0-3:0-7", 4, each(range(4), processes=2)),
        ("0-7:0-3", 8, {process: [2 * process, 2 * process + 1] for process in range(4)}),
        (
            "0-1:0-3,3-5,7-10:7-14",
            11,
            each([0, 1], processes=2) | each([3, 4, 5], first=4) | each(range(7, 11), processes=2, first=7),
        ),
        ("0-1:0-199,2-3:200-399", 4, each(range(4), processes=100)),
    ],
)
def test_maps_mean_what_the_pages_of_rlinf_say_of_them(value, total, expected):
    """The tables and examples of its pages on YAML configuration and on heterogeneous clusters."""
    assert assigned(value, total) == expected


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (3, [PlacementPart((3,), (0,))]),
        ("all", [PlacementPart((0, 1, 2, 3), (0, 1, 2, 3))]),
        ("all:0-1", [PlacementPart((0, 1, 2, 3), (0, 1))]),
        (" 0 - 1 : 0 - 3 , ,", [PlacementPart((0, 1), (0, 1, 2, 3))]),
        (["0-1", 3], [PlacementPart((0, 1), (0, 1)), PlacementPart((3,), (2,))]),
        (("0:0-1", "2-3"), [PlacementPart((0,), (0, 1)), PlacementPart((2, 3), (2, 3))]),
    ],
)
def test_forms_of_a_map(value, parts):
    assert parse_placement(value, 4) == parts


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "Invalid rank format"),
        (" , ", "Invalid rank format"),
        ("a", "Invalid rank format"),
        ("3-1", "Invalid rank format"),
        ("-1", "Invalid rank format"),
        ("0:", "Invalid rank format"),
        ("0:1:2", "Invalid rank format"),
        ("0:all", "Invalid rank format"),
        ("all,3", "Invalid rank format"),
        (True, "Invalid rank format"),
        (None, "Invalid rank format"),
        ("0-8", r"out of range \[0, 7\]"),
        ("0-3,3-4", "Resource ranks must be unique"),
        ("4-5,0-1", "Resource ranks must be in ascending order"),
        ("0:1", "Process ranks must be in ascending order"),
        ("0:0,1:2", "Process ranks must be in ascending order"),
        ("0:0-1,1:1-2", "Process ranks must be in ascending order"),
        ("0-3:0-2", "must divide"),
        ("0-1:0-2", "must divide"),
    ],
)
def test_broken_rule_is_named_with_the_total(value, words):
    with pytest.raises(PlacementError, match=rf"{words}.*\(total 8\)$"):
        parse_placement(value, 8)


def test_error_suits_callers_of_either_convention():
    for kind in (ValueError, AssertionError, IndexError, PlacementRangeError):
        with pytest.raises(kind, match=r"'2-9'.*total 8"):
            parse_placement("0,2-9", 8)


@st.composite
def meanings(draw):
    """A list of (resources, num_processes, written processes?) that a legal map can say."""
    resource, process, parts = 0, 0, []
    for _ in range(draw(st.integers(1, 5))):
        resource += draw(st.integers(0, 2))
        small = draw(st.integers(1, 4))
        large = small * draw(st.integers(1, 3))
        num_resources, num_processes = draw(st.sampled_from([(small, large), (large, small)]))
        written = draw(st.booleans()) or num_resources != num_processes
        parts.append((range(resource, resource + num_resources), range(process, process + num_processes), written))
        resource, process = resource + num_resources, process + num_processes
    return parts


def rendered(ranks, spaces):
    text = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    return f" {text} " if spaces else text


@settings(max_examples=150, deadline=None)
@given(parts=meanings(), spaces=st.booleans())
def test_map_means_what_it_was_written_for(parts, spaces):
    text = ",".join(
        rendered(resources, spaces) + (":" + rendered(processes, spaces) if written else "")
        for resources, processes, written in parts
    )
    total = parts[-1][0][-1] + 1
    expected = {}
    for resources, processes, _ in parts:
        for index, process in enumerate(processes):
            low = index * len(resources) // len(processes)
            high = max(low + 1, (index + 1) * len(resources) // len(processes))
            expected[process] = list(resources[low:high])
    assert assigned(text, total) == expected


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="0123456789-:, al", max_size=14), total=st.integers(0, 12))
def test_any_text_is_refused_or_means_a_legal_placement(text, total):
    try:
        parts = parse_placement(text, total)
    except PlacementError:
        return
    resources = [rank for part in parts for rank in part.resources]
    assert resources == sorted(set(resources)) and resources[0] >= 0 and resources[-1] < total
    assert [p for part in parts for p in part.processes] == list(range(sum(len(part.processes) for part in parts)))


def test_ranks_of_one_item_or_a_list():
    assert parse_ranks("0-2,5") == [0, 1, 2, 5]
    assert parse_ranks(4) == [4]
    assert parse_ranks("all", 3) == [0, 1, 2]
    with pytest.raises(PlacementError, match="Invalid rank format"):
        parse_ranks("all")
    with pytest.raises(PlacementRangeError, match="out of range"):
        parse_ranks("3", 3)
    with pytest.raises(PlacementError, match="must be unique"):
        parse_ranks("0-2,2")


@pytest.mark.parametrize("value", ["0:0-99999999999", "0:0-65536", "0-99999999999", "0:" + "9" * 6000, "9" * 6000])
def test_a_rank_beyond_every_job_is_refused_before_a_list_is_made(value):
    with pytest.raises(PlacementRangeError, match=r"out of range.*\(total 8\)$"):
        parse_placement(value, 8)


def test_a_rank_beyond_every_job_is_refused_where_the_number_of_ranks_is_not_known():
    with pytest.raises(PlacementRangeError, match="out of range"):
        parse_ranks("0-99999999999")


@pytest.mark.parametrize("digit", ["\u0663", "\uff13", "\u096a"])
def test_only_ascii_digits_are_numbers(digit):
    with pytest.raises(PlacementError, match="Invalid rank format"):
        parse_placement(digit, 8)


def test_leading_zeros_change_no_rank():
    assert parse_ranks("0" * 30 + "3") == [3]
