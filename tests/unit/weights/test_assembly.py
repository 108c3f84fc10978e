"""Whatever the pieces look like, every tensor arrives whole and verified, or is named as bad and never handed out."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.api.errors import DataError
from rl_core.weights.assembly import Assembly
from rl_core.weights.bucket import Layout
from rl_core.weights.host_copy import HostCopies
from rl_core.weights.manifest import build_manifest, host_bytes

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
    copies = HostCopies(FullStore(), bucket_bytes=1500, dtype=None)
    copy = copies.write(WEIGHTS, version=1, epoch=0)
    assert copy.segment is None and np.array_equal(copy.memory[:100], MEMORY[:100])
    assert copy.manifest == MANIFEST


def test_the_copy_refuses_a_model_that_changes_between_versions():
    copies = HostCopies(FullStore(), bucket_bytes=1500, dtype="bfloat16")
    first = copies.write(iter(WEIGHTS.items()), version=1, epoch=0)
    assert [entry.dtype for entry in first.manifest.entries] == [
        "bfloat16", "uint8", "bfloat16", "bfloat16", "bfloat16", "bfloat16",
    ]  # fmt: skip
    assert first.manifest == build_manifest(WEIGHTS, version=1, epoch=0, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"expected 'odd' \[7\], got 'odd' \[8\]"):
        copies.write({**WEIGHTS, "odd": torch.zeros(8, dtype=torch.uint8)}, version=2, epoch=0)
    with pytest.raises(ValueError, match="'wide' is gone"):
        copies.write(list(WEIGHTS.items())[:4], version=2, epoch=0)
    with pytest.raises(ValueError, match="expected no more tensors, got 'more'"):
        copies.write({**WEIGHTS, "more": torch.zeros(1)}, version=2, epoch=0)
    with pytest.raises(ValueError, match="'head' must stay equal to 'embed'"):
        copies.write({**WEIGHTS, "head": torch.zeros(300, 5)}, version=2, epoch=0)
    with pytest.raises(ValueError, match="unique"):
        HostCopies(FullStore(), bucket_bytes=1500, dtype=None).write([("a", torch.ones(1))] * 2, version=1, epoch=0)
