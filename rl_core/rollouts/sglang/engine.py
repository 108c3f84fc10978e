"""`SGLangEngine`: the engine's child process as the worker sees it: rows and calls in, and a new child where one died or hung.

    keeper thread:   start child -> up -> read its stream ... -> it died or is silent -> fail all rows, tell `lost` -> start child ...

Rows may be given from any thread; their results come on the keeper's thread. A child that answers nothing for `patience` seconds counts
as hung and is killed: it is asked whether its scheduler still turns, so silence is never for want of work.
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
    EngineSource,
)
from rl_core.rollouts.meter import EngineLoad
from rl_core.rollouts.rows import Result, Row, Sink
from rl_core.rollouts.sglang.pieces import Running
from rl_core.rollouts.sglang.process import EngineProcess

logger = logging.getLogger(__name__)
PauseMode = Literal["in_place", "retract", "abort"]
"""in_place: rows keep their keys and values; retract: they are computed anew; abort: rows are cut, and go on from their tokens."""
ASK_S = 2.0
"""How often, at the least, the child is asked whether its scheduler is alive, and what it has to do."""
LOOK_S = 1.0
"""How often the keeper looks whether it is to end, and at its rows."""
STARTS, WITHIN_S = 4, 600.0
"""A child that had to be started so often in this time is not started again."""


@dataclass(slots=True)
class _Waiting:
    """Whoever waits for rows and calls."""

    rows: dict[int, Running] = field(default_factory=dict)
    keys: dict[Hashable, int] = field(default_factory=dict)
    """The caller's key of a row -> ours."""
    calls: dict[int, Future[Any]] = field(default_factory=dict)


class SGLangEngine:
    """Implements `RowQueue`. CREATED -> start -> up <-> lost -> closed."""

    def __init__(
        self,
        source: EngineSource,
        *,
        environ: Mapping[str, str],
        memory: int,
        start_seconds: float,
        max_seq_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        on_tokens: Callable[[int], Any] = lambda tokens: None,
        patience: float,
        restarts: bool = True,
    ) -> None:
        """`memory` is the descriptor of the memory shared with the child, `environ` its variables; `on_tokens` hears of new tokens.

        `patience`: seconds of silence after which a child counts as hung; longer than the longest prefill or load of weights.
        `restarts`: whether a child that is lost has a successor here; else the engine is given up.
        """
        self.max_seq_len = max_seq_len
        self._vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.version = -1
        """Version of the weights that new tokens come from."""
        self.paused: PauseMode | None = None
        """How its rows are paused; None = they run."""
        self._source, self._environ, self._memory = source, environ, memory
        self._start_seconds, self._patience, self._on_tokens = start_seconds, patience, on_tokens
        self._restarts = restarts
        self._lost: Callable[[str], None] = lambda reason: None
        self._back: Callable[[RLJobError | None], None] = lambda error: None
        self._lock = threading.Lock()
        """Guards `_process` and `_waiting`: a row is given to the child that is up, or refused, but never left to one that is gone."""
        self._waiting = _Waiting()
        self._process: EngineProcess | None = None
        self._up = threading.Event()
        """Set while a child is up, and for good once there will be none."""
        self._failure: RLJobError | None = None
        self._closed = threading.Event()
        self._numbers = count(1)
        self._starts: deque[float] = deque()
        self._tokens_seen = 0
        self._stats = dict.fromkeys(("steps", "rows", "tokens", "busy_seconds", "row_steps"), 0.0)
        self._prompt_tokens = self._cached_tokens = 0
        self._scheduler: Mapping[str, float] = {}
        """Rows that wait and use of the KV memory, as the child last told."""
        self._thread = threading.Thread(target=self._keep, name="rljob-engine", daemon=True)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the child and return once the engine is up. Raises InfrastructureError with the reason."""
        self._thread.start()
        self.await_up(self._start_seconds)

    def watch(self, lost: Callable[[str], None], back: Callable[[RLJobError | None], None]) -> None:
        """Have `lost(reason)` called when the child and its weights are gone, `back(None)` when another is up, without weights.

        `back(error)`: there will be none. Both on the keeper's thread.
        """
        self._lost, self._back = lost, back

    def await_up(self, seconds: float) -> None:
        """Return once a child is up. Raises DeadlineExceeded, or what keeps it from ever being up again."""
        if not self._up.wait(seconds):
            raise DeadlineExceeded(f"the engine must be up within {seconds:g} s, its process is still starting")
        if self._failure is not None:
            raise self._failure

    @property
    def pids(self) -> list[int]:
        """Return the processes of the engine that is up, the child's own first."""
        process = self._process
        return list(process.pids) if process is not None else []

    def close(self) -> None:
        """Kill the child; rows in flight fail as GenerationUnavailable. Idempotent."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    # --- rows --------------------------------------------------------------------------------------------------------

    def submit(self, rows: Sequence[Row], sink: Sink) -> None:
        """Give rows to the child; see `RowQueue`."""
        added = []
        for row in rows:
            one = Running(next(self._numbers), row, sink, self.max_seq_len, self.eos_token_ids)
            result = self._problem(row) or one.empty
            if result is None:
                added.append(one)
            else:
                sink([(row.key, result)])
        with self._lock:
            process = self._living()
            for one in added:
                self._waiting.rows[one.number] = one
                self._waiting.keys[one.row.key] = one.number
            process.send(EngineRows(rows=[one.request() for one in added]))

    def _problem(self, row: Row) -> ValueError | None:
        """Return why a row cannot run: found by the engine's scheduler, an id outside the vocabulary would cost every row."""
        low, high = min(row.prompt, default=-1), max(row.prompt, default=-1)
        if low >= 0 and high < self._vocab_size:
            return None
        return ValueError(
            f"a prompt must have token ids in [0, {self._vocab_size}) and at least one, got {len(row.prompt)} from {low} to "
            f"{high}; use the model's tokenizer"
        )

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Drop rows; see `RowQueue`."""
        with self._lock:
            numbers = [self._waiting.keys.pop(key) for key in keys if key in self._waiting.keys]
            for number in numbers:
                del self._waiting.rows[number]
            if numbers and self._process is not None:
                self._process.send(EngineAbort(keys=numbers))

    def statistics(self) -> dict[str, float]:
        """Return the counts since the last `clear_statistics`; the engine does not tell its steps."""
        return dict(self._stats)

    def clear_statistics(self) -> None:
        """Start the statistics anew."""
        self._stats = dict.fromkeys(self._stats, 0.0)

    def load(self) -> EngineLoad:
        """Return what it has to do; what waits and the KV memory as the child told at most `ASK_S` ago."""
        rows, told = len(self._waiting.rows), self._scheduler
        waiting = min(int(told.get("waiting", 0)), rows)
        return EngineLoad(
            running=rows - waiting,
            waiting=waiting,
            kv_use=told.get("kv_use"),
            cached_tokens=self._cached_tokens,
            prompt_tokens=self._prompt_tokens,
        )

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, method: str, **arguments: Any) -> Future[Any]:
        """Return what the child's `method` will have returned; fails as InfrastructureError."""
        with self._lock:
            process = self._living()
            number = next(self._numbers)
            answer: Future[Any] = Future()
            self._waiting.calls[number] = answer
            process.send(EngineCall(call=number, method=method, arguments=arguments))
        return answer

    async def pause(self, mode: PauseMode, seconds: float) -> None:
        """Return once no row gets a further token until `go_on`; rows are neither lost nor given back."""
        answer = self.call("pause", mode=mode)
        self.paused = mode
        await asyncio.wait_for(asyncio.wrap_future(answer), seconds)

    async def go_on(self, seconds: float) -> None:
        """Let paused rows go on, with the weights that the engine has then; nothing to do unless paused."""
        if self.paused:
            await asyncio.wait_for(asyncio.wrap_future(self.call("go_on")), seconds)
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
            process = None
            try:
                self._count_start()
                process = EngineProcess(self._source, self._environ, self._memory)
                process.await_ready(self._start_seconds, self._closed.is_set)
                reason = self._serve(process)
            except Exception as error:  # whatever it was: who waits for the engine must hear that there will be none
                if not isinstance(error, RLJobError):
                    logger.exception("the engine's keeper failed")
                    error = InfrastructureError(f"the engine's keeper failed: {type(error).__name__}: {error}")
                self._give_up(error)
                return
            finally:
                if process is not None:
                    process.kill()
            if not self._closed.is_set() and not self._restarts:
                self._give_up(InfrastructureError(f"the engine is lost and may not start here again: {reason}"))
                return
        self._failure = GenerationUnavailable("the generation engine was shut down; this rollout process is ending")
        self._up.set()

    def _count_start(self) -> None:
        now = time.monotonic()
        while self._starts and now - self._starts[0] > WITHIN_S:
            self._starts.popleft()
        if len(self._starts) >= STARTS:
            raise InfrastructureError(
                f"the engine's process died {len(self._starts)} times within {WITHIN_S:g} s and is not started again; its output is in this log"
            )
        self._starts.append(now)

    def _give_up(self, error: RLJobError) -> None:
        logger.error("the engine does not come back: %s", error)
        self._failure = error
        self._up.set()
        self._back(error)

    def _serve(self, process: EngineProcess) -> str:
        """Hand over what the child sends until it is gone, hung, or `close` was called; return why."""
        with self._lock:
            self._process = process
            self._tokens_seen = 0
        restarted = len(self._starts) > 1
        self._up.set()
        if restarted:
            self._back(None)
        reason = "its keeper failed"
        try:
            reason = self._read(process)
        finally:
            self._up.clear()
            if not self._closed.is_set():
                # First of all: who asks why a call failed must find the loss told.
                logger.error("the engine is lost: %s", reason)
                self._lost(reason)
            self._fail_all(reason)
        return reason

    def _read(self, process: EngineProcess) -> str:
        heard = asked = time.monotonic()
        while not self._closed.is_set():
            try:
                message = process.receive(min(LOOK_S, self._patience / 4), self._patience)
            except (EOFError, OSError) as error:
                silent = isinstance(error, TimeoutError)
                return (
                    "its process stopped in the middle of a message"
                    if silent
                    else f"its process {process.how_it_ended()}"
                )
            now = time.monotonic()
            if message is not None:
                heard = now
                self._take(message)
            elif now - heard > self._patience:
                return f"its process {process.pids[0]} has answered nothing for {now - heard:.0f} s"
            if now - asked > min(ASK_S, self._patience / 4):
                asked = now
                self._ask_alive(process)
        return "closed"

    def _ask_alive(self, process: EngineProcess) -> None:
        """Ask what only the scheduler can answer: the child itself goes on talking beside one that hangs."""
        with self._lock:
            number = next(self._numbers)
            answer: Future[Any] = Future()
            self._waiting.calls[number] = answer
            process.send(EngineCall(call=number, method="alive", arguments={}))
        answer.add_done_callback(self._note)

    def _note(self, answer: Future[Any]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            self._scheduler = {}
            return
        self._scheduler = answer.result()
        tokens = int(self._scheduler["tokens"])
        if tokens > self._tokens_seen:
            self._on_tokens(tokens - self._tokens_seen)
            self._tokens_seen = tokens

    def _take(self, message: Any) -> None:
        if isinstance(message, EngineOutputs):
            self._deliver(message.outputs)
        elif isinstance(message, EngineAnswer | EngineFailure):
            with self._lock:
                answer = self._waiting.calls.pop(message.call, None)
            if answer is None or not answer.set_running_or_notify_cancel():
                return
            if isinstance(message, EngineAnswer):
                answer.set_result(message.value)
            else:
                answer.set_exception(InfrastructureError(f"the engine failed: {message.type}: {message.message}"))

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Hand rows over, by sink; those that the engine ended before their time go on."""
        results: dict[Sink, list[Result]] = {}
        tokens = 0
        with self._lock:
            for output in outputs:
                one = self._waiting.rows.get(output.key)
                if one is None:  # nobody waits for it any more
                    continue
                tokens += len(output.ids)
                self._prompt_tokens += output.prompt_tokens
                self._cached_tokens += output.cached_tokens
                result = one.take(output)
                if result is None:
                    assert self._process is not None
                    self._process.send(EngineRows(rows=[one.request()]))
                    continue
                del self._waiting.rows[output.key]
                self._waiting.keys.pop(one.row.key, None)
                results.setdefault(one.sink, []).append((one.row.key, result))
        self._stats["rows"] += sum(map(len, results.values()))
        self._stats["tokens"] += tokens
        if tokens:
            self._tokens_seen += tokens
            self._on_tokens(tokens)
        for sink, batch in results.items():
            sink(batch)

    def _fail_all(self, reason: str) -> None:
        """Fail everything that waits: the child that had it is gone, for `reason`."""
        with self._lock:
            self._process = None
            self.version = -1
            self.paused = None
            waiting, self._waiting = self._waiting, _Waiting()
        for one in waiting.rows.values():
            error = GenerationUnavailable(f"the engine is lost, the row was not finished: {reason}")
            one.sink([(one.row.key, error)])
        for answer in waiting.calls.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(InfrastructureError(f"the engine is lost, the call was not answered: {reason}"))
