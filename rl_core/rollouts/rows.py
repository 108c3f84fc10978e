"""Rows on their way to an engine that runs elsewhere (a thread, a process of its own), and the port that takes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.rollouts.padding import GenerationOutput
from rl_core.rollouts.sampling import SamplingParams

Result = tuple[Any, GenerationOutput | BaseException]
Sink = Callable[[list[Result]], None]
"""Takes what one step finished, on a thread of the engine's; must not block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row to be generated; `key` is what the sink gets back with its result."""

    key: Hashable
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    unit: int | None = None
    """Rows of one unit form an engine batch of their own."""


class RowQueue(Protocol):
    """What runs rows. Implemented by `hf.loop.EngineLoop` and `sglang.engine.SGLangEngine`; usable from any thread."""

    @property
    def version(self) -> int:
        """Version of the weights that new tokens come from."""
        ...

    def submit(self, rows: Sequence[Row], sink: Sink) -> None:
        """Queue `rows` together; each result reaches `sink` once. Raises GenerationUnavailable where none can run."""
        ...

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Drop rows whose caller does not wait any more; their sink hears nothing."""
        ...

    def statistics(self) -> dict[str, float]:
        """Return steps, rows, tokens, seconds at work and row-steps since the last `clear_statistics`."""
        ...

    def clear_statistics(self) -> None:
        """Start the statistics anew."""
        ...

    def close(self) -> None:
        """Stop; rows in flight fail as GenerationUnavailable. Idempotent."""
        ...
