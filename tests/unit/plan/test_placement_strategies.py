"""Inventory and strategies: worked examples, invariants over random inventories, refusals."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.errors import PlacementError, PlacementRangeError
from rl_core.plan.placement import (
    FlexiblePlacementStrategy,
    Inventory,
    NodeGroup,
    NodeInfo,
    NodePlacementStrategy,
    PackedPlacementStrategy,
)

TWO_BY_FOUR = Inventory([NodeInfo(0, 4, "H100"), NodeInfo(1, 4, "H100")])
CPU = Inventory([NodeInfo(rank, 0) for rank in range(3)])


def test_packed_worked_example():
    one_node = Inventory([NodeInfo(0, 12)])
    found = PackedPlacementStrategy(0, 11, num_hardware_per_process=3, stride=2).get_placement(one_node)
    assert [place.local_hardware_ranks for place in found] == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]


@settings(max_examples=100, deadline=None)
@given(start=st.integers(0, 5), size=st.integers(1, 4), stride=st.integers(1, 4), blocks=st.integers(1, 3))
def test_packed_takes_the_lowest_unused_rank_then_strides(start, size, stride, blocks):
    end = start + size * stride * blocks - 1
    unused, expected = set(range(start, end + 1)), []
    while unused:
        ranks = [min(unused) + index * stride for index in range(size)]
        unused -= set(ranks)
        expected.append(ranks)
    assert PackedPlacementStrategy(start, end, size, stride).hardware_ranks_list == expected


def test_packed_over_nodes_counts_each_node_on_its_own():
    found = PackedPlacementStrategy(2, 5).get_placement(TWO_BY_FOUR)
    assert [(p.cluster_node_rank, p.placement_node_rank, p.local_rank, p.local_world_size) for p in found] == [
        (0, 0, 0, 2), (0, 0, 1, 2), (1, 1, 0, 2), (1, 1, 1, 2),
    ]  # fmt: skip
    assert [p.visible_accelerators for p in found] == [["2"], ["3"], ["0"], ["1"]]
    assert [p.local_accelerator_rank for p in found] == [2, 3, 0, 1]
    assert {p.accelerator_type for p in found} == {"H100"}


def test_packed_refuses_at_construction_what_cannot_divide_and_later_what_is_not_there():
    with pytest.raises(PlacementError, match="must divide the 6 resources"):
        PackedPlacementStrategy(0, 5, num_hardware_per_process=2, stride=2)
    beyond = PackedPlacementStrategy(0, 8)
    with pytest.raises(PlacementRangeError, match="out of range"):
        beyond.get_placement(TWO_BY_FOUR)
    with pytest.raises(PlacementError, match="same node"):
        PackedPlacementStrategy(2, 5, num_hardware_per_process=4).get_placement(TWO_BY_FOUR)


def test_flexible_sorts_inside_and_across_and_processes_may_share():
    found = FlexiblePlacementStrategy([[5, 4], [1], [1], [3, 0]]).get_placement(TWO_BY_FOUR)
    assert [p.local_hardware_ranks for p in found] == [[0, 3], [1], [1], [0, 1]]
    assert [p.rank for p in found] == [0, 1, 2, 3]
    assert [(p.local_rank, p.local_world_size) for p in found] == [(0, 3), (1, 3), (2, 3), (0, 1)]


def test_flexible_leaves_its_input_unchanged():
    written = [[3, 1], [0]]
    FlexiblePlacementStrategy(written).get_placement(TWO_BY_FOUR)
    assert written == [[3, 1], [0]]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([], "must not be empty"), ([[0], []], "must not be empty"), ([[1, 1]], "must be unique"),
     ([[3, 4]], "same node"), ([[8]], "out of range"), ([[-1]], "out of range")],
)  # fmt: skip
def test_flexible_refusals(ranks, words):
    with pytest.raises(PlacementError, match=words):
        FlexiblePlacementStrategy(ranks).get_placement(TWO_BY_FOUR)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_local_numbers_count_this_groups_processes_per_node(sizes, data):
    inventory = Inventory([NodeInfo(rank, size) for rank, size in enumerate(sizes)])
    ranks = data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=8))
    found = FlexiblePlacementStrategy([[rank] for rank in ranks]).get_placement(inventory)
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    per_node = Counter(place.cluster_node_rank for place in found)
    seen = Counter()
    for place, rank in zip(found, sorted(ranks), strict=True):
        assert starts[place.cluster_node_rank] + place.local_hardware_ranks[0] == rank
        assert (place.local_rank, place.local_world_size) == (
            seen[place.cluster_node_rank],
            per_node[place.cluster_node_rank],
        )
        seen[place.cluster_node_rank] += 1
    assert [p.placement_node_rank for p in found] == [sorted(per_node).index(p.cluster_node_rank) for p in found]


def test_shared_devices_show_the_whole_node_when_not_isolated():
    (place,) = FlexiblePlacementStrategy([[6]]).get_placement(TWO_BY_FOUR, isolate_accelerator=False)
    assert place.visible_accelerators == ["0", "1", "2", "3"] and place.local_hardware_ranks == [2]
    assert place.local_accelerator_rank == 0 and not place.isolate_accelerator


def test_node_strategy_sorts_repeats_and_shows_all_accelerators():
    found = NodePlacementStrategy([1, 0, 1]).get_placement(TWO_BY_FOUR)
    assert [(p.cluster_node_rank, p.local_rank, p.local_world_size) for p in found] == [(0, 0, 1), (1, 0, 2), (1, 1, 2)]
    assert all(p.visible_accelerators == ["0", "1", "2", "3"] and p.local_hardware_ranks == [] for p in found)
    (cpu,) = NodePlacementStrategy([2]).get_placement(CPU)
    assert cpu.visible_accelerators == [] and cpu.local_accelerator_rank == -1


def test_node_strategy_refuses_ranks_outside_and_overlapping_groups():
    with pytest.raises(PlacementRangeError, match="out of range"):
        NodePlacementStrategy([3]).get_placement(CPU)
    groups = [NodeGroup("a", [0, 1]), NodeGroup("b", [1, 2])]
    with pytest.raises(PlacementError, match=r"overlap.*\[1\]"):
        NodePlacementStrategy([0], "a,b").get_placement(Inventory(CPU.nodes, groups))


def test_other_hardware_leaves_the_nodes_accelerators_visible():
    robots = Inventory(
        [NodeInfo(0, 2, "4090", ("robot", "camera", "robot"))], [NodeGroup("arm", [0], hardware="robot")]
    )
    found = FlexiblePlacementStrategy([[0], [1]], "arm").get_placement(robots)
    assert [p.local_hardware_ranks for p in found] == [[0], [1]]
    assert all(p.visible_accelerators == ["0", "1"] and p.node_group_label == "arm" for p in found)


def test_ranks_run_through_groups_in_listed_order():
    inventory = Inventory(TWO_BY_FOUR.nodes, [NodeGroup("left", [0]), NodeGroup("right", [1])])
    found = FlexiblePlacementStrategy([[0], [5]], ["right", "left"]).get_placement(inventory)
    assert [(p.cluster_node_rank, p.node_group_label) for p in found] == [(1, "right"), (0, "left")]
    assert [p.placement_node_rank for p in found] == [0, 1]


@pytest.mark.parametrize("label", ["cluster", "node", "", "a,b"])
def test_reserved_labels_are_refused(label):
    with pytest.raises(PlacementError, match="label"):
        NodeGroup(label, [0])


@pytest.mark.parametrize(
    ("nodes", "groups", "words"),
    [
        ([NodeInfo(0, 1), NodeInfo(0, 1)], [], "node ranks must be"),
        ([NodeInfo(0, 1)], [("a", [0], {}), ("a", [0], {"ignore_hardware": True})], "labels must be unique"),
        ([NodeInfo(0, 1)], [("a", [0], {}), ("b", [0], {})], "one group only"),
        ([NodeInfo(0, 1)], [("a", [1], {})], "out of range"),
        ([NodeInfo(0, 1, "A"), NodeInfo(1, 1, "B")], [("a", [0, 1], {})], "one accelerator type"),
        ([NodeInfo(0, 1)], [("a", [0], {"hardware": "robot"})], "must have hardware 'robot'"),
        ([NodeInfo(0, 1)], [("a", [0], {"hardware": "robot", "ignore_hardware": True})], "excludes"),
        ([NodeInfo(0, 1)], [("a", [0], {"env": [{"A": "1", "B": "2"}]})], "one-key"),
    ],
)
def test_inconsistent_inventory_is_refused(nodes, groups, words):
    with pytest.raises(PlacementError, match=words):
        Inventory(nodes, [NodeGroup(label, ranks, **more) for label, ranks, more in groups])


@pytest.mark.parametrize("env", [("BAD",), (None,), (5,), ({"A": 1},), ({5: "a"},), {"A": "1"}, "A=1", None, 5])
def test_environment_of_a_group_is_one_key_maps_of_text(env):
    with pytest.raises(PlacementError, match=r"node group a: env items must be one-key maps of text, got .*; write"):
        NodeGroup("a", [0], env=env)


def test_group_that_ignores_hardware_may_share_nodes_with_one_that_does_not():
    inventory = Inventory(TWO_BY_FOUR.nodes, [NodeGroup("gpu", [0]), NodeGroup("cpu", [0, 1], ignore_hardware=True)])
    assert len(inventory.units("gpu")) == 4 and len(inventory.units("cpu")) == 2


def test_cluster_is_nodes_with_accelerators_and_node_is_all():
    mixed = Inventory([NodeInfo(1, 2), NodeInfo(0, 0)])
    assert [unit.node.rank for unit in mixed.units("cluster")] == [1, 1]
    assert [unit.node.rank for unit in mixed.units("node")] == [0, 1]
    assert len(CPU.units("cluster")) == 3
