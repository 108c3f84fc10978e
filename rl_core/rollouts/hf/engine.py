"""`HFEngine`: generation with continuous batching, in this process and on the calling thread.

Every `step` admits waiting rows (a prompt that several rows share is computed once), computes one token for all rows, samples and
records it, and returns the rows that ended. `generate` steps until its rows have ended; `loop.EngineLoop` steps for asynchronous
callers. Not thread-safe: one thread may call it at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core.api.errors import RolloutConfigError
from rl_core.api.records import FinishReason
from rl_core.rollouts.hf.decoder import Decoder
from rl_core.rollouts.hf.models import decoder_for
from rl_core.rollouts.hf.running import Request, Rows
from rl_core.rollouts.hf.sampling import BatchSampler
from rl_core.rollouts.hf.stopping import StopIds, StopStrings
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.model_files import token_ids
from rl_core.rollouts.rows import GenerationOutput, check_prompt, token_limit
from rl_core.rollouts.sampling import SamplingParams

PREFILL_TOKENS = 16384
"""Largest number of padded prompt tokens of one prefill; it bounds the memory of activations."""
ADMIT_SHARE = 8
"""Waiting rows join a running batch once 1/8 of its places are free, or all waiting rows fit: a prefill costs about as much as a step."""


class HFEngine:
    """Generates with the built-in forward for Llama, Qwen2, Qwen3 and Mistral, and through transformers for other models."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_batch: int,
        max_seq_len: int,
        compile: bool = False,
        float32_head: bool = False,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """Create an engine over `model`.

        Args:
            model: A transformers model, whose weights are copied, or a `DecoderWeights`.
            tokenizer: Decodes tokens to find stop strings.
            max_batch: Most rows that run at once. The KV cache grows as rows need it, up to `max_batch` x `max_seq_len` tokens.
            max_seq_len: Longest sequence of prompt and completion, tokens.
            compile: Whether to use torch.compile.
            float32_head: Whether to compute logits in float32 from the head's weight as it is stored.
            eos_token_ids: End-of-sequence ids in addition to those of tokenizer and model.

        Raises RolloutConfigError for max_batch < 1 or max_seq_len < 2.
        """
        if max_batch < 1 or max_seq_len < 2:
            raise RolloutConfigError(f"max_batch must be >= 1 and max_seq_len >= 2, got {max_batch} and {max_seq_len}")
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.max_seq_len = max_seq_len
        self.version = 0
        self._interrupted = False
        """Whether the running rows were interrupted and keep their keys and values."""
        self._decoder: Decoder = decoder_for(model, max_seq_len=max_seq_len, compile=compile, float32_head=float32_head)
        self.eos_token_ids = frozenset(_eos_ids(model, tokenizer) | set(eos_token_ids))
        self._stop_ids = StopIds(self._decoder.vocab_size)
        self._stop_strings = StopStrings(tokenizer)
        self._rows = Rows(max_batch)
        self._waiting: deque[Request] = deque()
        self._last_tokens = torch.zeros(0, dtype=torch.int64)
        self._sampler: BatchSampler | None = None
        self._next_ticket = 0
        self._queued_seconds, self._queued_rows = 0.0, 0
        self._aborted: set[int] = set()
        self._finished: list[tuple[int, GenerationOutput]] = []

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._decoder.device

    @property
    def busy(self) -> bool:
        """Return whether any row runs or waits."""
        return bool(self._rows.requests or self._waiting or self._finished)

    @property
    def num_running(self) -> int:
        """Return the number of running rows."""
        return len(self._rows)

    def load(self) -> EngineLoad:
        """Return how busy the engine is. This does not load weights. May be called from any thread."""
        return EngineLoad(
            running=len(self._rows),
            waiting=len(self._waiting),
            kv_use=self._rows.num_tokens() / (self.max_batch * self.max_seq_len),
            queued_seconds=self._queued_seconds,
            queued_rows=self._queued_rows,
        )

    def generate(
        self, input_ids: Sequence[Sequence[int]], sampling: Any, seeds: Sequence[int] | None = None
    ) -> list[GenerationOutput]:
        """Return the generations of `input_ids` in their order.

        `sampling` is one SamplingParams (or a mapping of its fields), or one per prompt. `seeds` has one seed per prompt; None = drawn
        from torch's generator. Raises ValueError for a row that `submit` refuses; then no row stays queued.
        """
        is_per_prompt = isinstance(sampling, Sequence)
        for name, entries in (("sampling", sampling if is_per_prompt else None), ("seeds", seeds)):
            if entries is not None and len(entries) != len(input_ids):
                raise ValueError(f"{name} must have one entry per prompt ({len(input_ids)}), got {len(entries)}")
        params = (
            list(map(SamplingParams.of, sampling)) if is_per_prompt else [SamplingParams.of(sampling)] * len(input_ids)
        )
        row_seeds = torch.randint(2**62, (len(input_ids),)).tolist() if seeds is None else [int(seed) for seed in seeds]
        tickets: list[int] = []
        try:
            for prompt, row_params, seed in zip(input_ids, params, row_seeds, strict=True):
                tickets.append(self.submit(prompt, row_params, seed))
        except ValueError:
            self.abort(tickets)
            raise
        return self._finish(tickets)

    def _finish(self, tickets: Sequence[int]) -> list[GenerationOutput]:
        """Step until these rows have ended; return their outputs in order. Other rows that end are returned by the next `step`."""
        outputs: dict[int, GenerationOutput] = {}
        missing = set(tickets)
        try:
            while missing:
                outputs_of_step = self.step()
                outputs.update(outputs_of_step)
                missing.difference_update(ticket for ticket, _ in outputs_of_step)
        except BaseException:
            self.reset()
            raise
        finished = [outputs.pop(ticket) for ticket in tickets]
        self._finished += outputs.items()
        return finished

    def submit(self, prompt: Sequence[int], params: SamplingParams, seed: int, *, batch: int | None = None) -> int:
        """Queue one row and return its number (ticket).

        Rows with the same `batch` must be submitted together; they run as a batch of their own.

        Raises ValueError for a prompt that `rows.check_prompt` rejects and for a seed outside 64 bits.
        """
        ids = tuple(map(int, prompt))
        check_prompt(ids, params, vocab_size=self._decoder.vocab_size, max_seq_len=self.max_seq_len)
        if not 0 <= seed < 2**64:
            raise ValueError(f"a seed must be in [0, 2**64), got {seed}; take rollouts.sampling.sample_seed")
        self._next_ticket += 1
        ticket = self._next_ticket
        limit, reason = token_limit(len(ids), params, self.max_seq_len)
        if limit == 0:
            self._finished.append((ticket, GenerationOutput(ids=[], logprobs=[], finish_reason=reason, versions=[])))
            return ticket
        request = Request(
            ticket=ticket,
            prompt=ids,
            params=params,
            seed=seed,
            limit=limit,
            limit_reason=reason,
            stop_set=self._stop_ids.set_index(params.stop_ids(self.eos_token_ids)),
            batch=batch,
            queued=time.monotonic(),
        )
        self._waiting.append(request)
        return ticket

    def abort(self, tickets: Iterable[int]) -> None:
        """Drop these rows at the next step; they have no output."""
        self._aborted.update(tickets)

    def interrupt(self, *, keep_cache: bool = False) -> None:
        """Interrupt all running rows, so that weights may change. The next step continues them from the tokens that they have.

        With `keep_cache` rows continue with their present keys and values; otherwise these are computed again. Every token keeps the
        version of the weights that generated it, and the random numbers of a row do not depend on interruptions.
        """
        interrupted = [
            replace(request, begun=self._rows.output(row, "", self.version))
            for row, request in enumerate(self._rows.requests)
        ]
        if keep_cache:
            self._rows.requests[:] = interrupted
            self._interrupted = True
        else:
            self._remove(list(range(len(self._rows))))
            self._waiting.extendleft(reversed(interrupted))

    def reset(self) -> None:
        """Drop all running and waiting rows. Also repairs the engine after a failed step, when decoder and rows may disagree."""
        self._waiting.clear()
        self._finished.clear()
        self._aborted.clear()
        self._rows.remove(range(len(self._rows)))
        self._last_tokens = self._last_tokens[:0]
        self._decoder.keep(0, [])
        self._sampler = None

    def step(self) -> list[tuple[int, GenerationOutput]]:
        """Generate one token for every running row, or the first token of newly admitted rows; return (ticket, output) of rows that ended."""
        self._interrupted = False
        if self._aborted:
            self._drop_aborted()
        finished, self._finished = self._finished, []
        admitted = self._admissible()
        if admitted:
            finished += self._start(admitted)
        elif len(self._rows):
            finished += self._accept(0, self._decoder.step(self._last_tokens))
        return finished

    def new_ids(self, seen: Mapping[int, int]) -> dict[int, list[int]]:
        """Return ticket -> generated ids of the running rows in `seen`, without the first `seen[ticket]` of each."""
        requests = enumerate(self._rows.requests)
        return {
            request.ticket: self._rows.ids(row, seen[request.ticket])
            for row, request in requests
            if request.ticket in seen
        }

    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every tensor that `load_weights` expects, by Hugging Face name."""
        return self._decoder.weights.names_and_shapes()

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor by name, such as "float32"."""
        return self._decoder.weights.dtypes()

    def shapes_and_dtypes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return name -> (shape, dtype) of every tensor, such as ((64, 64), "float32")."""
        dtypes = self.dtypes()
        return {name: (shape, dtypes[name]) for name, shape in self.names_and_shapes().items()}

    def destinations(self) -> dict[str, Tensor]:
        """Return the parameters in host memory that may be overwritten in place while nothing runs."""
        return self._decoder.weights.destinations()

    def stored_weights(self) -> list[Tensor]:
        """Return the tensors that hold the weights; several may be views of one storage."""
        return self._decoder.weights.stored()

    def release_cache(self) -> None:
        """Free the KV cache while nothing runs; it is allocated again when rows need it."""
        self._require_idle()
        self._decoder.release_cache()

    def write_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors whose names and shapes were checked before; call `serve` after the last one."""
        self._require_idle()
        for name, tensor in tensors:
            self._decoder.weights.write(name, tensor)

    def serve(self, version: int) -> None:
        """Record `version` as the policy version of tokens that are generated from now on."""
        self._require_idle()
        self.version = version

    def load_weights(self, iterator: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by (name, tensor) pairs and serve them as `version`.

        Raises DataError for unknown, missing, repeated or wrongly shaped tensors; then no weight was changed. Raises RolloutConfigError
        while rows run that were not interrupted, because their keys and values belong to the old weights. Tensors must stay valid until
        this returns.
        """
        self._require_idle()
        self._decoder.weights.load(iterator)
        self.version = version

    def _require_idle(self) -> None:
        if len(self._rows) and not self._interrupted:
            raise RolloutConfigError(
                f"weights cannot change while {len(self._rows)} rows run; finish, interrupt or abort them first"
            )

    def _admissible(self) -> list[Request]:
        """Remove the rows that are admitted now from the queue, and return them in order."""
        if not self._waiting:
            return []
        running, head = len(self._rows), self._waiting[0]
        if head.batch is not None:
            return [] if running else self._take(lambda request: request.batch == head.batch)
        free = self.max_batch - running
        if running and free < min(len(self._waiting), max(1, self.max_batch // ADMIT_SHARE)):
            return []
        return self._take(lambda request: request.batch is None, free)

    def _take(self, matches: Callable[[Request], bool], free: int | None = None) -> list[Request]:
        """Remove and return the first rows of the queue while `matches`, at most `free` rows and PREFILL_TOKENS of distinct prompts."""
        requests: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and matches(self._waiting[0]) and (free is None or len(requests) < free):
            prompt = self._waiting[0].context
            prompts.add(prompt)
            longest = max(longest, len(prompt))
            if requests and free is not None and longest * len(prompts) > PREFILL_TOKENS:
                break
            requests.append(self._waiting.popleft())
        return requests

    def _start(self, requests: list[Request]) -> list[tuple[int, GenerationOutput]]:
        """Prefill new rows and sample their first token."""
        contexts = [request.context for request in requests]
        distinct = {context: index for index, context in enumerate(dict.fromkeys(contexts))}
        rows = np.array([distinct[context] for context in contexts], dtype=np.int64)
        first_row = len(self._rows)
        now = time.monotonic()
        new_requests = [request for request in requests if request.begun is None]
        self._queued_seconds += sum(now - request.queued for request in new_requests)
        self._queued_rows += len(new_requests)
        logits = self._decoder.prefill(list(distinct), rows)
        self._rows.add(requests)
        self._sampler = None
        return self._accept(first_row, logits)

    def _accept(self, first_row: int, logits: Tensor) -> list[tuple[int, GenerationOutput]]:
        """Sample and record a token for the rows from `first_row` on; remove and return those that ended."""
        rows = self._rows
        noise = torch.from_numpy(rows.uniforms(first_row)).to(logits.device)
        with torch.inference_mode():
            tokens, logprobs = self._drawer(first_row)(logits, noise)
            self._last_tokens = torch.cat([self._last_tokens[:first_row], tokens]) if first_row else tokens
        host = tokens.cpu().numpy()
        at_limit = rows.record(first_row, host, logprobs.cpu().numpy())
        stopped = self._stop_ids.hits(rows.stop_sets[first_row : len(rows)], host)
        if rows.with_strings:
            self._mark_string_stops(first_row, stopped)
        finished = stopped | at_limit
        if not finished.any():
            return []
        finished_rows = (np.flatnonzero(finished) + first_row).tolist()
        outputs = []
        for row in finished_rows:
            request = rows.requests[row]
            reason = FinishReason.STOP.value if stopped[row - first_row] else request.limit_reason
            outputs.append((request.ticket, rows.output(row, reason, self.version)))
        self._remove(finished_rows)
        return outputs

    def _drawer(self, first_row: int) -> BatchSampler:
        """Return the sampler of the rows from `first_row` on; that of the whole batch is kept until rows come or go."""
        if self._sampler is None or first_row:
            params = [request.params for request in self._rows.requests[first_row:]]
            ids = [
                self._rows.ids(first_row + row) if row_params.penalised else [] for row, row_params in enumerate(params)
            ]
            draw = BatchSampler(params, ids, vocab_size=self._decoder.vocab_size, device=self._decoder.device)
            if first_row:
                return draw
            self._sampler = draw
        return self._sampler

    def _mark_string_stops(self, first_row: int, stopped: np.ndarray) -> None:
        for row in range(first_row, len(self._rows)):
            strings = self._rows.requests[row].params.stop_strings
            if strings and not stopped[row - first_row]:
                stopped[row - first_row] = self._stop_strings.completed(strings, self._rows.ids(row))

    def _drop_aborted(self) -> None:
        dropped, self._aborted = self._aborted, set()
        self._waiting = deque(request for request in self._waiting if request.ticket not in dropped)
        self._finished = [(ticket, output) for ticket, output in self._finished if ticket not in dropped]
        self._remove([row for row, request in enumerate(self._rows.requests) if request.ticket in dropped])

    def _remove(self, finished_rows: list[int]) -> None:
        """Remove rows from the batch, here and in the decoder."""
        if not finished_rows:
            return
        moves = self._rows.remove(finished_rows)
        count = len(self._rows)
        with torch.inference_mode():
            if moves:
                sources, targets = zip(*moves, strict=True)
                self._last_tokens[list(targets)] = self._last_tokens[list(sources)]
            self._last_tokens = self._last_tokens[:count]
            self._decoder.keep(count, moves)
        self._sampler = None


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the end-of-sequence ids of the tokenizer and of the model's generation settings."""
    ids = set(token_ids(getattr(tokenizer, "eos_token_id", None)))
    settings = getattr(model, "generation_config", None) or getattr(model, "config", None)
    for name in ("eos_token_id", "eos_token_ids"):
        ids.update(token_ids(getattr(settings, name, None)))
    return ids
