"""Engines on the devices of several trainer ranks: each maps the copy on its own device, which is gone when the version is published.

Ranks and receivers are processes; shared memory stands in for that of devices.
"""

from dataclasses import asdict

import pytest
from safetensors import safe_open

from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_harness import run_ranks, scenario
from tests.integration.weight_world import Receiver, started

DEVICES = ("cpu:0", "cpu:1", "cpu:9")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("device-copies") / "model")


@pytest.fixture
def receivers(model):
    with safe_open(model / "model.safetensors", framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118, it is no mapping
    made = [Receiver(f"rollout:{n}", shapes=shapes, devices=[device]) for n, device in enumerate(DEVICES)]
    with started(*made):
        yield made


def addresses(receivers):
    return [asdict(one.about) | {"devices": (device,)} for one, device in zip(receivers, DEVICES, strict=False)]


def test_each_receiver_maps_the_copy_on_its_device_and_another_device_gets_the_host_copy(tmp_path, model, receivers):
    everybody = addresses(receivers)
    verbs = [["publish_to", 1, everybody], ["train", 1], ["publish_to", 2, everybody], ["publish_to", 3, everybody[:1]]]
    ranks = run_ranks(tmp_path, 3, [scenario("all", make_spec(model), verbs, world_size=3)])
    first, second, third = ([rank["all"]["published"][n] for rank in ranks] for n in range(3))
    for published in (first, second):
        assert published[0]["acked"] == ["rollout:0", "rollout:1", "rollout:2"]
        assert published[0]["transport"] == "ipc+shared"
        assert [one["filled"] for one in published] == [False, True, False], "rank 2 shares its device with no engine"
        assert published[0]["broadcasts"] == published[2]["broadcasts"] > 3
    assert [one["broadcasts"] for one in third] == [0] * 3, "rank 0 has a copy anyway"
    assert all(one["freed"] for one in (*first, *second, *third))
    assert first[0]["bits"] != second[0]["bits"]
    probes = [one.call("probe") for one in receivers]
    owners = [one["pid"] for one in first]
    assert [one["mapped_from"] for one in probes] == [[owners[0]] * 3, [owners[1]] * 2, []]
    assert [one["current"][0] for one in probes] == [3, 2, 2]
    assert all(one["serving"] and one["bits"] == second[0]["bits"] for one in probes)


@pytest.mark.parametrize(
    ("dead", "where"), [(1, "broadcast"), (0, "deliver")], ids=["in a bucket", "while the others wait"]
)
def test_a_lost_rank_is_named_to_the_others_which_free_their_copies(tmp_path, model, receivers, dead, where):
    verbs = [["publish_to", 1, addresses(receivers), (dead, where)]]
    ranks = run_ranks(tmp_path, 2, [scenario("lost", make_spec(model), verbs, world_size=2)])
    assert ranks[dead] == {}
    survivor = ranks[1 - dead]["lost"]
    assert survivor["error"].startswith("InfrastructureError: publishing version 1 failed on actor rank")
    assert f"missing: rank {dead}" in survivor["error"]
    assert survivor["published"][0]["freed"] and survivor["published"][0]["broadcasts"] >= 2
    assert all(not one.call("probe")["loads"] for one in receivers)
