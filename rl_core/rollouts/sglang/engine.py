"""`SGLangEngine`: runs rows and calls in the engine's child process, and replaces a child that died or hangs.

    keeper thread:   start child -> ready -> read its messages ... -> it died or is silent -> report the loss, fail all rows -> start child ...

Rows may be submitted from any thread; results are delivered on the keeper thread. The child is asked every few seconds whether its
scheduler runs, so a child that sends nothing for `silence_seconds` hangs, and is killed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from rl_core.api.errors import DeadlineExceeded, GenerationUnavailable, InfrastructureError, RLJobError
from rl_core.messages.engine import (
    EngineAbort,
    EngineAnswer,
    EngineCall,
    EngineFailure,
    EngineOutput,
    EngineOutputs,
    EngineRows,
    EngineSettings,
    EngineTokens,
)
from rl_core.rollouts.hf.stopping import StopStrings
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.rows import Result, Row, Sink, check_prompt
from rl_core.rollouts.sglang.process import REPORT_S, EngineProcess
from rl_core.rollouts.sglang.row_progress import RowProgress

logger = logging.getLogger(__name__)
PauseMode = Literal["in_place", "retract", "abort"]
"""How rows continue after a pause. in_place: with their present keys and values. retract: with keys and values that are computed again.
abort: the engine aborts them, and they are requested again with their tokens so far.

In each mode no generated token is lost.
"""
ASK_S = 2.0
"""Seconds between two requests to the child that report whether its scheduler is alive and how busy it is."""
LOOK_S = 1.0
"""How often the keeper checks whether the engine was closed."""
MAX_STARTS, START_WINDOW_S = 4, 600.0
"""A child that was started so many times within this time is not started again."""


@dataclass(slots=True)
class _Pending:
    """Rows and calls that were sent to the child and have no result yet."""

    rows: dict[int, RowProgress] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    """Number of a row by the caller's key."""
    calls: dict[int, Future[Any]] = field(default_factory=dict)


class SGLangEngine:
    """Implements `RowQueue` with a child process. CREATED -> started -> ready <-> lost -> closed."""

    def __init__(
        self,
        source: EngineSettings,
        *,
        environ: Mapping[str, str],
        memory: int,
        start_seconds: float,
        max_seq_len: int,
        vocab_size: int,
        tokenizer: Any,
        eos_token_ids: Iterable[int] = (),
        on_tokens: Callable[[int], Any] = lambda tokens: None,
        silence_seconds: float,
        restarts: bool = True,
        on_stage: Callable[[str], object] = lambda stage: None,
    ) -> None:
        """Create an engine; `start` starts the child.

        Args:
            source: Arguments of the engine.
            environ: Environment variables of the child.
            memory: Descriptor of the memory that the child shares with this process.
            start_seconds: Deadline of a start.
            max_seq_len: Longest sequence of prompt and completion, tokens.
            vocab_size: Number of token ids.
            tokenizer: Decodes tokens to find stop strings in rows that were aborted.
            eos_token_ids: End-of-sequence ids.
            on_tokens: Called with the number of new tokens.
            silence_seconds: A child that sends nothing for so long hangs; longer than any prefill, load of weights or compilation.
            restarts: Whether a lost child is replaced; if not, the engine fails for good.
            on_stage: Called with what a start of a child does, in words.
        """
        self.max_seq_len = max_seq_len
        self._vocab_size = vocab_size
        self._stop_strings = StopStrings(tokenizer)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.version = -1
        """Version of the weights that new tokens are drawn from."""
        self.paused: PauseMode | None = None
        """Mode in which generation is paused; None = it is not."""
        self._source, self._environ, self._memory = source, environ, memory
        self._start_seconds, self._silence_seconds, self._on_tokens = start_seconds, silence_seconds, on_tokens
        self._restarts, self._on_stage = restarts, on_stage
        self._on_lost: Callable[[str], None] = lambda reason: None
        self._on_back: Callable[[RLJobError | None], None] = lambda error: None
        self._lock = threading.Lock()
        """Guards `_process` and `_pending`: a row is either sent to a living child or refused, so none is left with a child that is gone."""
        self._pending = _Pending()
        self._process: EngineProcess | None = None
        self._ready = threading.Event()
        """Set while a child is ready, and for good once there will be none."""
        self._failure: RLJobError | None = None
        self._closed = threading.Event()
        self._numbers = count(1)
        self._starts: deque[float] = deque()
        self._tokens_seen = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._scheduler: Mapping[str, float] = {}
        """Waiting rows and use of the KV memory, as the child last reported them."""
        self._thread = threading.Thread(target=self._keep, name="rljob-engine", daemon=True)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the child and return once the engine is ready. Raises InfrastructureError with the reason if it does not start."""
        self._thread.start()
        self.await_ready(self._start_seconds)

    def watch(self, lost: Callable[[str], None], back: Callable[[RLJobError | None], None]) -> None:
        """Register callbacks, which are called on the keeper thread; see `Engine.watch`."""
        self._on_lost, self._on_back = lost, back

    def await_ready(self, seconds: float) -> None:
        """Block until a child is ready. Raises DeadlineExceeded after `seconds`, or the error that prevents a new child."""
        if not self._ready.wait(seconds):
            raise DeadlineExceeded(f"the engine must be up within {seconds:g} s, its process is still starting")
        if self._failure is not None:
            raise self._failure

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the engine that runs, the child's first; empty while none runs."""
        process = self._process
        return list(process.pids) if process is not None else []

    def close(self) -> None:
        """Kill the child; rows in flight fail as GenerationUnavailable. Idempotent."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    # --- rows --------------------------------------------------------------------------------------------------------

    def submit(self, rows: Sequence[Row], sink: Sink) -> None:
        """Send rows to the child; see `RowQueue`. Rows that cannot run, or have no room for a token, get their result at once."""
        started = []
        for row in rows:
            progress = RowProgress(
                next(self._numbers), row, sink, self.max_seq_len, self.eos_token_ids, self._stop_strings
            )
            try:
                check_prompt(row.prompt, row.params, vocab_size=self._vocab_size, max_seq_len=self.max_seq_len)
            except ValueError as error:
                sink([(row.key, error)])
                continue
            if progress.empty is None:
                started.append(progress)
            else:
                sink([(row.key, progress.empty)])
        with self._lock:
            process = self._living()
            for progress in started:
                self._pending.rows[progress.number] = progress
                self._pending.numbers[progress.row.key] = progress.number
            process.send(EngineRows(rows=[progress.request() for progress in started]))

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Drop rows; see `RowQueue`."""
        with self._lock:
            numbers = [self._pending.numbers.pop(key) for key in keys if key in self._pending.numbers]
            for row_id in numbers:
                del self._pending.rows[row_id]
            if numbers and self._process is not None:
                self._process.send(EngineAbort(keys=numbers))

    def load(self) -> EngineLoad:
        """Return how busy the engine is. This does not load weights. Waiting rows and KV memory are at most `ASK_S` seconds old."""
        rows, report = len(self._pending.rows), self._scheduler
        waiting = min(int(report.get("waiting", 0)), rows)
        return EngineLoad(
            running=rows - waiting,
            waiting=waiting,
            kv_use=report.get("kv_use"),
            cached_tokens=self._cached_tokens,
            prompt_tokens=self._prompt_tokens,
        )

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, method: str, **arguments: Any) -> Future[Any]:
        """Call `method` of the child; the returned future fails with InfrastructureError."""
        with self._lock:
            process = self._living()
            call_id = next(self._numbers)
            answer: Future[Any] = Future()
            self._pending.calls[call_id] = answer
            process.send(EngineCall(call=call_id, method=method, arguments=arguments))
        return answer

    async def pause(self, mode: PauseMode, seconds: float) -> None:
        """Pause generation, and return when no row is generating any more. Rows continue when `resume` is called.

        No row is lost in any mode: rows that the engine aborts continue from their tokens. Raises TimeoutError after `seconds`.
        """
        answer = self.call("pause", mode=mode)
        self.paused = mode
        await asyncio.wait_for(asyncio.wrap_future(answer), seconds)

    async def resume(self, seconds: float) -> None:
        """Continue paused rows with the weights that the engine has now; does nothing if generation is not paused."""
        if self.paused:
            await asyncio.wait_for(asyncio.wrap_future(self.call("resume")), seconds)
            self.paused = None

    def _living(self) -> EngineProcess:
        if self._process is None:
            raise self._failure or GenerationUnavailable(
                "the engine's process is gone and another is starting; ask again"
            )
        return self._process

    # --- the keeper --------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closed.is_set():
            try:
                reason = self._run_process()
            except Exception as error:  # Callers that wait for the engine must learn of any failure.
                if not isinstance(error, RLJobError):
                    logger.exception("the engine's keeper failed")
                    error = InfrastructureError(f"the engine's keeper failed: {type(error).__name__}: {error}")
                self._give_up(error)
                return
            if not self._closed.is_set() and not self._restarts:
                self._give_up(InfrastructureError(f"the engine is lost and may not start here again: {reason}"))
                return
        self._failure = GenerationUnavailable("the generation engine was shut down; this rollout process is ending")
        self._ready.set()

    def _run_process(self) -> str:
        """Start a child, serve it until it is lost, and kill it; return why it was lost.

        Raises InfrastructureError if no child can be started, or if the child cannot be killed and so keeps its device memory.
        """
        self._count_start()
        process = EngineProcess(self._source, self._environ, self._memory, self._on_stage)
        try:
            process.await_ready(self._start_seconds, self._closed.is_set)
            return self._serve(process)
        finally:
            process.kill()

    def _count_start(self) -> None:
        now = time.monotonic()
        while self._starts and now - self._starts[0] > START_WINDOW_S:
            self._starts.popleft()
        if len(self._starts) >= MAX_STARTS:
            raise InfrastructureError(
                f"the engine's process died {len(self._starts)} times within {START_WINDOW_S:g} s and is not started again; its output is in this log"
            )
        self._starts.append(now)

    def _give_up(self, error: RLJobError) -> None:
        logger.error("the engine does not come back: %s", error)
        self._failure = error
        self._ready.set()
        if not self._closed.is_set():  # After `close` nobody waits for another engine.
            self._on_back(error)

    def _serve(self, process: EngineProcess) -> str:
        """Handle the child's messages until it is gone, it hangs, or `close` is called; return the reason."""
        with self._lock:
            self._process = process
            self._tokens_seen = 0
        restarted = len(self._starts) > 1
        self._ready.set()
        if restarted:
            self._on_back(None)
        reason = "its keeper failed"
        try:
            reason = self._read(process)
        finally:
            self._ready.clear()
            if not self._closed.is_set():
                # Before the calls fail: a caller that looks for the reason of a failed call must find the loss reported.
                logger.error("the engine is lost: %s", reason)
                self._on_lost(reason)
            self._fail_all(reason)
        return reason

    def _read(self, process: EngineProcess) -> str:
        heard_at = asked_at = reported_at = time.monotonic()
        while not self._closed.is_set():
            try:
                message = process.receive(min(LOOK_S, self._silence_seconds / 4), self._silence_seconds)
            except (EOFError, OSError) as error:
                silent = isinstance(error, TimeoutError)
                return (
                    "its process stopped in the middle of a message"
                    if silent
                    else f"its process {process.how_it_ended()}"
                )
            now = time.monotonic()
            if message is not None:
                heard_at = now
                self._handle(message)
            elif now - heard_at > self._silence_seconds:
                return (
                    f"its process {process.pids[0]} has answered nothing for {now - heard_at:.0f} s "
                    "(runtime.deadlines.engineSilence)"
                )
            elif now - max(heard_at, reported_at) > REPORT_S:
                reported_at = now
                logger.warning(
                    "the engine has answered nothing for %.0f s, it may be compiling; it is replaced after %g s "
                    "(runtime.deadlines.engineSilence)",
                    now - heard_at,
                    self._silence_seconds,
                )
            if now - asked_at > min(ASK_S, self._silence_seconds / 4):
                asked_at = now
                self._ask_alive(process)
        return "closed"

    def _ask_alive(self, process: EngineProcess) -> None:
        """Ask the child a question that only its scheduler can answer: the child itself keeps sending while its scheduler hangs."""
        with self._lock:
            call_id = next(self._numbers)
            answer: Future[Any] = Future()
            self._pending.calls[call_id] = answer
            process.send(EngineCall(call=call_id, method="alive", arguments={}))
        answer.add_done_callback(self._store_load)

    def _store_load(self, answer: Future[Any]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            self._scheduler = {}
            return
        self._scheduler = answer.result()
        tokens = int(self._scheduler["tokens"])
        if tokens > self._tokens_seen:
            self._on_tokens(tokens - self._tokens_seen)
            self._tokens_seen = tokens

    def _handle(self, message: Any) -> None:
        if isinstance(message, EngineOutputs):
            self._deliver(message.outputs)
        elif isinstance(message, EngineTokens):
            with self._lock:
                progress = self._pending.rows.get(message.key)
            if progress is not None:
                progress.stream(message.ids)
        elif isinstance(message, EngineAnswer | EngineFailure):
            with self._lock:
                answer = self._pending.calls.pop(message.call, None)
            if answer is None or not answer.set_running_or_notify_cancel():
                return
            if isinstance(message, EngineAnswer):
                answer.set_result(message.value)
            else:
                answer.set_exception(InfrastructureError(f"the engine failed: {message.type}: {message.message}"))

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Deliver the rows that ended, together per sink; rows that the engine aborted are requested again."""
        results: dict[Sink, list[Result]] = {}
        tokens = 0
        with self._lock:
            for output in outputs:
                progress = self._pending.rows.get(output.key)
                if progress is None:  # The caller has left.
                    continue
                tokens += len(output.ids)
                self._prompt_tokens += output.prompt_tokens
                self._cached_tokens += output.cached_tokens
                result = progress.append(output)
                if result is None:
                    assert self._process is not None
                    self._process.send(EngineRows(rows=[progress.request()]))
                    continue
                del self._pending.rows[output.key]
                self._pending.numbers.pop(progress.row.key, None)
                results.setdefault(progress.sink, []).append((progress.row.key, result))
        if tokens:
            self._tokens_seen += tokens
            self._on_tokens(tokens)
        for sink, batch in results.items():
            sink(batch)

    def _fail_all(self, reason: str) -> None:
        """Fail all rows and calls that were sent to a child that is gone for `reason`."""
        with self._lock:
            self._process = None
            self.version = -1
            self.paused = None
            pending, self._pending = self._pending, _Pending()
        for progress in pending.rows.values():
            error = GenerationUnavailable(f"the engine is lost, the row was not finished: {reason}")
            progress.sink([(progress.row.key, error)])
        for answer in pending.calls.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(InfrastructureError(f"the engine is lost, the call was not answered: {reason}"))
