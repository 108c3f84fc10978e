"""The publisher's chain: what the patch of a version is made from, what breaks it, and that it costs no further copy."""

import pytest
import torch

from rl_core.transports.shared_memory import SegmentStore
from rl_core.weights.checksums import sum_bytes
from rl_core.weights.host_copy import HostCopies
from rl_core.weights.patch_encoder import PatchEncoder, tensors_to_verify
from tests.weight_samples import Patch, StateSource, apply_patch, build_manifest


@pytest.fixture
def store():
    made = SegmentStore("unit")
    yield made
    made.close()


@pytest.fixture
def copies(store):
    return HostCopies(store)


@pytest.fixture
def chain(copies):
    return PatchEncoder(copies, verify_every=2)


def weights(value, **others):
    tied = torch.arange(3000.0).bfloat16()
    tied[7] = value
    return {"a": torch.arange(500.0), "b": tied, "head": tied, **others}


def write(chain, version, state=None):
    return chain.write(StateSource(weights(version) if state is None else state), version=version, epoch=1)


def patch_of(copy):
    return Patch(tensors=copy.patch.tensors, data=copy.patch.memory.data)


def test_each_version_has_the_patch_from_the_one_before_and_is_whole_itself(chain):
    before = write(chain, 1)
    assert before.patch is None and before.patch_share is None and before.patches_follow
    state = weights(1)
    for version in (2, 3, 4):
        copy = write(chain, version)
        assert copy.patch.base == before.manifest.digest and copy.patch_share == 1 / 3500
        assert [change.name for change in copy.patch.tensors] == ["b"]  # a tied name travels once
        apply_patch(state, patch_of(copy))
        assert torch.equal(state["b"], weights(version)["b"])
        manifest = build_manifest(weights(version), version=version, epoch=1)
        assert copy.manifest.digest == manifest.digest
        for index, start in copy.layout.starts.items():
            entry = manifest.entries[index]
            assert sum_bytes(copy.memory.data[start : start + entry.nbytes]) == entry.checksum
        before = copy


def test_weights_that_did_not_change_make_an_empty_patch(chain):
    write(chain, 1, weights(5))
    copy = write(chain, 2, weights(5))
    assert copy.patch.tensors == () and copy.patch.nbytes == 0 and copy.patch_share == 0.0


def test_a_patch_as_large_as_the_version_is_left_out_and_the_next_one_builds_on_it_all_the_same(chain):
    write(chain, 1, {"a": torch.zeros(500)})
    copy = write(chain, 2, {"a": torch.ones(500)})
    assert copy.patch is None and copy.patch_share == 1.0 and copy.patches_follow
    assert write(chain, 3, {"a": torch.ones(500)}).patch.base == copy.manifest.digest


def test_each_tensor_has_its_turn_once_in_so_many_patches_and_like_bytes_are_read_in_each(chain):
    write(chain, 1)
    turns = [write(chain, version).patch.verify for version in range(2, 6)]  # of 2000 and 6000 bytes, two patches
    assert sorted(turns[0] + turns[1]) == ["a", "b"] and turns[:2] == turns[2:]
    entries = build_manifest({f"t{i}": torch.zeros(10 + i % 3) for i in range(40)}, version=1, epoch=0).entries
    turns = [tensors_to_verify(entries, number, 8) for number in range(8)]
    assert sorted(sum(turns, ())) == sorted(entry.name for entry in entries)
    assert all(4 <= len(turn) <= 6 for turn in turns)
    assert tensors_to_verify(entries, 3, 1) == tuple(entry.name for entry in entries)


@pytest.mark.parametrize("other", [{"x": torch.zeros(1)}, {"a": torch.zeros(501)}, {"a": torch.zeros(500).half()}])
def test_another_model_breaks_the_chain(chain, store, other):
    write(chain, 1)
    assert write(chain, 2, weights(2) | other).patch is None
    assert write(chain, 3, weights(3) | other).patch is not None
    assert store.stats()["lent"] == 2


def test_a_source_that_fails_in_the_middle_breaks_the_chain_and_frees_its_memory(chain, store):
    class Broken(StateSource):
        def buckets(self, device):
            yield next(super().buckets(device))
            raise OSError("the device is gone")

    write(chain, 1)
    with pytest.raises(OSError, match="the device is gone"):
        chain.write(Broken(weights(2)), version=2, epoch=1)
    assert store.stats()["lent"] == 0
    assert write(chain, 3).patch is None and write(chain, 4).patch is not None


def test_a_version_is_written_over_the_one_before_unless_somebody_reads_that(chain, copies, store):
    first = write(chain, 1)
    second = write(chain, 2)
    assert second.memory is first.memory
    copies.hold(second, "a late joiner")
    before = second.memory.data.copy()
    third = write(chain, 3)
    assert third.memory is not second.memory and (second.memory.data == before).all()
    assert third.patch.base == second.manifest.digest
    copies.drop(second, "a late joiner")
    write(chain, 4)
    assert store.stats()["lent"] == 2  # a version and its patch


def test_a_segment_that_somebody_removed_is_not_written_again(chain):
    first = write(chain, 1)
    (first.memory.exists.__self__.path).unlink()
    second = write(chain, 2)
    assert second.memory is not first.memory and second.patch.base == first.manifest.digest
