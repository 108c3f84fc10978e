"""Large items on their way into shared memory: every byte is copied once, by however many threads are free."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rl_core.channel.puts import COPY_THREADS, PIECE_BYTES, fill
from rl_core.messages.channel import SegmentPart
from rl_core.transports.links import ProcessSharedMemory


@pytest.fixture
def copier():
    with ThreadPoolExecutor(COPY_THREADS) as copier:
        yield copier


def room(size, holder):
    segment = ProcessSharedMemory.shared().store.lend(size, holder)
    return SegmentPart(segment=segment.name, generation=segment.generation, nbytes=size)


@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES - 3])
@pytest.mark.parametrize("busy", [0, COPY_THREADS])
def test_a_part_is_copied_whole_while_the_other_threads_are_free_or_busy(copier, size, busy):
    store, holder, release = ProcessSharedMemory.shared().store, object(), threading.Event()
    for _ in range(busy):
        copier.submit(release.wait, 60)
    items = [np.random.default_rng(seed).integers(0, 256, size, np.uint8) for seed in range(3)]
    parts = [room(size, holder) for _ in items]
    with ThreadPoolExecutor(len(items)) as producers:
        filled = list(producers.map(fill, [copier] * len(items), parts, items))
    release.set()
    assert filled == parts
    reader = ProcessSharedMemory.shared().reader
    for part, item in zip(parts, items, strict=True):
        assert np.array_equal(np.frombuffer(reader.view(part.segment, 0, size), np.uint8), item)
    store.release_holder(holder)
