"""A patch over the version in memory: every tensor is proven by that version's checksum or by its own bytes, or it is named as bad."""

from dataclasses import replace

import pytest
import torch

from rl_core.api.errors import DataError
from rl_core.messages.weights import PatchSource, SharedSource
from rl_core.weights.assembly import Assembly
from rl_core.weights.bucket import Layout
from rl_core.weights.manifest import host_bytes
from tests.weight_samples import build_manifest, make_patch

OLD = {"a": torch.arange(400.0), "b": torch.arange(300.0).bfloat16(), "c": torch.zeros(5)}
OLD["tied"] = OLD["b"]
NEW = {**{name: tensor.clone() for name, tensor in OLD.items()}}
NEW["a"][5], NEW["b"][7] = -1.0, -1.0
NEW["tied"] = NEW["b"]
TRAVELS = ("a", "b", "c")
BASE = build_manifest(OLD, version=1, epoch=0)
MANIFEST = build_manifest(NEW, version=2, epoch=0)
PATCH = make_patch({name: OLD[name] for name in TRAVELS}, {name: NEW[name] for name in TRAVELS})
SOURCE = PatchSource(
    base=BASE.digest, tensors=PATCH.tensors, data=SharedSource(segment="s", nbytes=PATCH.data.size), verify=()
)


class Memory:
    """A receiver's memory with the old version: "a" in place, the others kept."""

    def __init__(self):
        self.placed = {"a": OLD["a"].clone()}
        self.kept = {name: host_bytes(OLD[name]).copy() for name in ("b", "c")}

    def take(self, source=SOURCE, base=BASE):
        layout = Layout.of(MANIFEST.entries)
        assembly = Assembly(MANIFEST, layout, destinations=self.placed, wanted=NEW, retained=self.kept, base=base)
        return assembly, dict(assembly.patched(source, PATCH.data))


def test_what_has_no_destination_is_handed_out_whole_with_its_tied_name():
    memory = Memory()
    assembly, handed = memory.take()
    assert torch.equal(memory.placed["a"], NEW["a"]) and assembly.bad == [] and assembly.touched
    assert list(handed) == ["b", "tied", "c"]
    assert all(torch.equal(tensor, NEW[name]) for name, tensor in handed.items())


@pytest.mark.parametrize("left_out", ["a", "b"])
def test_a_change_that_is_left_out_is_found_although_nothing_was_written(left_out):
    tensors = tuple(change for change in PATCH.tensors if change.name != left_out)
    assembly, handed = Memory().take(replace(SOURCE, tensors=tensors))
    assert assembly.bad == [left_out] and left_out not in handed


def test_a_patch_applied_twice_over_the_same_memory_is_one_of_another_base():
    memory = Memory()
    memory.take()
    with pytest.raises(DataError, match="must be of the version in memory"):
        memory.take(base=MANIFEST)
    with pytest.raises(DataError, match="must be of the version in memory"):
        memory.take(base=None)


@pytest.mark.parametrize(
    ("name", "byte", "verify", "found"),
    [
        ("a", 5 * 4 + 1, (), True),
        ("a", 19, (), False),
        ("a", 19, ("a",), True),
        ("c", 19, ("a",), False),
        ("c", 19, ("c",), True),
    ],
    ids=["where it writes", "beside", "beside, in its turn", "unchanged", "unchanged, in its turn"],
)
def test_damage_is_found_at_once_where_the_patch_writes_and_elsewhere_when_the_tensor_has_its_turn(
    name, byte, verify, found
):
    memory = Memory()
    damaged = host_bytes(memory.placed["a"]) if name == "a" else memory.kept[name]
    damaged[byte] ^= 1
    assembly, _ = memory.take(replace(SOURCE, verify=verify))
    assert assembly.bad == ([name] if found else [])


def test_a_change_that_lands_one_element_beside_its_place_is_found():
    memory, data = Memory(), PATCH.data.copy()
    data[PATCH.tensors[0].start] += 1
    layout = Layout.of(MANIFEST.entries)
    assembly = Assembly(MANIFEST, layout, destinations=memory.placed, wanted=NEW, retained=memory.kept, base=BASE)
    list(assembly.patched(SOURCE, data))
    assert assembly.bad == ["a"]


def test_a_base_without_one_of_the_tensors_is_refused():
    entries = tuple(entry for entry in BASE.entries if entry.name != "c")
    base = replace(BASE, entries=entries)
    with pytest.raises(DataError, match="must be of tensors of the version in memory, got 'c'"):
        Memory().take(replace(SOURCE, base=base.digest), base=base)


def test_memory_that_moved_since_the_version_before_is_refused():
    memory = Memory()
    memory.placed = {}
    with pytest.raises(DataError, match="must find the tensors where the version before it left them"):
        memory.take()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "x"}, "must be of tensors of the manifest, got 'x'"),
        ({"shape": (20, 20)}, r"'a' must be float32 \[400\]"),
    ],
)
def test_a_patch_of_other_tensors_is_refused(fields, words):
    tensors = (replace(PATCH.tensors[0], **fields), *PATCH.tensors[1:])
    with pytest.raises(DataError, match=words):
        Memory().take(replace(SOURCE, tensors=tensors))
