"""Faster imports of large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection inside the block, for all threads.

    An import makes many objects and next to no garbage. The collections that it would cause take a fifth to a third of the time that torch
    and transformers need to be imported.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
