"""`EngineServer`: runs the rows and calls that the worker sends to the child process, on the engine's event loop."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from rl_core.messages.engine import (
    EngineAbort,
    EngineAnswer,
    EngineCall,
    EngineFailure,
    EngineOutput,
    EngineOutputs,
    EngineRow,
    EngineRows,
    EngineTokens,
)
from rl_core.rollouts.sglang.child.adapters import Adapter, ChildAdapters
from rl_core.rollouts.sglang.child.generation import Generation
from rl_core.rollouts.sglang.child.memory import EngineMemory
from rl_core.rollouts.sglang.child.weights import ChildWeightLoader
from rl_core.transports import pipe

BAD_REQUEST = 400


class EngineServer:
    """Serves one engine to the worker at the other end of the stream."""

    def __init__(self, engine: Any, shared: mmap.mmap, writer: asyncio.StreamWriter) -> None:
        """Serve `engine`; messages go to `writer`, and tensors arrive in the memory `shared`."""
        self._engine, self._manager, self._writer = engine, engine.tokenizer_manager, writer
        settings = engine.server_args
        self._loader = ChildWeightLoader(self._manager, shared, ranks=settings.tp_size)
        self._adapters = ChildAdapters(self._manager, self._loader, enabled=bool(settings.enable_lora))
        self._generation = Generation(self._manager, self._adapters)
        self._memory = EngineMemory(self._manager, self._loader, self._generation, frees=settings.enable_memory_saver)
        self._outputs: list[EngineOutput] = []
        self._tokens = 0
        """Tokens of all rows that ended."""
        self._rows: dict[int, asyncio.Task[None]] = {}
        """Tasks of the rows that run, by key."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Running tasks; the event loop itself holds them weakly only."""

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve until the stream ends, then raise EOFError."""
        while True:
            message = await pipe.receive(reader)
            if isinstance(message, EngineRows):
                for row in message.rows:
                    self._rows[row.key] = self._start(self._run(row))
            elif isinstance(message, EngineAbort):
                for key in message.keys:
                    self._abort(key)
            else:
                self._start(self._answer(message))

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- rows --------------------------------------------------------------------------------------------------------

    def _abort(self, key: int) -> None:
        """Abort a row wherever it is.

        The scheduler ignores the abort of a row that it does not have yet: one that was just sent, or that SGLang holds back while
        generation is paused. Such a row is cancelled here, before it reaches the scheduler.
        """
        state = self._manager.rid_to_state.get(_rid(key))
        if state is not None and state.dispatched:
            self._manager.abort_request(rid=_rid(key))
        elif key in self._rows:
            self._rows.pop(key).cancel()

    async def _run(self, row: EngineRow) -> None:
        adapter = await self._adapters.for_row()
        try:
            self._end(await self._generate(row, adapter))
        except Exception as error:  # noqa: BLE001 - concerns this row alone; the worker gets it
            if not self._adapters.serves(adapter):  # SGLang held the row back while the adapter was replaced
                await self._run(row)
                return
            message = f"{type(error).__name__}: {error}"
            refused = isinstance(error, ValueError)
            self._end(_failure(row.key, message, data_fault=refused))

    async def _generate(self, row: EngineRow, adapter: Adapter | None) -> EngineOutput:
        answer = await self._engine.async_generate(
            input_ids=row.ids,
            sampling_params=row.sampling,
            return_logprob=True,
            rid=_rid(row.key),
            stream=row.stream,
            lora_path=None if adapter is None else adapter.name,
        )
        if row.stream:
            answer = await self._last(row.key, answer)
        output = _output(row.key, answer)
        if adapter is None:
            return output
        return replace(output, versions=[(0, len(output.ids), str(adapter.version))])

    async def _last(self, key: int, answers: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
        """Return the last of the answers of a row; each holds all ids so far. Ids of the others are sent on as they come."""
        num_sent = 0
        last_answer: dict[str, Any] | None = None
        async for last_answer in answers:
            new = list(last_answer["output_ids"][num_sent:])
            if new and last_answer["meta_info"]["finish_reason"] is None:
                num_sent += len(new)
                self._writer.write(pipe.pack(EngineTokens(key=key, ids=new)))
        if last_answer is None:
            raise RuntimeError("the engine ended a row without an answer")
        return last_answer

    def _end(self, output: EngineOutput) -> None:
        """Send the rows that end in one iteration of the event loop together."""
        self._rows.pop(output.key, None)
        self._tokens += len(output.ids)
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        self._writer.write(pipe.pack(EngineOutputs(outputs=outputs)))

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _answer(self, call: EngineCall) -> None:
        try:
            value = await self._method(call.method, call.arguments)
        except Exception as error:  # noqa: BLE001 - concerns this call alone; the worker gets it
            failure = EngineFailure(call=call.call, type=type(error).__name__, message=str(error))
            self._writer.write(pipe.pack(failure))
        else:
            self._writer.write(pipe.pack(EngineAnswer(call=call.call, value=value)))

    async def _method(self, name: str, arguments: dict[str, Any]) -> Any:
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "alive": self._alive,
            "pause": self._generation.pause,
            "resume": self._generation.resume,
            "load_adapter": self._adapters.load,
            "serve_adapter": self._adapters.serve,
            "begin_weights": self._loader.begin,
            "load_weights": self._loader.load,
            "load_source": self._loader.load_source,
            "end_weights": self._loader.end,
            "held_weights": self._loader.held,
            "release_memory": self._memory.release,
            "restore_memory": self._memory.restore,
        }
        return await methods[name](**arguments)

    async def _alive(self) -> dict[str, float]:
        """Return the tokens generated so far, the waiting rows and the use of KV memory, once the scheduler itself has answered.

        While the engine reads weights from their source it cannot answer, and is not asked.
        """
        if not self._loader.loading_source:
            await self._manager.get_internal_state()
        running = sum(len(state.output_ids) for state in list(self._manager.rid_to_state.values()))
        loads = self._manager.load_snapshot_reader.read_all()
        return {
            "tokens": self._tokens + running,
            "waiting": sum(load.num_waiting_reqs for load in loads),
            "kv_use": max((load.token_usage for load in loads), default=0.0),
        }


def _rid(key: int) -> str:
    """Return the request id. All have one width, because SGLang aborts every request whose id begins with the given one."""
    return f"{key:016d}"


def _output(key: int, answer: dict[str, Any]) -> EngineOutput:
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    if finish["type"] == "abort" and finish.get("status_code"):
        status = int(finish["status_code"])
        return _failure(key, str(finish.get("message")), data_fault=status == BAD_REQUEST)
    ids = list(answer["output_ids"])
    return EngineOutput(
        key=key,
        ids=ids,
        logprobs=[entry[0] for entry in meta["output_token_logprobs"][: len(ids)]],
        reason=finish["type"],
        versions=[(part["start"], part["end"], part["version"]) for part in meta["weight_versions"]],
        message=str(finish.get("message", "")),
        prompt_tokens=int(meta["prompt_tokens"]),
        cached_tokens=int(meta["cached_tokens"]),
    )


def _failure(key: int, message: str, *, data_fault: bool) -> EngineOutput:
    return EngineOutput(
        key=key, ids=[], logprobs=[], reason="error", versions=[], message=message, data_fault=data_fault
    )
