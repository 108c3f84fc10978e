"""What a group accepts before anything travels, and what a worker knows outside a job."""

import asyncio
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_core.api.env import EnvSpec
from rl_core.api.errors import ConfigError, InfrastructureError
from rl_core.messages.calls import PackedSpec
from rl_core.plan.placement import Placement
from rl_core.workers import arguments
from rl_core.workers.context import WorkerContext
from rl_core.workers.group import GROUP_NAMES
from rl_core.workers.method_server import load_class
from rl_core.workers.worker import Worker

SPEC = importlib.util.spec_from_file_location("worker_classes", Path(__file__).parent / "worker_classes.py")
worker_classes = importlib.util.module_from_spec(SPEC)
sys.modules["worker_classes"] = worker_classes
SPEC.loader.exec_module(worker_classes)


def test_a_class_in_a_local_scope_is_refused():
    class Local(Worker):
        pass

    with pytest.raises(ConfigError, match="importable by name"):
        Local.create_group()


def test_a_class_in_main_is_refused(monkeypatch):
    monkeypatch.setattr(worker_classes.Plain, "__module__", "__main__")
    with pytest.raises(ConfigError, match="__main__"):
        worker_classes.Plain.create_group()


def test_a_method_with_the_name_of_a_groups_own_is_refused():
    with pytest.raises(ValueError, match="execute_on"):
        worker_classes.Clashing.create_group()


def test_a_method_with_the_name_of_a_hook_and_other_arguments_is_refused():
    with pytest.raises(ValueError, match=r"Hooked.drain must be callable as drain\(\), .* argument: 'channel'; rename"):
        worker_classes.Hooked.create_group()


def test_every_name_of_a_groups_interface_is_kept_from_workers():
    assert {"launch", "execute_on", "within", "construct", "of", "name", "cluster", "world_size"} <= GROUP_NAMES


@pytest.mark.parametrize("value", [object(), lambda: 0, {1.5: 2}], ids=["object", "function", "key"])
def test_arguments_that_cannot_travel_are_refused_at_create_group(value):
    with pytest.raises(ConfigError, match="arguments of a worker"):
        worker_classes.Plain.create_group(value)


def test_parts_of_the_job_travel_as_they_are():
    spec = EnvSpec(type="math", replicas=3, options={"a": [1, 2.5]})
    args, kwargs = arguments.unpack(*arguments.pack((spec, 1, np.arange(3)), {"more": spec}))
    assert args[0] == spec == kwargs["more"] and args[1] == 1


def test_schema_objects_from_elsewhere_are_refused():
    with pytest.raises(ConfigError, match=r"rl_core\.api"):
        arguments.unpack([PackedSpec(schema="os:environ", json="{}")], {})


def test_private_and_unknown_methods_are_refused_without_a_call():
    group = worker_classes.Plain.create_group()
    with pytest.raises(AttributeError, match="private"):
        _ = group._secret
    with pytest.raises(AttributeError, match="nothing"):
        _ = group.nothing


def test_static_methods_stay_static():
    assert worker_classes.Plain.create_group().double(4) == 8


def test_a_group_that_was_not_launched_says_so():
    with pytest.raises(RuntimeError, match="launch"):
        worker_classes.Plain.create_group().answer(1)


@pytest.mark.parametrize("path", ["nowhere_at_all:Plain", "worker_classes:Nobody", "worker_classes:SPEC"])
def test_a_class_that_cannot_be_loaded_is_a_config_error(path):
    with pytest.raises(ConfigError):
        load_class(path)


def test_a_worker_outside_a_job_stands_alone():
    worker = worker_classes.Plain(1, key=2)
    assert (worker.rank, worker.world_size, worker.epoch, worker.device) == (0, 1, 0, "cpu")
    assert worker.worker_address.get_name() == "worker:0" and worker.worker_info.rank == 0
    assert worker.job is None and worker.files == {} and worker.members() == []
    assert worker.args == (1,) and worker.kwargs == {"key": 2}
    worker.record_progress("tokens", 5)
    with worker.waiting("work", "prompts"):
        pass
    with pytest.raises(InfrastructureError, match="outside a job"):
        asyncio.run(worker.hub_call("admit"))


def test_a_worker_knows_its_planned_place_and_its_device_as_torch_counts():
    placed = Placement(
        rank=2, cluster_node_rank=3, placement_node_rank=1, local_rank=0, local_world_size=2, accelerator_type="H200",
        visible_accelerators=["4", "5"], local_accelerator_rank=4, local_hardware_ranks=[4, 5], node_group_label="cluster",
        isolate_accelerator=True,
    )  # fmt: skip
    worker = worker_classes.Plain.create_in_context(WorkerContext(placement=placed, device_uuids=("GPU-a", "GPU-b")))
    info = worker.worker_info
    assert (info.cluster_node_rank, info.accelerator_type, info.accelerator_rank) == (3, "H200", 4)
    assert info.available_accelerators == ("4", "5") == info.hardware_infos and info.device_uuids == ("GPU-a", "GPU-b")
    assert worker.device == "cuda:0"
    shared = worker_classes.Plain.create_in_context(WorkerContext(placement=replace(placed, isolate_accelerator=False)))
    assert shared.device == "cuda:4"


def test_a_free_port_can_be_bound_at_once():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", worker_classes.Plain().acquire_free_port()))
