"""`SourceLoader`: lets one tensor-parallel process of the engine read a version where the publisher has it, and load it into the model.

The source is a segment of shared memory, memory of the device (CUDA IPC), or a process group of which this process is a member. Each tensor
is verified before it is loaded, or afterwards in the parameters (`LoadedLayout.checksums`) if all of them are read back then. It is copied
once: by SGLang's own loader, into the parameter. The next bucket of a group arrives meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, TypedDict

from rl_core.messages.engine import SourceLoad
from rl_core.messages.weights import DeviceSource, GroupSource, SharedSource
from rl_core.rollouts.sglang.child.layout import LoadedLayout
from rl_core.weights.assembly import Assembly
from rl_core.weights.bucket import Layout
from rl_core.weights.deadlines import Deadlines
from rl_core.weights.manifest import WeightManifest
from rl_core.weights.source_reader import SourceReader

logger = logging.getLogger(__name__)


class LoadReport(TypedDict):
    """What a process of the SGLang engine reports after it has loaded a version of the weights, or has failed to."""

    error: str
    """Why it failed; "" if it did not."""
    ended: bool
    """Whether only the process group or the mapping was at fault."""
    opened: bool
    """Whether it has opened its handle of a `DeviceSource`."""
    group: str
    """Key of the usable process group; "" if there is none."""
    bad: list[str]
    """Names of the tensors that were not loaded because their checksum is not that of the manifest."""


class SourceLoader:
    """Loads versions into the model of one engine process. Mapped segments and the process group are kept from one version to the next."""

    def __init__(self, layout: LoadedLayout, *, rank: int, device: str, seconds: float) -> None:
        """Load through `layout` on `device`, as process number `rank`. `seconds`: deadline of one operation of the process group."""
        self._layout, self._rank, self._sum_copies = layout, rank, device == "cpu"
        self._reader = SourceReader(keys=None, device=device, deadlines=Deadlines(collective_seconds=seconds))

    def load(self, model: Any, request: SourceLoad) -> LoadReport:
        """Load the version of `request` into `model`, and return the result."""
        source = self._own(request.source)
        manifest = WeightManifest.unpack(request.manifest)
        layout, wanted = Layout.of(manifest.entries, request.bucket_bytes), frozenset(request.wanted)
        proven_later = self._layout.names() if request.whole else frozenset()
        assembly = Assembly(manifest, layout, destinations={}, wanted=wanted, proven_later=proven_later)
        problem, group_ended = "", False
        try:
            with self._reader.open(source, assembly) as tensors:
                for count in _counts(manifest, layout, wanted):
                    self._layout.record(model, islice(tensors, count), sum_copies=self._sum_copies)
                next(tensors, None)  # Lets the source finish.
        # The model's loader may raise anything, and an exception would end SGLang's scheduler.
        except Exception as error:
            logger.exception("version %s could not be loaded", manifest.version)
            problem, group_ended = f"{type(error).__name__}: {error}", self._reader.group_ended(source)
            self._reader.leave_group(problem)  # Otherwise the other processes of the engine would wait for this one.
        opened = isinstance(source, DeviceSource) and self._reader.opened
        return LoadReport(error=problem, ended=group_ended, opened=opened, group=self._reader.group, bad=assembly.bad)

    def _own(self, source: SharedSource | DeviceSource | GroupSource) -> SharedSource | DeviceSource | GroupSource:
        """Return the part of `source` that is for this process."""
        if isinstance(source, GroupSource):
            return replace(source, rank=source.rank + self._rank)
        if isinstance(source, DeviceSource):
            return DeviceSource(handles=source.handles[self._rank : self._rank + 1])
        return source


def _counts(manifest: WeightManifest, layout: Layout, wanted: Container[str]) -> Iterator[int]:
    """Yield the number of wanted tensors of each bucket, those that share the bytes of another name included."""
    tensor_names = [entry.alias_of or entry.name for entry in manifest.entries if entry.name in wanted]
    for bucket in layout.buckets:
        names = {manifest.entries[index].name for index in bucket.entries}
        yield sum(name in names for name in tensor_names)
