"""Components and modes: rules 6-9, derivation of modes, packed strategies, default layouts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.api.errors import PlacementError, PlacementRangeError
from rl_core.plan.placement import (
    ComponentPlacement,
    FlexiblePlacementStrategy,
    HybridComponentPlacement,
    Inventory,
    ModelParallelComponentPlacement,
    NodeGroup,
    NodeInfo,
    NodePlacementStrategy,
    PlacementMode,
)

EIGHT = Inventory([NodeInfo(0, 4, "H100"), NodeInfo(1, 4, "H100"), NodeInfo(2, 0)])


def placed(written, inventory=EIGHT, cls=ComponentPlacement, **more):
    return cls({"componentPlacement": written} | more, inventory)


def modes(written, parallelism=None, inventory=EIGHT, **more):
    return ModelParallelComponentPlacement({"componentPlacement": written} | more, inventory, parallelism or {})


def ranks_of(placement, name):
    return [
        [place.cluster_node_rank * 4 + rank for rank in place.local_hardware_ranks]
        for place in placement.get_strategy(name).get_placement(placement.inventory)
    ]


def test_joined_names_share_one_strategy():
    found = placed({"actor, inference": "0-3", "rollout": "4-7:0-1"})
    assert found.get_strategy("actor") is found.get_strategy("inference")
    assert isinstance(found.get_strategy("rollout"), FlexiblePlacementStrategy)
    assert (found.get_world_size("actor"), found.get_world_size("rollout")) == (4, 2)
    assert found.get_hardware_ranks("rollout") == [4, 5, 6, 7]
    assert found.components == ["actor", "inference", "rollout"]


def test_groups_without_hardware_place_on_nodes():
    found = placed({"env": {"node_group": "node", "placement": "0-1:0-3,2"}})
    assert isinstance(found.get_strategy("env"), NodePlacementStrategy)
    nodes = [place.cluster_node_rank for place in found.get_strategy("env").get_placement(EIGHT)]
    assert nodes == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("labels", ["right,left", ["right", "left"], ("right", "left")])
def test_sequence_of_groups_equals_the_comma_text(labels):
    groups = [{"label": "left", "nodeRanks": 0}, NodeGroup("right", [1])]
    found = placed({"actor": {"node_group": labels, "placement": "0,4"}}, nodeGroups=groups)
    places = found.get_strategy("actor").get_placement(found.inventory)
    assert [(place.cluster_node_rank, place.node_group_label) for place in places] == [(1, "right"), (0, "left")]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"actor": "0-9"}, r"component actor: part '0-9'.*out of range.*total 8"),
        ({"actor,critic": "0-3:1-4"}, "component actor, critic: .*Process ranks must be in ascending order"),
        ({"actor": "2-5:0"}, "component actor: .*same node"),
        ({"env": {"node_group": "node", "placement": "0-1:0"}}, "component env: .*same node"),
        ({"actor": "0", "rollout,actor": "1"}, "component actor: names must be unique"),
        ({"actor": {"placement": "0", "nodes": "1"}}, "may have node_group"),
        ({"actor": {"node_group": "west", "placement": "0"}}, "'west' must be one of cluster, node"),
        ({"actor": {"node_group": "cluster,node", "placement": "0"}}, "all have hardware or all have none"),
        ({}, "must map components"),
        ({" , ": "0"}, "must name components"),
    ],
)
def test_broken_rule_names_component_and_rule(written, words):
    with pytest.raises(PlacementError, match=words):
        placed(written)


def test_range_errors_keep_their_type_through_the_component():
    with pytest.raises(PlacementRangeError):
        placed({"actor": "8"})


def test_unknown_component_and_unknown_key_are_refused():
    with pytest.raises(PlacementError, match="'critic' must be one of actor"):
        placed({"actor": "0"}).get_strategy("critic")
    with pytest.raises(PlacementError, match="placementMode"):
        placed({"actor": "0"}, placementMode="hybrid")


def test_hybrid_accepts_any_overlap():
    found = placed({"actor": "0-3", "rollout": "2-5"}, cls=HybridComponentPlacement)
    assert found.get_hardware_ranks("rollout") == [2, 3, 4, 5]


def test_equal_sets_are_colocated_and_engines_stride_over_the_actors_slices():
    found = modes({"actor,rollout": "0-7"}, {"actor": {"tensor": 4}, "rollout": {"tensor": 2}})
    assert found.mode is PlacementMode.COLLOCATED == "colocated"
    assert ranks_of(found, "actor") == [[rank] for rank in range(8)]
    # each engine rank shares a GPU with an actor rank: engine TP rank r on offset r * 2 (+ parity) of the actor's 4
    assert ranks_of(found, "rollout") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (found.get_world_size("actor"), found.get_world_size("rollout")) == (8, 4)


def test_engine_larger_than_the_actor_is_packed_without_stride():
    found = modes({"actor,rollout": "0-7"}, {"actor": {"tensor": 2}, "rollout": {"tensor": 4}})
    assert ranks_of(found, "rollout") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_disjoint_sets_are_disaggregated_and_reward_may_overlap():
    written = {"actor": "0-3", "inference": "4-5", "rollout": "6-7", "reward,env": "0"}
    found = modes(written, {"rollout": {"tensor": 2}}, recomputeLogProbs=True)
    assert found.mode is PlacementMode.DISAGGREGATED
    assert ranks_of(found, "rollout") == [[6, 7]] and ranks_of(found, "inference") == [[4], [5]]
    assert found.get_parallel("actor").data == 4


def test_alias_of_inference_is_honoured():
    found = modes({"actor": "0-3", "actor_inference": "4-5", "rollout": "6-7"}, recomputeLogProbs=True)
    assert found.get_strategy("inference") is found.get_strategy("actor_inference")
    assert found.get_parallel("actor_inference").world == 2


def test_equal_numbers_in_different_groups_are_different_resources():
    groups = [{"label": "a", "nodeRanks": "0"}, {"label": "b", "nodeRanks": "1"}]
    written = {"actor": {"node_group": "a", "placement": "0-3"}, "rollout": {"node_group": "b", "placement": "0-3"}}
    assert modes(written, nodeGroups=groups).mode is PlacementMode.DISAGGREGATED


@pytest.mark.parametrize(
    ("written", "more", "words"),
    [
        ({"actor": "0-3", "rollout": "2-5"}, {}, r"actor \[0, 1, 2, 3\]; rollout \[2, 3, 4, 5\].*mode: hybrid"),
        (
            {"actor": "0-3", "rollout": "4-7"},
            {"mode": "colocated"},
            r"must be disaggregated.*got colocated.*\[4, 5, 6, 7\]",
        ),
        ({"actor,rollout": "0-3"}, {"mode": "disaggregated"}, "must be colocated"),
        ({"actor": "0-1,4-5", "rollout": "6-7"}, {}, "actor: resource ranks must be contiguous"),
        ({"actor": "0-3"}, {}, "'rollout' must be one of"),
        ({"actor,rollout": "0-3", "inference": "4"}, {"recomputeLogProbs": True}, "no dedicated inference"),
        ({"actor": "0-3", "inference": "4", "rollout": "5"}, {}, "needs algorithm.recomputeLogProbs"),
        ({"actor": "0-1", "inference": "2", "actor_inference": "3", "rollout": "4"}, {}, "alias of inference"),
        ({"actor": "0-3", "critic": "3", "rollout": "4-7"}, {}, "disjoint"),
        ({"actor": "0-3", "rollout": "4-7"}, {"mode": "spread"}, "colocated, disaggregated, hybrid"),
        ({"actor": "0-3:0-1", "rollout": "4-7"}, {}, "4 resources make 4 processes of 1, got 2"),
    ],
)
def test_layout_that_fits_no_mode_is_refused(written, more, words):
    with pytest.raises(PlacementError, match=words):
        modes(written, **more)


@pytest.mark.parametrize(
    ("parallelism", "words"),
    [
        ({"rollout": {"tensor": 8}}, "component rollout: tensor 8 must be at most its world 4"),
        ({"actor": {"tensor": 3}}, "component actor: tensor 3 .*divide its world 4"),
        ({"actor": {"tensor": 2, "pipeline": 2, "context": 2}}, "component actor"),
        ({"actor": {"expert": 2}}, "tensor, pipeline, context"),
        ({"actor": {"tensor": 0}}, "sizes >= 1"),
    ],
)
def test_parallel_sizes_that_do_not_divide_are_refused_by_role(parallelism, words):
    with pytest.raises(PlacementError, match=words):
        modes({"actor": "0-3", "rollout": "4-7"}, parallelism)


def test_written_hybrid_allows_overlap_and_keeps_the_written_processes():
    found = modes({"actor": "0-3", "rollout": "2-5"}, mode="hybrid")
    assert found.mode is PlacementMode.HYBRID
    assert ranks_of(found, "rollout") == [[2], [3], [4], [5]]


def test_mode_alone_lays_components_side_by_side_or_on_equal_sets():
    apart = ModelParallelComponentPlacement({"mode": "disaggregated"}, EIGHT, {"actor": {"tensor": 2}})
    assert (apart.get_hardware_ranks("actor"), apart.get_hardware_ranks("rollout")) == ([0, 1, 2, 3], [4, 5, 6, 7])
    three = ModelParallelComponentPlacement(
        {"mode": "disaggregated", "recomputeLogProbs": True}, EIGHT, {"inference": {"tensor": 1}}
    )
    assert [three.get_hardware_ranks(name) for name in ("actor", "inference", "rollout")] == [
        [0, 1],
        [2, 3, 4],
        [5, 6, 7],
    ]
    together = ModelParallelComponentPlacement({"mode": "colocated"}, EIGHT, {})
    assert together.get_hardware_ranks("actor") == together.get_hardware_ranks("rollout") == list(range(8))
    for found in (apart, together):
        assert isinstance(found.get_strategy("env"), NodePlacementStrategy)
        assert found.get_world_size("reward") == 3


def test_mode_alone_without_room_is_refused():
    with pytest.raises(PlacementError, match="component rollout: 1 resources must be left"):
        ModelParallelComponentPlacement({"mode": "disaggregated"}, Inventory([NodeInfo(0, 1)]), {})
    with pytest.raises(PlacementError, match="componentPlacement must be given"):
        ModelParallelComponentPlacement({}, EIGHT, {})


def test_on_cpu_the_resources_are_process_slots():
    slots = Inventory([NodeInfo(rank, 0) for rank in range(4)])
    found = modes({"actor": "0-1", "rollout": "2-3:0-3"}, inventory=slots)
    assert found.mode is PlacementMode.DISAGGREGATED
    assert found.get_parallel("rollout").world == found.get_world_size("rollout") == 4


texts = st.text(alphabet="0123456789-:, alctor", max_size=8)
scalars = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | texts
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
groups = st.lists(
    st.fixed_dictionaries(
        {"label": texts | scalars, "nodeRanks": texts | anything},
        optional={"env": anything, "hardware": scalars, "ignoreHardware": scalars, "interpreter": scalars},
    )
    | anything,
    max_size=2,
)
maps = st.dictionaries(
    st.sampled_from(["actor", "rollout", "actor,rollout", "env"]) | texts,
    texts | anything | st.fixed_dictionaries({"placement": texts | anything}, optional={"node_group": anything}),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(
    written=maps | anything,
    groups=groups | anything,
    cls=st.sampled_from([ComponentPlacement, ModelParallelComponentPlacement]),
)
def test_whatever_is_written_is_placed_or_refused_by_rule(written, groups, cls):
    try:
        cls({"componentPlacement": written, "nodeGroups": groups}, EIGHT)
    except PlacementError as error:
        assert str(error)
