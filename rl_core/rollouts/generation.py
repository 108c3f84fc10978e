"""How rollouts generate: the interface `RowGenerator`, which prompt groups are run with, and its implementation over an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from rl_core.rollouts.request_batcher import RequestBatcher, RowGroup
from rl_core.rollouts.rows import GenerationOutput, OnTokens, Row, RowQueue
from rl_core.rollouts.sampling import SamplingParams


class RowGenerator(Protocol):
    """Generates rows of token ids. Implemented by `EngineGenerator`, and by `padded.PaddedGenerator` over a backend of padded tensors."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that generate new tokens."""
        ...

    @property
    def honours_seeds(self) -> bool:
        """Whether the same prompt and seed give the same tokens; if not, records hold no seed."""
        ...

    async def generate_row(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        stop_strings: Sequence[str] | None = None,
        max_new_tokens: int | None = None,
        greedy: bool = False,
        group: RowGroup | None = None,
        on_tokens: OnTokens | None = None,
    ) -> GenerationOutput:
        """Return the continuation of the token ids `prompt`.

        Args:
            prompt: Token ids of the row.
            seed: Sampling seed of the row.
            stop_strings: Strings that end this row, in addition to those of the sampling settings.
            max_new_tokens: Length limit of this row; None = that of the sampling settings.
            greedy: Whether to take the most likely token at every position.
            group: Name and size of the prompt group, for backends that run each group as a batch of its own.
            on_tokens: Called on the caller's event loop with new ids while the row runs, if the backend reports them. What was not
                reported is in the output.

        Raises GenerationUnavailable if the backend is gone, ValueError for a prompt that it cannot run. Cancelling the call
        drops the row from the backend.
        """
        ...


class EngineGenerator:
    """`RowGenerator` over the engine behind a `RowQueue`. Several generators may share an engine (training and validation)."""

    def __init__(
        self, queue: RowQueue, params: SamplingParams, *, honours_seeds: bool = True, batches_by_group: bool = False
    ) -> None:
        """`params` apply to every row; `batches_by_group` runs each prompt group as an engine batch of its own."""
        self.params = params
        self.honours_seeds = honours_seeds
        self._queue = queue
        self._batches_by_group = batches_by_group
        self._row_params: dict[tuple[tuple[str, ...], int | None, bool], SamplingParams] = {}
        self._batchers: WeakKeyDictionary[asyncio.AbstractEventLoop, RequestBatcher] = WeakKeyDictionary()

    @property
    def policy_version(self) -> int:
        """Policy version of the weights that new tokens are drawn from."""
        return self._queue.version

    async def generate_row(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        stop_strings: Sequence[str] | None = None,
        max_new_tokens: int | None = None,
        greedy: bool = False,
        group: RowGroup | None = None,
        on_tokens: OnTokens | None = None,
    ) -> GenerationOutput:
        """Return the continuation of `prompt`; see `RowGenerator.generate_row`."""
        settings = (tuple(stop_strings or ()), max_new_tokens, greedy)
        if settings not in self._row_params:
            self._row_params[settings] = self.params.for_row(*settings)
        row = Row(key=None, prompt=prompt, params=self._row_params[settings], seed=seed, on_tokens=on_tokens)
        return await self._batcher().generate(row, group)

    def _batcher(self) -> RequestBatcher:
        running = asyncio.get_running_loop()
        if running not in self._batchers:
            self._batchers[running] = RequestBatcher(self._queue, by_group=self._batches_by_group)
        return self._batchers[running]
