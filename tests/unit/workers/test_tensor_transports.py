"""Which transport a tensor takes, by where both ends are and by what the network rules of a job permit."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rl_core.messages.tensors import TensorLocation
from rl_core.plan.groups import KINDS_VARIABLE
from rl_core.workers.context import WorkerContext
from rl_core.workers.tensor_memory import accelerator_of, check_tensor
from rl_core.workers.tensors import TensorTransfers

HERE, THERE = (TensorLocation(device="GPU-1", host_token=token) for token in ("here", "there"))
OTHER = TensorLocation(device="GPU-2", host_token="here")
HOST = TensorLocation(device="", host_token="here")


def transfers(job=None):
    context = WorkerContext()
    context.job = job
    return TensorTransfers(SimpleNamespace(context=context, name="worker:0"))


@pytest.mark.parametrize(
    ("receiver", "transport"),
    [(HERE, "ipc"), (OTHER, "nccl"), (HOST, "host"), (THERE, "host")],
    ids=["same", "other", "host", "apart"],
)
def test_the_transport_is_that_of_the_locations_of_both_ends(receiver, transport):
    assert transfers()._transport(HERE, receiver, "other:0") == transport


def test_in_a_job_only_groups_that_hold_the_model_share_memory_and_process_groups(monkeypatch):
    kinds = [
        {"name": name, "lifecycle": lifecycle, "weights": "none", "callers": [], "channels": {}}
        for name, lifecycle in (("worker", "gang"), ("gang", "gang"), ("elastic", "elastic"))
    ]
    monkeypatch.setenv(KINDS_VARIABLE, json.dumps(kinds))
    of_job = transfers(job=SimpleNamespace())
    found = {name: of_job._transport(HERE, OTHER, f"{name}:0") for name in ("gang", "elastic", "unknown")}
    assert found == {"gang": "nccl", "elastic": "host", "unknown": "host"}
    assert [of_job._transport(HERE, HERE, name) for name in ("gang:0", "elastic:0")] == ["ipc", "host"]


def test_what_is_in_host_memory_is_sent_as_any_other_message():
    assert accelerator_of(np.ones(3)) == accelerator_of([1]) == ""
    assert transfers().header(np.ones(3)) is None


def test_a_header_is_checked_as_the_tensor_itself():
    found = SimpleNamespace(shape=(2, 3), dtype="float32")
    check_tensor(np.zeros((2, 3), np.float32), found, "a:0")
    with pytest.raises(ValueError, match=r"of shape \(3, 2\) and type float32, got \(2, 3\) of float32"):
        check_tensor(np.zeros((3, 2), np.float32), found, "a:0")
