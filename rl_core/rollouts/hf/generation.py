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

import torch
from torch import Tensor

from rl_core.api.errors import RolloutConfigError
from rl_core.api.records import FinishReason
from rl_core.rollouts.generation import BatchedDataDict, GenerationConfig, GenerationInterface
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.hf.loop import EngineLoop, Result, Row
from rl_core.rollouts.hf.mailbox import Mailbox
from rl_core.rollouts.hf.running import GenerationOutput
from rl_core.rollouts.hf.sampling import SamplingParams, unique

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
        self._pad_is_content = self._pad in self.engine.eos_token_ids
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """Return the version of the weights that new tokens come from."""
        return self.engine.version

    @property
    def loop(self) -> EngineLoop:
        """Return the engine's thread, to share it or to run commands between its steps."""
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
        return self._batch(prompts, list(results.values()))

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
                yield index, self._batch([prompts[index]], [NO_ROOM])
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
                yield index, self._batch([prompts[index]], [done.result()])
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
        """Return the ids of every row without padding.

        Raises ValueError for padding on the left or inside and for a length that the row does not have.
        """
        lengths = torch.as_tensor(data["input_lengths"]).tolist()
        prompts = []
        for row, (ids, length) in enumerate(zip(torch.as_tensor(data["input_ids"]).tolist(), lengths, strict=True)):
            if not 0 <= length <= len(ids):
                raise ValueError(
                    f"input_lengths must be in [0, {len(ids)}], the width of input_ids, got {length} in row {row}"
                )
            prompt, rest = ids[:length], ids[length:]
            stray = any(token != self._pad for token in rest) or (
                bool(rest) and not self._pad_is_content and self._pad in prompt
            )
            if stray:
                raise ValueError(
                    f"input_ids must be right-padded with {self._pad}: row {row} of {length} tokens has padding on the left "
                    "or inside; move it to the right"
                )
            prompts.append(prompt)
        return prompts

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

    def _batch(self, prompts: Sequence[list[int]], outputs: Sequence[GenerationOutput]) -> BatchedDataDict:
        """Return the rows in the interface's shape."""
        totals = [len(prompt) + len(output.ids) for prompt, output in zip(prompts, outputs, strict=True)]
        width = max(totals, default=0)
        ids, logprobs = [], []
        for prompt, output, total in zip(prompts, outputs, totals, strict=True):
            ids.append(prompt + output.ids + [self._pad] * (width - total))
            logprobs.append([0.0] * len(prompt) + output.logprobs + [0.0] * (width - total))
        reasons = [output.finish_reason for output in outputs]
        return BatchedDataDict(
            {
                "output_ids": _tensor(ids, width, torch.int64),
                "generation_lengths": torch.tensor([len(output.ids) for output in outputs], dtype=torch.int64),
                "unpadded_sequence_lengths": torch.tensor(totals, dtype=torch.int64),
                "logprobs": _tensor(logprobs, width, torch.float32),
                "truncated": torch.tensor([FinishReason(reason).truncated for reason in reasons], dtype=torch.bool),
                "finish_reasons": reasons,
                "policy_versions": [output.versions for output in outputs],
            }
        )


def _tensor(rows: list[list[Any]], width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(rows, dtype=dtype).view(len(rows), width)


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
