"""Segments: lent, shared, released, reused; nothing leaks, nothing outlives its owner, a full store is no error."""

import gc
import os
import stat

import numpy as np
import pytest

from rl_core.api.errors import FrameError
from rl_core.transports import frames, shared_memory
from rl_core.transports.shared_memory import SegmentLoan, SegmentReader, SegmentStore, copy_into

MIB = 2**20
RANDOM = "0123456789abcdef"
SEGMENT = f"rljob-a-1-{RANDOM}-2"


@pytest.fixture
def store(tmp_path):
    store = SegmentStore("Job-0123456789", directory=tmp_path, capacity=8 * MIB)
    yield store
    store.close()


@pytest.fixture
def reader(tmp_path):
    return SegmentReader(directory=tmp_path)


def data(mib=1, value=7):
    return np.full(mib * MIB, value, np.uint8)


def put(store, buffer, holder):
    """Lend a segment with a copy of `buffer`; None when the store is full."""
    segment = store.lend(buffer.nbytes, holder)
    if segment is None:
        return None
    copy_into(segment.memory, buffer)
    return SegmentLoan(segment.name, segment.generation)


def test_names_carry_job_and_pid_and_files_are_private(store, tmp_path):
    placement = put(store, data().data, "peer")
    assert placement.segment.startswith(f"rljob-job01234-{os.getpid()}-")
    assert stat.S_IMODE((tmp_path / placement.segment).stat().st_mode) == 0o600


def test_what_was_put_is_read_without_a_copy(store, reader):
    placement = put(store, data(value=3).data, "peer")
    view = reader.view(placement.segment, 0, MIB)
    assert bytes(view[:4]) == b"\3\3\3\3"
    store._lent[placement.segment, placement.generation][0].memory[0] = 9
    assert view[0] == 9


def test_a_released_segment_is_used_again_under_a_new_generation(store):
    first = put(store, data().data, "peer")
    assert store.release(first.segment, first.generation, "peer")
    second = put(store, data().data, "peer")
    assert second.segment == first.segment and second.generation == first.generation + 1
    assert not store.release(first.segment, first.generation, "peer"), "a late release must not hit the next holder"
    assert store.stats()["lent"] == 1


@pytest.mark.parametrize("foreign", [False, True], ids=["removed", "replaced"])
def test_a_segment_that_somebody_removed_is_not_lent_again_and_what_has_its_name_is_left_alone(
    store, tmp_path, foreign
):
    first = put(store, data().data, "peer")
    (tmp_path / first.segment).unlink()
    if foreign:
        (tmp_path / first.segment).write_text("another one's")
    store.release(first.segment, first.generation, "peer")
    second = put(store, data().data, "peer")
    assert second.segment != first.segment and (tmp_path / second.segment).is_file()
    assert (tmp_path / first.segment).exists() is foreign
    assert store.stats()["lent"] == 1 and store.stats()["bytes"] == MIB


def test_a_segment_is_free_only_when_its_last_holder_let_go(store):
    spot = put(store, data().data, "a")
    store.share(spot.segment, spot.generation, "b")
    store.share(spot.segment, spot.generation, "b")
    assert store.release(spot.segment, spot.generation, "a")
    assert store.release(spot.segment, spot.generation, "b")
    assert store.stats()["lent"] == 1
    assert not store.release(spot.segment, spot.generation, "a"), "nobody may release more than it holds"
    assert store.release(spot.segment, spot.generation, "b")
    assert store.stats()["lent"] == 0


def test_the_death_of_a_holder_frees_what_it_alone_held(store):
    alone, both = put(store, data().data, "dead"), put(store, data().data, "dead")
    store.share(both.segment, both.generation, "alive")
    assert store.release_holder("dead") == 2
    assert store.stats()["lent"] == 1
    assert store.release(both.segment, both.generation, "alive")
    assert not store.release(alone.segment, alone.generation, "dead")


def test_what_a_lost_holder_had_is_never_used_again(store, tmp_path):
    """It may only be stopped or cut off: when it goes on it reads and writes there still."""
    alone, both = put(store, data().data, "lost"), put(store, data().data, "lost")
    store.share(both.segment, both.generation, "alive")
    store.release_holder("lost")
    assert not (tmp_path / alone.segment).exists() and (tmp_path / both.segment).exists()
    store.release(both.segment, both.generation, "alive")
    assert not (tmp_path / both.segment).exists()
    assert store.stats() == {"bytes": 0, "lent": 0, "idle": 0, "created": 2, "reused": 0, "full": 0}


def test_a_full_store_says_so_and_counts_and_recovers(store):
    spots = [put(store, data().data, "peer") for _ in range(8)]
    assert all(spots)
    assert put(store, data().data, "peer") is None
    assert store.stats()["full"] == 1
    store.release(spots[0].segment, spots[0].generation, "peer")
    assert put(store, data().data, "peer") is not None


def test_idle_segments_of_another_size_make_room(store):
    small = [put(store, data().data, "peer") for _ in range(8)]
    for spot in small:
        store.release(spot.segment, spot.generation, "peer")
    assert put(store, data(mib=6).data, "peer") is not None


def test_trimming_deletes_what_was_not_used_since_the_last_time(store, tmp_path):
    spots = [put(store, data().data, "peer") for _ in range(3)]
    for spot in spots:
        store.release(spot.segment, spot.generation, "peer")
    assert store.trim() == 0
    again = put(store, data().data, "peer")
    store.release(again.segment, again.generation, "peer")
    assert store.trim() == 2
    assert [path.name for path in tmp_path.iterdir()] == [again.segment]


def test_one_busy_segment_keeps_no_others(store, tmp_path):
    spots = [put(store, data().data, "peer") for _ in range(3)]
    for spot in spots:
        store.release(spot.segment, spot.generation, "peer")
    store.trim()
    for _ in range(5):
        busy = put(store, data().data, "peer")
        store.release(busy.segment, busy.generation, "peer")
    assert store.trim() == 2
    assert [path.name for path in tmp_path.iterdir()] == [busy.segment]


def test_a_segment_that_its_owner_does_not_read_is_not_mapped_there_and_leaves_no_descriptor(store, reader):
    def mapped(name):
        with open("/proc/self/maps") as maps:
            return name in maps.read()

    with_reader = len(os.listdir("/proc/self/fd")) + 1
    segment = store.lend(MIB, "peer")
    assert not mapped(segment.name)
    copy_into(reader.view(segment.name, 0, MIB), data(value=5).data)
    assert segment.memory[0] == 5 and mapped(segment.name)
    other = store.lend(MIB, "lost")
    store.release_holder("lost")
    store.close()
    assert len(os.listdir("/proc/self/fd")) == with_reader and not mapped(other.name)


@pytest.mark.parametrize("size", [1, 2**18, 2**18 + 1, 2**20, 3 * 2**20 + 5, 2**26 + 1])
def test_size_classes_waste_at_most_a_quarter(size):
    given = shared_memory._size_class(size)
    assert (
        given >= max(size, shared_memory.THRESHOLD)
        and given <= 1.25 * max(size, shared_memory.THRESHOLD)
        and given % 4096 == 0
    )


class TestReading:
    def test_the_release_runs_when_the_last_array_over_the_view_dies(self, store, reader):
        released = []
        placement = put(store, np.arange(MIB // 4, dtype=np.float32).view(np.uint8).data, "peer")
        head, _ = frames.encode(np.arange(MIB // 4, dtype=np.float32))
        view = reader.view(placement.segment, 0, MIB, lambda: released.append(1))
        array = frames.decode([head, view])
        part = array.reshape(4, -1)[2][5:10]
        del array, view
        gc.collect()
        assert released == []
        assert part[0] == 2 * MIB // 16 + 5
        del part
        gc.collect()
        assert released == [1]

    def test_the_release_waits_for_torch_tensors_too(self, store, reader):
        import torch

        released = []
        placement = put(store, data().data, "peer")
        head, _ = frames.encode(torch.zeros(MIB, dtype=torch.uint8))
        tensor = frames.decode([head, reader.view(placement.segment, 0, MIB, lambda: released.append(1))])
        part = tensor.view(2, -1)[1]
        del tensor
        gc.collect()
        assert released == [] and part[0] == 7
        del part
        gc.collect()
        assert released == [1]

    @pytest.mark.parametrize(("offset", "size"), [(0, 9 * MIB), (MIB, MIB), (-1, 5), (0, -1)])
    def test_views_beyond_the_segment_are_refused(self, store, reader, offset, size):
        placement = put(store, data().data, "peer")
        with pytest.raises(FrameError):
            reader.view(placement.segment, offset, size)

    @pytest.mark.parametrize(
        "name",
        ["../etc/passwd", f"{SEGMENT}/../../x", "other", "rljob-a-1-2", f"rljob-a-1-{RANDOM}-token", f"{SEGMENT}\n"],
    )
    def test_only_segment_names_are_opened(self, reader, name):
        with pytest.raises(FrameError, match="not the name of a segment"):
            reader.view(name, 0, 1)

    def test_a_missing_segment_is_a_frame_error(self, reader):
        with pytest.raises(FrameError, match="its owner may be gone"):
            reader.view(SEGMENT, 0, 1)

    def test_a_link_is_not_followed(self, reader, tmp_path):
        secret = tmp_path / "secret"
        secret.write_bytes(b"x" * 4096)
        (tmp_path / SEGMENT).symlink_to(secret)
        with pytest.raises(FrameError):
            reader.view(SEGMENT, 0, 1)

    def test_mappings_of_deleted_segments_are_dropped(self, store, reader, tmp_path):
        first = put(store, data().data, "peer")
        reader.view(first.segment, 0, 1)
        (tmp_path / first.segment).unlink()
        second = put(store, data().data, "peer")
        reader.view(second.segment, 0, 1)
        assert list(reader._maps) == [second.segment]
