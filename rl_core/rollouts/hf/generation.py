"""`HFGeneration`: the engine as rollouts see it, for hundreds of concurrent one-row requests.

Rows requested in one moment of an event loop reach the engine together; rows that one step finished come back in one
call. A cancelled request is dropped from the batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from rl_core.api.errors import RolloutConfigError
from rl_core.api.records import FinishReason
from rl_core.rollouts.generation import BatchedDataDict, GenerationConfig, GenerationInterface
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.hf.loop import EngineLoop, Result, Row
from rl_core.rollouts.hf.mailbox import Mailbox
from rl_core.rollouts.hf.sampling import SamplingParams, unique
from rl_core.rollouts.padding import GenerationOutput, batch_of, prompts_of

HONOURED = frozenset(
    {"backend", "model_name", "max_new_tokens", "temperature", "top_p", "top_k", "val_temperature", "val_top_p"}
    | {"val_top_k", "stop_token_ids", "stop_strings", "_pad_token_id", "use_async_rollouts", "colocated"}
)
"""Keys of GenerationConfig that mean something here; its others must be empty, keys that it does not have are refused."""
NO_ROOM = GenerationOutput(ids=[], logprobs=[], finish_reason=FinishReason.SEQ_LIMIT.value, versions=[])
_SEEDS = count(1)


class HFGeneration(GenerationInterface):
    """Generates with an `HFEngine` on a thread of its own."""

    def __init__(
        self,
        engine: HFEngine | EngineLoop,
        config: GenerationConfig | Mapping[str, Any] | None = None,
        *,
        validation: bool = False,
        batches_by_group: bool = False,
        allow_truncated_sampling: bool = False,
    ) -> None:
        """`validation` takes the val_ settings; `batches_by_group` runs each prompt group as an engine batch of its own.

        An EngineLoop may be shared by several generations (training and validation). Raises RolloutConfigError for
        settings that are not honoured, and for those that would bias training.
        """
        settings = dict(config or {})
        self._loop = engine if isinstance(engine, EngineLoop) else EngineLoop(engine)
        self.engine = self._loop.engine
        self.batches_by_group = batches_by_group
        self._base = sampling_params(settings, validation=validation, allow_truncated=allow_truncated_sampling)
        self._params: dict[tuple[Any, ...], SamplingParams] = {}
        self._pad = _pad_id(settings, self.engine.tokenizer)
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """Return the version of the weights that new tokens come from."""
        return self.engine.version

    @property
    def loop(self) -> EngineLoop:
        """Return the engine's thread, which several generations may share."""
        return self._loop

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
            self._loop.submit(rows, sink)
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
        """Stop the engine's thread; idempotent."""
        self._loop.close()

    def get_logger_metrics(self) -> dict[str, Any]:
        """Return `generation/` rows, tokens, steps, seconds at work and the mean rows per step since the last clear."""
        stats = self._loop.statistics()
        row_steps = stats.pop("row_steps")
        stats["mean_batch"] = row_steps / stats["steps"] if stats["steps"] else 0.0
        return {f"generation/{name}": value for name, value in stats.items()}

    def clear_logger_metrics(self) -> None:
        """Start the statistics anew."""
        self._loop.clear_statistics()

    def _mailbox(self) -> Mailbox:
        running = asyncio.get_running_loop()
        if running not in self._mailboxes:
            self._mailboxes[running] = Mailbox(self._loop, by_group=self.batches_by_group)
        return self._mailboxes[running]

    def _prompts(self, data: Mapping[str, Any]) -> list[list[int]]:
        return prompts_of(data, self._pad, pad_is_content=self._pad in self.engine.eos_token_ids)

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
            if len(prompt) < self.engine.max_seq_len
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


def sampling_params(config: Mapping[str, Any], *, validation: bool, allow_truncated: bool) -> SamplingParams:
    """Return the settings of GenerationConfig as SamplingParams.

    Raises RolloutConfigError for keys that are not honoured; in training for temperature <= 0, and for top_p or top_k
    unless `allow_truncated` (algorithms.md 7: sampling from a cut distribution biases the policy ratio).
    """
    _check_keys(config)
    prefix = "val_" if validation else ""
    temperature = config.get(f"{prefix}temperature", 0.0 if validation else 1.0)
    top_p, top_k = config.get(f"{prefix}top_p", 1.0), config.get(f"{prefix}top_k")
    if not validation and temperature <= 0:
        raise RolloutConfigError(f"temperature must be > 0 for training, got {temperature}; use greedy for validation")
    if not validation and not allow_truncated and (top_p < 1 or top_k is not None):
        raise RolloutConfigError(
            f"top_p and top_k bias the policy ratio, got top_p {top_p}, top_k {top_k}; remove them or set "
            "algorithm.allowTruncatedSampling"
        )
    return SamplingParams(
        max_new_tokens=config.get("max_new_tokens", SamplingParams().max_new_tokens),
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=top_k,
        stop_token_ids=unique(config.get("stop_token_ids")),
        stop_strings=unique(config.get("stop_strings")),
    )


def _check_keys(config: Mapping[str, Any]) -> None:
    known = GenerationConfig.__annotations__
    unknown = sorted(key for key, value in config.items() if key not in HONOURED and (value or key not in known))
    if unknown:
        raise RolloutConfigError(
            f"generation settings {', '.join(unknown)} are not honoured by the HF engine; remove them"
        )
    if config.get("backend") not in (None, "hf"):
        raise RolloutConfigError(
            f"backend must be 'hf' for the HF engine, got {config['backend']!r}; change one of the two"
        )
    if config.get("use_async_rollouts", True) is False:
        raise RolloutConfigError(
            "use_async_rollouts must be true, got False: rollouts are always asynchronous; remove it"
        )
    if (config.get("colocated") or {}).get("enabled"):
        raise RolloutConfigError("colocated.enabled is not honoured by the HF engine, got true; set it to false")


def _pad_id(config: Mapping[str, Any], tokenizer: Any) -> int:
    candidates = (
        config.get("_pad_token_id"),
        getattr(tokenizer, "pad_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    return next((int(one) for one in candidates if one is not None), 0)
