"""What each process of an engine does with a version that it reads itself: verify it, load it, tell why not. Two processes, here two threads.

The model is that of the proof's tests, split over both; truth is the manifest's checksum, computed of the given tensors.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_core.api.errors import InfrastructureError
from rl_core.collective.group import GroupStore, TensorGroup
from rl_core.messages.engine import SourceLoad
from rl_core.messages.weights import DeviceSource, GroupPlan, GroupSource, SharedSource
from rl_core.rollouts.sglang.child.layout import LoadedLayout
from rl_core.rollouts.sglang.child.source_loader import SourceLoader
from rl_core.rollouts.sglang.proof import GivenTensors
from rl_core.transports.shared_memory import SegmentStore
from rl_core.weights.device_buffer import DeviceBuffer
from rl_core.weights.host_copy import HostCopies
from rl_core.weights.weight_transport import DeviceIpc
from tests.unit.rollouts.test_sglang_proof import Model, tensors
from tests.weight_samples import StateSource

BUCKET_BYTES = 1 << 8
"""Each tensor is a bucket of its own."""
RANKS = 2


@pytest.fixture
def copies():
    made = HostCopies(SegmentStore())
    yield made
    made.close()


@pytest.fixture(scope="module")
def store():
    return GroupStore("127.0.0.1")


class Publisher:
    """Gives one version to the ranks by each kind of source."""

    whole = False

    def __init__(self, kind, copies, store, state, generation=1):
        self.buffer = DeviceBuffer(optional=False)
        version = StateSource(state, bucket_bytes=BUCKET_BYTES)
        self.copy = copies.write(self.buffer.copying(version) if kind == "ipc" else version, version=1, epoch=1)
        self.names = list(state)
        if kind == "shared":
            self.source = SharedSource(segment=self.copy.memory.segment, nbytes=self.copy.nbytes)
        elif kind == "ipc":
            self.source = DeviceSource(handles=tuple(self.buffer.handle() for _ in range(RANKS)))
        else:
            plan = GroupPlan(
                name="weights", epoch=1, generation=generation, members=("publisher", "rollout:0", "rollout:0"), backend="gloo",
                host=store.host, port=store.port,
            )  # fmt: skip
            self.source = GroupSource(plan=plan, rank=1)
            self.store, self.group = store, None

    def request(self):
        return SourceLoad(
            whole=self.whole,
            source=self.source,
            manifest=self.copy.manifest.packed,
            bucket_bytes=BUCKET_BYTES,
            wanted=self.names,
            collective_seconds=60.0,
        )

    def broadcast(self, before_bucket=lambda index: None):
        """Send all buckets. If that fails, release the group, as the publisher does."""
        if self.group is None:
            self.group = TensorGroup.form(self.source.plan, 0, timeout=60)
        for index, (_, bucket) in enumerate(self.copy.buckets("cpu")):
            before_bucket(index)
            try:
                self.group.broadcast(bucket)
            except InfrastructureError:
                self.store.release(self.source.plan)
                raise

    def deliver(self, ranks):
        """Return the report of each rank."""
        with ThreadPoolExecutor(RANKS + 1) as threads:
            reports = [threads.submit(rank.load, self.request()) for rank in ranks]
            if isinstance(self.source, GroupSource):
                threads.submit(self.broadcast).result()
            return [report.result() for report in reports]


class Rank:
    """One process of the engine."""

    def __init__(self, number):
        self.model, self.layout = Model(number, torch.float32), LoadedLayout()
        self.loader = SourceLoader(self.layout, rank=number, device="cpu", seconds=60.0)

    def load(self, request):
        return self.loader.load(self.model, request)


@pytest.fixture
def ranks():
    first = Rank(0)  # what torch imports at the first load takes longer than a group may wait where the machine is busy
    first.layout.record(first.model, tensors(0, torch.float32).items())
    return [Rank(number) for number in range(RANKS)]


def prove(ranks, publisher):
    given = GivenTensors()
    given.add_manifest(publisher.copy.manifest, publisher.names)
    return given.prove([rank.layout.checksums(rank.model, turn=0, turns=1) for rank in ranks], whole=True)


KINDS = pytest.mark.parametrize("kind", ["shared", "ipc", "gloo"])


@KINDS
def test_each_rank_loads_its_part_and_the_parts_add_up_to_the_manifest(ranks, copies, store, kind):
    publisher = Publisher(kind, copies, store, tensors(0, torch.float32), generation=10)
    assert len(publisher.copy.layout.buckets) > 2
    key = "weights/1/10" if kind == "gloo" else ""
    for seed in range(1, 3):
        assert (
            publisher.deliver(ranks)
            == [{"error": "", "ended": False, "opened": kind == "ipc", "group": key, "bad": []}] * RANKS
        )
        assert prove(ranks, publisher) == []
        publisher.copy = copies.write(StateSource(tensors(seed, torch.float32), bucket_bytes=BUCKET_BYTES), version=1, epoch=1)  # fmt: skip
        if kind == "shared":
            publisher.source = SharedSource(segment=publisher.copy.memory.segment, nbytes=publisher.copy.nbytes)
        elif kind == "ipc":
            return


@KINDS
def test_what_is_read_back_afterwards_is_found_there(ranks, copies, store, kind):
    publisher = Publisher(kind, copies, store, tensors(0, torch.float32), generation=15)
    publisher.whole = True
    assert not publisher.deliver(ranks)[0]["error"] and prove(ranks, publisher) == []
    if kind == "ipc":
        publisher.source = DeviceSource(handles=tuple(publisher.buffer.handle() for _ in range(RANKS)))
    place = publisher.copy.memory.data if kind != "ipc" else publisher.buffer._buffer.numpy()
    place[publisher.copy.layout.starts[publisher.names.index("out")]] ^= 1
    assert [report["bad"] for report in publisher.deliver(ranks)] == [[], []]
    with pytest.raises(InfrastructureError, match="1 hold something else.*out"):
        prove(ranks, publisher)


@KINDS
def test_a_tensor_that_is_not_that_of_the_manifest_is_named_and_not_loaded(ranks, copies, store, kind):
    publisher = Publisher(kind, copies, store, tensors(0, torch.float32), generation=20)
    place = publisher.copy.memory.data if kind != "ipc" else publisher.buffer._buffer.numpy()
    place[publisher.copy.layout.starts[publisher.names.index("out")]] ^= 1
    assert [report["bad"] for report in publisher.deliver(ranks)] == [["out"]] * RANKS
    assert all(bool((rank.model.out == 0).all()) and bool((rank.model.norm != 0).all()) for rank in ranks)
    with pytest.raises(InfrastructureError, match="is not served") as caught:
        ranks[0].layout.record(ranks[0].model, [("out", torch.ones(7, 6))])
        prove(ranks, publisher)
    assert "out" in str(caught.value)


def test_each_rank_reads_the_copy_on_its_own_device(ranks, copies, store):
    publisher = Publisher("ipc", copies, store, tensors(0, torch.float32))
    second = Publisher("ipc", copies, store, tensors(0, torch.float32))
    second.buffer._buffer[publisher.copy.layout.starts[publisher.names.index("out")]] ^= 1
    ipc = DeviceIpc(None, publisher.buffer, wanted="auto", place=("host", "GPU-0"))
    ipc.handles = {("host", "GPU-1"): [second.buffer.handle()]}
    assert ipc._take([("host", "GPU-0"), ("host", "GPU-2")]) == ipc._take([("host", "GPU-1")] * 2) == []
    publisher.source = DeviceSource(handles=tuple(ipc._take([("host", "GPU-0"), ("host", "GPU-1")])))
    assert [report["bad"] for report in publisher.deliver(ranks)] == [[], ["out"]]
    assert ipc._take([("host", "GPU-1")]) == [], "a handle is for one process"


def test_handles_that_a_process_could_not_open_are_taken_back(ranks, copies, store):
    publisher = Publisher("ipc", copies, store, tensors(0, torch.float32))
    own, other = ("host", "GPU-0"), ("host", "GPU-1")
    ipc = DeviceIpc(None, publisher.buffer, wanted="auto", place=own)
    ipc.handles = {other: []}
    publisher.source = DeviceSource(handles=(publisher.buffer.handle(), (b"", b"/nothing-there", 3)))
    found = [(report["opened"], report["ended"]) for report in publisher.deliver(ranks)]
    assert found == [(True, False), (False, True)]
    handle, missing = publisher.source.handles
    ipc._put_back([(own, handle), (other, missing)])
    assert ipc._unused == [handle] and ipc.handles == {other: [missing]}


def test_tied_names_are_loaded_from_the_same_bytes(ranks, copies, store):
    state = tensors(0, torch.float32)
    state["bias"] = state["norm"]
    publisher = Publisher("shared", copies, store, state)
    assert [entry.alias_of for entry in publisher.copy.manifest.entries].count("norm") == 1
    publisher.names = [name for name in state if name != "norm"]
    assert [report["error"] for report in publisher.deliver(ranks)] == ["", ""]
    assert torch.equal(ranks[0].model.norm, state["norm"])


def test_a_rank_that_cannot_load_ends_the_group_for_the_others(ranks, copies, store, monkeypatch):
    publisher = Publisher("gloo", copies, store, tensors(0, torch.float32), generation=30)

    def fail(given):
        list(given)
        raise KeyError("no such parameter")

    monkeypatch.setattr(ranks[1].model, "load_weights", fail)
    failed = threading.Event()

    def load(rank):
        report = rank.load(publisher.request())
        failed.set()
        return report

    with ThreadPoolExecutor(RANKS + 1) as threads:
        reports = [threads.submit(load, rank) for rank in ranks]
        sending = threads.submit(publisher.broadcast, lambda index: index > 1 and failed.wait(60))
        with pytest.raises(InfrastructureError, match="form a new generation"):
            sending.result()
        first, second = (report.result() for report in reports)
    assert "no such parameter" in second["error"] and not second["ended"], "its own fault"
    assert first["error"] and first["ended"] and first["group"] == second["group"] == ""


def test_a_group_that_is_released_in_a_transfer_ends_it_at_every_rank_and_the_next_one_works(ranks, copies, store):
    publisher = Publisher("gloo", copies, store, tensors(0, torch.float32), generation=40)
    with ThreadPoolExecutor(RANKS + 1) as threads:
        reports = [threads.submit(rank.load, publisher.request()) for rank in ranks]
        publisher.group = TensorGroup.form(publisher.source.plan, 0, timeout=60)
        publisher.group.broadcast(next(publisher.copy.buckets("cpu"))[1])
        store.release(publisher.source.plan)
        for report in (one.result() for one in reports):
            assert "publisher ended it" in report["error"] and report["ended"] and not report["group"]
    again = Publisher("gloo", copies, store, tensors(0, torch.float32), generation=41)
    assert [report["error"] for report in again.deliver(ranks)] == ["", ""] and prove(ranks, again) == []
