"""`RowGeneration`: an engine that takes rows, as rollouts see it: hundreds of concurrent one-row requests.

Rows requested in one moment of an event loop reach the engine together; rows that one step finished come back in one
call. A cancelled request is dropped from the batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from rl_core.api.records import FinishReason
from rl_core.rollouts.generation import BatchedDataDict, GenerationConfig, GenerationInterface
from rl_core.rollouts.mailbox import Mailbox
from rl_core.rollouts.padding import GenerationOutput, batch_of, prompts_of
from rl_core.rollouts.rows import Result, Row, RowQueue
from rl_core.rollouts.sampling import SamplingParams, pad_id, sampling_params, unique

NO_ROOM = GenerationOutput(ids=[], logprobs=[], finish_reason=FinishReason.SEQ_LIMIT.value, versions=[])
_SEEDS = count(1)


class RowGeneration(GenerationInterface):
    """Generates with the engine behind a `RowQueue`, which several generations may share (training and validation)."""

    def __init__(
        self,
        queue: RowQueue,
        config: GenerationConfig | Mapping[str, Any] | None = None,
        *,
        backend: str,
        tokenizer: Any,
        max_seq_len: int,
        eos_token_ids: Collection[int],
        validation: bool = False,
        batches_by_group: bool = False,
        allow_truncated_sampling: bool = False,
    ) -> None:
        """`validation` takes the val_ settings; `batches_by_group` runs each prompt group as an engine batch of its own.

        `backend` is the engine's name in messages and in `config`. Raises RolloutConfigError for settings that are not
        honoured, and for those that would bias training.
        """
        settings = dict(config or {})
        self._queue = queue
        self.batches_by_group = batches_by_group
        self._base = sampling_params(
            settings, backend=backend, validation=validation, allow_truncated=allow_truncated_sampling
        )
        self._params: dict[tuple[Any, ...], SamplingParams] = {}
        self._pad = pad_id(settings, tokenizer)
        self._pad_is_content = self._pad in eos_token_ids
        self._max_seq_len = max_seq_len
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """Return the version of the weights that new tokens come from."""
        return self._queue.version

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict:
        """Return the outputs of all rows, in order, padded to the longest. Blocks; not for an event loop's thread."""
        prompts = self._prompts(data)
        results: dict[Hashable, Any] = dict.fromkeys(range(len(prompts)), NO_ROOM)
        rows = self._rows(data, prompts, range(len(prompts)), greedy)
        missing = len(rows)
        done = threading.Event()

        def sink(batch: list[Result]) -> None:
            nonlocal missing
            results.update(batch)
            missing -= len(batch)
            if not missing:
                done.set()

        if rows:
            self._queue.submit(rows, sink)
            done.wait()
        failures = [value for value in results.values() if isinstance(value, BaseException)]
        if failures:
            raise failures[0]
        return batch_of(prompts, list(results.values()), self._pad)

    async def generate_async(
        self, data: Mapping[str, Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict]]:
        """Yield `(index, one-row batch)` as rows finish; rows whose caller leaves are dropped from the engine."""
        prompts = self._prompts(data)
        mailbox = self._mailbox()
        futures = [mailbox.future() for _ in prompts]
        rows = self._rows(data, prompts, futures, greedy)
        wanted = {row.key for row in rows}
        for index, future in enumerate(futures):
            if future not in wanted:
                future.set_result(NO_ROOM)
                yield index, batch_of([prompts[index]], [NO_ROOM], self._pad)
        finished: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
        posted = [future for future in futures if future in wanted]
        for future in posted:
            future.add_done_callback(finished.put_nowait)
        mailbox.post(rows, data.get("batch_keys"))
        index_of = {future: index for index, future in enumerate(futures)}
        try:
            for _ in posted:
                done = await finished.get()
                index = index_of[done]
                yield index, batch_of([prompts[index]], [done.result()], self._pad)
        finally:
            mailbox.withdraw([future for future in futures if not future.done()])

    def shutdown(self) -> None:
        """Stop the engine; idempotent."""
        self._queue.close()

    def get_logger_metrics(self) -> dict[str, Any]:
        """Return `generation/` rows, tokens, steps, seconds at work and the mean rows per step since the last clear."""
        stats = self._queue.statistics()
        row_steps = stats.pop("row_steps")
        stats["mean_batch"] = row_steps / stats["steps"] if stats["steps"] else 0.0
        return {f"generation/{name}": value for name, value in stats.items()}

    def clear_logger_metrics(self) -> None:
        """Start the statistics anew."""
        self._queue.clear_statistics()

    def _mailbox(self) -> Mailbox:
        running = asyncio.get_running_loop()
        if running not in self._mailboxes:
            self._mailboxes[running] = Mailbox(self._queue, by_group=self.batches_by_group)
        return self._mailboxes[running]

    def _prompts(self, data: Mapping[str, Any]) -> list[list[int]]:
        return prompts_of(data, self._pad, pad_is_content=self._pad_is_content)

    def _rows(
        self, data: Mapping[str, Any], prompts: Sequence[list[int]], keys: Sequence[Hashable], greedy: bool
    ) -> list[Row]:
        """Return what the engine has to do; rows without room for a token are left out."""
        stops = data.get("stop_strings") or [None] * len(prompts)
        seeds = data.get("seeds")
        seeds = [next(_SEEDS) for _ in prompts] if seeds is None else [int(seed) for seed in seeds]
        limits = data.get("max_new_tokens") or [None] * len(prompts)
        return [
            Row(key=key, prompt=prompt, params=self._row_params(greedy, stop, limit), seed=seed)
            for key, prompt, stop, limit, seed in zip(keys, prompts, stops, limits, seeds, strict=True)
            if len(prompt) < self._max_seq_len
        ]

    def _row_params(self, greedy: bool, stop_strings: Sequence[str] | None, limit: int | None) -> SamplingParams:
        """Return the settings of a row; `limit` None = those of the configuration."""
        name = (greedy, unique(stop_strings), limit)
        if name not in self._params:
            strings = unique((*self._base.stop_strings, *unique(stop_strings)))
            length = self._base.max_new_tokens if limit is None else limit
            params = replace(self._base, stop_strings=strings, max_new_tokens=length)
            self._params[name] = replace(params, temperature=0.0, top_p=1.0, top_k=None) if greedy else params
        return self._params[name]
