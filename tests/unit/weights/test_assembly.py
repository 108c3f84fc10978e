"""Whatever the pieces look like, every tensor arrives whole and verified, or is named as bad and never handed out."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.errors import DataError
from rl_core.transports.shared_memory import SegmentStore
from rl_core.weights.assembly import Assembly
from rl_core.weights.bucket import Layout
from rl_core.weights.host_copy import HostCopies
from rl_core.weights.manifest import host_bytes
from tests.weight_samples import StateSource, build_manifest

WEIGHTS = {
    "embed": torch.randn(300, 5),
    "odd": torch.arange(7, dtype=torch.uint8),
    "empty": torch.empty(0),
    "scalar": torch.tensor(2.5),
    "wide": torch.randn(2000).bfloat16(),
}
WEIGHTS["head"] = WEIGHTS["embed"]


def host_copy():
    manifest = build_manifest(WEIGHTS, version=1, epoch=0)
    layout = Layout.of(manifest.entries, 1500)
    memory = np.zeros(layout.nbytes, np.uint8)
    for index, start in layout.starts.items():
        entry = manifest.entries[index]
        memory[start : start + entry.nbytes] = host_bytes(WEIGHTS[entry.name])
    return manifest, layout, memory


MANIFEST, LAYOUT, MEMORY = host_copy()
WORDS = LAYOUT.nbytes // 4


def pieces_of(memory, cuts):
    edges = sorted({0, memory.size, *(cut * 4 for cut in cuts)})
    return [(start, memory[start:stop].copy()) for start, stop in itertools.pairwise(edges)]


def assemble(pieces, destinations=(), wanted=tuple(WEIGHTS)):
    targets = {name: torch.zeros_like(WEIGHTS[name]) for name in destinations}
    assembly = Assembly(MANIFEST, LAYOUT, destinations=targets, wanted=wanted)
    handed = {name: tensor.clone() for name, tensor in assembly.tensors(pieces)}
    return assembly, handed, targets


@given(
    cuts=st.lists(st.integers(0, WORDS), max_size=12),
    destinations=st.sets(st.sampled_from(sorted(WEIGHTS))),
)
def test_any_cut_at_whole_words_gives_every_tensor(cuts, destinations):
    assembly, handed, targets = assemble(pieces_of(MEMORY, cuts), destinations)
    assert assembly.bad == [] and handed.keys() == WEIGHTS.keys() - destinations
    for name, tensor in {**handed, **targets}.items():
        assert tensor.dtype == WEIGHTS[name].dtype and torch.equal(tensor, WEIGHTS[name])


@given(
    byte=st.integers(0, LAYOUT.nbytes - 1),
    cuts=st.lists(st.integers(0, WORDS), max_size=4),
    in_place=st.booleans(),
)
def test_a_damaged_byte_is_found_in_its_tensor_and_the_others_arrive(byte, cuts, in_place):
    memory = MEMORY.copy()
    memory[byte] ^= 0x10
    hit = [
        MANIFEST.entries[index].name
        for index, start in LAYOUT.starts.items()
        if start <= byte < start + MANIFEST.entries[index].nbytes
    ]
    assembly, handed, _ = assemble(pieces_of(memory, cuts), WEIGHTS if in_place else ())
    assert assembly.bad == hit  # a byte of padding hits nobody
    tied = {"embed", "head"} if hit == ["embed"] else set(hit)
    assert in_place or handed.keys() == WEIGHTS.keys() - tied


def test_a_tied_name_with_memory_of_its_own_gets_the_bytes_too():
    _, _, targets = assemble([(0, MEMORY)], ["embed", "head"])
    assert targets["embed"].data_ptr() != targets["head"].data_ptr() and torch.equal(targets["head"], WEIGHTS["embed"])


def test_names_nobody_wants_are_not_handed_out():
    _, handed, _ = assemble([(0, MEMORY)], wanted=("scalar", "head"))
    assert handed.keys() == {"scalar", "head"}


@pytest.mark.parametrize(
    ("pieces", "rule"),
    [
        ([(0, MEMORY[:1024])], "ended at byte 1024"),
        ([(0, MEMORY[:1024]), (1028, MEMORY[1028:])], "'embed' misses bytes 1024 to 1028"),
        ([(512, MEMORY[512:])], "'embed' misses bytes 0 to 512"),
        ([(0, MEMORY[:1024]), (512, MEMORY[512:])], "expected byte 1024 or later, got 512"),
        ([(0, MEMORY[:1023]), (1023, MEMORY[1023:])], "cut at whole 32-bit words"),
    ],
    ids=["short", "gap", "late-start", "overlap", "half-word"],
)
def test_pieces_with_gaps_or_overlaps_are_a_data_error(pieces, rule):
    with pytest.raises(DataError, match=rule):
        assemble(pieces)


def test_device_buckets_are_verified_and_handed_out_where_they_lie():
    assembly = Assembly(MANIFEST, LAYOUT, destinations={}, wanted=WEIGHTS)
    damaged = MEMORY.copy()
    damaged[LAYOUT.starts[1]] ^= 1
    buckets = [(one, torch.from_numpy(damaged[one.start : one.start + one.nbytes])) for one in LAYOUT.buckets]
    handed = dict(assembly.device_tensors(buckets))
    assert assembly.bad == ["odd"] and handed.keys() == WEIGHTS.keys() - {"odd"}
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in handed.items())


class FullStore:
    """A segment store without room."""

    def lend(self, size, holder):
        return None


def test_without_shared_memory_the_copy_lies_in_private_memory():
    copy = HostCopies(FullStore()).write(StateSource(WEIGHTS, bucket_bytes=1500), version=1, epoch=0)
    assert copy.memory.segment is None and np.array_equal(copy.memory.data[:100], MEMORY[:100])
    assert copy.manifest == MANIFEST and copy.layout == LAYOUT


def test_a_copy_gives_its_buckets_as_bytes():
    copy = HostCopies(FullStore()).write(StateSource(WEIGHTS, bucket_bytes=1500), version=1, epoch=0)
    given = list(copy.buckets("cpu"))
    assert [bucket for bucket, _ in given] == list(LAYOUT.buckets)
    held = np.zeros(LAYOUT.nbytes, np.uint8)
    for one, data in given:
        held[one.start : one.start + one.nbytes] = data.numpy()
    for index, start in LAYOUT.starts.items():  # what lies between tensors is nobody's
        end = start + MANIFEST.entries[index].nbytes
        assert np.array_equal(held[start:end], MEMORY[start:end])


def test_floating_tensors_are_copied_in_the_type_of_the_wire():
    source = StateSource(WEIGHTS, dtype="bfloat16", bucket_bytes=1500)
    copy = HostCopies(FullStore()).write(source, version=1, epoch=0)
    assert [entry.dtype for entry in copy.manifest.entries] == [
        "bfloat16", "uint8", "bfloat16", "bfloat16", "bfloat16", "bfloat16",
    ]  # fmt: skip
    assert copy.manifest == build_manifest(WEIGHTS, version=1, epoch=0, dtype="bfloat16")


class LyingSource(StateSource):
    """Gives something else than its entries say."""

    def __init__(self, change):
        super().__init__(WEIGHTS, bucket_bytes=1500)
        self.change = change

    def buckets(self, device):
        return iter(self.change(list(super().buckets(device))))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda all: all[:-1], "every tensor of its entries, 'wide' is missing"),
        (
            lambda all: [
                replace(one, tensors=tuple(t[..., :1] if t.dim() == 2 else t for t in one.tensors)) for one in all
            ],
            r"'embed' must be float32 \[300, 5\] as its entry says, got float32 \[300, 1\]",
        ),
        (
            lambda all: [replace(one, tensors=tuple(t.double() for t in one.tensors)) for one in all],
            r"'embed' must be float32 \[300, 5\] as its entry says, got float64 \[300, 5\]",
        ),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_a_copy_refuses_a_source_that_does_not_give_what_its_entries_say(change, rule):
    with pytest.raises(ValueError, match=rule):
        HostCopies(FullStore()).write(LyingSource(change), version=1, epoch=0)


def test_one_memory_serves_version_after_version_and_a_held_one_stays_as_it_is():
    store = SegmentStore("unit")
    copies, weights = HostCopies(store), {"a": torch.zeros(100_000)}
    for version in range(1, 4):
        weights["a"].fill_(version)
        copy = copies.write(StateSource(weights), version=version, epoch=0)
        copies.hold(copy, "publisher")
        if version < 3:
            copies.drop(copy, "publisher")  # as the publisher does before it writes the next
    assert store.stats()["created"] == 1
    copies.hold(copy, "a late joiner")
    copies.drop(copy, "publisher")
    before = copy.memory.data.copy()
    weights["a"].fill_(9)
    copies.write(StateSource(weights), version=4, epoch=0)
    assert store.stats()["created"] == 2 and np.array_equal(copy.memory.data, before)
    copies.drop(copy, "a late joiner")
    assert store.stats()["lent"] == 1
    store.close()
