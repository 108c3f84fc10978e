"""`/v1/chat/completions` with `stream: true`: the pieces of a call as chunks of the API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from rl_core.data.tokenizer import Tokenizer
from rl_core.rollouts.endpoint.chat import ChatRequest, Choice, Completed, token_logprobs
from rl_core.rollouts.endpoint.pieces import DONE, Piece, server_sent


async def events(
    request: ChatRequest, parts: AsyncGenerator[Piece | Completed], *, model: str, tokenizer: Tokenizer
) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of the call `parts`, those of `pieces.pieces`.

    The last chunk of a choice has its tool calls, its finish reason and, if asked for, its log-probabilities.
    """
    head = {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }
    started: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        if index not in started:
            started.add(index)
            delta = {"role": "assistant", **delta}
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return server_sent({**head, "choices": [choice]})

    try:
        async for part in parts:
            if isinstance(part, Piece):
                ids = {"token_ids": part.ids} if request.return_token_ids else {}
                yield chunk(part.index, {"content": part.text}, **ids)
                continue
            for index, choice in enumerate(part.choices):
                yield chunk(index, _tool_calls(choice), **_end(request, choice, tokenizer))
            if totals := _totals(request, part):
                yield server_sent({**head, "choices": [], **totals})
    finally:
        await parts.aclose()
    yield DONE


def _tool_calls(choice: Choice) -> dict[str, Any]:
    calls = choice.message.get("tool_calls", ())
    return {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]} if calls else {}


def _end(request: ChatRequest, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    fields: dict[str, Any] = {"finish_reason": choice.finish_reason}
    if request.logprobs:
        as_ids = bool(request.return_tokens_as_token_ids)
        fields["logprobs"] = {"content": token_logprobs(choice.output, tokenizer, as_ids=as_ids)}
    return fields


def _totals(request: ChatRequest, completed: Completed) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    if (request.stream_options or {}).get("include_usage"):
        totals["usage"] = completed.usage
    if request.return_token_ids:
        totals["prompt_token_ids"] = completed.prompt_ids
    return totals
