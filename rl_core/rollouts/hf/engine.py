"""`HFEngine`: generation for many prompts with continuous batching, in this process and thread.

A loop of `step()`: admit waiting prompts into free rows (distinct prompts are computed once, whatever the number of
samples), run one token for all rows, draw, record, and hand back what ended. `generate` drives the loop to the end;
`loop.EngineLoop` drives it for asynchronous callers. Not thread-safe: one thread calls it at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
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
from rl_core.rollouts.hf.sampling import Draw
from rl_core.rollouts.hf.stopping import StopIds, StopStrings
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.model_files import token_ids
from rl_core.rollouts.padding import GenerationOutput
from rl_core.rollouts.sampling import SamplingParams

PREFILL_TOKENS = 16384
"""Padded prompt tokens of one prefill at most; bounds its activations."""
ADMIT_SHARE = 8
"""A running batch is joined once 1/8 of its rows are free (or all that wait fit): a prefill costs about a step."""


class HFEngine:
    """Generates with a decoder of the Qwen2, Qwen3 or Llama families, or through transformers for any other."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_batch: int,
        max_seq_len: int,
        compile: bool = False,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`model` is a transformers model or a `DecoderWeights`; a transformers model's weights are taken as they are now.

        `max_batch` rows of at most `max_seq_len` tokens are the memory for keys and values; it is taken as rows need it.
        `eos_token_ids` end a sequence besides those that tokenizer and model name. Raises RolloutConfigError for limits
        that cannot be honoured.
        """
        if max_batch < 1 or max_seq_len < 2:
            raise RolloutConfigError(f"max_batch must be >= 1 and max_seq_len >= 2, got {max_batch} and {max_seq_len}")
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.max_seq_len = max_seq_len
        self.version = 0
        self._parked = False
        """Whether the running rows rest with their keys and values."""
        self._decoder: Decoder = decoder_for(model, max_seq_len=max_seq_len, compile=compile)
        self.eos_token_ids = frozenset(_eos_ids(model, tokenizer) | set(eos_token_ids))
        self._stop_ids = StopIds(self._decoder.vocab_size)
        self._stop_strings = StopStrings(tokenizer)
        self._rows = Rows(max_batch)
        self._waiting: deque[Request] = deque()
        self._last = torch.zeros(0, dtype=torch.int64)
        self._draw: Draw | None = None
        self._next_ticket = 0
        self._queued_seconds, self._queued_rows = 0.0, 0
        self._aborted: set[int] = set()
        self._ended: list[tuple[int, GenerationOutput]] = []

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._decoder.device

    @property
    def busy(self) -> bool:
        """Return whether anything runs or waits."""
        return bool(self._rows.requests or self._waiting or self._ended)

    @property
    def num_running(self) -> int:
        """Return the number of rows that generate."""
        return len(self._rows)

    def load(self) -> EngineLoad:
        """Return what it has to do. From any thread."""
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

        `sampling` is one SamplingParams (or what `SamplingParams.of` takes) or one per prompt; `seeds` one per prompt,
        None = drawn from torch's generator. Raises ValueError for what `submit` refuses, and leaves nothing queued then.
        """
        many = isinstance(sampling, Sequence)
        for name, given in (("sampling", sampling if many else None), ("seeds", seeds)):
            if given is not None and len(given) != len(input_ids):
                raise ValueError(f"{name} must have one entry per prompt ({len(input_ids)}), got {len(given)}")
        params = (
            [SamplingParams.of(one) for one in sampling] if many else [SamplingParams.of(sampling)] * len(input_ids)
        )
        drawn = torch.randint(2**62, (len(input_ids),)).tolist() if seeds is None else [int(seed) for seed in seeds]
        tickets: list[int] = []
        try:
            for prompt, one, seed in zip(input_ids, params, drawn, strict=True):
                tickets.append(self.submit(prompt, one, seed))
        except ValueError:
            self.abort(tickets)
            raise
        return self._finish(tickets)

    def _finish(self, tickets: Sequence[int]) -> list[GenerationOutput]:
        """Step until these rows have ended; return their outputs in order. What else ends is handed out by `step`."""
        outputs: dict[int, GenerationOutput] = {}
        missing = set(tickets)
        try:
            while missing:
                ended = self.step()
                outputs.update(ended)
                missing.difference_update(ticket for ticket, _ in ended)
        except BaseException:
            self.reset()
            raise
        found = [outputs.pop(ticket) for ticket in tickets]
        self._ended += outputs.items()
        return found

    def submit(self, prompt: Sequence[int], params: SamplingParams, seed: int, *, unit: int | None = None) -> int:
        """Queue one row; return its ticket. Rows of one `unit` must be submitted together; they run as one batch.

        Raises ValueError, with numbers, for a prompt that is empty or longer than max_seq_len, for ids outside the model's
        vocabulary and for a seed outside 64 bits: found later, they would cost every running row.
        """
        ids = tuple(map(int, prompt))
        self._check(ids, seed)
        length = len(ids)
        self._next_ticket += 1
        ticket = self._next_ticket
        room = self.max_seq_len - length
        limit = min(params.max_new_tokens, room)
        cut_by_room = room < params.max_new_tokens
        reason = (FinishReason.SEQ_LIMIT if cut_by_room else FinishReason.LENGTH).value
        if limit == 0:
            self._ended.append((ticket, GenerationOutput(ids=[], logprobs=[], finish_reason=reason, versions=[])))
            return ticket
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        request = Request(
            ticket=ticket,
            prompt=ids,
            params=params,
            seed=seed,
            limit=limit,
            limit_reason=reason,
            stop_set=self._stop_ids.set_index(stops),
            unit=unit,
            queued=time.monotonic(),
        )
        self._waiting.append(request)
        return ticket

    def _check(self, ids: tuple[int, ...], seed: int) -> None:
        if not 1 <= len(ids) <= self.max_seq_len:
            raise ValueError(
                f"a prompt must have 1 to max_seq_len={self.max_seq_len} tokens, got {len(ids)}; it can never fit"
            )
        if min(ids) < 0 or max(ids) >= self._decoder.vocab_size:
            raise ValueError(
                f"token ids must be in [0, {self._decoder.vocab_size}), got {min(ids)} to {max(ids)}; use the model's tokenizer"
            )
        if not 0 <= seed < 2**64:
            raise ValueError(f"a seed must be in [0, 2**64), got {seed}; take rollouts.base.sample_seed")

    def abort(self, tickets: Iterable[int]) -> None:
        """Drop these rows at the next step; they end without an output."""
        self._aborted.update(tickets)

    def park(self, *, keep_cache: bool = False) -> None:
        """Interrupt every running row until the next step: it goes on from its tokens, by keys and values computed anew.

        `keep_cache`: by those it has. The weights may change in between; each token keeps the version that drew it, and the seed of a row
        its place.
        """
        parked = [
            replace(request, begun=self._rows.output(row, "", self.version))
            for row, request in enumerate(self._rows.requests)
        ]
        if keep_cache:
            self._rows.requests[:] = parked
            self._parked = True
        else:
            self._remove(list(range(len(self._rows))))
            self._waiting.extendleft(reversed(parked))

    def reset(self) -> None:
        """Drop everything that runs or waits; after a step that failed too, when decoder and rows may differ."""
        self._waiting.clear()
        self._ended.clear()
        self._aborted.clear()
        self._rows.remove(range(len(self._rows)))
        self._last = self._last[:0]
        self._decoder.keep(0, [])
        self._draw = None

    def step(self) -> list[tuple[int, GenerationOutput]]:
        """Generate one token for every row (the first one for new rows); return (ticket, output) of those that ended."""
        self._parked = False
        if self._aborted:
            self._drop_aborted()
        ended, self._ended = self._ended, []
        admitted = self._admissible()
        if admitted:
            ended += self._start(admitted)
        elif len(self._rows):
            ended += self._accept(0, self._decoder.step(self._last))
        return ended

    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return what `load_weights` must bring, by Hugging Face name."""
        return self._decoder.weights.names_and_shapes()

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor by name, such as "float32"."""
        return self._decoder.weights.dtypes()

    def destinations(self) -> dict[str, Tensor]:
        """Return the parameters that may be overwritten in place while nothing runs, in host memory."""
        return self._decoder.weights.destinations()

    def stored_weights(self) -> list[Tensor]:
        """Return the tensors that hold the weights; views of one storage may repeat."""
        return self._decoder.weights.stored()

    def release_cache(self) -> None:
        """Give the memory of keys and values back while nothing runs; rows take it anew."""
        self._require_idle()
        self._decoder.release_cache()

    def write_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors whose names and shapes were checked before, each at once; `serve` ends the update."""
        self._require_idle()
        for name, tensor in tensors:
            self._decoder.weights.write(name, tensor)

    def serve(self, version: int) -> None:
        """Generate as `version` from now on."""
        self._require_idle()
        self.version = version

    def load_weights(self, iterator: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by (name, tensor) pairs and serve them as `version`.

        Strict: unknown, missing, repeated or mis-shaped names -> DataError, nothing applied. Tensors must stay valid
        until this returns. Raises RolloutConfigError while rows run that are not parked: their keys and values are of the old weights.
        """
        self._require_idle()
        self._decoder.weights.load(iterator)
        self.version = version

    def _require_idle(self) -> None:
        if len(self._rows) and not self._parked:
            raise RolloutConfigError(
                f"weights cannot change while {len(self._rows)} rows run; finish, park or abort them first"
            )

    def _admissible(self) -> list[Request]:
        """Take from the queue what joins now, in order."""
        if not self._waiting:
            return []
        running, first = len(self._rows), self._waiting[0]
        if first.unit is not None:
            return [] if running else self._take(lambda one: one.unit == first.unit)
        free = self.max_batch - running
        if running and free < min(len(self._waiting), max(1, self.max_batch // ADMIT_SHARE)):
            return []
        return self._take(lambda one: one.unit is None, free)

    def _take(self, wanted: Any, free: int | None = None) -> list[Request]:
        """Return the front of the queue while `wanted`, at most `free` rows and PREFILL_TOKENS of distinct prompts."""
        taken: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and wanted(self._waiting[0]) and (free is None or len(taken) < free):
            prompt = self._waiting[0].context
            prompts.add(prompt)
            longest = max(longest, len(prompt))
            if taken and free is not None and longest * len(prompts) > PREFILL_TOKENS:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _start(self, requests: list[Request]) -> list[tuple[int, GenerationOutput]]:
        """Prefill new rows and draw their first token."""
        contexts = [request.context for request in requests]
        distinct = {context: index for index, context in enumerate(dict.fromkeys(contexts))}
        rows = np.array([distinct[context] for context in contexts], dtype=np.int64)
        first = len(self._rows)
        now = time.monotonic()
        fresh = [request for request in requests if request.begun is None]
        self._queued_seconds += sum(now - request.queued for request in fresh)
        self._queued_rows += len(fresh)
        logits = self._decoder.prefill(list(distinct), rows)
        self._rows.add(requests)
        self._draw = None
        return self._accept(first, logits)

    def _accept(self, first: int, logits: Tensor) -> list[tuple[int, GenerationOutput]]:
        """Draw and record a token for the rows from `first` on; return and remove those that ended."""
        rows = self._rows
        noise = torch.from_numpy(rows.noise(first)).to(logits.device)
        with torch.inference_mode():
            tokens, logprobs = self._drawer(first)(logits, noise)
            self._last = torch.cat([self._last[:first], tokens]) if first else tokens
        host = tokens.cpu().numpy()
        at_limit = rows.record(first, host, logprobs.cpu().numpy())
        stopped = self._stop_ids.hits(rows.stop_sets[first : len(rows)], host)
        if rows.with_strings:
            self._mark_string_stops(first, stopped)
        over = stopped | at_limit
        if not over.any():
            return []
        gone = (np.flatnonzero(over) + first).tolist()
        outputs = []
        for row in gone:
            request = rows.requests[row]
            reason = FinishReason.STOP.value if stopped[row - first] else request.limit_reason
            outputs.append((request.ticket, rows.output(row, reason, self.version)))
        self._remove(gone)
        return outputs

    def _drawer(self, first: int) -> Draw:
        """Return how the rows from `first` on draw; kept while the whole batch stays as it is."""
        if self._draw is None or first:
            params = [request.params for request in self._rows.requests[first:]]
            draw = Draw(params, vocab_size=self._decoder.vocab_size, device=self._decoder.device)
            if first:
                return draw
            self._draw = draw
        return self._draw

    def _mark_string_stops(self, first: int, stopped: np.ndarray) -> None:
        for row in range(first, len(self._rows)):
            strings = self._rows.requests[row].params.stop_strings
            if strings and not stopped[row - first]:
                stopped[row - first] = self._stop_strings.completed(strings, self._rows.ids(row))

    def _drop_aborted(self) -> None:
        dropped, self._aborted = self._aborted, set()
        self._waiting = deque(request for request in self._waiting if request.ticket not in dropped)
        self._ended = [one for one in self._ended if one[0] not in dropped]
        self._remove([row for row, request in enumerate(self._rows.requests) if request.ticket in dropped])

    def _remove(self, gone: list[int]) -> None:
        """Take rows out of the batch, here and in the decoder."""
        if not gone:
            return
        moves = self._rows.remove(gone)
        count = len(self._rows)
        with torch.inference_mode():
            if moves:
                sources, targets = zip(*moves, strict=True)
                self._last[list(targets)] = self._last[list(sources)]
            self._last = self._last[:count]
            self._decoder.keep(count, moves)
        self._draw = None


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end a sequence: the tokenizer's and those of the model's generation settings."""
    found = set(token_ids(getattr(tokenizer, "eos_token_id", None)))
    settings = getattr(model, "generation_config", None) or getattr(model, "config", None)
    for name in ("eos_token_id", "eos_token_ids"):
        found.update(token_ids(getattr(settings, name, None)))
    return found
